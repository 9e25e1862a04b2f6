"""Amounts of tokens and money, and what one run may spend of them."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble_ray.values.metrics import CostConfiguration

__all__ = ["NOTHING", "Amount", "RunBudget", "price"]


#: Costs are whole numbers of the 8th decimal place, to which estimates of cost are rounded (S-MET-31).
_UNITS = 10**8


@dataclass(frozen=True, slots=True)
class Amount:
    """Tokens, and money in units of the 8th decimal place."""

    tokens: int = 0
    cost: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.tokens + other.tokens, self.cost + other.cost)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.tokens - other.tokens, self.cost - other.cost)

    def at_least(self, other: Amount) -> Amount:
        """Return the larger one of each."""
        return Amount(max(self.tokens, other.tokens), max(self.cost, other.cost))


#: No tokens and no money.
NOTHING = Amount()


def price(costs: CostConfiguration | None, input_tokens: int, output_tokens: int) -> Amount:
    """Return the amount of so many tokens, with their cost where it is known."""
    estimate = None if costs is None else costs.estimate(input_tokens, output_tokens)
    return Amount(input_tokens + output_tokens, 0 if estimate is None else int(estimate.total_cost * _UNITS))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBudget:
    """A run's budget, as every process of the run is told."""

    #: None: no limit
    max_tokens: int | None = None
    #: in units of the 8th decimal place; None: no limit
    max_cost: int | None = None
    #: what the run had spent when its present owner took it
    spent: Amount = NOTHING
    #: name of its account, where all processes of a cluster draw from one
    account: str = ""

    @classmethod
    def of(cls, max_tokens: int | None, max_cost: float | None) -> RunBudget | None:
        """Make a budget of what a user wrote; None where nothing is limited."""
        if max_tokens is None and max_cost is None:
            return None
        return cls(max_tokens=max_tokens, max_cost=None if max_cost is None else int(Decimal(str(max_cost)) * _UNITS))

    def covers(self, total: Amount) -> bool:
        """Whether so much may be spent altogether."""
        return (self.max_tokens is None or total.tokens <= self.max_tokens) and (
            self.max_cost is None or total.cost <= self.max_cost
        )

    def allows_more(self, than: RunBudget) -> bool:
        """Whether more may be spent than under another one, of something that is limited there."""
        pairs = ((self.max_tokens, than.max_tokens), (self.max_cost, than.max_cost))
        return any(theirs is not None and (mine is None or mine > theirs) for mine, theirs in pairs)

    def describe(self, amount: Amount) -> str:
        """Format an amount in words, as far as it is limited."""
        parts = [f"{amount.tokens} tokens"] if self.max_tokens is not None else []
        parts += [f"a cost of {amount.cost / _UNITS:.8g}"] if self.max_cost is not None else []
        return " and ".join(parts)

    def describe_limits(self) -> str:
        """Format the limits in words, under the names they are written by."""
        parts = [f"max_tokens {self.max_tokens}"] if self.max_tokens is not None else []
        parts += [f"max_cost {self.max_cost / _UNITS:.8g}"] if self.max_cost is not None else []
        return " and ".join(parts)
