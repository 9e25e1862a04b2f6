"""Review gates in a PostgreSQL database: which there are, and decisions that any process takes.

In: a connection. Out: facts of gates; one more fact, unless the gate has its decision. A decision is recorded under the lock on
its run's row, as facts are and as owners come.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, LiteralString
from uuid import uuid4

from ensemble_ray.errors import RecordError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.open_reviews import END_KINDS, Gate, Obstacle, ends_of_open, fold_gates, obstacle_at
from ensemble_ray.record.postgres.group import Append, commit_group, render, text_of_name
from ensemble_ray.record.postgres.journal import with_bodies
from ensemble_ray.record.postgres.owner import owner_of
from ensemble_ray.record.postgres.runs import read_runs, unknown_run
from ensemble_ray.record.stores import GatesOfRun

if TYPE_CHECKING:
    from ensemble_ray.facts.reviews import ReviewDecided
    from ensemble_ray.record.postgres.connection import Connection
    from ensemble_ray.record.postgres.database import Database

_log = bounded_logger(__name__)
#: As the index of gates has it, so that it is used.
_GATES = """
SELECT seq, kind, name, at, epoch, data FROM ensemble_ray.facts
WHERE run_id = %s AND kind IN ('review', 'review_decision') ORDER BY seq
"""
_RUNS_WITH_GATES = """
SELECT r.run_id FROM ensemble_ray.runs r
WHERE r.state NOT IN ('completed', 'failed', 'cancelled', 'budget_exhausted') AND EXISTS (
    SELECT FROM ensemble_ray.facts f WHERE f.run_id = r.run_id AND f.kind IN ('review', 'review_decision')
) ORDER BY r.created_at, r.run_id
"""
_ENDS = """
SELECT f.seq, f.kind, f.name, f.at, f.epoch, '{}' FROM ensemble_ray.facts f
JOIN unnest(%(instances)s::text[], %(names)s::text[]) AS e (instance, name) ON f.instance = e.instance AND f.name = e.name
WHERE f.run_id = %(run)s AND f.kind = ANY(%(kinds)s)
"""
_RUN = "SELECT begun, epoch FROM ensemble_ray.runs WHERE run_id = %s FOR NO KEY UPDATE"
_EPOCH = "SELECT max(epoch) FROM ensemble_ray.epochs WHERE run_id = %s AND instance = %s"
_NAMED = """
SELECT seq, kind, name, at, epoch, data FROM ensemble_ray.facts
WHERE run_id = %s AND instance = %s AND name = %s ORDER BY seq
"""


async def gates_in(connection: Connection, location: str) -> list[GatesOfRun]:
    """Return the runs that have not ended and have gates, oldest first."""
    cursor = await connection.execute(_RUNS_WITH_GATES)
    found: list[GatesOfRun] = []
    for (run_id,) in await cursor.fetchall():
        for run in await read_runs(connection, location, run_id):
            if run.state.is_final:  # its owner died before it wrote the state
                continue
            try:
                found.append(GatesOfRun(run, await read_gates(connection, run_id, location)))
            except RecordError as error:
                _log.warning("The review gates of run %s are not listed: %s", run_id, error)
    return found


async def read_gates(connection: Connection, run_id: str, location: str) -> list[Fact]:
    """Return what is recorded of a run's gates; see `GatesOfRun.facts`.

    Raises:
        RecordError: a fact is damaged.
    """
    found = await with_bodies(connection, run_id, location, await _rows(connection, _GATES, [run_id]))
    ends = ends_of_open(found)
    if not ends:
        return found
    values = {
        "run": run_id,
        "instances": [text_of_name(instance) for instance, _ in ends],
        "names": [text_of_name(name) for _, name in ends],
        "kinds": list(END_KINDS),
    }
    return found + await with_bodies(connection, run_id, location, await _rows(connection, _ENDS, values))


async def record_decision(
    database: Database, run_id: str, gate: str, decision: ReviewDecided
) -> tuple[Gate, Obstacle] | None:
    """Record a decision unless something is in its way; see `RunStore.decide`.

    Raises:
        RecordError: the record is damaged.
        ValidationError: there is no such run.
        Error: psycopg's.
    """
    async with await database.connect() as connection, connection.transaction():
        rows = await _rows(connection, _RUN, [run_id])
        if not rows:
            raise await unknown_run(connection, run_id, database.location)
        ((begun, of_run),) = rows
        # Whoever takes the run locks its row, too: an owner that is not there now reads what is written here.
        is_owned = await owner_of(connection, run_id) is not None
        fact = Fact(run=run_id, name=gate, at=time.time(), data=decision)
        instance = text_of_name(fact.instance)
        found = await _rows(connection, _NAMED, [run_id, instance, text_of_name(gate)])
        (asked,) = fold_gates(await with_bodies(connection, run_id, database.location, found))
        obstacle = obstacle_at(asked, at=fact.at, is_owned=is_owned)
        if obstacle is not None:
            return asked, obstacle
        ((of_instance,),) = await _rows(connection, _EPOCH, [run_id, instance])
        entry = Append(target=(run_id, begun), facts=(fact,), epoch=max(of_run, of_instance or 0), first=1)
        await commit_group(connection, render([entry], {}), uuid4())
    return None


async def _rows(
    connection: Connection, query: LiteralString, values: Sequence[object] | Mapping[str, object]
) -> list[tuple[Any, ...]]:
    return await (await connection.execute(query, values)).fetchall()
