"""State that the parts of one task's work share."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, Self, TypeVar, cast

import msgspec
from msgspec import Struct

from ensemble_ray.definition.task import ReflectionInput
from ensemble_ray.errors import BudgetExhaustedError, ExitEarlyError, ValidationError, message_of
from ensemble_ray.events import Event
from ensemble_ray.execute.agent.context_window import estimated_input
from ensemble_ray.execute.effects import TaskEffects, UnknownEffect, is_work
from ensemble_ray.execute.orders import Peers, RunContext, TaskOrder
from ensemble_ray.execute.redaction import clean_fact, record_values
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact, FactData, find_fact, require_usable
from ensemble_ray.facts.runs import LossAccepted
from ensemble_ray.llm.limits.endpoints import EndpointService, process_endpoints
from ensemble_ray.llm.prices import describe_model, describe_unpriced, price_of
from ensemble_ray.ports import (
    ChatModel,
    Clock,
    EventSink,
    Journal,
    Persistence,
    Reviewer,
    RunMemory,
    Services,
    SpendingAccount,
    StoredAnswers,
    ToolMetrics,
)
from ensemble_ray.text.foreign_text import estimate_tokens
from ensemble_ray.text.redaction import Redaction
from ensemble_ray.values.ids import RUN
from ensemble_ray.values.memory import TaskReflection
from ensemble_ray.values.messages import ChatMessage, ChatResponse, JsonSchema, TokenUsage, ToolCall, ToolSpec
from ensemble_ray.values.metrics import Amount, CostConfiguration, RunBudget, amount_of, price
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.prices import RunCosts, estimate_embeddings
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.trace import TaskTrace

D = TypeVar("D", bound=FactData)
T = TypeVar("T")


class Callables(Protocol):
    """Calls the user's callables, in the process that has them."""

    async def evaluate(self, path: str, argument: object) -> object:
        """Call the callable at a `callable_path`. Its error is raised here."""
        ...


class RunReflections(Protocol):
    """Reads and writes reflections from any process. Errors of user code are raised here."""

    async def recall(self, key: str) -> TaskReflection | None:
        """Return the reflection from before this run (S-REFL-2)."""
        ...

    async def find_prior(self, key: str) -> TaskReflection | None:
        """Return the present reflection."""
        ...

    async def store(self, key: str, reflection: TaskReflection) -> None: ...

    async def ask_strategy(self, asked: ReflectionInput) -> TaskReflection:
        """Call the task's own strategy; `TypeError` if it returned another type."""
        ...


class FirstRequest(Struct, frozen=True, kw_only=True):
    """The first model call of a task, before it is made."""

    order: TaskOrder
    model: ChatModel
    messages: Sequence[ChatMessage]
    schema: JsonSchema | None
    digest: str
    reuse_digest: str  # as in `ModelAnswered`
    is_answered: bool  # whether its answer is recorded, here or in an earlier run


class RequestDeferredError(Exception):
    """A task stops before its first model call."""


class RunnerPorts(Struct, frozen=True, kw_only=True):
    clock: Clock
    journal: Journal
    events: EventSink
    callables: Callables
    services: Services
    tool_metrics: ToolMetrics
    spending: Spending | None = None  # None: no limit
    endpoints: EndpointService = msgspec.field(default_factory=process_endpoints)
    #: receives (effect name, recorded fact, digest and messages of today's request) of each recorded answer (S-DUR-55)
    compare: Callable[[str, Fact[ModelAnswered], str, Sequence[ChatMessage]], None] | None = None
    #: the user's callable for unknown outcomes; None: ask at the terminal (S-DUR-24)
    ask_unknown: Callable[[UnknownEffect], object] | None = None
    #: safety of an output without effects on the world before its result is reported
    report_after: Persistence = Persistence.COMMITTED
    #: takes the first request of each task in place of its model; it raises `RequestDeferredError` (S-BAT-20)
    defer: Callable[[FirstRequest], Awaitable[None]] | None = None
    reviewer: Reviewer | None = None  # only in the process that started the run
    memory: RunMemory | None = None  # None: no memory, or its process cannot be reached
    reflections: RunReflections | None = None  # None: no reflections, or their process cannot be reached
    answers: StoredAnswers | None = None  # None: the run is not recorded


