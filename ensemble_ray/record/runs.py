"""The runs of a home: their directories, states and facts.

In: a home directory and an id. Out: who owns the run, how it stands, what it recorded. Everything here blocks: it is for
threads, and for people's own programs. Never: a directory that others may read, a state that is half written.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from ensemble_ray.errors import EnsembleError, RecordError, RunExistsError, ValidationError, message_of
from ensemble_ray.facts.fact import Fact, kinds_of
from ensemble_ray.facts.runs import RunEnded, RunResumed
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.journal import FORMAT
from ensemble_ray.record.sqlite.file import cannot_write
from ensemble_ray.record.sqlite.losses import COUNT, RECORD, make_deleted_error
from ensemble_ray.record.sqlite.reading import last_of_run, last_seq, read_all, read_page
from ensemble_ray.record.stores import PAGE, Ownership, RecordedRun, RunStore, StoreAddress
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.value import utc_now, utc_of

_STANDING = {
    RunState.COMPLETED: "is finished: choose another run_id",
    RunState.FAILED: "has failed: choose another run_id",
    RunState.CANCELLED: "was cancelled: resume it, or choose another run_id",
    RunState.WAITING: "waits for reviews: decide them and resume it, or choose another run_id",
    RunState.BUDGET_EXHAUSTED: "spent its budget: resume it with a larger one, or choose another run_id",
}
_INTERRUPTED = "was interrupted: resume it, or choose another run_id"


def describe_conflict(run_id: str, state: RunState) -> str:
    """Return what to tell somebody who wants to begin a run of an id that nobody owns and that has recorded something."""
    return f"Run '{run_id}' {_STANDING.get(state, _INTERRUPTED)}"


def chosen_id(text: str, known: Sequence[str], newest: Callable[[], Sequence[str]], location: str) -> str:
    """Return the run of that id, the only one whose id begins so, or the newest for `latest`.

    Args:
        text: What a user wrote.
        known: All ids.
        newest: Gives them with the newest first; only asked where that matters.
        location: Where they are, for people.

    Raises:
        ValidationError: there is none, or several; the message names the nearest.
    """
    if text in known:
        return text
    if not known:
        asked = "There are" if text == "latest" else f"Unknown run '{text}': there are"
        raise ValidationError(f"{asked} no runs in {location}")
    if text == "latest":
        return newest()[0]
    begins = sorted(each for each in known if text and each.startswith(text))
    if len(begins) == 1:
        return begins[0]
    if begins:
        raise ValidationError(f"Several runs begin with '{text}': [{', '.join(begins[:5])}]")
    near = difflib.get_close_matches(text, known, n=3, cutoff=0.5)
    shown = near or list(newest())[:3]
    raise ValidationError(
        f"Unknown run '{text}' in {location}. {'Nearest' if near else 'Newest'}: [{', '.join(shown)}]"
    )


_META = "meta.json"
_CANCEL = "cancel"
_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def runs_directory(home: Path) -> Path:
    """Return the directory of all runs of a home."""
    return home / "runs"


def check_run_id(run_id: str) -> None:
    """Refuse ids that cannot name a directory.

    Raises:
        ValidationError: it has other characters, begins with a dot or a dash, or is too long.
    """
    if not _RUN_ID.fullmatch(run_id):
        msg = (
            f"Run id '{run_id}' cannot name a record: "
            "use up to 128 letters, digits, '.', '_' and '-', beginning with a letter, a digit or '_'"
        )
        raise ValidationError(msg)


class RunDirectory:
    """The directory of one run."""

    def __init__(self, home: Path, run_id: str) -> None:
        """Name the directory; nothing is made.

        Raises:
            ValidationError: the id cannot name a directory.
        """
        check_run_id(run_id)
        self.run_id = run_id
        self.path = runs_directory(home) / run_id
        self.ownership = Ownership(self.path / "owner.lock")

    def begin(self, origin: str, clock: Callable[[], float] = time.time) -> None:
        """Make the directory as the owner of a new run; what one that recorded nothing left is taken over.

        Raises:
            RunExistsError: there is a run of that id.
            RecordError: the directory cannot be written, or what is in it cannot be read.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                self.path.mkdir(mode=0o700)
                is_new = True
            except FileExistsError:
                is_new = False
            self._acquire_lock()
            if not is_new:
                self._clear()
            self._write_meta(clock(), origin, RunState.PENDING)
        except OSError as error:
            self.release()
            raise cannot_write(self.path, error) from error
        except BaseException:
            self.release()
            raise

    def own(self, *, by_force: bool = False) -> None:
        """Become the owner of a run that is there.

        Raises:
            RunExistsError: somebody else owns it, and it is not taken by force.
            RecordError: the directory cannot be written.
        """
        try:
            if not by_force:
                self._acquire_lock()
            elif not self.ownership.acquire():
                self.ownership.acquire_by_force()
            (self.path / _CANCEL).unlink(missing_ok=True)
            created_at, origin, _ = self._read_meta()
            self._write_meta(created_at, origin, RunState.PENDING)
        except OSError as error:
            self.release()
            raise cannot_write(self.path, error) from error

    def write_state(self, state: RunState) -> None:
        """Say how the run stands; after a final state the run has no owner any more. Only its owner says so.

        Raises:
            RecordError: it cannot be written.
        """
        if not self.ownership.is_mine():  # taken by force: how it stands is for its new owner to say
            self.release()
            if not self.ownership.is_there():
                raise make_deleted_error(self.path / RECORD)
            return
        created_at, origin, _ = self._read_meta()
        try:
            self._write_meta(created_at, origin, state)
        except OSError as error:
            raise cannot_write(self.path / _META, error) from error
        if not state.is_going_on:
            self.release()

    def release(self) -> None:
        """Own the run no more."""
        self.ownership.release()

    def state(self) -> RunState:
        """How the run stands. What nobody owns and has not ended was interrupted."""
        return self.summary().state

    def summary(self) -> RecordedRun:
        """Return the run as lists show it."""
        created_at, origin, state = self._read_meta()
        owner = ""
        if not state.is_final and self.ownership.is_held():
            state, owner = state if state.is_going_on else RunState.RUNNING, self.ownership.owner()
        else:
            state = self._unowned_state(state)
        return RecordedRun(
            run_id=self.run_id,
            created_at=utc_of(created_at),
            origin=origin,
            state=state,
            location=str(self.path),
            owner=owner,
        )

    def facts(self, *, is_partial: bool = False) -> list[Fact]:
        """All committed facts in order, numbered from 1. `is_partial`: what is left of them.

        Raises:
            RecordError: the record is damaged, or of a newer format.
        """
        return read_all(self.path, self.run_id, is_partial=is_partial)

    def last_seq(self, kinds: Collection[str] | None = None, *, is_partial: bool = False) -> int:
        """Position of the last committed fact, of those kinds if any are named; 0 when there is none.

        Raises:
            RecordError: the record is damaged, or of a newer format.
        """
        return last_seq(self.path, kinds, is_partial=is_partial)

    def page(
        self, *, after: int, kinds: Collection[str] | None = None, has_data: bool = True, is_partial: bool = False
    ) -> list[Fact]:
        """Return the next committed facts behind a position, at most `PAGE`; see `RunStore.read`.

        Raises:
            RecordError: the record is damaged, or of a newer format.
        """
        return read_page(
            self.path, self.run_id, after=after, size=PAGE, kinds=kinds, has_data=has_data, is_partial=is_partial
        )

    def ask_cancel(self) -> None:
        """Ask the owner to end the run.

        Raises:
            RecordError: the directory cannot be written.
        """
        try:
            (self.path / _CANCEL).touch(mode=0o600)
        except OSError as error:
            raise cannot_write(self.path / _CANCEL, error) from error

    def is_cancel_asked(self) -> bool:
        """Whether somebody asked for the run's end since its owner came."""
        return (self.path / _CANCEL).exists()

    def delete(self) -> None:
        """Remove the record.

        Raises:
            RunExistsError: somebody owns it.
            RecordError: it cannot be removed.
        """
        try:
            self._acquire_lock()
            # Under a name that no list shows: what is half removed is no run any more.
            hidden = self.path.with_name(f".{self.run_id}.{os.getpid()}.deleted")
            self.path.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        finally:
            self.release()

    def _acquire_lock(self) -> None:
        if not self.ownership.acquire():
            owner = self.ownership.owner()
            who = f" ({owner})" if owner else ""
            msg = f"Run '{self.run_id}' is running{who}: wait for its end, or choose another run_id"
            raise RunExistsError(msg)

    def _unowned_state(self, written: RunState) -> RunState:
        """How a run stands that nobody owns: as its facts say, where its owner died before it wrote the state."""
        if not written.is_going_on and (self.path / _META).exists():
            return written
        with contextlib.suppress(RecordError, ValueError):  # a list shows what there is; reading the run tells
            last = last_of_run(self.path, self.run_id, kinds_of(RunEnded, RunResumed))
            if last is not None and isinstance(last.data, RunEnded):
                return last.data.state or RunState.INTERRUPTED
        return RunState.INTERRUPTED

    def _clear(self) -> None:
        """Remove what a run left that recorded nothing."""
        if self.facts():
            state = self._unowned_state(self._read_meta()[2])
            raise RunExistsError(describe_conflict(self.run_id, state))
        for name in (COUNT, RECORD, f"{RECORD}-wal", f"{RECORD}-shm", _CANCEL):
            (self.path / name).unlink(missing_ok=True)

    def _write_meta(self, created_at: float, origin: str, state: RunState) -> None:
        meta = {
            "format": FORMAT,
            "run": self.run_id,
            "created_at": utc_of(created_at).isoformat(),
            "origin": origin,
            "state": state.value,
        }
        text = json.dumps(meta, indent=2)
        # One length for all states: then it is changed in its place, in one piece, on a full disk too.
        length = len(text) - len(state.value) + max(map(len, RunState)) + 1
        descriptor = os.open(self.path / _META, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, text.encode().ljust(length - 1) + b"\n", 0)
            if os.fstat(descriptor).st_size != length:
                os.ftruncate(descriptor, length)
        finally:
            os.close(descriptor)

    def _read_meta(self) -> tuple[float, str, RunState]:
        """Creation (Unix time, s), origin and state as written; a directory without them was interrupted."""
        try:
            read: object = json.loads((self.path / _META).read_bytes())
            match read:
                case {"created_at": str(created_at), "origin": str(origin), "state": str(state)}:
                    began_at = datetime.fromisoformat(created_at).timestamp()
                    utc_of(began_at)  # a date that cannot be shown in UTC is none
                    return began_at, origin, RunState(state)
                case _:
                    pass
        except (OSError, ValueError, OverflowError):
            pass
        with contextlib.suppress(OSError):
            return self.path.stat().st_mtime, "", RunState.INTERRUPTED
        return 0.0, "", RunState.INTERRUPTED


