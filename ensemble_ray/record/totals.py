"""Tokens and calls of a run, counted from its facts: the usage of its executions, and the usage that its budget counts.

Executions include unfinished tasks, delegated work, and copies in a fork (S-MET-38). A budget leaves out copies, and
includes calls that made agents or reflected on outputs (S-BUD-7, S-BUD-9). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

from ensemble_ray.execute.effects import answer_cost
from ensemble_ray.execute.scope import answer_tokens
from ensemble_ray.facts.effects import (
    DelegationDecided,
    MemoryRecalled,
    MemoryStored,
    ModelAnswered,
    ReflectionRecorded,
    SamplingAnswered,
    ToolIntended,
    ToolReturned,
    is_making_agent,
)
from ensemble_ray.facts.fact import Fact, FactData, as_count, as_mapping
from ensemble_ray.facts.runs import FailureRecorded, OutputRecorded
from ensemble_ray.values.messages import TokenUsage
from ensemble_ray.values.metrics import Amount, CostEstimate, add_tokens, amount_of
from ensemble_ray.values.prices import RunCosts, estimate_embeddings
from ensemble_ray.values.trace import TaskTrace

PAID = (ModelAnswered, SamplingAnswered, MemoryRecalled, MemoryStored, ReflectionRecorded)  # Facts that cost tokens.


class UsageTally:
    """The usage of a run.

    Attributes:
        tokens: Input and output tokens of all executions; -1 if a provider did not count.
        model_calls: Also answers to servers of tools; without reused answers.
        reused_calls: Answers that were taken from earlier runs (S-USE-40).
        reused_tokens: Input and output tokens that these answers had there; -1 if a provider did not count.
        tool_calls: Started or answered, including unknown tools.
        spent_tokens: Tokens that a budget counts, including estimates.
    """

    def __init__(self, costs: RunCosts = None) -> None:
        """Start without facts; with `costs` the tally of the budget includes money."""
        self.tokens = 0
        self.model_calls = 0
        self.reused_calls = 0
        self.reused_tokens = 0
        self.tool_calls = 0
        self.spent_tokens = 0
        self._spent_cost = 0
        self._costs = costs
        #: names and times of the answers that made agents; a resumed run may record earlier answers again
        self._preliminary: set[tuple[str, float]] = set()
        self._uncounted: dict[str, int] = {}  # of its last answer; calls of unknown tools have no fact
        self._counted: dict[str, int] = {}  # by instance that has not ended: counted calls
        self._open_calls: set[str] = set()

    @property
    def spent(self) -> Amount:
        return Amount(self.spent_tokens, self._spent_cost)

    def apply(self, fact: Fact) -> None:
        rule = self._RULES.get(type(fact.data))
        if rule is not None:
            rule(self, fact)

    def apply_all(self, facts: Iterable[Fact]) -> None:
        for fact in facts:
            self.apply(fact)

    def _apply_answer(self, fact: Fact[ModelAnswered]) -> None:
        answer = fact.data
        if is_making_agent(fact):
            if not answer.is_copied and (fact.name, fact.at) not in self._preliminary:
                self._preliminary.add((fact.name, fact.at))
                self._spend_answer(answer)
            return
        if answer.reused:
            self.reused_calls += 1
            self.reused_tokens = add_tokens((self.reused_tokens, *answer.reused_tokens))
        else:
            self._count_tokens(answer)
            if not answer.is_copied:
                self._spend_answer(answer)
        instance = fact.instance
        # The model was called again, so all of them are answered.
        if uncounted := self._uncounted.pop(instance, 0):
            self._count_calls(instance, uncounted)
        if answer.tool_calls:
            self._uncounted[instance] = len(answer.tool_calls)

    def _apply_sampling(self, fact: Fact[SamplingAnswered]) -> None:
        self._count_tokens(fact.data)
        self._spend_answer(fact.data)

    def _apply_memory(self, fact: Fact[MemoryRecalled | MemoryStored]) -> None:
        self.tokens = add_tokens((self.tokens, fact.data.embedding_tokens))
        tokens = fact.data.embedding_tokens
        self._spend(tokens, 0, estimate_embeddings(self._costs, tokens))

    def _apply_reflection(self, fact: Fact[ReflectionRecorded]) -> None:
        self._spend_call(fact.data, fact.data.input_tokens, fact.data.output_tokens)

    def _count_tokens(self, answer: ModelAnswered | SamplingAnswered) -> None:
        self.model_calls += 1
        self.tokens = add_tokens((self.tokens, int(answer.input_tokens), int(answer.output_tokens)))

    def _spend_answer(self, answer: ModelAnswered | SamplingAnswered) -> None:
        """Count an answer; tokens that the provider and the budget did not count are estimated from the text."""
        sent, received = int(answer.input_tokens), int(answer.output_tokens)
        if sent < 0 or received < 0:
            calls, reasoning = getattr(answer, "tool_calls", ()), getattr(answer, "reasoning", None)
            estimated = answer.estimated_tokens or (0, answer_tokens(answer.text, calls, reasoning))
            sent = sent if sent >= 0 else max(0, estimated[0])
            received = received if received >= 0 else max(0, estimated[-1])
        delivery = answer.delivery if isinstance(answer, ModelAnswered) else ""
        self._spend_call(answer, sent, received, delivery=delivery)

    def _spend_call(
        self,
        answer: ModelAnswered | SamplingAnswered | ReflectionRecorded,
        sent: int,
        received: int,
        *,
        delivery: str = "",
    ) -> None:
        cost = None
        if self._costs is not None:
            usage = TokenUsage(sent, received, -1, int(answer.cached_tokens), int(answer.cache_write_tokens))
            cost = answer_cost(self._costs, answer, usage, delivery=delivery)
        self._spend(sent, received, cost)

    def _spend(self, sent: int, received: int, cost: CostEstimate | None) -> None:
        self.spent_tokens += sent + received
        if cost is not None:
            self._spent_cost += amount_of(sent, received, cost).cost

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
            # The model may have been called again without an answer; then the failure's trace has all calls.
            trace = fact.data.trace
            if isinstance(trace, TaskTrace):
                calls = trace.metrics.tool_call_count
            else:
                calls = as_count(as_mapping(as_mapping(trace).get("metrics")).get("tool_call_count"))
            self.tool_calls += max(0, calls - counted)

    def _count_calls(self, instance: str, count: int) -> None:
        self.tool_calls += count
        self._counted[instance] = self._counted.get(instance, 0) + count

    _RULES: ClassVar[Mapping[type[FactData], Callable[..., None]]] = {
        ModelAnswered: _apply_answer,
        SamplingAnswered: _apply_sampling,
        MemoryRecalled: _apply_memory,
        MemoryStored: _apply_memory,
        ReflectionRecorded: _apply_reflection,
        ToolIntended: _apply_call,
        DelegationDecided: _apply_call,
        ToolReturned: _apply_call,
        OutputRecorded: _apply_end,
        FailureRecorded: _apply_end,
    }
