"""Every contract of the core, except `Runtime` (in `runtime.py`, since it speaks of plans). Package: ports.

An adapter fulfils a port by its shape and inherits nothing. Each port has one contract suite over all its adapters.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ensemble_ray.events import Event
from ensemble_ray.facts.fact import Fact
from ensemble_ray.values.messages import ChatMessage, ChatResponse, JsonSchema, ToolSpec

if TYPE_CHECKING:
    from ensemble_ray.values.amounts import Amount
    from ensemble_ray.values.rate_limit import RateLimit
    from ensemble_ray.values.reviews import ReviewAnswer, ReviewRequest

__all__ = [
    "ChatModel",
    "Clock",
    "CpuPool",
    "CustomToolMetrics",
    "DriverServices",
    "EventSink",
    "Journal",
    "Limiter",
    "Persistence",
    "Reviewer",
    "SpendingAccount",
    "StreamingChatModel",
    "StructuredChatModel",
    "ToolMetrics",
]


@runtime_checkable
class ChatModel(Protocol):
    """A model that answers a conversation; a synchronous `chat` is accepted too."""

    def chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> ChatResponse | Awaitable[ChatResponse]:
        """Answer the conversation; with `tools`, the answer may ask for calls of them."""
        ...


@runtime_checkable
class StreamingChatModel(Protocol):
    """A model that also streams."""

    def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncIterator[str | ChatResponse]:
        """Fragments of the text, then one `ChatResponse` with the assembled whole."""
        ...


@runtime_checkable
class StructuredChatModel(Protocol):
    """A model that can also be held to a JSON schema by its endpoint; a synchronous method is accepted too."""

    def chat_structured(
        self, messages: Sequence[ChatMessage], schema: JsonSchema
    ) -> ChatResponse | Awaitable[ChatResponse]:
        """Answer the conversation, which asks for that form in words too, in that form.

        Where the endpoint cannot be held to it, answer as `chat` without tools does: whoever asks parses and corrects.
        """
        ...


class Clock(Protocol):
    """Time from outside, so that tests can make it."""

    def now(self) -> float:
        """Unix time, s."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Return after that many seconds of this clock."""
        ...


class EventSink(Protocol):
    """Takes events in the order in which they happened; never waits, never raises for a listener's sake."""

    def wants(self, event_type: type[Event]) -> bool:
        """Whether anybody listens to that type; events nobody wants are not built."""
        ...

    def emit(self, event: Event) -> None:
        """Take one event."""
        ...


class RunEventSink(EventSink, Protocol):
    """The sink of a whole run, where its listeners are."""

    async def wait_until_delivered(self, *event_types: type[Event]) -> None:
        """Return when the listeners to one of these types have heard of all that happened so far (S-SET-30)."""
        ...


class Persistence(IntEnum):
    """How safe a fact must be before whoever appends it goes on; later values include the earlier ones."""

    #: in order in this process's queue, on its way to the store
    QUEUED = 0
    #: committed: it survives the death of every process
    COMMITTED = 1
    #: on the disk itself: it survives a loss of power too
    SYNCED = 2


class Journal(Protocol):
    """One run's append-only list of facts, as one writer sees it."""

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:
        """Add facts in order; return when they are as safe as asked, those appended before them included.

        They are taken before it waits for anything: a caller that is cancelled does not call them back. A buffered journal (durability `run`) and one in memory return at once.

        Raises:
            StaleEpochError: a newer epoch has been seen; the writer must stop before its next effect. Facts that were
                only `QUEUED` may be refused later: then the next `append` for that instance raises.
            RecordError: the store refused what was appended.
        """
        ...

    async def lookup_recorded(self, instance: str) -> Mapping[tuple[str, str], Fact]:
        """Return what is recorded of an instance, by any writer: (name, kind) -> its newest fact, stimuli left out."""
        ...

    async def flush(self) -> None:
        """Return when everything appended so far is committed.

        Raises:
            RecordError: the store refused it.
        """
        ...

    async def close(self) -> None:
        """Flush, and release what the writer holds."""
        ...


class DriverServices(Protocol):
    """What only the process that started the run can do: correlated requests as data, answered by the driver."""

    async def ask(self, name: str, payload: Mapping[str, object]) -> object:
        """Ask the driver's service of that name and wait for its answer.

        Raises:
            IllegalStateError: the driver is gone or has no such service.
        """
        ...

    def notify(self, name: str, payload: Mapping[str, object]) -> None:
        """Notify the driver's service of that name; no answer, order kept."""
        ...


class Reviewer(Protocol):
    """Asks whoever decides at the review gates of a run, in the process that started it (S-REV-49)."""

    async def ask(self, request: ReviewRequest) -> ReviewAnswer:
        """Return the decision, and who took it; gates of one run come one after the other.

        Raises:
            ReviewTimeoutError: nobody answered in time, and that fails the task.
            ValidationError: what was returned is no decision.
        """
        ...


class Limiter(Protocol):
    """Shared permits; one bucket per id for all holders, wherever they run (S-SET-36)."""

    async def acquire(self, bucket: str, limit: RateLimit, *, timeout_s: float) -> None:
        """Take one permit, first come first served.

        Raises:
            RateLimitTimeoutError: none came in time.
        """
        ...


class SpendingAccount(Protocol):
    """What one run may spend; one account for all its requests, wherever they are made (S-BUD-8)."""

    async def reserve(self, estimate: Amount) -> str:
        """Wait until a request of that estimate may be sent, first come first served; gives its claim.

        A cancelled caller takes nothing.

        Raises:
            BudgetExhaustedError: it never will, and no other request either.
        """
        ...

    def charge(self, claim: str, spent: Amount = ...) -> None:
        """Charge the cost of a request that is over, nothing by default; never waits."""
        ...

    async def settle(self) -> None:
        """Return when all charges of this process have arrived where the account is kept."""
        ...

    def close(self) -> None:
        """Close the account for this process: what it has not said by now need not be heard."""
        ...


class CpuPool(Protocol):
    """Runs stateless functions outside this process, so that cores add up (S-SET-35)."""

    async def run(
        self, function: bytes, arguments: Mapping[str, object], *, timeout_s: float | None, may_repeat: bool = True
    ) -> object:
        """Call a cloudpickled function with keyword arguments in another process and give its result.

        The time runs from when a processor is free for the call; a cancelled call frees its processor. What the
        function raises is raised here, as itself. A call whose process died is made again only if it may be.

        Raises:
            CannotTravelError: function or arguments cannot be loaded there (`tools/cpu.py`).
            TimeoutError: the time is up.
            ToolExecutionError: the process that ran it died.
        """
        ...


@runtime_checkable
class ToolMetrics(Protocol):
    """Counts of tool calls, for a monitoring system."""

    def increment_success(self, tool_name: str, agent_role: str) -> None:
        """Count a call that succeeded."""
        ...

    def increment_failure(self, tool_name: str, agent_role: str) -> None:
        """Count a call that returned a failure."""
        ...

    def increment_error(self, tool_name: str, agent_role: str) -> None:
        """Count a call that raised."""
        ...

    def record_duration(self, tool_name: str, agent_role: str, duration_s: float) -> None:
        """How long a call took, s."""
        ...


class CustomToolMetrics(ToolMetrics, Protocol):
    """Metrics that also take what the code of tools counts itself."""

    def increment_counter(self, metric: str, tool_name: str, tags: Mapping[str, str] | None = None) -> None:
        """Count something of the tool's own."""
        ...

    def record_value(self, metric: str, tool_name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Note a value of the tool's own."""
        ...
