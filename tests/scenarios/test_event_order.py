"""Order of events of very different sizes on their way to the hub: whatever travels, they arrive as they happened."""

from __future__ import annotations

import asyncio
import pickle
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from ensemble_ray import FileChangedEvent
from ensemble_ray.actors.link.events import EventHub, HubSink
from ensemble_ray.actors.spawn import event_hub
from ensemble_ray.values.ids import new_run_id

if TYPE_CHECKING:
    from ensemble_ray import RayRuntime

#: Events of one producer; every other one is too large to travel beside its message.
EVENTS = 40


def changed(number: int) -> FileChangedEvent:
    """An event that is large where its number is odd."""
    return FileChangedEvent(
        agent_role="w",
        file_path="x" * (400_000 if number % 2 else 1),
        change_type="created",
        lines_added=number,
        lines_removed=0,
        timestamp=datetime.now(UTC),
    )


async def test_events_keep_their_order_when_some_are_large(ray_runtime: RayRuntime) -> None:
    """S-PAR-41, S-EVT-7: Ray itself starts a large call after small ones that were sent later."""
    hub: Any = event_hub(EventHub)
    run_id = new_run_id()
    sink = HubSink(hub, run_id, frozenset({FileChangedEvent.method}))
    for number in range(EVENTS):
        sink.emit(changed(number))
        for _ in range(3):  # it leaves in one of the loop's next turns, before the next event comes
            await asyncio.sleep(0)
    await sink.flush()
    page = await hub.poll.remote(run_id, 0, 0.0)
    await hub.mark_driver_gone.remote(run_id)
    arrived = [cast("FileChangedEvent", pickle.loads(body)).lines_added for body in page.events]  # noqa: S301  our own
    assert arrived == list(range(EVENTS))
