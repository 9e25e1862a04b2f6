"""The `RunStore` port, store addresses, and locks of ownership.

Adapters: `ensemble_ray.record.sqlite` (one file per run) and `ensemble_ray.record.postgres`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec import Struct

from ensemble_ray.errors import RecordError
from ensemble_ray.facts.fact import Fact, kinds_of
from ensemble_ray.facts.runs import FailureRecorded, OutputRecorded, ReviewDecided
from ensemble_ray.ports import Journal, StoredAnswers
from ensemble_ray.process.concurrency import after_fork, no_fork
from ensemble_ray.process.config import Settings
from ensemble_ray.record.open_reviews import Gate, Obstacle
from ensemble_ray.values.ids import delegating_call, node_key
from ensemble_ray.values.outputs import RunState

PAGE = 500
_OWNER = re.compile(r"process (?P<pid>\d+) on (?P<host>.+)")


class RecordedRun(Struct, frozen=True, kw_only=True):
    run_id: str
    created_at: datetime
    origin: str  # source of its definition: a YAML path, `module:attribute`, or empty
    state: RunState  # a run without an owner that has not ended is interrupted
    location: str  # for messages: a path, or a database without its password
    owner: str = ""  # for messages: `process 4711 on HOST`; empty if there is none or it is unknown

    @property
    def owner_process(self) -> tuple[int, str] | None:
        """Id and host of the owning process; None if they are unknown."""
        named = _OWNER.fullmatch(self.owner)
        return None if named is None else (int(named["pid"]), named["host"])


class GatesOfRun(NamedTuple):
    run: RecordedRun
    facts: Sequence[Fact]  # requests, decisions, and facts without data that closed gates (`fold_gates`)


class OwnedRun(Protocol):
    """A run that this process owns until it releases the run or dies. A failed write raises a `RecordError`."""

    @property
    def journal(self) -> Journal: ...

    @property
    def epoch(self) -> int:
        """0 for a new run, above every earlier one for a claimed run."""
        ...

    async def write_state(self, state: RunState) -> None:
        """Store the run's state. A final state releases ownership."""
        ...

    async def is_cancel_asked(self) -> bool:
        """Whether a client requested cancellation since the claim. Cheap; called about once a second."""
        ...

    async def close(self, state: RunState) -> None:
        """Close the journal and store the state. Ownership is released even if this raises."""
        ...


class RunReader(Protocol):
    """Read access to the runs of one or several stores.

    Methods raise a `RecordError` if a record is damaged, has a newer format, was removed, or cannot be read or written.
    """

    def read(
        self,
        run_id: str,
        *,
        after: int = 0,
        kinds: Collection[str] | None = None,
        has_data: bool = True,
        is_partial: bool = False,
    ) -> AsyncGenerator[Sequence[Fact]]:
        """Yield the facts that are committed when reading begins, in order, page by page; none if the run does not exist.

        Args:
            run_id: The run's id.
            after: Position after which reading starts.
            kinds: None: all kinds.
            has_data: Reading only the names of facts is much cheaper.
            is_partial: As for `facts`.
        """
        ...

    async def facts_of(self, run_id: str, instance: str) -> list[Fact]:
        """Return the facts of one instance in order, without stimuli. Other instances hardly affect the cost."""
        ...

    async def read_content(self, run_id: str, sha256: str) -> bytes | None:
        """Return the content of an attachment; None: the run does not contain it. The caller checks its hash."""
        ...

    async def summary(self, run_id: str) -> RecordedRun | None: ...

    async def runs(self) -> list[RecordedRun]: ...

    async def gates(self) -> list[GatesOfRun]:
        """Return the runs that have not ended and have review gates, oldest first. Other runs hardly affect the cost.

        An unreadable record is logged and its run omitted. Reading that run raises the error.
        """
        ...


