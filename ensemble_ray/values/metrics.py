"""What work cost: counts, tokens, seconds, money. Sums only; no clock, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Annotated, ClassVar, Protocol

from pydantic import BeforeValidator, Field

from ensemble_ray.errors import ValidationError
from ensemble_ray.values.value import Value

#: Token count that the provider did not tell (S-MET-3).
UNKNOWN_TOKENS = -1
_CENT_OF_A_MICRO = Decimal("0.00000001")


def _is_zero(value: object) -> bool:
    return value == 0


def add_tokens(counts: Iterable[int]) -> int:
    """Sum of token counts; unknown if any is (S-MET-10, S-MET-22)."""
    total = 0
    for count in counts:
        if count < 0:
            return UNKNOWN_TOKENS
        total += count
    return total


class MemoryOperationCounts(Value):
    """How often memory was used."""

    ZERO: ClassVar[MemoryOperationCounts]

    short_term_entries_written: int = 0
    long_term_stores: int = 0
    long_term_retrievals: int = 0
    entity_lookups: int = 0

    def add(self, other: MemoryOperationCounts) -> MemoryOperationCounts:
        """Both together."""
        return MemoryOperationCounts(
            short_term_entries_written=self.short_term_entries_written + other.short_term_entries_written,
            long_term_stores=self.long_term_stores + other.long_term_stores,
            long_term_retrievals=self.long_term_retrievals + other.long_term_retrievals,
            entity_lookups=self.entity_lookups + other.entity_lookups,
        )


MemoryOperationCounts.ZERO = MemoryOperationCounts()


def _as_decimal(value: object) -> object:
    """Floats and strings by their text, so that 0.1 stays 0.1 (S-MET-30)."""
    if isinstance(value, bool) or not isinstance(value, float | int | str):
        return value
    try:
        return Decimal(str(value))
    except InvalidOperation:
        msg = f"CostConfiguration rates must be numbers, got: {value}"
        raise ValueError(msg) from None


class CostEstimate(Value):
    """Estimated money for tokens."""

    input_cost: Decimal
    output_cost: Decimal
    total_cost: Decimal
    currency: str = "USD"

    def add(self, other: CostEstimate | None) -> CostEstimate:
        """Both together, in this one's currency; adding None gives this one."""
        if other is None:
            return self
        return CostEstimate(
            input_cost=self.input_cost + other.input_cost,
            output_cost=self.output_cost + other.output_cost,
            total_cost=self.total_cost + other.total_cost,
            currency=self.currency,
        )


class CostConfiguration(Value):
    """Money per token.

    Attributes:
        input_token_rate: Money per input token; >= 0.
        output_token_rate: Money per output token; >= 0.
    """

    input_token_rate: Annotated[Decimal, BeforeValidator(_as_decimal)]
    output_token_rate: Annotated[Decimal, BeforeValidator(_as_decimal)]
    currency: str = "USD"

    def model_post_init(self, _context: object, /) -> None:
        """Refuse negative rates."""
        for name, rate in (("input_token_rate", self.input_token_rate), ("output_token_rate", self.output_token_rate)):
            if rate < 0:
                msg = f"CostConfiguration {name} must be >= 0, got: {rate}"
                raise ValidationError(msg)

    def estimate(self, input_tokens: int, output_tokens: int) -> CostEstimate | None:
        """Cost of so many tokens, each part rounded to 8 places half up; None when either is unknown."""
        if input_tokens < 0 or output_tokens < 0:
            return None
        input_cost = (self.input_token_rate * input_tokens).quantize(_CENT_OF_A_MICRO, ROUND_HALF_UP)
        output_cost = (self.output_token_rate * output_tokens).quantize(_CENT_OF_A_MICRO, ROUND_HALF_UP)
        return CostEstimate(
            input_cost=input_cost, output_cost=output_cost, total_cost=input_cost + output_cost, currency=self.currency
        )


class TaskMetrics(Value):
    """What one task cost. Durations are sums of parts, so parallel tool calls may exceed wall time."""

    EMPTY: ClassVar[TaskMetrics]

    input_tokens: int = UNKNOWN_TOKENS
    output_tokens: int = UNKNOWN_TOKENS
    total_tokens: int = UNKNOWN_TOKENS
    #: part of `output_tokens`: what endpoints counted as reasoning; 0 also where none counted it (S-LLM-6)
    reasoning_tokens: int = Field(default=0, exclude_if=_is_zero)
    llm_latency: timedelta = timedelta()
    tool_execution_time: timedelta = timedelta()
    memory_retrieval_time: timedelta = timedelta()
    prompt_build_time: timedelta = timedelta()
    llm_call_count: int = 0
    tool_call_count: int = 0
    #: model calls that were made again because their provider failed (S-DUR-66)
    retry_count: int = 0
    #: answers of models that were cut off or empty, those that were asked for again not counted (S-MET-18)
    incomplete_answers: int = 0
    delegation_count: int = 0
    memory_operations: MemoryOperationCounts = MemoryOperationCounts.ZERO
    cost_estimate: CostEstimate | None = None

    def add(self, other: TaskMetrics) -> TaskMetrics:
        """Return the sum of both, as of a task that ran twice."""
        mine, its = self.cost_estimate, other.cost_estimate
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        tokens = {name: add_tokens((getattr(self, name), getattr(other, name))) for name in _TOKENS}
        rest = {
            "memory_operations": self.memory_operations.add(other.memory_operations),
            "cost_estimate": its if mine is None else mine.add(its),
        }
        return self.model_copy(update={**sums, **tokens, **rest})


