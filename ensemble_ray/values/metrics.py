"""Usage of tasks and runs (model calls, tokens, seconds, money, budgets), and what processes report about their work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from functools import cache
from operator import not_
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeAlias

from msgspec import Struct
from pydantic import BeforeValidator, Field, TypeAdapter

from ensemble_ray.errors import ValidationError
from ensemble_ray.values.value import Value

UNKNOWN_TOKENS = -1  # S-MET-3
COST_UNIT = Decimal("0.00000001")  # costs have 8 decimal places (S-MET-31); an `Amount` is a multiple of the unit
_UNITS = 10**8
BATCH = "batch"  # delivery of an answer
_BATCH_SHARE = Decimal("0.5")  # of the price, at the providers with a Batch API


def _is_zero(value: object) -> bool:
    return value == 0


def _is_batch_share(value: object) -> bool:
    return value == _BATCH_SHARE


def add_tokens(counts: Iterable[int]) -> int:
    """Return the sum; unknown if one is unknown (S-MET-10, S-MET-22)."""
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
        """Return the sum of both."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in MemoryOperationCounts.model_fields}
        return MemoryOperationCounts(**sums)


# Without validation, which would build a schema when the module is imported.
MemoryOperationCounts.ZERO = MemoryOperationCounts.unchecked()


def _as_decimal(value: object) -> object:
    """Convert by text, so that 0.1 stays 0.1 (S-MET-30)."""
    if isinstance(value, bool) or not isinstance(value, float | int | str):
        return value
    try:
        return Decimal(str(value))
    except InvalidOperation:
        raise ValueError(f"CostConfiguration rates must be numbers, got: {value}") from None


