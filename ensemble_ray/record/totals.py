"""Tokens and calls of a run, counted from its facts (S-MET-38). Pure.

Counts all executions of tasks: completed, failed, cancelled and unfinished ones, delegated work, and what a fork has copied. What a budget
counts is different (`record.spent`): it leaves out copies, and includes calls that made agents or reflected on outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from ensemble_ray.facts.effects import DelegationDecided, ModelAnswered, ToolIntended, ToolReturned, is_making_agent
from ensemble_ray.facts.ends import FailureRecorded, OutputRecorded
from ensemble_ray.facts.lenient import as_count, as_mapping
from ensemble_ray.facts.memory import MemoryRecalled, MemoryStored
from ensemble_ray.facts.sampling import SamplingAnswered
from ensemble_ray.values.metrics import add_tokens
from ensemble_ray.values.trace import TaskTrace

if TYPE_CHECKING:
    from ensemble_ray.facts.fact import Fact, FactData


class ExecutionTotals:
    """What all executions of a run used, as far as facts were applied.

    Attributes:
        tokens: Input and output tokens; -1: a provider did not count.
        model_calls: Answers of models, also those to servers of tools.
        tool_calls: Calls of tools that began or were answered, unknown tools included.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.model_calls = 0
        self.tool_calls = 0
        #: by instance: how many calls of its last answer are not counted yet; a call of an unknown tool has no fact
        self._uncounted: dict[str, int] = {}
        #: by instance that has not ended: how many calls are counted
        self._counted: dict[str, int] = {}
        #: names of the calls without a result
        self._open_calls: set[str] = set()

    def apply(self, fact: Fact) -> None:
        """Apply the next fact."""
        rule = self._RULES.get(type(fact.data))
        if rule is not None:
            rule(self, fact)

    def _apply_answer(self, fact: Fact[ModelAnswered]) -> None:
        if is_making_agent(fact):
            return
        self._count_answer(fact)
        instance = fact.instance
        # All are answered, since the model was called again.
        if uncounted := self._uncounted.pop(instance, 0):
            self._count_calls(instance, uncounted)
        if fact.data.tool_calls:
            self._uncounted[instance] = len(fact.data.tool_calls)

    def _count_answer(self, fact: Fact[ModelAnswered | SamplingAnswered]) -> None:
        self.model_calls += 1
        self.tokens = add_tokens((self.tokens, int(fact.data.input_tokens), int(fact.data.output_tokens)))

    def _apply_memory(self, fact: Fact[MemoryRecalled | MemoryStored]) -> None:
        self.tokens = add_tokens((self.tokens, fact.data.embedding_tokens))

    def _apply_call(self, fact: Fact[ToolIntended | DelegationDecided | ToolReturned]) -> None:
        if "/call-" not in fact.name:
            return
        if fact.name not in self._open_calls:
            instance = fact.instance
            self._count_calls(instance, 1)
            self._uncounted[instance] = self._uncounted.get(instance, 1) - 1
        if isinstance(fact.data, ToolReturned):
            self._open_calls.discard(fact.name)
        else:
            self._open_calls.add(fact.name)

    def _apply_end(self, fact: Fact[OutputRecorded | FailureRecorded]) -> None:
        counted = self._counted.pop(fact.instance, 0)
        if self._uncounted.pop(fact.instance, 0) and isinstance(fact.data, FailureRecorded):
            # The model may have been called again without an answer; then the failure's trace has them all.
            self.tool_calls += max(0, _calls_of(fact.data.trace) - counted)

    def _count_calls(self, instance: str, count: int) -> None:
        self.tool_calls += count
        self._counted[instance] = self._counted.get(instance, 0) + count

    _RULES: ClassVar[Mapping[type[FactData], Callable[..., None]]] = {
        ModelAnswered: _apply_answer,
        SamplingAnswered: _count_answer,
        MemoryRecalled: _apply_memory,
        MemoryStored: _apply_memory,
        ToolIntended: _apply_call,
        DelegationDecided: _apply_call,
        ToolReturned: _apply_call,
        OutputRecorded: _apply_end,
        FailureRecorded: _apply_end,
    }


def _calls_of(trace: TaskTrace | Mapping[str, object] | None) -> int:
    """Return how many tools a failed task called; 0: its trace does not say."""
    if isinstance(trace, TaskTrace):
        return trace.metrics.tool_call_count
    return as_count(as_mapping(as_mapping(trace).get("metrics")).get("tool_call_count"))
