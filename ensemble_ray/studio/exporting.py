"""A run as one document: everything that the page is told of it. On the library's loop.

The document is written step by step, so that only the texts of one step are in memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ensemble_ray.process.forks import threads
from ensemble_ray.studio.routes.answers import json_text
from ensemble_ray.studio.schemas.actors import Actors
from ensemble_ray.studio.schemas.flow import FlowSchema
from ensemble_ray.studio.schemas.runs import RunDetailSchema, StudioInfo
from ensemble_ray.studio.schemas.steps import StepSchema
from ensemble_ray.studio.schemas.wire import Millis, StudioSchema
from ensemble_ray.text.foreign_text import whole_text

if TYPE_CHECKING:
    from ensemble_ray.studio.reading import StudioReader
    from ensemble_ray.studio.visitors import Visitor

#: Steps whose details go along; of a longer run those that failed, then the first ones.
_MOST_DETAILS = 2000


class ExportedFlows(StudioSchema):
    """The graph of a run, as declared and as it ran."""

    declared: FlowSchema | None = None
    ran: FlowSchema | None = None


class ExportedRun(StudioSchema):
    """What an export holds besides `details`: the details by step, their texts whole."""

    version: str
    exported_at: Millis
    info: StudioInfo
    run: RunDetailSchema
    steps: list[StepSchema]
    flows: ExportedFlows = ExportedFlows()
    actors: Actors | None = None


async def write_run(
    reader: StudioReader, run_id: str, visitor: Visitor, info: StudioInfo, write: Callable[[str], object]
) -> None:
    """Write a run as one JSON document.

    Args:
        reader: Has the run.
        run_id: Which one.
        visitor: Who asks.
        info: What the page is told of its server.
        write: Is called in a thread with one piece after the other.

    Raises:
        StudioRefusal: there is no such run.
        RecordError: the record is damaged.
    """
    run = await reader.run(run_id, visitor)
    steps = (await reader.steps(run_id, visitor, after=0)).steps
    begun = [each for each in steps if each.started_at is not None and each.kind not in _UNITS]
    chosen = sorted(begun, key=lambda each: each.status != "failed")[:_MOST_DETAILS]
    exported = ExportedRun(
        version=info.version,
        exported_at=round(time.time() * 1000),
        info=info.model_copy(update={"actions": [], "has_actors": False, "has_files": False}),
        run=run,
        steps=steps,
        flows=ExportedFlows(
            declared=await reader.flow(run_id, visitor, "declared"), ran=await reader.flow(run_id, visitor, "ran")
        ),
    )
    await threads.run(write, f'{json_text(exported)[:-1]},"details":{{')
    comma = ""
    async for step_id, detail in reader.step_details(run_id, [each.id for each in chosen], visitor):
        await threads.run(write, f"{comma}{json.dumps(whole_text(step_id))}:{json_text(detail)}")
        comma = ","
    await threads.run(write, "}}")


_UNITS = frozenset({"loop", "iteration", "phase", "attempt", "graph", "state"})
