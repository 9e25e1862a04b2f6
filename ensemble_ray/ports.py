"""Every contract of the core, except `Runtime` (in `runtime.py`, since it speaks of plans).

An adapter fulfils a port by its shape and inherits nothing. Each port has one contract suite over all its adapters.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from ensemble_ray.events import Event
from ensemble_ray.facts.fact import Fact
from ensemble_ray.process.context import ScopedVariable
from ensemble_ray.values.messages import ChatMessage, ChatResponse, JsonSchema, ToolSpec

if TYPE_CHECKING:
    from ensemble_ray.events.delivery import EnsembleListener
    from ensemble_ray.values.memory import (
        EmbeddingMatch,
        MemoryEntry,
        MemoryNote,
        MemoryQuery,
        RecalledMemory,
        RememberedNote,
        TaskReflection,
    )
    from ensemble_ray.values.metrics import Amount
    from ensemble_ray.values.reviews import ReviewAnswer, Reviewing, ReviewRequest
    from ensemble_ray.values.trace import ExecutionTraceExporter
    from ensemble_ray.values.value import RateLimit


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


@runtime_checkable
class EmbeddingModel(Protocol):
    """Places texts in a space in which texts of like meaning are near to each other."""

    def embed(self, text: str) -> Sequence[float]:
        """Return the vector of a text."""
        ...


@runtime_checkable
class EmbeddingStore(Protocol):
    """Keeps texts by their vectors."""

    def add(self, vector: Sequence[float], text: str, metadata: Mapping[str, str]) -> None:
        """Keep a text."""
        ...

    def search(
        self,
        vector: Sequence[float],
        max_results: int,
        min_score: float = 0.0,
        filter: Mapping[str, str] | None = None,  # noqa: A002  the name of the port
    ) -> Sequence[EmbeddingMatch]:
        """Return the nearest texts whose score is at least `min_score`, nearest first.

        Args:
            vector: What they are near to.
            max_results: How many at most.
            min_score: The least score.
            filter: Metadata that a text must have, before results are counted; None: any.
        """
        ...


@runtime_checkable
class LongTermMemory(Protocol):
    """Keeps entries across runs and finds them by meaning."""

    def store(self, entry: MemoryEntry) -> None:
        """Keep an entry."""
        ...

    def retrieve(self, query: str | None, max_results: int) -> Sequence[MemoryEntry]:
        """Return entries that have to do with the query, most relevant first."""
        ...


@runtime_checkable
class EntityMemory(Protocol):
    """Knows a fact about each of some things."""

    def put(self, name: str, fact: str) -> None:
        """Keep a fact, in place of an earlier one of that name."""
        ...

    def get(self, name: str | None) -> str | None:
        """Return the fact; None where none is known."""
        ...

    def get_all(self) -> Mapping[str, str]:
        """Return all facts by name, in the order in which the names came."""
        ...

    def is_empty(self) -> bool:
        """Return whether nothing is known."""
        ...


class MemoryOperationListener(Protocol):
    """Hears how one task uses the memory of its ensemble."""

    def on_stm_write(self) -> None:
        """Take note of an entry that short-term memory took."""
        ...

    def on_ltm_store(self) -> None:
        """Take note of an entry that long-term memory took."""
        ...

    def on_ltm_retrieval(self, duration: float) -> None:
        """Take note of a retrieval from long-term memory, which took so many seconds."""
        ...

    def on_entity_lookup(self, duration: float) -> None:
        """Take note of a look at the entities, which took so many seconds."""
        ...


class RunMemory(Protocol):
    """The memory of one run, as its tasks reach it wherever they are (S-MEM-69)."""

    async def recall(self, query: MemoryQuery) -> RecalledMemory:
        """Return what a task is to be reminded of; what a store raises is raised here."""
        ...

    async def remember(self, note: MemoryNote) -> RememberedNote:
        """Keep what a completed task leaves; what a store raises is raised here.

        A note that was taken already is not taken again.
        """
        ...


@runtime_checkable
class ReflectionStore(Protocol):
    """Keeps the newest reflection of each task across runs; its methods may be async."""

    def store(self, key: str, reflection: TaskReflection) -> None:
        """Keep a reflection, in place of the one that has that key."""
        ...

    def retrieve(self, key: str) -> TaskReflection | None:
        """Return the reflection of a key; None where there is none."""
        ...


if TYPE_CHECKING:
    from ensemble_ray.values.delegation import TaskAnswer, TaskRequest

    #: What a runner may give: the whole answer, or pieces of text as they come, with a `TaskAnswer` behind them or without.
    RunnerOutput: TypeAlias = str | TaskAnswer | AsyncIterator[str | TaskAnswer]


@runtime_checkable
class RunsTask(Protocol):
    """Does the tasks of an agent, such as an agent of another framework; a synchronous `run` is accepted too.

    An attribute `effect` says what doing a task does to the world, as that of a tool; without one it is `once`.
    """

    def run(self, request: TaskRequest) -> RunnerOutput | Awaitable[RunnerOutput]:
        """Do the task. What it raises fails the task; when the run is cancelled, so is this call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Shared things of a process that user-level objects reach without being handed them."""

    limiter: Limiter
    cpu: CpuPool
    #: None where this process is the driver itself
    driver: DriverServices | None = None


_services: ContextVar[Services] = ContextVar("ensemble_ray_services")


def services() -> Services | None:
    """Return the services set for this piece of work; None outside any run."""
    return _services.get(None)


def use_services(chosen: Services) -> AbstractContextManager[None]:
    """Use these services in the block."""
    return ScopedVariable(_services, chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended."""

    #: None: it never ran, or was killed
    exit_code: int | None
    is_stopped: bool
    #: the cluster's own words
    message: str


