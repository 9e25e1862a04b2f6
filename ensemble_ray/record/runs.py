"""Read and write the runs of a home: their directories, ownership, states and facts.

All functions block. Directories are readable for their owner only.
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
from ensemble_ray.record.sqlite.file import cannot_write, last_of_run, read_all
from ensemble_ray.record.sqlite.losses import COUNT, RECORD, make_deleted_error
from ensemble_ray.record.stores import Ownership, RecordedRun, RunStore, StoreAddress
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.value import age_from, utc_now, utc_of

_STANDING = {
    RunState.COMPLETED: "is finished: choose another run_id",
    RunState.FAILED: "has failed: choose another run_id",
    RunState.CANCELLED: "was cancelled: resume it, or choose another run_id",
    RunState.WAITING: "waits for reviews: decide them and resume it, or choose another run_id",
    RunState.BUDGET_EXHAUSTED: "spent its budget: resume it with a larger one, or choose another run_id",
}
_INTERRUPTED = "was interrupted: resume it, or choose another run_id"


def describe_conflict(run_id: str, state: RunState) -> str:
    return f"Run '{run_id}' {_STANDING.get(state, _INTERRUPTED)}"


def chosen_id(text: str, known: Sequence[str], newest: Callable[[], Sequence[str]], location: str) -> str:
    """Return the run with this id, the only run with an id that starts with the text, or the newest run for `latest`.

    `newest` is called only if the order matters. The error names the nearest ids.
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
#: Length of the longest state in `meta.json`, with its quotes and the end of the text.
_STATE_BYTES = max(map(len, RunState)) + len('""\n}\n')
_CANCEL = "cancel"
_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def runs_directory(home: Path) -> Path:
    return home / "runs"


def check_run_id(run_id: str) -> None:
    if not _RUN_ID.fullmatch(run_id):
        raise ValidationError(
            f"Run id '{run_id}' cannot name a record: "
            "use up to 128 letters, digits, '.', '_' and '-', beginning with a letter, a digit or '_'"
        )


class RunDirectory:
    def __init__(self, home: Path, run_id: str) -> None:
        check_run_id(run_id)
        self.run_id = run_id
        self.path = runs_directory(home) / run_id
        self.ownership = Ownership(self.path / "owner.lock")
        self._meta = ""  # text of the owner's `meta.json` up to the state

    def begin(self, origin: str, state: RunState = RunState.PENDING, *, clock: Callable[[], float] = time.time) -> None:
        """Replaces a run of that id that has no facts."""
        try:
            is_new = self._make()
            self._acquire_lock()
            if not is_new:
                self._clear()
            self._describe(clock(), origin)
            self._write_meta(state)
        except OSError as error:
            self.ownership.release()
            raise cannot_write(self.path, error) from error
        except BaseException:
            self.ownership.release()
            raise

    def own(self, state: RunState = RunState.PENDING, *, by_force: bool = False) -> None:
        try:
            if not by_force:
                self._acquire_lock()
            elif not self.ownership.acquire():
                self.ownership.acquire_by_force()
            (self.path / _CANCEL).unlink(missing_ok=True)
            created_at, origin, _ = self._read_meta()
            self._describe(created_at, origin)
            self._write_meta(state)
        except OSError as error:
            self.ownership.release()
            raise cannot_write(self.path, error) from error

    def write_state(self, state: RunState) -> None:
        """Store the state if this process is the owner; a final state releases ownership."""
        if not self.ownership.is_mine():  # claimed by force: its new owner stores the state
            self.ownership.release()
            if not self.ownership.is_there():
                raise make_deleted_error(self.path / RECORD)
            return
        try:
            self._write_meta(state)
        except OSError as error:
            raise cannot_write(self.path / _META, error) from error
        if not state.is_active:
            self.ownership.release()

    def state(self) -> RunState:
        return self.summary().state

    def summary(self) -> RecordedRun:
        created_at, origin, state = self._read_meta()
        owner = ""
        if not state.is_final and self.ownership.is_held():
            state, owner = state if state.is_active else RunState.RUNNING, self.ownership.owner()
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
        return read_all(self.path, self.run_id, is_partial=is_partial)

    def ask_cancel(self) -> None:
        try:
            (self.path / _CANCEL).touch(mode=0o600)
        except OSError as error:
            raise cannot_write(self.path / _CANCEL, error) from error

    def is_cancel_asked(self) -> bool:
        return (self.path / _CANCEL).exists()

    def delete(self) -> None:
        try:
            self._acquire_lock()
            # No list shows this name: a partly removed run is no run any more.
            hidden = self.path.with_name(f".{self.run_id}.{os.getpid()}.deleted")
            self.path.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        finally:
            self.ownership.release()

    def _make(self) -> bool:
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            return False
        except (FileNotFoundError, NotADirectoryError):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            return self._make()
        return True

    def _acquire_lock(self) -> None:
        if not self.ownership.acquire():
            owner = self.ownership.owner()
            who = f" ({owner})" if owner else ""
            raise RunExistsError(f"Run '{self.run_id}' is running{who}: wait for its end, or choose another run_id")

    def _clear(self) -> None:
        if self.facts():
            state = self._unowned_state(self._read_meta()[2])
            raise RunExistsError(describe_conflict(self.run_id, state))
        for name in (COUNT, RECORD, f"{RECORD}-wal", f"{RECORD}-shm", _CANCEL):
            (self.path / name).unlink(missing_ok=True)

    def _unowned_state(self, written: RunState) -> RunState:
        """Return the state of a run without an owner; its facts decide if the owner died before it stored the state."""
        if not written.is_active and (self.path / _META).exists():
            return written
        with contextlib.suppress(RecordError, ValueError):  # a list shows the run anyway; reading the run raises
            last = last_of_run(self.path, self.run_id, kinds_of(RunEnded, RunResumed))
            if last is not None and isinstance(last.data, RunEnded):
                return last.data.state or RunState.INTERRUPTED
        return RunState.INTERRUPTED

    def _describe(self, created_at: float, origin: str) -> None:
        created = utc_of(created_at).isoformat()
        meta = {"format": FORMAT, "run": self.run_id, "created_at": created, "origin": origin, "state": ""}
        self._meta = json.dumps(meta, indent=2).removesuffix('""\n}')

    def _write_meta(self, state: RunState) -> None:
        # Pad all states to the same length, so that one write replaces the text, also on a full disk.
        length = len(self._meta) + _STATE_BYTES
        text = f'{self._meta}"{state.value}"\n}}'.ljust(length - 1) + "\n"
        descriptor = os.open(self.path / _META, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, text.encode(), 0)
            if os.fstat(descriptor).st_size != length:
                os.ftruncate(descriptor, length)
        finally:
            os.close(descriptor)

    def _read_meta(self) -> tuple[float, str, RunState]:
        """Return creation time (Unix time, s), origin and stored state. Without them, the run is interrupted."""
        with contextlib.suppress(OSError, ValueError, OverflowError):
            read: object = json.loads((self.path / _META).read_bytes())
            match read:
                case {"created_at": str(created_at), "origin": str(origin), "state": str(state)}:
                    began_at = datetime.fromisoformat(created_at).timestamp()
                    utc_of(began_at)  # UTC cannot represent every date
                    return began_at, origin, RunState(state)
                case _:
                    pass
        with contextlib.suppress(OSError):
            return self.path.stat().st_mtime, "", RunState.INTERRUPTED
        return 0.0, "", RunState.INTERRUPTED


