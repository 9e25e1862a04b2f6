"""Where runs are recorded: the `RunStore` port, and the store of an address.

In: a home directory, or the URL of a database. Out: runs that one process owns, runs that others write to, and what is
known of them. Adapters: `store_sqlite` (a file per run), `store_postgres`.
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

from ensemble_ray.errors import RecordError
from ensemble_ray.facts.fact import Fact, kinds_of
from ensemble_ray.facts.runs import FailureRecorded, OutputRecorded, ReviewDecided
from ensemble_ray.ports import Journal
from ensemble_ray.process.config import Settings
from ensemble_ray.process.forks import after_fork, no_fork
from ensemble_ray.record.open_reviews import Gate, Obstacle
from ensemble_ray.values.ids import delegating_call, node_key
from ensemble_ray.values.outputs import RunState

#: Most facts that `RunStore.read` gives at once.
PAGE = 500
#: As stores describe owners.
_OWNER = re.compile(r"process (?P<pid>\d+) on (?P<host>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run as lists show it."""

    run_id: str
    created_at: datetime
    #: where its definition came from: a YAML path, `module:attribute`, or nothing
    origin: str
    #: as it stands; a run that nobody owns and that has not ended is interrupted
    state: RunState
    #: where its record lies, for people: a path, or a database without its password
    location: str
    #: who owns it now, for people: `process 4711 on HOST`; empty when nobody does or it is not known
    owner: str = ""

    @property
    def owner_process(self) -> tuple[int, str] | None:
        """The id and the host of the process that owns it; None where they are not known."""
        named = _OWNER.fullmatch(self.owner)
        return None if named is None else (int(named["pid"]), named["host"])


class GatesOfRun(NamedTuple):
    """A run, and what is recorded of its review gates."""

    run: RecordedRun
    #: what was asked and decided, in order, and without its data what closed gates (`open_reviews.fold_gates`)
    facts: Sequence[Fact]


class OwnedRun(Protocol):
    """A run that this process owns, until it lets go or dies."""

    @property
    def journal(self) -> Journal:
        """Where this process writes its facts."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch that this owner writes under: 0 for a new run, above every earlier one for a run taken over."""
        ...

    async def write_state(self, state: RunState) -> None:
        """Say how the run stands; after a final state the run has no owner any more.

        Raises:
            RecordError: it cannot be written.
        """
        ...

    async def is_cancel_asked(self) -> bool:
        """Whether somebody asked for the run's end since this owner came; cheap, asked about once a second."""
        ...

    async def close(self, state: RunState) -> None:
        """Close the journal and write the state; whatever fails here, the run has no owner any more.

        Raises:
            RecordError: the store refused what was appended, or the state.
        """
        ...


class RunReader(Protocol):
    """Runs of one place or of several, as far as they are looked at."""

    def read(
        self,
        run_id: str,
        *,
        after: int = 0,
        kinds: Collection[str] | None = None,
        has_data: bool = True,
        is_partial: bool = False,
    ) -> AsyncGenerator[Sequence[Fact]]:
        """Return the facts behind a position; see `RunStore.read`."""
        ...

    async def facts_of(self, run_id: str, instance: str) -> list[Fact]:
        """Return what is recorded of one instance; see `RunStore.facts_of`."""
        ...

    async def summary(self, run_id: str) -> RecordedRun | None:
        """Return how a run stands; see `RunStore.summary`."""
        ...

    async def runs(self) -> list[RecordedRun]:
        """Return the runs, newest first."""
        ...

    async def gates(self) -> list[GatesOfRun]:
        """Return the runs with review gates; see `RunStore.gates`."""
        ...