def list_runs(home: Path, known: MutableMapping[str, tuple[int, RecordedRun]] | None = None) -> list[RecordedRun]:
    """All runs of a home, newest first; none when there is no home.

    Args:
        home: The home.
        known: What an earlier call has read of runs that had ended; it is kept up. Such a run's `meta.json` alone says how it
            stands, so that it is read again only when it was written again.

    Raises:
        RecordError: the home cannot be read.
    """
    directory, found = os.fspath(runs_directory(home)), list[RecordedRun]()
    for name in _list_ids(home):
        written_at = _written_at(f"{directory}/{name}/{_META}") if known is not None else 0
        if known is not None and (earlier := known.get(name)) is not None and earlier[0] == written_at:
            found.append(earlier[1])
            continue
        summary = RunDirectory(home, name).summary()
        found.append(summary)
        if known is not None and written_at and summary.state.is_final:
            known[name] = (written_at, summary)
    return sorted(found, key=lambda run: (run.created_at, run.run_id), reverse=True)


def _written_at(path: str) -> int:
    """Return when a file was written, ns; 0: it is not there."""
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116  asked for each of ten thousand runs
    except OSError:
        return 0


def find_run(text: str, home: Path) -> RunDirectory:
    """Return the run of that id, the only one whose id begins so, or the newest for `latest`.

    Raises:
        ValidationError: there is none, or several; the message names the nearest.
    """
    found = chosen_id(text, _list_ids(home), lambda: [run.run_id for run in list_runs(home)], str(runs_directory(home)))
    return RunDirectory(home, found)