class CostEstimate(Value):
    """Estimated money for tokens."""

    input_cost: Decimal
    output_cost: Decimal
    total_cost: Decimal
    currency: str = "USD"

    def add(self, other: CostEstimate | None) -> CostEstimate:
        """Return the sum of both in this estimate's currency; with None, this estimate."""
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
        batch_share: Share of these rates for answers of batches; >= 0.
    """

    input_token_rate: Annotated[Decimal, BeforeValidator(_as_decimal)]
    output_token_rate: Annotated[Decimal, BeforeValidator(_as_decimal)]
    currency: str = "USD"
    batch_share: Annotated[Decimal, BeforeValidator(_as_decimal)] = Field(
        default=_BATCH_SHARE, exclude_if=_is_batch_share
    )

    def model_post_init(self, _context: object, /) -> None:
        """Reject negative rates."""
        for name in ("input_token_rate", "output_token_rate", "batch_share"):
            if (rate := getattr(self, name)) < 0:
                raise ValidationError(f"CostConfiguration {name} must be >= 0, got: {rate}")

    def estimate(self, input_tokens: int, output_tokens: int, *, delivery: str = "") -> CostEstimate | None:
        """Return the cost of tokens, each part rounded half up to 8 decimal places; None if a number is unknown."""
        if input_tokens < 0 or output_tokens < 0:
            return None
        share = self.batch_share if delivery == BATCH else 1
        input_cost = (self.input_token_rate * share * input_tokens).quantize(COST_UNIT, ROUND_HALF_UP)
        output_cost = (self.output_token_rate * share * output_tokens).quantize(COST_UNIT, ROUND_HALF_UP)
        return CostEstimate(
            input_cost=input_cost, output_cost=output_cost, total_cost=input_cost + output_cost, currency=self.currency
        )


class TaskMetrics(Value):
    """The usage of one task. Durations are sums of parts, so parallel tool calls may exceed wall time."""

    EMPTY: ClassVar[TaskMetrics]

    input_tokens: int = UNKNOWN_TOKENS
    output_tokens: int = UNKNOWN_TOKENS
    total_tokens: int = UNKNOWN_TOKENS
    #: part of `output_tokens`; 0 also if uncounted (S-LLM-6)
    reasoning_tokens: int = Field(default=0, exclude_if=_is_zero)
    #: parts of `input_tokens` that providers' caches had, and that they stored; 0 also if uncounted (S-PRC-2)
    cached_tokens: int = Field(default=0, exclude_if=not_)
    cache_write_tokens: int = Field(default=0, exclude_if=not_)
    llm_latency: timedelta = timedelta()
    tool_execution_time: timedelta = timedelta()
    memory_retrieval_time: timedelta = timedelta()
    prompt_build_time: timedelta = timedelta()
    llm_call_count: int = 0
    #: answers to the task's own calls by the name of the model; None: its model is no fallback chain (S-FBK-31)
    answers_by_model: Mapping[str, int] | None = Field(default=None, exclude_if=not_)
    tool_call_count: int = 0
    retry_count: int = 0  # model calls after failures of their provider (S-DUR-66)
    incomplete_answers: int = 0  # cut off or empty; without those that a retry replaced (S-MET-18)
    delegation_count: int = 0
    reused_calls: int = Field(default=0, exclude_if=not_)  # answers of earlier runs, in no other number (S-USE-40)
    reused_tokens: int = Field(default=0, exclude_if=not_)  # input and output that these answers had there
    reused_output_tokens: int = Field(default=0, exclude_if=not_)  # the output alone
    memory_operations: MemoryOperationCounts = MemoryOperationCounts.ZERO
    #: model calls of unknown price or tokens, which `cost_estimate` lacks; 0 if no model of the run has a price (S-PRC-12)
    unpriced_calls: int = Field(default=0, exclude_if=not_)
    cost_estimate: CostEstimate | None = None

    def add(self, other: TaskMetrics) -> TaskMetrics:
        """Return the sum of both."""
        sums = MetricsSum()
        sums.add_metrics(self)
        sums.add_metrics(other)
        return self.model_copy(update=sums.fields)


_TOKENS = ("input_tokens", "output_tokens", "total_tokens", "reused_tokens", "reused_output_tokens")
_SUMMED = tuple(
    name
    for name in TaskMetrics.model_fields
    if name not in {*_TOKENS, "answers_by_model", "memory_operations", "cost_estimate"}
)
TaskMetrics.EMPTY = TaskMetrics.unchecked()


def metrics_by_key(entries: Iterable[tuple[str, TaskMetrics]]) -> dict[str, TaskMetrics]:
    """Return the metrics by key, summed for a task that ran several times (S-MET-27, S-MET-28)."""
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
    """The usage of a run: sums over its tasks."""

    EMPTY: ClassVar[ExecutionMetrics]

    total_input_tokens: int = UNKNOWN_TOKENS
    total_output_tokens: int = UNKNOWN_TOKENS
    total_tokens: int = UNKNOWN_TOKENS
    total_reasoning_tokens: int = Field(default=0, exclude_if=_is_zero)
    total_cached_tokens: int = Field(default=0, exclude_if=not_)
    total_cache_write_tokens: int = Field(default=0, exclude_if=not_)
    total_llm_latency: timedelta = timedelta()
    total_tool_execution_time: timedelta = timedelta()
    total_memory_retrieval_time: timedelta = timedelta()
    total_prompt_build_time: timedelta = timedelta()
    total_llm_call_count: int = 0
    answers_by_model: Mapping[str, int] | None = Field(default=None, exclude_if=not_)
    total_tool_calls: int = 0
    total_delegations: int = 0
    total_incomplete_answers: int = 0
    total_reused_calls: int = Field(default=0, exclude_if=not_)
    total_reused_tokens: int = Field(default=0, exclude_if=not_)
    memory_operations: MemoryOperationCounts = MemoryOperationCounts.ZERO
    task_metrics: Mapping[str, TaskMetrics] = {}  # by role; the last task of a role wins (S-MET-23)
    metrics_by_task: Mapping[str, TaskMetrics] = {}  # by key in the plan, in execution order (S-MET-27)
    total_unpriced_calls: int = Field(default=0, exclude_if=not_)
    total_cost_estimate: CostEstimate | None = None

    @classmethod
    def from_outputs(
        cls, outputs: Iterable[_HasMetrics] | None, *, by_task: Mapping[str, TaskMetrics] | None = None
    ) -> ExecutionMetrics:
        """Return the sums over task outputs; EMPTY without outputs."""
        added = MetricsSum()
        added.add(outputs or ())
        total = added.total()
        return total.model_copy(update={"metrics_by_task": dict(by_task)}) if by_task else total


class MetricsSum:
    """The sum of the metrics of many tasks."""

    def __init__(self) -> None:
        self._by_role: dict[str, TaskMetrics] = {}
        self._numbers: dict[str, Any] = {}
        self._tokens: dict[str, int] = dict.fromkeys(_TOKENS, 0)
        self._by_model: Counter[str] = Counter()
        self._memory = MemoryOperationCounts.ZERO
        self._cost: CostEstimate | None = None

    def add(self, outputs: Iterable[_HasMetrics]) -> None:
        for output in outputs:
            self.add_metrics(output.metrics)
            self._by_role[output.agent_role] = output.metrics

    def add_metrics(self, added: TaskMetrics) -> None:
        numbers, tokens = self._numbers, self._tokens
        for name in _SUMMED:
            value = getattr(added, name)
            numbers[name] = numbers[name] + value if name in numbers else value
        for name in _TOKENS:
            count = getattr(added, name)
            # A sum is unknown if one number is (S-MET-22).
            tokens[name] = UNKNOWN_TOKENS if count < 0 or tokens[name] < 0 else tokens[name] + count
        if added.answers_by_model:
            self._by_model.update(added.answers_by_model)
        if added.memory_operations is not MemoryOperationCounts.ZERO:
            self._memory = self._memory.add(added.memory_operations)
        if added.cost_estimate is not None:
            self._cost = added.cost_estimate if self._cost is None else self._cost.add(added.cost_estimate)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the sum as `TaskMetrics`."""
        return {
            **self._numbers,
            **self._tokens,
            "answers_by_model": dict(self._by_model) or None,
            "memory_operations": self._memory,
            "cost_estimate": self._cost,
        }

    def total(self) -> ExecutionMetrics:
        if not self._numbers:
            return ExecutionMetrics.EMPTY
        found = TaskMetrics.unchecked(**self.fields)
        return ExecutionMetrics.unchecked(
            total_input_tokens=found.input_tokens,
            total_output_tokens=found.output_tokens,
            total_tokens=found.total_tokens,
            total_reasoning_tokens=found.reasoning_tokens,
            total_cached_tokens=found.cached_tokens,
            total_cache_write_tokens=found.cache_write_tokens,
            total_llm_latency=found.llm_latency,
            total_tool_execution_time=found.tool_execution_time,
            total_memory_retrieval_time=found.memory_retrieval_time,
            total_prompt_build_time=found.prompt_build_time,
            total_llm_call_count=found.llm_call_count,
            answers_by_model=found.answers_by_model,
            total_tool_calls=found.tool_call_count,
            total_delegations=found.delegation_count,
            total_incomplete_answers=found.incomplete_answers,
            total_reused_calls=found.reused_calls,
            total_reused_tokens=found.reused_tokens,
            memory_operations=found.memory_operations,
            task_metrics=dict(self._by_role),
            metrics_by_task={},
            total_unpriced_calls=found.unpriced_calls,
            total_cost_estimate=found.cost_estimate,
        )


