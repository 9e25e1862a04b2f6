"""The runs in a PostgreSQL database, as lists show them.

In: a connection. Out: summaries, and the one that a text means. Never: a run shown as running whose owner is dead.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from datetime import UTC
from typing import TYPE_CHECKING

from ensemble_ray.errors import ValidationError
from ensemble_ray.facts.runs import RunEnded
from ensemble_ray.record.stores import RecordedRun
from ensemble_ray.values.outputs import RunState

if TYPE_CHECKING:
    from ensemble_ray.record.postgres.connection import Connection

#: Keys of all locks of owners; looking does not take a lock, which others would stumble over.
HELD = """
held AS MATERIALIZED (
    SELECT l.classid::bigint << 32 | l.objid::bigint AS key FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
"""
#: The last fact that says how the run stands: an owner may have died before it wrote the state.
_LAST_STATE = """
(
    SELECT f.kind || ' ' || f.data FROM ensemble_ray.facts f
    WHERE f.run_id = r.run_id AND f.instance = 'run' AND f.kind IN ('end', 'resume') ORDER BY f.seq DESC LIMIT 1
)
"""
_RUNS = f"""
WITH {HELD}
SELECT r.run_id, r.created_at, r.origin, r.state, r.owner,
    hashtextextended(r.run_id || ':' || r.begun || ':' || r.epoch, 0) IN (SELECT key FROM held),
    CASE WHEN r.state NOT IN ('completed', 'failed', 'cancelled') THEN {_LAST_STATE} END
FROM ensemble_ray.runs r
"""  # noqa: S608  our own constants


async def read_runs(connection: Connection, location: str, run_id: str | None = None) -> list[RecordedRun]:
    """All runs, newest first; or the one of that id, if it is there."""
    if run_id is None:
        cursor = await connection.execute(f"{_RUNS} ORDER BY r.created_at DESC, r.run_id DESC")
    else:
        cursor = await connection.execute(f"{_RUNS} WHERE r.run_id = %s", [run_id])
    return [
        RecordedRun(
            run_id=found,
            created_at=created_at.astimezone(UTC),
            origin=origin,
            state=_to_visible(_to_written(state), last_fact, is_owned=is_owned),
            location=location,
            owner=owner if is_owned and not _to_written(state).is_final else "",
        )
        for found, created_at, origin, state, owner, is_owned, last_fact in await cursor.fetchall()
    ]


def _to_written(state: str) -> RunState:
    """Return the state as it is written; what is none says nothing."""
    try:
        return RunState(state)
    except ValueError:
        return RunState.INTERRUPTED


def _to_visible(state: RunState, last_fact: str | None, *, is_owned: bool) -> RunState:
    """How a run stands, of what is written and what its facts tell."""
    if state.is_final:
        return state
    if is_owned:
        return RunState.RUNNING if state is RunState.INTERRUPTED else state
    kind, _, data = (last_fact or "").partition(" ")
    if kind == RunEnded.KIND:
        with contextlib.suppress(ValueError, AttributeError):  # a list shows what there is; reading the run tells
            return RunEnded.from_data(json.loads(data), 0.0).state or RunState.INTERRUPTED
    return RunState.INTERRUPTED


async def unknown_run(connection: Connection | None, run_id: str, location: str) -> ValidationError:
    """Says that there is no such run, and which are near."""
    recorded: list[str] = []
    if connection is not None:
        cursor = await connection.execute("SELECT run_id FROM ensemble_ray.runs")
        recorded = [row[0] for row in await cursor.fetchall()]
    near = difflib.get_close_matches(run_id, recorded, n=3, cutoff=0.5)
    shown = f". Nearest: [{', '.join(near)}]" if near else ""
    return ValidationError(f"Unknown run '{run_id}' in {location}{shown}")
