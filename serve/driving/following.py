"""Readers of a run's events, where the runs of an endpoint are driven.

In: a run, and the cursor of a client. Out: a reader of what its record tells, and of what its models say just now.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING

from ensemble_ray.events.messages import Cursor, WireEvent
from ensemble_ray.record.following import RunFollower, SharedEnds
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.run_schemas import RunEvent, RunStatus

if TYPE_CHECKING:
    from ensemble_ray.serve.driving.active import ActiveRun

_EXIT_REASONS = {RunStatus.FAILED: "error", RunStatus.REJECTED: "error"}


def open_follower(
    followed: SharedEnds,
    run_id: str,
    after: str | None,
    *,
    active: ActiveRun | None,
    status: Callable[[], Awaitable[RunStatus]],
) -> RunFollower:
    """Return a reader of a run's events.

    Args:
        followed: The records that are read by several.
        run_id: The run's id.
        after: What the client has had; None: nothing.
        active: The run, where it is not over.
        status: Returns how it stands.

    Raises:
        Refusal: the cursor is none.
    """
    try:
        cursor = None if after is None else Cursor.parse(after)
    except ValueError as error:
        raise Refusal(HTTPStatus.BAD_REQUEST, "INVALID_CURSOR", str(error), run_id=run_id) from None

    async def outcome() -> str | None:
        found = await status()
        return _EXIT_REASONS.get(found, found.value) if found.is_final else None

    live = None if active is None else active.live
    return RunFollower(followed, run_id, after=cursor, live=live, outcome=outcome)


def wire_event(event: WireEvent) -> RunEvent:
    """Return an event as routes give it on."""
    cursor = None if event.cursor is None else str(event.cursor)
    return RunEvent.model_validate({"type": event.type, "data": dict(event.data), "cursor": cursor})