class RunStore(Protocol):
    """All runs of one place."""

    async def begin(self, run_id: str, *, origin: str = "", is_buffered: bool = False) -> OwnedRun:
        """Begin the record of a new run as its owner. What a run of that id left that recorded nothing is taken over.

        Args:
            run_id: The run's id.
            origin: Where its definition came from.
            is_buffered: Whether facts need not be committed before `append` returns (durability `run`).

        Raises:
            RunExistsError: there is a run of that id; the message says how it stands.
            RecordError: the store cannot be written.
            ValidationError: the id cannot name a record.
        """
        ...

    async def claim(self, run_id: str, *, is_buffered: bool = False, by_force: bool = False) -> OwnedRun:
        """Own a recorded run, under an epoch above all earlier ones (S-DUR-16).

        Args:
            run_id: The run's id.
            is_buffered: As for `begin`.
            by_force: Take it also from an owner that still holds it (S-DUR-17).

        Raises:
            RunExistsError: somebody owns it; the message names the process.
            RecordError: the record is damaged or cannot be written.
            ValidationError: there is no such run.
        """
        ...

    async def join(self, run_id: str, *, writer: str, is_buffered: bool = False) -> Journal:
        """Write to a run that another process owns.

        Raises:
            RecordError: the record cannot be written.
        """
        ...

    async def accept_loss(self, run_id: str, *, by_force: bool = False) -> bool:
        """Go on without what a record has lost: it is recorded that it is lost. False: nothing is.

        Args:
            run_id: The run's id.
            by_force: As for `claim`.

        Raises:
            RunExistsError: somebody owns it.
            RecordError: nothing is left of it, what is left cannot be read, or it cannot be written.
            ValidationError: there is no such run.
        """
        ...

    async def facts(self, run_id: str, *, is_partial: bool = False) -> list[Fact]:
        """All committed facts in order, numbered from 1; none when there is no such run.

        Args:
            run_id: The run's id.
            is_partial: Give what is left of a record that has lost something.

        Raises:
            RecordError: the record is damaged, or of a newer format.
        """
        ...

    def read(
        self,
        run_id: str,
        *,
        after: int = 0,
        kinds: Collection[str] | None = None,
        has_data: bool = True,
        is_partial: bool = False,
    ) -> AsyncGenerator[Sequence[Fact]]:
        """Return the facts that are committed when reading begins, in order, page by page; one page is in memory at a time.

        Args:
            run_id: The run's id; where there is no such run, there are no pages.
            after: Position of the last fact that is not wanted any more.
            kinds: Only facts of these kinds; None: all.
            has_data: Whether their data is read; without it they are only named, which costs much less.
            is_partial: As for `facts`.

        Raises:
            RecordError: the record is damaged, of a newer format, or was removed meanwhile.
        """
        ...

    async def facts_of(self, run_id: str, instance: str) -> list[Fact]:
        """Return what is recorded of one instance, in order, stimuli left out; it costs little how many others there are.

        Raises:
            RecordError: the record is damaged, or of a newer format.
        """
        ...

    async def summary(self, run_id: str) -> RecordedRun | None:
        """Return the run as lists show it; None when there is none."""
        ...

    async def runs(self) -> list[RecordedRun]:
        """All runs, newest first."""
        ...

    async def find(self, text: str) -> RecordedRun:
        """Return the run of that id, the only one whose id begins so, or the newest for `latest`.

        Raises:
            ValidationError: there is none, or several; the message names the nearest.
        """
        ...

    async def ask_cancel(self, run_id: str) -> None:
        """Ask the owner of a run to end it."""
        ...

    async def gates(self) -> list[GatesOfRun]:
        """Return the runs that have not ended and have review gates, oldest first; it costs little how many others there are.

        A run whose record cannot be read is left out, which is logged: reading the run tells why.

        Raises:
            RecordError: the store cannot be read.
        """
        ...

    async def gates_of(self, run_id: str) -> list[Fact]:
        """Return what is recorded of a run's review gates; see `GatesOfRun.facts`. None when there is no such run.

        Raises:
            RecordError: the record is damaged, or of a newer format.
        """
        ...

    async def decide(self, run_id: str, gate: str, decision: ReviewDecided) -> tuple[Gate, Obstacle] | None:
        """Record a decision at a gate, on the disk, unless something is in its way; both are one step for every process.

        Args:
            run_id: The run's id.
            gate: The gate's name; it was asked at.
            decision: The decision.

        Returns:
            The gate as it stands, and what is in the way (`open_reviews.obstacle_at`); None: the decision counts.

        Raises:
            RecordError: the record is damaged, or cannot be written.
            ValidationError: there is no such run.
        """
        ...

    async def delete(self, run_id: str) -> None:
        """Remove a run's record.

        Raises:
            RunExistsError: somebody owns it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Which store, as data that travels; `store_at` opens it."""

    #: directory that holds `runs/ID/`
    home: str
    #: a database in place of files; may hold a password
    url: str = field(default="", repr=False)

    @classmethod
    def of(cls, home: str | Path | None = None, url: str | None = None) -> StoreAddress:
        """Return an address from what a user chose; what was not chosen comes from the environment.

        A home that was chosen is meant, whatever database the environment names.
        """
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
    """Return the pages of a record as it stands when the first one is asked for: what `RunStore.read` gives.

    Args:
        last_seq: Gives the position of the last fact to give.
        page: Gives the facts behind a position, in order; none when there is nothing more.
        run_id: The run's id, for messages.
        after: Position behind which they begin.

    Raises:
        RecordError: facts that were there are not there any more.
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
except ImportError:  # a system without file locks: nobody is kept out there, and no run counts as running
    fcntl = None  # type: ignore[assignment]

#: Somebody who looks whether a run has an owner holds the lock for a moment, which is long where the machine is busy; so
#: try again before giving up. A new owner has then said who it is, too.
_TRIES = 20
_PAUSE_S = 0.01


class Ownership:
    """A lock on one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Become the owner; False when somebody else is.

        Raises:
            OSError: the file cannot be made.
        """
        if self._descriptor is not None:
            return True
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_PAUSE_S)
            with no_fork():  # a child would hold a lock that it does not know of
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
                # A file that was replaced meanwhile is nobody's lock any more.
                if _lock(descriptor) and _is_same(descriptor, self._path):
                    self._hold(descriptor)
                    return True
                os.close(descriptor)
        return False

    def acquire_by_force(self) -> None:
        """Become the owner in place of one that holds the lock: another file takes the place of its file.

        Raises:
            OSError: the file cannot be made.
        """
        half = self._path.with_suffix(f".{os.getpid()}.tmp")
        with no_fork():
            descriptor = os.open(half, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                _lock(descriptor)
                half.replace(self._path)
            except OSError:
                os.close(descriptor)
                raise
            self.release()
            self._hold(descriptor)

    def is_mine(self) -> bool:
        """Whether this object owns it, and nobody took it by force."""
        return self._descriptor is not None and _is_same(self._descriptor, self._path)

    def is_there(self) -> bool:
        """Whether the file is there: it stays as long as the run does."""
        return self._path.exists()

    def is_held(self) -> bool:
        """Whether anybody owns it, this object included."""
        if self._descriptor is not None:
            return True
        with no_fork():
            try:
                descriptor = os.open(self._path, os.O_RDONLY)
            except OSError:
                return False
            try:
                return not _lock(descriptor, is_shared=True)
            finally:
                os.close(descriptor)

    def owner(self) -> str:
        """Who owns it, or was the last to, for people: `process 4711 on HOST`; empty when it is not known."""
        with contextlib.suppress(OSError, ValueError):
            match json.loads(self._path.read_bytes()):
                case {"pid": int(pid), "host": str(host)}:
                    return f"process {pid} on {host}"
                case _:
                    pass
        return ""

    def release(self) -> None:
        """Own it no more."""
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


def _lock(descriptor: int, *, is_shared: bool = False) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


_held: weakref.WeakSet[Ownership] = weakref.WeakSet()


@after_fork
def _release_all() -> None:
    for ownership in list(_held):  # a child that outlives its parent must not keep what the parent owned
        ownership.release()


def resume_advice(run_id: str, origin: str | None, *, field: str = "", command: str = "ensemble-ray") -> str:
    """Return how to resume a run (S-DUR-154).

    Args:
        run_id: The run.
        origin: Where its definition came from; empty: a program began it, which alone has the definition; None: not known.
        field: What is given besides, as an argument of `resume`: `max_tokens=N`, `allow_loss=True`.
        command: How the command line is called here.
    """
    option = f" --{field.replace('_', '-').removesuffix('=True').replace('=', ' ')}" if field else ""
    at_command = f"{command} resume {run_id}{option}"
    in_program = f"ensemble_ray.resume({run_id!r}, ensemble{field and f', {field}'}), in the program that began it"
    return f"{at_command}, or {in_program}" if origin is None else at_command if origin else in_program


def fork_advice(run_id: str, origin: str, facts: Iterable[Fact], *, command: str = "ensemble-ray") -> str:
    """Return how to begin a new run with what a failed run did; empty where no task failed, or there is nothing to use.

    Args:
        run_id: The failed run.
        origin: Where its definition came from; empty: a program began it, which alone has the definition.
        facts: What it recorded.
        command: How the command line is called here.
    """
    failed, has_output = "", False
    for fact in facts:
        if delegating_call(fact.name) is not None:
            continue
        if isinstance(fact.data, FailureRecorded):
            failed = failed or fact.name
        has_output |= isinstance(fact.data, OutputRecorded)
    if not failed or not has_output:
        return ""
    name = failed if "/" in failed else node_key(failed)
    if not origin:
        return f"ensemble_ray.fork({run_id!r}, {name!r}, ensemble), in the program that began it"
    return f"{command} fork {run_id} --from {shlex.quote(name)}"


async def read_fork_advice(store: RunStore, run_id: str, origin: str, *, command: str = "ensemble-ray") -> str:
    """Return `fork_advice` of a run of a store.

    Raises:
        RecordError: the record is damaged, or was removed meanwhile.
    """
    ends: list[Fact] = []
    async for page in store.read(run_id, kinds=kinds_of(OutputRecorded, FailureRecorded), has_data=False):
        ends += page
    return fork_advice(run_id, origin, ends, command=command)
