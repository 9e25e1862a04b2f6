"""Ports of the core, except `Runtime` (in `runs.ports`). Adapters do not inherit from a port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

from ensemble_ray.errors import DriverGoneError, IllegalStateError
from ensemble_ray.events import Event
from ensemble_ray.facts.fact import Fact
from ensemble_ray.process.context import ScopedVariable
from ensemble_ray.values.messages import ChatMessage, ChatResponse, JsonSchema, ToolSpec

#: digest of the request, name of the model call, time of the answer (Unix time, s)
OfferedAnswer: TypeAlias = tuple[str, str, float]

if TYPE_CHECKING:
    from ensemble_ray.events.delivery import EnsembleListener
    from ensemble_ray.facts.effects import ModelAnswered
    from ensemble_ray.values.delegation import TaskAnswer, TaskRequest
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

    #: A whole answer, or pieces of text and then, optionally, a `TaskAnswer`.
    RunnerOutput: TypeAlias = str | TaskAnswer | AsyncIterator[str | TaskAnswer]


@runtime_checkable
class ChatModel(Protocol):
    """A model that answers a conversation; a synchronous `chat` is accepted too."""

    def chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> ChatResponse | Awaitable[ChatResponse]:
        """Answer the conversation. With `tools`, the answer may request calls of them."""
        ...


@runtime_checkable
class StreamingChatModel(Protocol):
    """A model that also streams."""

    def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncIterator[str | ChatResponse]:
        """Yield fragments of the text, then one `ChatResponse` with the whole answer."""
        ...


@runtime_checkable
class StructuredChatModel(Protocol):
    """A model with an endpoint that can enforce a JSON schema; a synchronous method is accepted too."""

    def chat_structured(
        self, messages: Sequence[ChatMessage], schema: JsonSchema
    ) -> ChatResponse | Awaitable[ChatResponse]:
        """Answer the conversation in that form, which it also requests in words.

        If the endpoint cannot enforce the form, answer like `chat` without tools: the caller corrects the answer.
        """
        ...


@runtime_checkable
class RunsTask(Protocol):
    """Does the tasks of an agent, such as an agent of another framework; a synchronous `run` is accepted too.

    An attribute `effect`, as of a tool, says whether a task may run again after a crash. The default is `once`.
    """

    def run(self, request: TaskRequest) -> RunnerOutput | Awaitable[RunnerOutput]:
        """Do the task. An exception fails the task. If the run is cancelled, this call is cancelled too."""
        ...


class Clock(Protocol):
    """Source of time, which tests can replace."""

    def now(self) -> float:
        """Unix time, s."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Wait on this clock."""


class EventSink(Protocol):
    """Receives events in their order. It never blocks, and never raises because of a listener."""

    def wants(self, event_type: type[Event]) -> bool:
        """Return whether a listener exists for that type; other events are not created."""
        ...

    def emit(self, event: Event) -> None:
        """Receive one event."""


class RunEventSink(EventSink, Protocol):
    """The sink of a whole run, in the process of its listeners."""

    async def wait_until_delivered(self, *event_types: type[Event]) -> None:
        """Return after the listeners of these types have received all events so far (S-SET-30)."""


class Persistence(IntEnum):
    """How safe a fact must be before `append` returns; later values include the earlier ones."""

    QUEUED = 0  # in this process's queue
    SOON = 1  # its commit begins within milliseconds
    COMMITTED = 2  # it survives the death of every process
    SYNCED = 3  # on disk: it survives a loss of power


class Journal(Protocol):
    """One run's append-only list of facts, for one writer."""

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:
        """Add facts in order; return when they and all earlier facts have that persistence.

        Cancelling the caller does not remove the facts. A buffered journal (durability `run`) and one in memory return
        immediately.

        Raises:
            StaleEpochError: a newer epoch exists; the writer must stop before its next effect. If facts that were not
                waited for are refused, the next `append` for that instance raises.
            RecordError: the store refused the facts.
        """

    async def lookup_recorded(self, instance: str) -> Mapping[tuple[str, str], Fact]:
        """Return the newest fact of an instance by (name, kind), from any writer, without stimuli."""
        ...

    async def store_content(self, content: bytes) -> bool:
        """Commit the content of an attachment under its SHA-256, once; return False if the journal stores no contents.

        A RecordError: the store refused it.
        """
        ...

    async def read_content(self, sha256: str) -> bytes | None:
        """Return a stored content, from any writer; None: it is not stored."""
        ...

    async def flush(self) -> None:
        """Return when all facts are committed. A RecordError: the store refused them."""

    async def close(self) -> None:
        """Flush, and release resources."""