class Jobs(Protocol):
    """The job server of a cluster. Its calls block."""

    @property
    def address(self) -> str:
        """Its URL."""
        ...

    def submit(
        self,
        entrypoint: str,
        *,
        job_id: str,
        working_dir: Path | None = None,
        pip: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Start a program on the cluster's head.

        Args:
            entrypoint: A line for its shell.
            job_id: The job's name.
            working_dir: Directory that is sent along, without what `.gitignore` and `.rayignore` name.
            pip: Requirements that are installed for it on the nodes.
            env: Environment variables of it and of its workers.
            metadata: Kept with the job.

        Raises:
            EnsembleError: the directory cannot be sent, or the server refuses the job.
        """
        ...

    def follow(self, job_id: str, show: Callable[[str], None]) -> JobEnd:
        """Show a job's log from its beginning to its end, as it is written. A connection that breaks is made again.

        Raises:
            EnsembleError: the server has been gone for too long.
        """
        ...

    def stop(self, job_id: str) -> None:
        """Ask a job to end; its program is told as by `kill`, and has time to end what it does.

        Raises:
            EnsembleError: the server refuses, or is gone.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnteredRun:
    """A run that a dashboard shows, and where its record will be."""

    run_id: str
    #: whether anything is recorded of it
    is_recorded: bool = False
    #: directory that holds the records
    home: str = ""
    #: a database in place of files
    url: str = ""


@runtime_checkable
class Dashboard(Protocol):
    """A page beside the runs of this process (S-WEB-10)."""

    @property
    def streaming_listener(self) -> EnsembleListener:
        """What is told of their events."""
        ...

    @property
    def review_handler(self) -> Reviewing:
        """What asks at their gates."""
        ...

    @property
    def trace_exporter(self) -> ExecutionTraceExporter | None:
        """What takes their traces; None: nothing of the dashboard's."""
        ...

    def enter_run(self, run: EnteredRun) -> None:
        """Take notice that a run begins: serve from now on, where that is not done yet (S-WEB-11).

        Raises:
            EnsembleError: it cannot.
        """
        ...

    def leave_run(self) -> None:
        """Take notice that a run has ended: stop serving where it was begun for runs alone, and this was the last (S-WEB-12)."""
        ...
