"""What every part of one task's work shares: the run's context, the ports, the order, the effects.

Parts note facts and publish events through it; none of them holds the runner.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, cast

from ensemble_ray.errors import BudgetExhaustedError, ExitEarlyError, message_of
from ensemble_ray.events import Event
from ensemble_ray.events.telemetry.active import effect_span
from ensemble_ray.execute.agent.context_window import estimated_input
from ensemble_ray.execute.effects import is_doing
from ensemble_ray.facts.fact import Fact, FactData, find_fact, require_usable
from ensemble_ray.facts.runs import LossAccepted
from ensemble_ray.llm.limits.accounts import LocalAccount
from ensemble_ray.llm.limits.endpoints import EndpointService, process_endpoints
from ensemble_ray.ports import Persistence
from ensemble_ray.text.foreign_text import estimate_tokens
from ensemble_ray.values.ids import RUN
from ensemble_ray.values.messages import ChatMessage, TokenUsage
from ensemble_ray.values.metrics import price
from ensemble_ray.values.outputs import ExitReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ensemble_ray.definition.task import ReflectionInput
    from ensemble_ray.execute.effects import TaskEffects, UnknownEffect
    from ensemble_ray.execute.orders import Peers, RunContext, TaskOrder
    from ensemble_ray.facts.effects import ModelAnswered
    from ensemble_ray.ports import (
        Clock,
        EventSink,
        Journal,
        Reviewer,
        RunMemory,
        Services,
        SpendingAccount,
        ToolMetrics,
    )
    from ensemble_ray.values.memory import TaskReflection
    from ensemble_ray.values.messages import ChatResponse, ToolCall, ToolSpec
    from ensemble_ray.values.metrics import CostConfiguration, RunBudget
    from ensemble_ray.values.task_output import TaskOutput
    from ensemble_ray.values.trace import TaskTrace


class Slot:
    """One slot; None as the semaphore means that there are as many as one likes."""

    def __init__(self, slots: asyncio.Semaphore | None = None) -> None:
        self._slots = slots
        self._is_held = False
        #: calls of the turn that have not returned, and those of them that only wait
        self._open = 0
        self._waiting = 0

    async def __aenter__(self) -> Self:
        """Acquire the slot."""
        await self.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave it for good."""
        self._release()

    async def acquire(self) -> None:
        """Acquire the slot, after a wait where another task has it."""
        if self._slots is not None and not self._is_held:
            await self._slots.acquire()
            self._is_held = True

    def begin(self, calls: int) -> None:
        """So many calls of a turn begin."""
        self._open += calls

    def end(self) -> None:
        """One call returned."""
        self._open -= 1
        self._release_if_waiting()

    @asynccontextmanager
    async def waiting(self) -> AsyncGenerator[None]:
        """Mark this call as one that only waits in the block; the slot is released while all open calls do. `acquire` gets it again."""
        self._waiting += 1
        self._release_if_waiting()
        try:
            yield
        finally:
            self._waiting -= 1

    def _release_if_waiting(self) -> None:
        if self._waiting and self._waiting == self._open:
            self._release()

    def _release(self) -> None:
        if self._slots is not None and self._is_held:
            self._is_held = False
            self._slots.release()