class StoredAnswers(Protocol):
    """Models' answers in the records of all runs of a store, by digests of their requests (S-USE-20)."""

    async def find_answer(self, digest: str, *, since: float, run_id: str) -> Fact[ModelAnswered] | None:
        """Return the newest offered answer to a request that is not older than `since`, Unix time, s.

        None if there is none, if its run was deleted, or if it is an answer of `run_id`.

        Raises:
            RecordError: the answers cannot be read.
        """
        ...

    async def offer_answers(self, run_id: str, answers: Sequence[OfferedAnswer]) -> None:
        """Let other runs find these recorded answers of a run. Each replaces an earlier one with its digest.

        Raises:
            RecordError: the answers cannot be written.
        """
        ...


class DriverServices(Protocol):
    """Services of the process that started the run. Requests and answers are data."""

    async def ask(self, name: str, payload: Mapping[str, object]) -> object:
        """Return the answer of the driver's service of that name.

        Raises:
            IllegalStateError: the driver is gone or has no such service.
        """
        ...

    def notify(self, name: str, payload: Mapping[str, object]) -> None:
        """Send a request without an answer, in order."""


class Reviewer(Protocol):
    """Requests decisions at review gates, in the process that started the run (S-REV-49)."""

    async def ask(self, request: ReviewRequest) -> ReviewAnswer:
        """Return the decision and its author. The gates of one run are handled one after the other.

        Raises:
            ReviewTimeoutError: no decision arrived in time, and the timeout fails the task.
            ValidationError: the handler returned no decision.
        """
        ...


class Limiter(Protocol):
    """Shared permits: all processes use one bucket per id (S-SET-36)."""

    async def acquire(self, bucket: str, limit: RateLimit, *, timeout_s: float) -> None:
        """Acquire one permit, in order. A RateLimitTimeoutError: none was free in time."""


class SpendingAccount(Protocol):
    """The budget of one run, for its requests in all processes (S-BUD-8)."""

    async def reserve(self, estimate: Amount) -> str:
        """Wait, in order, until a request may be sent, and return its claim.

        Raises:
            BudgetExhaustedError: neither this request nor any other can be sent.
        """
        ...

    def charge(self, claim: str, spent: Amount = ...) -> None:
        """Charge the cost of a finished request; never block."""

    async def settle(self) -> None:
        """Return after all charges of this process have reached the account."""

    async def share_spent(self) -> float:
        """Return the share of the budget that all processes have spent."""
        ...

    def close(self) -> None:
        """Close this process's account. Unreported charges may be dropped."""


class CpuPool(Protocol):
    """Runs stateless functions in other processes, on all processors (S-SET-35)."""

    async def run(
        self, function: bytes, arguments: Mapping[str, object], *, timeout_s: float | None, may_repeat: bool = True
    ) -> object:
        """Call a cloudpickled function with keyword arguments, and return its result.

        The timeout starts when a processor is free; a cancelled call frees it. An exception of the function is raised
        here unchanged. If the process dies, the call is repeated only with `may_repeat`.

        Raises:
            CannotTravelError: function or arguments cannot be loaded there (`tools/cpu.py`).
            TimeoutError: the time is up.
            ToolExecutionError: the process died.
        """
        ...


@runtime_checkable
class ToolMetrics(Protocol):
    """Counts of tool calls, for a monitoring system."""

    def increment_success(self, tool_name: str, agent_role: str) -> None:
        """Count a call that succeeded."""

    def increment_failure(self, tool_name: str, agent_role: str) -> None:
        """Count a call that returned a failure."""

    def increment_error(self, tool_name: str, agent_role: str) -> None:
        """Count a call that raised."""

    def record_duration(self, tool_name: str, agent_role: str, duration_s: float) -> None:
        """Record the duration of a call, s."""


