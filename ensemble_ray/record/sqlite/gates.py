"""Review gates in the SQLite files of runs: which there are, and decisions that any process takes.

In: a run's directory. Out: facts of its gates; one more fact, unless the gate has its decision. Everything here blocks: it is
for threads.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble_ray.errors import RecordError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.open_reviews import END_KINDS, Gate, Obstacle, ends_of_open, fold_gates, obstacle_at
from ensemble_ray.record.rendering import body_digest, text_of
from ensemble_ray.record.runs import RunDirectory, list_runs
from ensemble_ray.record.sqlite.commit_lock import CommitLock
from ensemble_ray.record.sqlite.file import SqliteFile, cannot_write
from ensemble_ray.record.sqlite.journal import COMMIT_LOCK
from ensemble_ray.record.sqlite.losses import RECORD
from ensemble_ray.record.sqlite.reading import facts_in, read_from
from ensemble_ray.record.stores import GatesOfRun
from ensemble_ray.values.ids import RUN

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from ensemble_ray.facts.reviews import ReviewDecided
    from ensemble_ray.record.stores import RecordedRun

_log = bounded_logger(__name__)
#: As the file's index of gates has it, so that it is used.
_OF_GATES = "WHERE kind IN ('review', 'review_decision') ORDER BY seq"


def gates_in(home: Path, known: MutableMapping[str, tuple[int, RecordedRun]] | None = None) -> list[GatesOfRun]:
    """Return the runs of a home that have not ended and have gates, oldest first.

    Args:
        home: The home.
        known: As for `list_runs`.

    Raises:
        RecordError: the home cannot be read.
    """
    found: list[GatesOfRun] = []
    for run in reversed(list_runs(home, known)):
        if run.state.is_final:
            continue
        try:
            facts = read_gates(RunDirectory(home, run.run_id))
        except RecordError as error:
            _log.warning("The review gates of run %s are not listed: %s", run.run_id, error)
            continue
        if facts:
            found.append(GatesOfRun(run, facts))
    return found


def read_gates(directory: RunDirectory) -> list[Fact]:
    """Return what is recorded of a run's gates; see `GatesOfRun.facts`.

    Raises:
        RecordError: the file is damaged, or of a newer format.
    """
    run_id, path = directory.run_id, directory.path / RECORD

    def read(connection: sqlite3.Connection) -> list[Fact]:
        found = facts_in(connection, run_id, path, _OF_GATES)
        for instance, name in ends_of_open(found):
            where = f"WHERE instance = ? AND name = ? AND kind IN ({', '.join('?' * len(END_KINDS))})"
            found += facts_in(connection, run_id, path, where, (instance, name, *END_KINDS), has_data=False)
        return found

    return read_from(directory.path, read, [])


def record_decision(
    directory: RunDirectory, gate: str, decision: ReviewDecided, *, patience_s: float
) -> tuple[Gate, Obstacle] | None:
    """Record a decision unless something is in its way; see `RunStore.decide`.

    Raises:
        RecordError: the record is damaged, or cannot be written.
    """
    lock = CommitLock(directory.path / COMMIT_LOCK)
    try:
        lock.acquire_or_raise(patience_s)
        # Whoever takes the run holds this lock meanwhile: an owner that is not there now reads what is written here.
        is_owned = directory.ownership.is_held()
        return _record(
            directory, Fact(run=directory.run_id, name=gate, at=time.time(), data=decision), is_owned=is_owned
        )
    except (OSError, sqlite3.Error) as error:
        raise cannot_write(directory.path / RECORD, error) from error
    finally:
        lock.close()


def _record(directory: RunDirectory, fact: Fact, *, is_owned: bool) -> tuple[Gate, Obstacle] | None:
    bodies: dict[str, str] = {}

    def keep(text: str) -> str:
        digest = body_digest(text)
        bodies[digest] = text
        return digest

    data = text_of(fact.data.to_data(), keep)
    file = SqliteFile(directory.path)
    try:
        with file.transaction(is_synced=True):
            (gate,) = fold_gates(file.facts_named(directory.run_id, fact.instance, fact.name))
            obstacle = obstacle_at(gate, at=fact.at, is_owned=is_owned)
            if obstacle is not None:
                return gate, obstacle
            epochs = file.epochs()
            epoch = max(epochs.get(RUN, 0), epochs.get(fact.fence, 0))
            file.add_in_transaction([(fact.kind, fact.name, fact.fence, fact.at, epoch, data)], bodies)
    finally:
        file.close()
    return None