ExecutionMetrics.EMPTY = ExecutionMetrics.unchecked(task_metrics={})


class Amount(Struct, frozen=True):
    """Tokens, and money as a multiple of 10**-8."""

    tokens: int = 0
    cost: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.tokens + other.tokens, self.cost + other.cost)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.tokens - other.tokens, self.cost - other.cost)

    def at_least(self, other: Amount) -> Amount:
        return Amount(max(self.tokens, other.tokens), max(self.cost, other.cost))


NOTHING = Amount()


def amount_of(input_tokens: int, output_tokens: int, cost: CostEstimate | None) -> Amount:
    """Return tokens and their cost as an amount. An unknown cost is 0."""
    return Amount(input_tokens + output_tokens, 0 if cost is None else units_of(cost.total_cost))


def units_of(money: Decimal) -> int:
    """Return money as in `Amount`, rounded down."""
    return int(money * _UNITS)


def price(costs: CostConfiguration | None, input_tokens: int, output_tokens: int, *, delivery: str = "") -> Amount:
    """Return tokens as an amount. An unknown cost is 0."""
    return amount_of(
        input_tokens,
        output_tokens,
        None if costs is None else costs.estimate(input_tokens, output_tokens, delivery=delivery),
    )


class RunBudget(Struct, frozen=True, kw_only=True):
    """The budget of a run. None: no limit."""

    max_tokens: int | None = None
    max_cost: int | None = None  # as in `Amount`
    spent: Amount = NOTHING  # before the current owner
    account: str = ""  # shared by the processes of a cluster; "": one process makes all requests

    def share_of(self, spent: Amount) -> float:
        """Return the share of the budget that is spent; of two limits the larger share."""
        tokens = spent.tokens / self.max_tokens if self.max_tokens else 0.0
        return max(tokens, spent.cost / self.max_cost if self.max_cost else 0.0)

    @classmethod
    def of(cls, max_tokens: int | None, max_cost: float | None) -> RunBudget | None:
        """Return the budget of a user's limits."""
        if max_tokens is None and max_cost is None:
            return None
        return cls(max_tokens=max_tokens, max_cost=None if max_cost is None else int(Decimal(str(max_cost)) * _UNITS))

    def covers(self, total: Amount) -> bool:
        return (self.max_tokens is None or total.tokens <= self.max_tokens) and (
            self.max_cost is None or total.cost <= self.max_cost
        )

    def allows_more(self, than: RunBudget) -> bool:
        """Whether a limit of the other budget is higher here, or absent."""
        pairs = ((self.max_tokens, than.max_tokens), (self.max_cost, than.max_cost))
        return any(theirs is not None and (mine is None or mine > theirs) for mine, theirs in pairs)

    def describe(self, amount: Amount) -> str:
        """Return an amount as text, without parts that have no limit."""
        parts = [f"{amount.tokens} tokens"] if self.max_tokens is not None else []
        parts += [f"a cost of {amount.cost / _UNITS:.8g}"] if self.max_cost is not None else []
        return " and ".join(parts)

    def describe_limits(self) -> str:
        """Return the limits as text, with the names of the user's options."""
        parts = [f"max_tokens {self.max_tokens}"] if self.max_tokens is not None else []
        parts += [f"max_cost {self.max_cost / _UNITS:.8g}"] if self.max_cost is not None else []
        return " and ".join(parts)