def existing_run(run_id: str, home: Path) -> RunDirectory:
    """Return the run of exactly that id.

    Raises:
        ValidationError: there is none; the message names the nearest.
    """
    found = RunDirectory(home, run_id)
    if not found.path.is_dir():
        near = difflib.get_close_matches(run_id, _list_ids(home), n=3, cutoff=0.5)
        shown = f". Nearest: [{', '.join(near)}]" if near else ""
        msg = f"Unknown run '{run_id}' in {runs_directory(home)}{shown}"
        raise ValidationError(msg)
    return found


def read_facts(run_id: str, home: Path) -> list[Fact]:
    """All facts of a run, named by its id or the beginning of it.

    Raises:
        ValidationError: there is no such run, or several.
        RecordError: its record is damaged, or holds nothing.
    """
    directory = find_run(run_id, home)
    facts = directory.facts()
    if not facts:
        msg = f"Run '{directory.run_id}' has recorded nothing in {directory.path}"
        raise RecordError(msg, str(directory.path))
    return facts


def _list_ids(home: Path) -> list[str]:
    try:
        entries = list(os.scandir(runs_directory(home)))
    except FileNotFoundError:
        return []
    except OSError as error:
        where = runs_directory(home)
        msg = f"Cannot read the records in {where}: {error.strerror or error}"
        raise RecordError(msg, str(where)) from error
    return sorted(entry.name for entry in entries if entry.is_dir() and _RUN_ID.fullmatch(entry.name))