def list_runs(home: Path, known: MutableMapping[str, tuple[int, RecordedRun]] | None = None) -> list[RecordedRun]:
    directory, found = os.fspath(runs_directory(home)), list[RecordedRun]()
    for name in _list_ids(home):
        written_at = 0
        if known is not None:
            with contextlib.suppress(OSError):
                written_at = os.stat(f"{directory}/{name}/{_META}").st_mtime_ns  # noqa: PTH116  for each of ten thousand
        if known is not None and (earlier := known.get(name)) is not None and earlier[0] == written_at:
            found.append(earlier[1])
            continue
        summary = RunDirectory(home, name).summary()
        found.append(summary)
        if known is not None and written_at and summary.state.is_final:
            known[name] = (written_at, summary)
    return sorted(found, key=lambda run: (run.created_at, run.run_id), reverse=True)


def find_run(text: str, home: Path) -> RunDirectory:
    found = chosen_id(text, _list_ids(home), lambda: [run.run_id for run in list_runs(home)], str(runs_directory(home)))
    return RunDirectory(home, found)


def existing_run(run_id: str, home: Path) -> RunDirectory:
    found = RunDirectory(home, run_id)
    if not found.path.is_dir():
        near = difflib.get_close_matches(run_id, _list_ids(home), n=3, cutoff=0.5)
        shown = f". Nearest: [{', '.join(near)}]" if near else ""
        raise ValidationError(f"Unknown run '{run_id}' in {runs_directory(home)}{shown}")
    return found


def read_facts(run_id: str, home: Path) -> list[Fact]:
    directory = find_run(run_id, home)
    if facts := directory.facts():
        return facts
    raise RecordError(f"Run '{directory.run_id}' has recorded nothing in {directory.path}", str(directory.path))


def _list_ids(home: Path) -> list[str]:
    try:
        entries = list(os.scandir(runs_directory(home)))
    except FileNotFoundError:
        return []
    except OSError as error:
        where = runs_directory(home)
        raise RecordError(f"Cannot read the records in {where}: {error.strerror or error}", str(where)) from error
    return sorted(entry.name for entry in entries if entry.is_dir() and _RUN_ID.fullmatch(entry.name))


_log = bounded_logger(__name__)
RETENTION_VARIABLE = "ENSEMBLE_RAY_RETENTION"
_PAUSE_S = 60.0  # Shortest time between two removals in one process, s. Ages are in hours.
_ENDED = frozenset(state for state in RunState if state.is_final)


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
    """Remove the records of old runs, and return these runs, newest first (S-DUR-53).

    Args:
        store: The store of the runs.
        older_than: Age since the run began.
        keep: Number of the newest runs to keep, independent of their age.
        states: Empty: completed, failed or cancelled. Runs with an owner are never removed.
        spared: Id of a run to keep in any case.
        is_dry: Only return the runs that would be removed.
        now: None: read the clock.
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
            continue  # another process has just resumed or removed it
        removed.append(run)
    return removed


async def apply_retention(
    store: RunStore, environ: Mapping[str, str] | None = None, *, spared: str = ""
) -> Sequence[RecordedRun]:
    """Remove the records that are old by `ENSEMBLE_RAY_RETENTION`, if it is set. Failures are WARN lines.

    `spared` is the run that has just ended, which may have begun long ago.
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
    """Removes old records when runs end in this process, at most once a minute per store."""

    def __init__(self) -> None:
        self._looked_at: dict[StoreAddress, float] = {}

    async def run_ended(self, address: StoreAddress, store: RunStore, *, spared: str, at: float) -> None:
        """Apply the retention; `at` is the time, s of a monotonic clock."""
        is_wanted = bool(os.environ.get(RETENTION_VARIABLE, "").strip())
        if is_wanted and at - self._looked_at.get(address, -_PAUSE_S) >= _PAUSE_S:
            self._looked_at[address] = at
            await apply_retention(store, spared=spared)