#: Limits of a description: processes of an actor, tasks and runs of a process, agents of a run, buckets, endpoints.
MOST_PROCESSES, MOST_TASKS, MOST_AGENTS, MOST_BUCKETS, MOST_ENDPOINTS = 500, 50, 20, 200, 50
MOST_HOLDERS = 8

ActorKind: TypeAlias = Literal["scheduler", "agent", "manager", "callables", "journal", "limiter", "events", "driver"]
#: `starting`: has not answered yet, or waits for a node; `silent`: does not answer now; `kept`: idle, for a next run;
#: `retiring`: ends with its last run.
ActorState: TypeAlias = Literal["ready", "starting", "silent", "kept", "retiring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketDescription:
    name: str
    requests: int
    period_s: float
    tokens: int  # available
    waiting: int
    leased: int = 0  # held by processes, unused
    holders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointDescription:
    """A model endpoint, as one process sees it."""

    name: str
    state: Literal["closed", "open", "half_open"]  # `open`: the breaker blocks calls; `half_open`: it allows one probe
    probe_in_s: float | None = None  # None: closed, or a probe is allowed now
    last_failure: str = ""
    limit: int | None = None  # of concurrent calls, if the endpoint requested one
    sent: int = 0
    waiting: int = 0  # for the breaker or a slot


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDescription:
    run_id: str
    instance: str
    began_at: float | None = None  # Unix time, s; None: it waits there, or is in transit
    deaths: int = 0  # of processes that ran it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    run_id: str
    agents: tuple[str, ...] = ()  # roles
    more_agents: int = 0
    replica: int = 1  # 1-based, among the processes of these agents
    replicas: int = 1
    lost: int = 0  # predecessors that died


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDescription:
    name: str
    kind: ActorKind
    state: ActorState = "ready"
    node_id: str = ""  # empty: unknown
    host: str = ""
    pid: int | None = None
    memory_bytes: int | None = None
    reserved: str = ""
    restarts: int | None = None  # by Ray; None: unknown, or another process replaces it
    note: str = ""
    runs: tuple[RunDescription, ...] = ()
    more_runs: int = 0
    tasks: tuple[TaskDescription, ...] = ()
    more_tasks: int = 0
    queue: int = 0  # tasks that wait or are in transit
    endpoints: tuple[EndpointDescription, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorDescription:
    """An actor, the processes that it created, and its limits."""

    process: ProcessDescription
    processes: tuple[ProcessDescription, ...] = ()
    more_processes: int = 0
    buckets: tuple[BucketDescription, ...] = ()
    more_buckets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDescription:
    node_id: str
    name: str  # host, or address
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDescription:
    address: str
    nodes: tuple[NodeDescription, ...] = ()
    actors: tuple[ActorDescription, ...] = ()
    notes: tuple[str, ...] = ()


@cache
def _actor() -> TypeAdapter[ActorDescription]:
    return TypeAdapter(ActorDescription)


@cache
def _cluster() -> TypeAdapter[ClusterDescription]:
    return TypeAdapter(ClusterDescription)


def dump_actor(described: ActorDescription) -> bytes:
    return _actor().dump_json(described)


def load_actor(body: bytes) -> ActorDescription:
    return _actor().validate_json(body)


def dump_cluster(described: ClusterDescription) -> bytes:
    return _cluster().dump_json(described)


def load_cluster(body: bytes) -> ClusterDescription:
    return _cluster().validate_json(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointQuestion:
    url: str  # without a user; empty: `OPENAI_BASE_URL` of the node
    has_key: bool = True  # else the node needs one


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeQuestion:
    packages: Sequence[str] = ()
    #: pickles with modules of the user, by a name such as `Agent 'Writer'`
    payloads: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    endpoints: Sequence[EndpointQuestion] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    address: str
    node_id: str = ""  # two nodes may share an address
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict[str, str])  # versions; empty: not installed
    unloadable: Mapping[str, str] = field(default_factory=dict[str, str])  # reasons, by the name of the payload
    endpoints: Mapping[str, str] = field(default_factory=dict[str, str])  # reasons, by URL; empty: it can be used
    refusal: str = ""  # empty: it answered
    duration_s: float = 0.0

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "duration_s": round(self.duration_s, 3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesReport:
    """The answers of all nodes, and the state of the asking process."""

    here: NodeReport
    nodes: Sequence[NodeReport]
    duration_s: float = 0.0

    @property
    def is_fine(self) -> bool:
        return all(not self.problems(node) for node in self.nodes)

    def problems(self, node: NodeReport) -> Sequence[tuple[str, str]]:
        if node.refusal:
            return ((node.refusal, "Look at the node: ray list nodes; or take it out of the cluster"),)
        return tuple(self._find_problems(node))

    def _find_problems(self, node: NodeReport) -> Iterator[tuple[str, str]]:
        if node.python != self.here.python:
            yield f"Python {node.python}, here {self.here.python}", "Use the same Python on all nodes"
        for name, version in self.here.packages.items():
            there = node.packages.get(name, "")
            if there != version:
                shown = f"{name} {there}" if there else f"{name} is missing"
                install = "Install the same version on all nodes, or ship it: ensemble-ray submit --pip"
                yield f"{shown}, here {version or 'missing'}", install
        for name, reason in node.unloadable.items():
            ship = "Ship it: ensemble-ray submit --working-dir DIRECTORY, or install it on that node"
            yield f"{name} cannot be loaded: {reason}", ship
        for url, reason in node.endpoints.items():
            if reason:
                check = (
                    "Check the network and the environment of that node: the agents that live there call the endpoint"
                )
                yield f"{url}: {reason}", check
