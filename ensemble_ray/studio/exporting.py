"""A run as one document: everything that the page is told of it. Package: studio. On the library's loop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pydantic import Field

from ensemble_ray.studio.schemas.actors import Actors
from ensemble_ray.studio.schemas.flow import FlowSchema
from ensemble_ray.studio.schemas.runs import RunDetailSchema, StudioInfo
from ensemble_ray.studio.schemas.steps import StepDetail, StepSchema
from ensemble_ray.studio.schemas.wire import Millis, StudioSchema

if TYPE_CHECKING:
    from ensemble_ray.studio.reading import StudioReader
    from ensemble_ray.studio.visitors import Visitor

__all__ = ["ExportedRun", "export_run"]

#: Steps whose details go along; of a longer run those that failed, then the first ones.
_MOST_DETAILS = 2000


class ExportedFlows(StudioSchema):
    """The graph of a run, as declared and as it ran."""

    declared: FlowSchema | None = None
    ran: FlowSchema | None = None


class ExportedRun(StudioSchema):
    """What an export holds.

    Attributes:
        details: By step, their texts whole.
    """

    version: str
    exported_at: Millis
    info: StudioInfo
    run: RunDetailSchema
    steps: list[StepSchema]
    details: dict[str, StepDetail] = Field(default_factory=dict[str, StepDetail])
    flows: ExportedFlows = ExportedFlows()
    actors: Actors | None = None


async def export_run(reader: StudioReader, run_id: str, visitor: Visitor, info: StudioInfo) -> ExportedRun:
    """Return a run as one document.

    Raises:
        StudioRefusal: there is no such run.
        RecordError: the record is damaged.
    """
    run = await reader.run(run_id, visitor)
    steps = (await reader.steps(run_id, visitor, after=0)).steps
    begun = [each for each in steps if each.started_at is not None and each.kind not in _UNITS]
    chosen = sorted(begun, key=lambda each: each.status != "failed")[:_MOST_DETAILS]
    details = await reader.step_details(run_id, [each.id for each in chosen], visitor)
    return ExportedRun(
        version=info.version,
        exported_at=round(time.time() * 1000),
        info=info.model_copy(update={"actions": [], "has_actors": False, "has_files": False}),
        run=run,
        steps=steps,
        details=details,
        flows=ExportedFlows(
            declared=await reader.flow(run_id, visitor, "declared"), ran=await reader.flow(run_id, visitor, "ran")
        ),
    )


_UNITS = frozenset({"loop", "iteration", "phase", "attempt", "graph", "state"})