D = TypeVar("D", bound=FactData)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerPorts:
    """Everything a runner touches."""

    clock: Clock
    journal: Journal
    events: EventSink
    callables: Callables
    services: Services
    tool_metrics: ToolMetrics
    #: what model calls may spend; None: as much as they like
    spending: Spending | None = None
    #: whether and when endpoints are asked; the process's own unless a test brings another
    endpoints: EndpointService = field(default_factory=process_endpoints)
    #: told (effect, recorded fact, digest of today's request, its messages) where a recorded answer is used (S-DUR-55)
    compare: Callable[[str, Fact[ModelAnswered], str, Sequence[ChatMessage]], None] | None = None
    #: the user's callable that is asked about unknown outcomes in this process; None: its terminal (S-DUR-24)
    ask_unknown: Callable[[UnknownEffect], object] | None = None
    #: asks at review gates, in the process that started the run; None: another one has it, or there is nobody to ask
    reviewer: Reviewer | None = None
    #: the run's memory; None where it has none, or nobody answers for it
    memory: RunMemory | None = None
    #: what is learned of its tasks; None where no task is reflected on, or nobody answers for it
    reflections: RunReflections | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScope:
    """One task at work."""

    context: RunContext
    ports: RunnerPorts
    order: TaskOrder
    effects: TaskEffects
    #: what an earlier process of this task recorded: (name, kind) -> fact
    recorded_facts: Mapping[tuple[str, str], Fact] = field(default_factory=dict[tuple[str, str], Fact])
    #: its place among its agent's tasks
    slot: Slot = field(default_factory=Slot)
    #: who does what it delegates; None where nothing can be
    peers: Peers | None = None

    @property
    def is_manager(self) -> bool:
        """Whether it is the task of a hierarchical run's manager."""
        return self.context.hierarchy is not None and not self.order.depth

    @property
    def delegated(self) -> tuple[tuple[str, TaskOutput], ...]:
        """The outputs of a manager's workers, by role, in the order in which they were done (S-HIER-6)."""
        if not self.is_manager:
            return ()
        given = [each.output for each in self.effects.delegations if each.output is not None]
        return tuple((each.agent_role, each) for each in sorted(given, key=lambda output: output.completed_at))

    @property
    def failed_delegations(self) -> tuple[TaskTrace, ...]:
        """The traces of a manager's workers that failed; their tokens were spent (S-TRC-43)."""
        if not self.is_manager:
            return ()
        attempts = self.effects.delegations
        return tuple(each.trace for each in attempts if each.output is None and each.trace is not None)

    def find_recorded(self, name: str, wanted: type[D]) -> Fact[D] | None:
        """Return the effect recorded under that name, which is not performed again; None when there is none.

        Raises:
            RecordError: something of it is missing.
        """
        # Empty, as a rule: asked at every step, it is looked at before anything is looked up.
        found = find_fact(self.recorded_facts, name, wanted) if self.recorded_facts else None
        return None if found is None else require_usable(found)

    @property
    def loss(self) -> Fact[LossAccepted] | None:
        """What tells that a part of the record is lost in which the task may have called something; None: nothing does."""
        found = find_fact(self.recorded_facts, RUN, LossAccepted)
        return found if found is not None and found.data.has_effect else None

    async def note(
        self, name: str, *data: FactData, until: Persistence = Persistence.QUEUED, at: float | None = None
    ) -> None:
        """Put a fact, or several at once, into the journal; return when that is as safe as the next step needs.

        Args:
            name: Their name.
            data: What happened.
            until: How safe it must be.
            at: When it happened, Unix time, s; None: now.

        Raises:
            StaleEpochError: another process has this task now; nothing more of it must be done here.
            RecordError: the store refused it.
        """
        order = self.order
        self.effects.is_recorded = self.effects.is_recorded or any(map(is_doing, data))
        now = self.ports.clock.now() if at is None else at
        facts = [Fact(run=order.run_id, name=name, at=now, data=each, epoch=order.epoch) for each in data]
        await self.ports.journal.append(facts, epoch=order.epoch, until=until)

    async def note_end(self, *data: FactData) -> None:
        """Put the task's end on record, committed.

        Whoever wants it stopped meanwhile comes too late: the run must say what its record does (S-DUR-138).
        """
        try:
            await self.note(self.order.instance, *data, until=Persistence.COMMITTED)
        except asyncio.CancelledError:  # while it waits for the commit of what a journal has taken before it waits
            await self.ports.journal.flush()

    def effect_span(self, name: str) -> AbstractContextManager[None]:
        """Perform the effect of that name in the block, as its span where the run is traced (S-INT-37)."""
        return effect_span(self.context.tracing, name)

    def emit(self, event_type: type[Event], build: Callable[[], Event]) -> None:
        """Publish an event, building it only if somebody wants its type."""
        if self.ports.events.wants(event_type):
            self.ports.events.emit(build())


class Callables(Protocol):
    """Asks a callable of the run."""

    async def evaluate(self, path: str, argument: object) -> object:
        """Call it with that argument; what it raises is raised here."""
        ...


class RunReflections(Protocol):
    """The reflections of one run's tasks, as these reach them wherever they are; what user code raises is raised here."""

    async def recall(self, key: str) -> TaskReflection | None:
        """Return the reflection that was there before the run stored one under that key (S-REFL-2)."""
        ...

    async def find_prior(self, key: str) -> TaskReflection | None:
        """Return the reflection that is there now."""
        ...

    async def store(self, key: str, reflection: TaskReflection) -> None:
        """Keep a reflection, in place of the one that has that key."""
        ...

    async def ask_strategy(self, asked: ReflectionInput) -> TaskReflection:
        """Return what the task's own strategy makes of its output.

        Raises:
            TypeError: it made something else.
        """
        ...


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


def reason_of(error: BaseException | None) -> ExitReason:
    """Why a run ends with that error."""
    if isinstance(error, BudgetExhaustedError):
        return ExitReason.BUDGET_EXHAUSTED
    return ExitReason.TIMEOUT if isinstance(error, ExitEarlyError) and error.timed_out else ExitReason.USER_EXIT_EARLY


def exit_of(reason: ExitReason) -> ExitEarlyError:
    """Return the error that ends a run for that reason."""
    if reason is ExitReason.BUDGET_EXHAUSTED:
        return BudgetExhaustedError()
    return ExitEarlyError(timed_out=reason is ExitReason.TIMEOUT)


def describe_exit(said: str) -> str:
    """Return what a trace shows as the result of a tool that asked for the end of the run."""
    asked = "The tool asked for the end of the run"
    return f"{asked}: {said}" if said else asked


def describe_exhaustion(errors: Iterable[BaseException | None]) -> str:
    """Return what a run that spent its budget warns of: the limit, what was spent, what would have been needed (S-BUD-4).

    Args:
        errors: Those of the tasks that ended the run, in the order in which they did.
    """
    spent = (error for error in errors if isinstance(error, BudgetExhaustedError) and str(error))
    return next(map(message_of, spent), "Budget exhausted")
