"""What a recorded run has spent of its budget (S-BUD-6, S-BUD-7, S-BUD-9). Pure.

In: facts in order. Out: an amount, or the context of a run that goes on with it. Never: an answer that is counted twice, or
that another run paid for; a request without a recorded answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ensemble_ray.execute.scope import answer_tokens
from ensemble_ray.facts.effects import ModelAnswered, is_making_agent
from ensemble_ray.facts.memory import MemoryRecalled, MemoryStored
from ensemble_ray.facts.reflection import ReflectionRecorded
from ensemble_ray.facts.sampling import SamplingAnswered
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.metrics import NOTHING, Amount, price

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import RunContext
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.values.messages import ToolCall
    from ensemble_ray.values.metrics import CostConfiguration

#: What is paid for: answers of models, to tasks and to servers of their tools, what memory embeds, and reflections.
PAID = (ModelAnswered, SamplingAnswered, MemoryRecalled, MemoryStored, ReflectionRecorded)


def spent_of(facts: Iterable[Fact], costs: CostConfiguration | None) -> Amount:
    """Return what the recorded answers of a run cost."""
    tally = SpentTally(costs)
    tally.apply(facts)
    return tally.total


class SpentTally:
    """Counts what the recorded answers of a run cost, page by page.

    Attributes:
        total: What those cost that it was given.
    """

    def __init__(self, costs: CostConfiguration | None) -> None:
        self.total = NOTHING
        self._costs = costs
        #: a run that goes on may note again what was asked before it began
        self._seen: set[tuple[str, float]] = set()

    def apply(self, facts: Iterable[Fact]) -> None:
        """Count the next facts."""
        for fact in facts:
            if isinstance(fact.data, MemoryRecalled | MemoryStored):
                self.total += price(self._costs, fact.data.embedding_tokens, 0)
            if isinstance(fact.data, ReflectionRecorded):
                self.total += price(self._costs, fact.data.input_tokens, fact.data.output_tokens)
            if isinstance(fact.data, SamplingAnswered):
                self.total += price(self._costs, *_tokens(fact.data, ()))
            if not isinstance(fact.data, ModelAnswered) or fact.data.is_copied:
                continue
            if is_making_agent(fact):
                if (fact.name, fact.at) in self._seen:
                    continue
                self._seen.add((fact.name, fact.at))
            self.total += price(self._costs, *_tokens(fact.data, fact.data.tool_calls))


def with_account(context: RunContext, spent: Amount) -> RunContext:
    """Return the context for whoever owns the run now: its budget knows what is spent, and has an account of its own.

    Args:
        context: The context as it was made.
        spent: By what is recorded of the run, and by the effects of before scheduling.
    """
    if context.budget is None:
        return context
    account = f"{context.run_id}/{new_object_id()}"
    return replace(context, budget=replace(context.budget, spent=spent, account=account))


def _tokens(answer: ModelAnswered | SamplingAnswered, calls: Sequence[ToolCall]) -> tuple[int, int]:
    """Return input and output tokens; of what neither the provider nor a budget counted, what the answer's text says."""
    counted = (_count(answer.input_tokens), _count(answer.output_tokens))
    reasoning = answer.reasoning if isinstance(answer, ModelAnswered) else None
    estimated = answer.estimated_tokens or (0, answer_tokens(answer.text, calls, reasoning))
    return (
        counted[0] if counted[0] >= 0 else max(0, estimated[0]),
        counted[1] if counted[1] >= 0 else max(0, estimated[-1]),
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) else -1