class RunStore(RunReader, StoredAnswers, Protocol):
    """All runs of one home or database. `ValidationError`: the run does not exist, or its id cannot name a record."""

    async def begin(
        self, run_id: str, *, origin: str = "", is_buffered: bool = False, state: RunState = RunState.PENDING
    ) -> OwnedRun:
        """Create the record of a new run as its owner. Replaces a run of that id that has no facts.

        `origin` is the source of its definition. With `is_buffered`, `append` may return before facts are committed (durability
        `run`).

        Raises:
            RunExistsError: a run of that id exists; the message names its state.
            ValidationError: the id cannot name a record.
        """
        ...

    async def claim(
        self, run_id: str, *, is_buffered: bool = False, by_force: bool = False, state: RunState = RunState.PENDING
    ) -> OwnedRun:
        """Own a recorded run, under an epoch above all earlier ones (S-DUR-16). See `begin` for arguments.

        `by_force` claims the run even if it has an owner (S-DUR-17).

        Raises:
            RunExistsError: another process owns the run; the message names the process.
            ValidationError: the run does not exist.
        """
        ...

    async def join(self, run_id: str, *, writer: str, is_buffered: bool = False) -> Journal: ...

    async def accept_loss(self, run_id: str, *, by_force: bool = False) -> bool:
        """Record that lost facts are lost, so that the run can be resumed; return False if none are. Raises as `claim`."""
        ...

    async def facts(self, run_id: str, *, is_partial: bool = False) -> list[Fact]:
        """Return all committed facts in order; an empty list if the run does not exist.

        `is_partial` returns the remaining facts of a damaged record.
        """
        ...

    async def find(self, text: str) -> RecordedRun:
        """Return the run with this id, the only run with an id starting with the text, or the newest for `latest`.

        Raises:
            ValidationError: no run matches, or several do; the message names the nearest.
        """
        ...

    async def ask_cancel(self, run_id: str) -> None: ...

    async def gates_of(self, run_id: str) -> list[Fact]:
        """Return the facts of a run's review gates (see `GatesOfRun.facts`); an empty list if the run does not exist."""
        ...

    async def decide(self, run_id: str, gate: str, decision: ReviewDecided) -> tuple[Gate, Obstacle] | None:
        """Record a decision at a recorded gate on the disk, or return the obstacle (`open_reviews.obstacle_at`).

        Check and write are atomic.
        """
        ...

    async def delete(self, run_id: str) -> None:
        """Remove a run's record, unless a process owns the run (`RunExistsError`)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """The place of a store, as picklable data; `store_at` opens it."""

    home: str  # contains `runs/ID/`
    url: str = field(default="", repr=False)  # a database instead of files; may contain a password

    @classmethod
    def of(cls, home: str | Path | None = None, url: str | None = None) -> StoreAddress:
        """Return an address; the environment supplies missing parts, but an explicit home means files in any case."""
        settings = Settings.from_environment()
        chosen = settings.store if url is None and home is None else url
        return cls(home=str(Path(home or settings.home).expanduser().resolve()), url=chosen or "")


async def pages(
    last_seq: Callable[[], Awaitable[int]],
    page: Callable[[int], Awaitable[Sequence[Fact]]],
    run_id: str,
    *,
    after: int = 0,
) -> AsyncGenerator[Sequence[Fact]]:
    """Yield the pages of a record as it is at the first request: the implementation of `RunStore.read`.

    `last_seq` returns the position of the last fact to yield.
    """
    last = await last_seq()
    while after < last:
        found = await page(after)
        if not found:
            raise RecordError(f"The record of run '{run_id}' was removed while it was read")
        after = found[-1].seq
        yield [fact for fact in found if fact.seq <= last]


try:
    import fcntl
except ImportError:  # without file locks, any process can claim a run, and no run counts as running
    fcntl = None  # type: ignore[assignment]

#: A check for an owner holds the lock for a moment, longer on a busy machine, so acquiring is retried. By then, a new
#: owner has also written its name.
_TRIES = 20
_PAUSE_S = 0.01


class Ownership:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        if self._descriptor is not None:
            return True
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_PAUSE_S)
            with no_fork():  # a forked child would inherit the lock without tracking it
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
                # The lock of a file that was replaced meanwhile has no meaning.
                if try_lock(descriptor) and _is_same(descriptor, self._path):
                    self._hold(descriptor)
                    return True
                os.close(descriptor)
        return False

    def acquire_by_force(self) -> None:
        """Become the owner even if another process has the lock: a new file replaces the locked one."""
        half = self._path.with_suffix(f".{os.getpid()}.tmp")
        with no_fork():
            descriptor = os.open(half, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                try_lock(descriptor)
                half.replace(self._path)
            except OSError:
                os.close(descriptor)
                raise
            self.release()
            self._hold(descriptor)

    def is_mine(self) -> bool:
        """Whether this object is the owner and no forced claim has replaced its file."""
        return self._descriptor is not None and _is_same(self._descriptor, self._path)

    def is_there(self) -> bool:
        return self._path.exists()

    def is_held(self) -> bool:
        if self._descriptor is not None:
            return True
        with no_fork():
            try:
                descriptor = os.open(self._path, os.O_RDONLY)
            except OSError:
                return False
            try:
                return not try_lock(descriptor, is_shared=True)
            finally:
                os.close(descriptor)

    def owner(self) -> str:
        """Return the current or last owner for messages: `process 4711 on HOST`; empty if unknown."""
        with contextlib.suppress(OSError, ValueError):
            match json.loads(self._path.read_bytes()):
                case {"pid": int(pid), "host": str(host)}:
                    return f"process {pid} on {host}"
                case _:
                    pass
        return ""

    def release(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self)

    def _hold(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _held.add(self)
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n"
        os.ftruncate(descriptor, os.pwrite(descriptor, text, 0))


def try_lock(descriptor: int, *, is_shared: bool = False) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


_held: weakref.WeakSet[Ownership] = weakref.WeakSet()


@after_fork
def _release_all() -> None:
    for ownership in list(_held):
        ownership.release()


def resume_advice(run_id: str, origin: str | None, *, field: str = "", command: str = "ensemble-ray") -> str:
    """Return how to resume a run (S-DUR-154).

    Without `origin`, only the program that began the run has its definition; None: unknown. `field` is an additional
    argument of `resume`, such as `max_tokens=N`; `command` is the name of the command line here.
    """
    option = f" --{field.replace('_', '-').removesuffix('=True').replace('=', ' ')}" if field else ""
    at_command = f"{command} resume {run_id}{option}"
    in_program = f"ensemble_ray.resume({run_id!r}, ensemble{field and f', {field}'}), in the program that began it"
    return f"{at_command}, or {in_program}" if origin is None else at_command if origin else in_program


def fork_point(facts: Iterable[Fact], unit: str = "") -> str:
    """Return where to fork a failed run: the task that failed, or the last execution of the unit that failed.

    Empty if no task or unit failed, or no output can be reused. `facts`: the outputs and failures of its tasks.
    """
    failed, outputs = "", list[str]()
    for fact in facts:
        if delegating_call(fact.name) is not None:
            continue
        if isinstance(fact.data, FailureRecorded):
            failed = failed or fact.name
        elif isinstance(fact.data, OutputRecorded):
            outputs.append(fact.name)
    if not failed and unit:
        execution = unit if "#" in unit.rpartition("/")[2] else f"{unit}#"
        last = next((each for each in reversed(outputs) if each.startswith(execution)), "")
        failed = last[: last.find("/", len(execution))] if last else ""
        outputs = [each for each in outputs if not each.startswith(f"{failed}/")]
    if not failed or not outputs:
        return ""
    return failed if "/" in failed or ":" in failed else node_key(failed)


def fork_advice(
    run_id: str, origin: str, facts: Iterable[Fact], *, unit: str = "", command: str = "ensemble-ray"
) -> str:
    """Return how to fork a failed run from its `fork_point`; empty if it has none."""
    if not (name := fork_point(facts, unit)):
        return ""
    if not origin:
        return f"ensemble_ray.fork({run_id!r}, {name!r}, ensemble), in the program that began it"
    return f"{command} fork {run_id} --from {shlex.quote(name)}"


async def read_fork_advice(
    store: RunStore, run_id: str, origin: str, *, unit: str = "", command: str = "ensemble-ray"
) -> str:
    ends: list[Fact] = []
    async for page in store.read(run_id, kinds=kinds_of(OutputRecorded, FailureRecorded), has_data=False):
        ends += page
    return fork_advice(run_id, origin, ends, unit=unit, command=command)