class CustomToolMetrics(ToolMetrics, Protocol):
    """Metrics that also accept counts and values from the code of tools."""

    def increment_counter(self, metric: str, tool_name: str, tags: Mapping[str, str] | None = None) -> None:
        """Increment a counter of the tool."""

    def record_value(self, metric: str, tool_name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Record a value of the tool."""


@runtime_checkable
class EmbeddingModel(Protocol):
    """Maps texts to vectors; texts with similar meaning have near vectors."""

    def embed(self, text: str) -> Sequence[float]:
        """Return the vector of a text."""
        ...


@runtime_checkable
class EmbeddingStore(Protocol):
    """Stores texts with their vectors."""

    def add(self, vector: Sequence[float], text: str, metadata: Mapping[str, str]) -> None:
        """Store a text."""

    def search(
        self,
        vector: Sequence[float],
        max_results: int,
        min_score: float = 0.0,
        filter: Mapping[str, str] | None = None,  # noqa: A002  the name of the port
    ) -> Sequence[EmbeddingMatch]:
        """Return the nearest texts, nearest first, with a score of at least `min_score` and the metadata of `filter`."""
        ...


@runtime_checkable
class LongTermMemory(Protocol):
    """Stores entries across runs and finds them by meaning."""

    def store(self, entry: MemoryEntry) -> None:
        """Store an entry."""

    def retrieve(self, query: str | None, max_results: int) -> Sequence[MemoryEntry]:
        """Return entries that match the query, most relevant first."""
        ...


@runtime_checkable
class EntityMemory(Protocol):
    """Stores one fact per entity."""

    def put(self, name: str, fact: str) -> None:
        """Store a fact, and replace an earlier one of that name."""

    def get(self, name: str | None) -> str | None:
        """Return the fact, or None."""
        ...

    def get_all(self) -> Mapping[str, str]:
        """Return all facts by name, in the order of the first `put` of each name."""
        ...

    def is_empty(self) -> bool:
        """Return whether no fact is stored."""
        ...


class MemoryOperationListener(Protocol):
    """Listener for the memory operations of one task."""

    def on_stm_write(self) -> None:
        """Handle a new entry of short-term memory."""

    def on_ltm_store(self) -> None:
        """Handle a new entry of long-term memory."""

    def on_ltm_retrieval(self, duration: float) -> None:
        """Handle a retrieval from long-term memory; `duration` in seconds."""

    def on_entity_lookup(self, duration: float) -> None:
        """Handle a lookup of entities; `duration` in seconds."""


class RunMemory(Protocol):
    """The memory of one run, for tasks in any process (S-MEM-69). It raises exceptions of a store unchanged."""

    async def recall(self, query: MemoryQuery) -> RecalledMemory:
        """Return the memory for a task's prompt."""
        ...

    async def remember(self, note: MemoryNote) -> RememberedNote:
        """Store the note of a completed task, once."""
        ...


@runtime_checkable
class ReflectionStore(Protocol):
    """Stores the newest reflection of each task across runs; its methods may be async."""

    def store(self, key: str, reflection: TaskReflection) -> None:
        """Store a reflection, and replace the one with that key."""

    def retrieve(self, key: str) -> TaskReflection | None:
        """Return the reflection with a key, or None."""
        ...


class Services(Struct, frozen=True, kw_only=True):
    """Shared services of a process, which user-level objects get from `services()`."""

    limiter: Limiter
    cpu: CpuPool
    driver: DriverServices | None = None  # None in the driver's process


SERVICES: ContextVar[Services] = ContextVar("ensemble_ray_services")


def services() -> Services | None:
    """Return the current services; None outside a run."""
    return SERVICES.get(None)


async def ask_driver(name: str, payload: Mapping[str, object]) -> object:
    """Ask the process that has the run's deps; errors as `DriverServices.ask`, which then interrupt the run (S-CTX-52)."""
    here = services()
    if here is None or here.driver is None:
        raise IllegalStateError(
            "The deps of the run are in the process that started it, which cannot be reached from here"
        )
    try:
        return await here.driver.ask(name, payload)
    except DriverGoneError as gone:
        gone.is_deps_lost = True
        raise


def use_services(chosen: Services) -> AbstractContextManager[None]:
    """Use these services inside the block."""
    return ScopedVariable(SERVICES, chosen)


class JobEnd(Struct, frozen=True, kw_only=True):
    """End of a job."""

    exit_code: int | None  # None: it never ran, or was killed
    is_stopped: bool
    message: str


class Jobs(Protocol):
    """The job server of a cluster. Its methods block."""

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
        """Start a program on the cluster's head node.

        Args:
            entrypoint: Shell command.
            job_id: The job's name.
            working_dir: Directory to upload, except what `.gitignore` or `.rayignore` match.
            pip: Requirements to install on the nodes.
            env: Environment variables of the program and its workers.
            metadata: Stored with the job.

        Raises:
            EnsembleError: the directory cannot be uploaded, or the server refuses the job.
        """

    def follow(self, job_id: str, show: Callable[[str], None]) -> JobEnd:
        """Show a job's log from the beginning to the end, as it is written. Reconnect if the connection breaks.

        Raises:
            EnsembleError: the server did not respond for too long.
        """
        ...

    def stop(self, job_id: str) -> None:
        """Send the job's program the signal of `kill`; it has time to clean up.

        Raises:
            EnsembleError: the server refuses, or does not respond.
        """


class DashboardRun(Struct, frozen=True, kw_only=True):
    """A run for a dashboard, and the location of its record."""

    run_id: str
    is_recorded: bool = False
    home: str = ""  # directory of the records
    url: str = ""  # a database in place of files


@runtime_checkable
class Dashboard(Protocol):
    """A web page for the runs of this process (S-WEB-10)."""

    @property
    def streaming_listener(self) -> EnsembleListener:
        """Listener for the events of the runs."""
        ...

    @property
    def review_handler(self) -> Reviewing:
        """Decides at their review gates."""
        ...

    @property
    def trace_exporter(self) -> ExecutionTraceExporter | None:
        """Receives their traces, or None."""
        ...

    def enter_run(self, run: DashboardRun) -> None:
        """Register the start of a run; start serving if necessary (S-WEB-11).

        Raises:
            EnsembleError: the dashboard cannot serve.
        """

    def leave_run(self) -> None:
        """Register the end of a run. After the last one, stop serving if a run started it (S-WEB-12)."""