_log = bounded_logger(__name__)
#: Environment variable that has old records removed at the end of each run.
RETENTION_VARIABLE = "ENSEMBLE_RAY_RETENTION"
#: Hours of each unit.
_HOURS = {"h": 1, "d": 24, "w": 168}
#: more digits than these are more than a calendar holds
_AGE = re.compile(r"([0-9]{1,12})\s*([hdw])")
#: A process looks at all records once in so long, s, however many runs end in it: ages are counted in hours.
_PAUSE_S = 60.0
_ENDED = frozenset(state for state in RunState if state.is_final)


def age_from(text: str) -> timedelta:
    """Return an age as people write it: `30d`, `12h`, `2w`.

    Raises:
        ValidationError: it is none.
    """
    found = _AGE.fullmatch(text.strip().lower())
    if found is None:
        msg = f"'{text}' is no age: write 30d for days, 12h for hours, 2w for weeks"
        raise ValidationError(msg)
    try:
        return timedelta(hours=int(found[1]) * _HOURS[found[2]])
    except OverflowError:
        msg = f"'{text}' is too long an age"
        raise ValidationError(msg) from None


async def prune(
    store: RunStore,
    older_than: timedelta,
    *,
    keep: int = 0,
    states: Collection[RunState] = (),
    spared: str = "",
    is_dry: bool = False,
    now: datetime | None = None,
) -> list[RecordedRun]:
    """Remove the records of old runs (S-DUR-53).

    Args:
        store: Where they are.
        older_than: How long ago a run must have begun.
        keep: So many of the newest are kept, however old they are.
        states: Only of runs in these states; none named: of those that completed, failed or were cancelled. Runs that
            somebody owns are never removed.
        spared: Id of a run that is kept in any case.
        is_dry: Only say what would be removed.
        now: What ages are measured by; None: the clock.

    Returns:
        What was removed, newest first.
    """
    wanted = set(states) or _ENDED
    removable = [run for run in await store.runs() if run.state in wanted]
    until = (now or utc_now()) - older_than
    old = [run for run in removable[keep:] if run.created_at < until and run.run_id != spared]
    removed: list[RecordedRun] = []
    for run in old:
        try:
            if not is_dry:
                await store.delete(run.run_id)
        except (RunExistsError, ValidationError):
            continue  # somebody resumed it, or removed it, a moment ago
        removed.append(run)
    return removed


async def apply_retention(
    store: RunStore, environ: Mapping[str, str] | None = None, *, spared: str = ""
) -> Sequence[RecordedRun]:
    """Remove what `ENSEMBLE_RAY_RETENTION` calls old; nothing where it says nothing. Failures are WARN lines.

    The run that has just ended is spared, since it may have begun long ago.
    """
    value = (os.environ if environ is None else environ).get(RETENTION_VARIABLE, "").strip()
    if not value:
        return ()
    try:
        removed = await prune(store, age_from(value), spared=spared)
    except EnsembleError as error:
        _log.warning("%s: old records were not removed: %s", RETENTION_VARIABLE, message_of(error))
        return ()
    if removed:
        _log.info("%s: %d old records were removed", RETENTION_VARIABLE, len(removed))
    return removed


class Retention:
    """Old records of a process's stores go when runs end in it, and not at each end of many."""

    def __init__(self) -> None:
        #: store -> when its records were looked at
        self._looked_at: dict[StoreAddress, float] = {}

    async def run_ended(self, address: StoreAddress, store: RunStore, *, spared: str, at: float) -> None:
        """Remove what is old, as `apply_retention` does, where nobody has looked for a minute.

        Args:
            address: Which store it is.
            store: The same, opened.
            spared: Id of the run that ended.
            at: The time, s of a steady clock.
        """
        is_wanted = bool(os.environ.get(RETENTION_VARIABLE, "").strip())
        if is_wanted and at - self._looked_at.get(address, -_PAUSE_S) >= _PAUSE_S:
            self._looked_at[address] = at
            await apply_retention(store, spared=spared)