class Slot:
    """A concurrency slot of an agent, free while all open calls of a turn wait; without a semaphore no limit."""

    def __init__(self, slots: asyncio.Semaphore | None = None) -> None:
        self._slots = slots
        self._is_held = False
        self._open = 0  # calls of the turn without a return, and how many of them wait
        self._waiting = 0

    async def __aenter__(self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    async def acquire(self) -> None:
        if self._slots is not None and not self._is_held:
            await self._slots.acquire()
            self._is_held = True

    def begin(self, calls: int) -> None:
        self._open += calls

    def end(self) -> None:
        self._open -= 1
        self._release_if_waiting()

    @asynccontextmanager
    async def waiting(self) -> AsyncGenerator[None]:
        """Mark one call as waiting. If all open calls wait, the slot is free until `acquire`."""
        self._waiting += 1
        self._release_if_waiting()
        try:
            yield
        finally:
            self._waiting -= 1

    def _release_if_waiting(self) -> None:
        if self._waiting and self._waiting == self._open:
            self.release()

    def release(self) -> None:
        if self._slots is not None and self._is_held:
            self._is_held = False
            self._slots.release()


class TaskScope(Struct, frozen=True, kw_only=True):
    context: RunContext
    ports: RunnerPorts
    order: TaskOrder
    effects: TaskEffects
    #: recorded by an earlier process of this task, by (name, kind)
    recorded_facts: Mapping[tuple[str, str], Fact] = msgspec.field(default_factory=dict[tuple[str, str], Fact])
    slot: Slot = msgspec.field(default_factory=Slot)
    peers: Peers | None = None  # None: the task cannot delegate
    is_manager: bool = False  # of a hierarchical run

    @property
    def delegated(self) -> tuple[tuple[str, TaskOutput], ...]:
        """(role, output) of workers in completion order (S-HIER-6)."""
        outputs = [each.output for each in self.effects.delegations if each.output is not None]
        return tuple((each.agent_role, each) for each in sorted(outputs, key=lambda output: output.completed_at))

    @property
    def failed_delegations(self) -> tuple[TaskTrace, ...]:
        """Traces of failed workers; their tokens count, too (S-TRC-43)."""
        attempts = self.effects.delegations
        return tuple(each.trace for each in attempts if each.output is None and each.trace is not None)

    @property
    def loss(self) -> Fact[LossAccepted] | None:
        """A loss of records that may have contained calls of the task."""
        found = find_fact(self.recorded_facts, RUN, LossAccepted)
        return found if found is not None and found.data.has_effect else None

    def find_recorded(self, name: str, wanted: type[D]) -> Fact[D] | None:
        """Return the fact of an effect that must not be repeated; None: perform it."""
        found = find_fact(self.recorded_facts, name, wanted) if self.recorded_facts else None  # seldom any
        return None if found is None else require_usable(found)

    def clean(self, value: T) -> T:
        """Return the value without texts that the redactor of the run replaces."""
        return value if self.context.redaction is None else self.context.redaction.clean_data(value)

    async def note(
        self, name: str, *data: FactData, until: Persistence = Persistence.QUEUED, at: float | None = None
    ) -> None:
        """Append facts, and wait until they are as safe as `until`. `at` is Unix time, s; None: now.

        `StaleEpochError`: another process runs this task now, and this one must stop.
        """
        order = self.order
        if not self.effects.is_recorded:
            self.effects.is_recorded = any(map(is_work, data))
        self.effects.has_effect = self.effects.has_effect or until is Persistence.SYNCED
        now = self.ports.clock.now() if at is None else at
        if (redaction := self.context.redaction) is not None:
            data = tuple([clean_fact(redaction, each) for each in data])
            await self._record_values(redaction, now)
        facts = [Fact(run=order.run_id, name=name, at=now, data=each, epoch=order.epoch) for each in data]
        await self.ports.journal.append(facts, epoch=order.epoch, until=until)

    async def _record_values(self, redaction: Redaction, at: float) -> None:
        journal, epoch = self.ports.journal, self.order.epoch

        async def append(fact: Fact) -> None:
            await journal.append([fact], epoch=epoch)

        await record_values(redaction, append, run_id=self.order.run_id, at=at, epoch=epoch)

    async def note_end(
        self, *data: FactData, until: Persistence = Persistence.COMMITTED, at: float | None = None
    ) -> None:
        """Record the end. A cancellation is too late: result and record must agree (S-DUR-138)."""
        try:
            await self.note(self.order.instance, *data, until=until, at=at)
        except asyncio.CancelledError:  # the journal has accepted the facts, and the commit is under way
            await self.ports.journal.flush()

    def emit(self, event_type: type[Event], build: Callable[[], Event]) -> None:
        """Build and publish an event that has listeners."""
        if event_type.method in self.context.interest:
            self.ports.events.emit(self.clean(build()))


_FIRST_OUTPUT = 256  # estimate for the first answer of a kind of agent, tokens
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")  # by precedence


class Spending:
    """Budget of one run for the requests of this process."""

    def __init__(self, account: SpendingAccount, costs: RunCosts, *, needs_prices: bool = False) -> None:
        """`needs_prices` refuses requests of unknown price: the budget limits money."""
        self.account = account
        self.costs = costs
        self._needs_prices = needs_prices
        self._answers: dict[str, tuple[int, int]] = {}  # by kind of agent: (number of answers, their output tokens)

    def request(
        self, template: str, model: object, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> Request:
        """Estimate a request of a kind of agent, from earlier answers if the model has no token limit."""
        output = output_limit(model)
        if output is None:
            count, total = self._answers.get(template, (0, 0))
            output = max(1, math.ceil(total / count)) if count else _FIRST_OUTPUT
        return Request(
            spending=self,
            template=template,
            model=model,
            input_tokens=estimated_input(messages, tools),
            output_tokens=output,
        )

    def price(self, model: object, usage: TokenUsage, *, delivery: str = "") -> Amount:
        """Return the cost of a call; a `ValidationError` refuses an unknown price if the budget limits money."""
        costs = self.costs
        if costs is None or isinstance(costs, CostConfiguration):
            return price(costs, usage.input_tokens, usage.output_tokens, delivery=delivery)
        found = price_of(costs, model)
        if found is None and self._needs_prices:
            what = f"max_cost: the price of {describe_model(model)} is unknown"
            raise ValidationError(f"{what}. {describe_unpriced(model)}")
        return amount_of(
            usage.input_tokens, usage.output_tokens, None if found is None else found.estimate(usage, delivery=delivery)
        )

    def charge_answer(self, claim: str, template: str, model: object, usage: TokenUsage, *, delivery: str = "") -> None:
        count, total = self._answers.get(template, (0, 0))
        self._answers[template] = (count + 1, total + usage.output_tokens)
        self.account.charge(claim, self.price(model, usage, delivery=delivery))

    async def charge_embeddings(self, tokens: int) -> None:
        """Charge tokens that an embedding model read, without a claim, even beyond the budget."""
        self.account.charge("", amount_of(tokens, 0, estimate_embeddings(self.costs, tokens)))
        await self.account.settle()

    def close(self) -> None:
        self.account.close()


class Request(Struct, kw_only=True):
    """One request, with its repetitions."""

    spending: Spending
    template: str
    model: object
    input_tokens: int
    output_tokens: int
    estimated: tuple[int, int] | None = None  # (input, output) tokens that were charged without the provider's count

    async def send(self, attempt: Callable[[], Awaitable[ChatResponse]]) -> ChatResponse:
        """Reserve the estimate, make one attempt, and charge the real tokens; may raise `BudgetExhaustedError`."""
        estimate = TokenUsage(self.input_tokens, self.output_tokens)
        claim = await self.spending.account.reserve(self.spending.price(self.model, estimate))
        try:
            response = await attempt()
        except BaseException:
            self.spending.account.charge(claim)
            raise
        self.charge(claim, response)
        return response

    def charge(self, claim: str, response: ChatResponse, *, delivery: str = "") -> None:
        usage = response.usage or TokenUsage()
        counted = (usage.input_tokens, usage.output_tokens)
        charged = (
            counted[0] if counted[0] >= 0 else self.input_tokens,
            counted[1] if counted[1] >= 0 else answer_tokens(response.text, response.tool_calls, response.reasoning),
        )
        if charged != counted:
            self.estimated = charged
        known = TokenUsage(*charged, -1, usage.cached_tokens, usage.cache_write_tokens)
        self.spending.charge_answer(claim, self.template, self.model, known, delivery=delivery)


def spending_here(budget: RunBudget | None, costs: RunCosts) -> Spending | None:
    if budget is None:
        return None
    from ensemble_ray.llm.limits.accounts import LocalAccount  # few runs have a budget

    return Spending(LocalAccount(budget), costs, needs_prices=budget.max_cost is not None)


def answer_tokens(text: str | None, calls: Sequence[ToolCall], reasoning: str | None = None) -> int:
    return estimate_tokens(
        len(text or "") + len(reasoning or "") + sum(len(call.name) + len(call.arguments) for call in calls)
    )


def output_limit(model: object) -> int | None:
    """Return `max_output_tokens` of a user's model, or a request option of the library's; None: no limit."""
    while (inner := getattr(model, "delegate", None)) is not None:  # a rate-limited model
        model = inner
    found = getattr(model, "request_options", None)
    options = cast("Mapping[str, object]", found) if isinstance(found, Mapping) else {}
    limits = [options.get(name) for name in _LIMITS]
    candidates = (getattr(model, "max_output_tokens", None), *limits)
    return next((value for value in candidates if isinstance(value, int) and value > 0), None)


def reason_of(error: BaseException | None) -> ExitReason:
    if isinstance(error, BudgetExhaustedError):
        return ExitReason.BUDGET_EXHAUSTED
    return ExitReason.TIMEOUT if isinstance(error, ExitEarlyError) and error.timed_out else ExitReason.USER_EXIT_EARLY


def exit_of(reason: ExitReason) -> ExitEarlyError:
    if reason is ExitReason.BUDGET_EXHAUSTED:
        return BudgetExhaustedError()
    return ExitEarlyError(timed_out=reason is ExitReason.TIMEOUT)


def describe_exit(message: str) -> str:
    """Return the result, in a trace, of a tool that ended the run."""
    asked = "The tool asked for the end of the run"
    return f"{asked}: {message}" if message else asked


def describe_exhaustion(errors: Iterable[BaseException | None]) -> str:
    """Return the warning with limit, spending, and need of the first task without budget (S-BUD-4)."""
    exhausted = (error for error in errors if isinstance(error, BudgetExhaustedError) and str(error))
    return next(map(message_of, exhausted), "Budget exhausted")