_TOKENS = ("input_tokens", "output_tokens", "total_tokens")
_SUMMED = tuple(
    name for name in TaskMetrics.model_fields if name not in {*_TOKENS, "memory_operations", "cost_estimate"}
)
TaskMetrics.EMPTY = TaskMetrics()


def metrics_by_key(entries: Iterable[tuple[str, TaskMetrics]]) -> dict[str, TaskMetrics]:
    """Return the metrics of tasks by key; of a task that ran several times their sum (S-MET-27, S-MET-28)."""
    found: dict[str, TaskMetrics] = {}
    for key, metrics in entries:
        found[key] = found[key].add(metrics) if key in found else metrics
    return found


class _HasMetrics(Protocol):
    @property
    def agent_role(self) -> str: ...
    @property
    def metrics(self) -> TaskMetrics: ...


class ExecutionMetrics(Value):
    """What a run cost: sums over its tasks."""

    EMPTY: ClassVar[ExecutionMetrics]

    total_input_tokens: int = UNKNOWN_TOKENS
    total_output_tokens: int = UNKNOWN_TOKENS
    total_tokens: int = UNKNOWN_TOKENS
    #: part of `total_output_tokens`, as `TaskMetrics.reasoning_tokens`
    total_reasoning_tokens: int = Field(default=0, exclude_if=_is_zero)
    total_llm_latency: timedelta = timedelta()
    total_tool_execution_time: timedelta = timedelta()
    total_memory_retrieval_time: timedelta = timedelta()
    total_prompt_build_time: timedelta = timedelta()
    total_llm_call_count: int = 0
    total_tool_calls: int = 0
    total_delegations: int = 0
    total_incomplete_answers: int = 0
    memory_operations: MemoryOperationCounts = MemoryOperationCounts.ZERO
    #: role -> metrics; the last task of a role wins (S-MET-23)
    task_metrics: Mapping[str, TaskMetrics] = {}
    #: key of a task in the plan -> its metrics, in execution order (S-MET-27)
    metrics_by_task: Mapping[str, TaskMetrics] = {}
    total_cost_estimate: CostEstimate | None = None

    @classmethod
    def from_outputs(
        cls, outputs: Iterable[_HasMetrics] | None, *, by_task: Mapping[str, TaskMetrics] | None = None
    ) -> ExecutionMetrics:
        """Sum up task outputs; none of them gives EMPTY.

        Args:
            outputs: Outputs or traces of tasks, those of delegated work among them.
            by_task: Metrics of the plan's tasks by key, where keys are known.
        """
        added = MetricsSum()
        added.add(outputs or ())
        total = added.total()
        return total.model_copy(update={"metrics_by_task": dict(by_task)}) if by_task else total


class MetricsSum:
    """Sums of tasks that come one after the other, as `ExecutionMetrics` tells them."""

    def __init__(self) -> None:
        """Begin with no task."""
        self._count = 0
        #: input, output and total tokens
        self._tokens = [0, 0, 0]
        #: model latency, tool time, memory time, prompt time
        self._times = [timedelta()] * 4
        #: model calls, tool calls, delegations, incomplete answers, tokens of reasoning
        self._calls = [0, 0, 0, 0, 0]
        self._memory = MemoryOperationCounts.ZERO
        self._cost: CostEstimate | None = None
        self._by_role: dict[str, TaskMetrics] = {}

    def add(self, outputs: Iterable[_HasMetrics]) -> None:
        """Add tasks; the last of a role counts for that role (S-MET-23)."""
        for output in outputs:
            each = output.metrics
            self._count += 1
            tokens = (each.input_tokens, each.output_tokens, each.total_tokens)
            self._tokens = [add_tokens(pair) for pair in zip(self._tokens, tokens, strict=True)]
            times = (each.llm_latency, each.tool_execution_time, each.memory_retrieval_time, each.prompt_build_time)
            self._times = [before + more for before, more in zip(self._times, times, strict=True)]
            calls = (
                each.llm_call_count,
                each.tool_call_count,
                each.delegation_count,
                each.incomplete_answers,
                each.reasoning_tokens,
            )
            self._calls = [before + more for before, more in zip(self._calls, calls, strict=True)]
            if each.memory_operations is not MemoryOperationCounts.ZERO:
                self._memory = self._memory.add(each.memory_operations)
            if each.cost_estimate is not None:
                self._cost = each.cost_estimate if self._cost is None else self._cost.add(each.cost_estimate)
            self._by_role[output.agent_role] = each

    def total(self) -> ExecutionMetrics:
        """Return the sums so far; EMPTY when there was no task."""
        if not self._count:
            return ExecutionMetrics.EMPTY
        return ExecutionMetrics(
            total_input_tokens=self._tokens[0],
            total_output_tokens=self._tokens[1],
            total_tokens=self._tokens[2],
            total_llm_latency=self._times[0],
            total_tool_execution_time=self._times[1],
            total_memory_retrieval_time=self._times[2],
            total_prompt_build_time=self._times[3],
            total_llm_call_count=self._calls[0],
            total_tool_calls=self._calls[1],
            total_delegations=self._calls[2],
            total_incomplete_answers=self._calls[3],
            total_reasoning_tokens=self._calls[4],
            memory_operations=self._memory,
            task_metrics=dict(self._by_role),
            total_cost_estimate=self._cost,
        )


ExecutionMetrics.EMPTY = ExecutionMetrics()


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
