"""What requests of a run may cost and did cost: estimates, prices, claims on the run's account. Package: execute.

In: a request that is about to be sent. Out: its answer, or the end of the budget (S-BUD-4). A run without a budget has
none of this. Must never happen: a request that is sent without a claim, or a claim that outlives its request.

Each attempt claims anew: while a request waits to be made again, nothing is reserved for it (S-BUD-2).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from ensemble_ray.execute.request_size import estimated_input
from ensemble_ray.limits.account import LocalAccount
from ensemble_ray.text.token_estimate import estimate_tokens
from ensemble_ray.values.amounts import price
from ensemble_ray.values.messages import TokenUsage

if TYPE_CHECKING:
    from ensemble_ray.ports import SpendingAccount
    from ensemble_ray.values.amounts import RunBudget
    from ensemble_ray.values.messages import ChatMessage, ChatResponse, ToolCall, ToolSpec
    from ensemble_ray.values.metrics import CostConfiguration

__all__ = ["Request", "Spending", "answer_tokens", "output_limit", "spending_here"]

#: Output tokens that are expected of the first answer of a kind of agent.
_FIRST_OUTPUT = 256
#: Options of requests that limit an answer; the first one that is set counts.
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


def spending_here(budget: RunBudget | None, costs: CostConfiguration | None) -> Spending | None:
    """Return the spending of a run whose requests are all made by this process; None without a budget."""
    return None if budget is None else Spending(LocalAccount(budget), costs)


def answer_tokens(text: str | None, calls: Sequence[ToolCall], reasoning: str | None = None) -> int:
    """Output tokens of an answer that nobody counted."""
    return estimate_tokens(
        len(text or "") + len(reasoning or "") + sum(len(call.name) + len(call.arguments) for call in calls)
    )


def output_limit(model: object) -> int | None:
    """How many tokens an answer of that model can have; None where it does not say.

    A model of the user's says it by `max_output_tokens`, the library's own by their request options.
    """
    behind: object = model
    while (inner := getattr(behind, "delegate", None)) is not None:  # under a rate limit
        behind = inner
    said = getattr(behind, "max_output_tokens", None)
    options = getattr(behind, "request_options", None)
    limits = (
        [cast("Mapping[str, object]", options).get(name) for name in _LIMITS] if isinstance(options, Mapping) else []
    )
    return next((value for value in (said, *limits) if isinstance(value, int) and value > 0), None)


class Spending:
    """What the requests that this process makes for one run may spend."""

    def __init__(self, account: SpendingAccount, costs: CostConfiguration | None) -> None:
        self._account = account
        self._costs = costs
        #: kind of agent -> (answers, their output tokens)
        self._answers: dict[str, tuple[int, int]] = {}

    def request(
        self, template: str, model: object, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> Request:
        """Return a request that is about to be sent.

        Args:
            template: Kind of agent that asks; its answers so far tell how long the next one will be.
            model: Whom it asks.
            messages: The conversation.
            tools: What is offered.
        """
        output = output_limit(model)
        return Request(
            self, template, estimated_input(messages, tools), self._usual(template) if output is None else output
        )

    async def reserve(self, input_tokens: int, output_tokens: int) -> str:
        """Reserve an amount on the account and return the claim's id.

        Raises:
            BudgetExhaustedError: there will never be one.
        """
        return await self._account.reserve(price(self._costs, input_tokens, output_tokens))

    def charge_answer(self, claim: str, template: str, input_tokens: int, output_tokens: int) -> None:
        """Charge the cost of a request that was answered."""
        count, total = self._answers.get(template, (0, 0))
        self._answers[template] = (count + 1, total + output_tokens)
        self._account.charge(claim, price(self._costs, input_tokens, output_tokens))

    async def charge_input(self, tokens: int) -> None:
        """Charge input tokens that nothing was reserved for, whether or not the budget has them; the next request sees the charge."""
        self._account.charge("", price(self._costs, tokens, 0))
        await self._account.settle()

    def close(self) -> None:
        """Nobody makes requests for the run here any more."""
        self._account.close()

    def gave_nothing(self, claim: str) -> None:
        """Release the claim of a request that was not answered."""
        self._account.charge(claim)

    def _usual(self, template: str) -> int:
        count, total = self._answers.get(template, (0, 0))
        return max(1, math.ceil(total / count)) if count else _FIRST_OUTPUT


class Request:
    """One request, sent once or, where its provider fails, several times."""

    def __init__(self, spending: Spending, template: str, input_tokens: int, output_tokens: int) -> None:
        self._spending = spending
        self._template = template
        self._input_tokens = input_tokens
        self._output_tokens = output_tokens
        #: what was counted in place of what the provider did not count: input and output tokens, for the record
        self.estimated: tuple[int, int] | None = None

    async def send(self, attempt: Callable[[], Awaitable[ChatResponse]]) -> ChatResponse:
        """Make one attempt when its turn to spend has come.

        Raises:
            BudgetExhaustedError: it will never come.
        """
        claim = await self._spending.reserve(self._input_tokens, self._output_tokens)
        try:
            response = await attempt()
        except BaseException:
            self._spending.gave_nothing(claim)
            raise
        usage = response.usage or TokenUsage()
        counted = (usage.input_tokens, usage.output_tokens)
        charged = (
            counted[0] if counted[0] >= 0 else self._input_tokens,
            counted[1] if counted[1] >= 0 else answer_tokens(response.text, response.tool_calls, response.reasoning),
        )
        if charged != counted:
            self.estimated = charged
        self._spending.charge_answer(claim, self._template, *charged)
        return response
