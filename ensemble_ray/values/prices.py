"""Prices of models, and those that a run has decided on. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias, cast

from pydantic import BeforeValidator, Field

from ensemble_ray.errors import ValidationError
from ensemble_ray.values.messages import TokenUsage
from ensemble_ray.values.metrics import COST_UNIT, CostConfiguration, CostEstimate
from ensemble_ray.values.value import Accepts, Value

EMBEDDINGS = "embeddings"  # key of memory's embedding model among a run's prices
_RATES = ("input", "output", "cached_input", "cache_write")
_MILLION = 1_000_000


def _as_rate(value: object) -> object:
    """Convert by text, so that 0.1 stays 0.1."""
    if isinstance(value, bool) or not isinstance(value, float | int | str):
        return value
    try:
        return Decimal(str(value))
    except InvalidOperation:
        raise ValueError(f"ModelPrice rates must be numbers, got: {value}") from None


if TYPE_CHECKING:
    _Rate: TypeAlias = Accepts[Decimal | None, Decimal | float | str | None]
else:
    _Rate = Annotated[Decimal | None, BeforeValidator(_as_rate)]


class ModelPrice(Value):
    """What a model costs, in USD per million tokens.

    A rate that is None is the rate of the library of prices, if that has the model.

    Attributes:
        input: Of input tokens; >= 0, as all rates.
        output: Of output tokens.
        cached_input: Of input tokens that the provider's cache had. Default: as `input`.
        cache_write: Of input tokens that the provider's cache stored. Default: as `input`.
        above: Rates of requests with more input tokens than the key.
        batch: Rates of batch delivery. Default: the same rates.
        source: Where the rates are from.

    Examples:
        >>> ModelPrice(input=2, output=8).estimate(TokenUsage(1000, 500)).total_cost
        Decimal('0.00600000')
    """

    input: _Rate = Field(default=None, validate_default=True)
    output: _Rate = Field(default=None, validate_default=True)
    cached_input: _Rate = Field(default=None, validate_default=True)
    cache_write: _Rate = Field(default=None, validate_default=True)
    above: Mapping[int, ModelPrice] = Field(default={})
    batch: ModelPrice | None = None
    source: str = ""

    def model_post_init(self, _context: object, /) -> None:
        """Reject negative rates."""
        for name in _RATES:
            rate = cast("Decimal | None", getattr(self, name))
            if rate is not None and not (rate.is_finite() and rate >= 0):
                raise ValidationError(f"ModelPrice {name} must be a number >= 0, got: {rate}")

    @property
    def is_complete(self) -> bool:
        """Whether it has the rates of input and output, which every estimate needs."""
        return self.input is not None and self.output is not None

    def over(self, other: ModelPrice | None) -> ModelPrice:
        """Return these rates, and those of the other price where this one has none."""
        if other is None:
            return self
        batch = self.batch if self.batch is None or other.batch is None else self.batch.over(other.batch)
        return ModelPrice(
            **{name: getattr(other if getattr(self, name) is None else self, name) for name in _RATES},
            above={**other.above, **self.above},
            batch=batch or other.batch,
            source=self.source or other.source,
        )

    def estimate(self, usage: TokenUsage, *, delivery: str = "") -> CostEstimate | None:
        """Return the cost of one model call; input and output are rounded half up to 8 decimal places.

        None: a number of tokens or a rate is unknown. `delivery` is `batch`, or empty.
        """
        sent, received = usage.input_tokens, usage.output_tokens
        rates = self._rates_of(sent, delivery)
        if sent < 0 or received < 0 or rates.input is None or rates.output is None:
            return None
        cached = min(max(0, usage.cached_tokens), sent)
        stored = min(max(0, usage.cache_write_tokens), sent - cached)
        parts = (
            (sent - cached - stored, rates.input),
            (cached, rates.input if rates.cached_input is None else rates.cached_input),
            (stored, rates.input if rates.cache_write is None else rates.cache_write),
        )
        input_cost = _rounded(sum((count * rate for count, rate in parts), Decimal(0)))
        output_cost = _rounded(received * rates.output)
        return CostEstimate(input_cost=input_cost, output_cost=output_cost, total_cost=input_cost + output_cost)

    def _rates_of(self, input_tokens: int, delivery: str) -> ModelPrice:
        rates = self.batch.over(self) if delivery == "batch" and self.batch is not None else self
        start = max((start for start in rates.above if input_tokens > start), default=None)
        return rates if start is None else rates.above[start].over(rates)

    def to_data(self) -> dict[str, object]:
        """Return the recorded form: JSON data without defaults."""
        return self.model_dump(mode="json", exclude_defaults=True)


def _rounded(millionths: Decimal) -> Decimal:
    return (millionths / _MILLION).quantize(COST_UNIT, ROUND_HALF_UP)


#: What a user gives for a model: rates, or the name of a model with the same price, as `PROVIDER:MODEL`.
GivenPrice: TypeAlias = ModelPrice | str


#: How an answer refers to its price. None: the run's first; a text: another of the run's, "" if it is unknown; else itself.
PriceMark: TypeAlias = str | Mapping[str, object] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrices:
    """The prices of a run's models.

    Attributes:
        decided: Those of the models known at its start, by `PROVIDER:MODEL`, as the record has them.
        given: The user's, by `MODEL` or `PROVIDER:MODEL`.
        first: The key that answers need not name; "": no model has a price.
    """

    decided: Mapping[str, ModelPrice] = field(default_factory=dict[str, ModelPrice])
    given: Mapping[str, GivenPrice] = field(default_factory=dict[str, "GivenPrice"])
    first: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", min((key for key in self.decided if key != EMBEDDINGS), default=""))

    def estimate(self, usage: TokenUsage, mark: PriceMark, *, delivery: str = "") -> CostEstimate | None:
        """Return the cost of a model call; None: unknown."""
        if mark is None or isinstance(mark, str):
            price = self.decided.get(self.first if mark is None else mark)
        else:
            price = read_price(mark)
        return None if price is None else price.estimate(usage, delivery=delivery)

    def to_data(self) -> dict[str, dict[str, object]]:
        """Return the recorded form."""
        return {name: price.to_data() for name, price in self.decided.items()}

    @classmethod
    def from_data(cls, data: Mapping[str, object] | None, given: Mapping[str, GivenPrice]) -> Self:
        """Return recorded prices; `given` are the user's for other models."""
        return cls(decided={name: read_price(each) for name, each in (data or {}).items()}, given=given)


#: Prices of a run: one price for all models, or each model's; None: no model has a price.
RunCosts: TypeAlias = CostConfiguration | RunPrices | None


def estimate_embeddings(costs: RunCosts, tokens: int) -> CostEstimate | None:
    """Return the cost of tokens that memory's embedding model read; None: unknown."""
    if costs is None or isinstance(costs, CostConfiguration):
        return None if costs is None else costs.estimate(tokens, 0)
    return costs.estimate(TokenUsage(tokens, 0), EMBEDDINGS)


def price_key(provider: str | None, model: str | None) -> str:
    """Return the key of a model among a run's prices."""
    return f"{provider or ''}:{model or ''}"


def read_price(data: object) -> ModelPrice:
    """Return a price from its recorded form; a damaged one has no rates, so its costs are unknown."""
    if not isinstance(data, Mapping):
        return ModelPrice()
    try:
        return ModelPrice(**cast("Mapping[str, Any]", data))
    except ValidationError:
        return ModelPrice()
