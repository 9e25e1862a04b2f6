"""The runs of a home: their directories, states and facts. Room: record.

In: a home directory and an id. Out: who owns the run, how it stands, what it recorded.
Never: a directory that others may read, a state that is half written.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ensemble_ray.errors import RecordError, RunExistsError, ValidationError
from ensemble_ray.messages import Fact
from ensemble_ray.outputs import RunState
from ensemble_ray.record.bodies import FileBodies
from ensemble_ray.record.files import cannot_write
from ensemble_ray.record.ownership import Ownership
from ensemble_ray.record.rendering import FORMAT
from ensemble_ray.record.segments import located_facts
from ensemble_ray.values import utc_of

__all__ = ["RunDirectory", "RunSummary", "find_run", "list_runs", "make_private", "read_facts", "runs_directory"]

_META = "meta.json"
_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
#: States in which somebody must own the run; nobody does: it was interrupted.
_OWNED = {RunState.PENDING, RunState.RUNNING, RunState.WAITING}


def runs_directory(home: Path) -> Path:
    """The directory of all runs of a home."""
    return home / "runs"


def make_private(path: Path) -> None:
    """Make a run's directory, and the one of all runs, for its owner only.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.mkdir(exist_ok=True, mode=0o700)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run as lists show it."""

    run_id: str
    created_at: datetime
    #: where its definition came from: a YAML path, `module:attribute`, or nothing
    origin: str
    state: RunState
    path: Path


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
        self._ownership = Ownership(self.path / "owner.lock")

    @classmethod
    def own(cls, home: Path, run_id: str, *, origin: str = "", clock: Callable[[], float] = time.time) -> RunDirectory:
        """Make the directory, or take it over, as the run's owner.

        Raises:
            RunExistsError: a run of that id is running.
            RecordError: the directory cannot be written.
        """
        directory = cls(home, run_id)
        try:
            make_private(directory.path)
            if not directory._ownership.take():
                msg = f"Run '{run_id}' is running: wait for its end, or choose another run_id"
                raise RunExistsError(msg)
            if not (directory.path / _META).exists():
                directory._write_meta(clock(), origin, RunState.PENDING)
        except OSError as error:
            directory.release()
            raise cannot_write(directory.path, error) from error
        return directory

    def write_state(self, state: RunState) -> None:
        """Say how the run stands; after a final state the run has no owner any more.

        Raises:
            RecordError: it cannot be written.
        """
        found = self.summary()
        try:
            self._write_meta(found.created_at.timestamp(), found.origin, state)
        except OSError as error:
            raise cannot_write(self.path / _META, error) from error
        if state.is_final or state is RunState.INTERRUPTED:
            self.release()

    def release(self) -> None:
        """Own the run no more."""
        self._ownership.release()

    def state(self) -> RunState:
        """How the run stands. What nobody owns and has not ended was interrupted."""
        return self.summary().state

    def summary(self) -> RunSummary:
        """The run as lists show it."""
        created_at, origin, state = self._read_meta()
        if state in _OWNED and not self._ownership.is_taken():
            state = RunState.INTERRUPTED
        return RunSummary(run_id=self.run_id, created_at=utc_of(created_at), origin=origin, state=state, path=self.path)

    def facts(self) -> list[Fact]:
        """All recorded facts in order, numbered from 1; what was still unwritten is not among them.

        Raises:
            RecordError: a file is damaged, or of a newer format.
        """
        bodies = FileBodies(self.path)

        def resolve(digest: str) -> str:
            try:
                return bodies.get(digest)
            except (KeyError, ValueError):
                return f"[text {digest} is missing from the record]"

        return [
            Fact(run=f.run, kind=f.kind, name=f.name, at=f.at, data=f.data, epoch=f.epoch, seq=number)
            for number, (f, _) in enumerate(located_facts(self.path, self.run_id, resolve), start=1)
        ]

    def _write_meta(self, created_at: float, origin: str, state: RunState) -> None:
        meta = {
            "format": FORMAT,
            "run": self.run_id,
            "created_at": utc_of(created_at).isoformat(),
            "origin": origin,
            "state": state.value,
        }
        target = self.path / _META
        half = target.with_suffix(f".{os.getpid()}.tmp")
        try:
            half.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
            half.replace(target)
        except OSError:
            with contextlib.suppress(OSError):
                half.unlink(missing_ok=True)
            raise

    def _read_meta(self) -> tuple[float, str, RunState]:
        """Creation (Unix time, s), origin and state as written; a directory without them was interrupted."""
        try:
            read: object = json.loads((self.path / _META).read_bytes())
            match read:
                case {"created_at": str(created_at), "origin": str(origin), "state": str(state)}:
                    return datetime.fromisoformat(created_at).timestamp(), origin, RunState(state)
                case _:
                    pass
        except (OSError, ValueError):
            pass
        with contextlib.suppress(OSError):
            return self.path.stat().st_mtime, "", RunState.INTERRUPTED
        return 0.0, "", RunState.INTERRUPTED


def list_runs(home: Path) -> list[RunSummary]:
    """All runs of a home, newest first; none when there is no home."""
    found = [RunDirectory(home, name).summary() for name in _known_ids(home)]
    return sorted(found, key=lambda run: (run.created_at, run.run_id), reverse=True)


def find_run(run_id: str, home: Path) -> RunDirectory:
    """The run of that id, or the only one whose id begins so.

    Raises:
        ValidationError: there is none, or several; the message names the nearest.
    """
    known = _known_ids(home)
    if run_id in known:
        return RunDirectory(home, run_id)
    begins = [each for each in known if run_id and each.startswith(run_id)]
    if len(begins) == 1:
        return RunDirectory(home, begins[0])
    where = runs_directory(home)
    if begins:
        msg = f"Several runs begin with '{run_id}': [{', '.join(begins[:5])}]"
    elif not known:
        msg = f"Unknown run '{run_id}': there are no runs in {where}"
    else:
        near = difflib.get_close_matches(run_id, known, n=3, cutoff=0.5)
        shown = near or [run.run_id for run in list_runs(home)[:3]]
        msg = f"Unknown run '{run_id}' in {where}. {'Nearest' if near else 'Newest'}: [{', '.join(shown)}]"
    raise ValidationError(msg)


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


def _known_ids(home: Path) -> list[str]:
    try:
        entries = list(runs_directory(home).iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        where = runs_directory(home)
        msg = f"Cannot read the records in {where}: {error.strerror or error}"
        raise RecordError(msg, str(where)) from error
    return sorted(entry.name for entry in entries if entry.is_dir() and _RUN_ID.fullmatch(entry.name))
