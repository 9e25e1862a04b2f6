"""`/runs/{run_id}/events`: what happens in a run, as server-sent events (S-SRV-30 to S-SRV-38).

The next event is asked for when the client has taken the last one, so that a slow client costs one page of events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header
from fastapi.responses import Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from ensemble_ray.access.keys import Right
from ensemble_ray.serve.answers import FAILURES, json_text
from ensemble_ray.serve.rights import CallerDependency
from ensemble_ray.serve.routes.service import ServiceDependency
from ensemble_ray.serve.routes.visible_runs import visible_run
from ensemble_ray.serve.run_schemas import RunEvent
from ensemble_ray.studio.event_answer import EventAnswer

events_router: APIRouter = APIRouter(tags=["events"], responses=FAILURES)
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


@events_router.get(
    "/runs/{run_id}/events",
    response_class=EventSourceResponse,
    responses={
        200: {"description": "`event:` is a type, `data:` its JSON, `id:` a cursor", "content": _STREAM},
        204: {"description": "The client has had everything, and need not come back"},
    },
)
async def get_events(
    run_id: str,
    service: ServiceDependency,
    caller: CallerDependency,
    *,
    after: str | None = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Stream what happens in a run, from its beginning or behind an event, to its end."""
    caller.check(Right.READ)
    run = await visible_run(service, caller, run_id)
    events = service.events(run_id, last_event_id or after)
    first: RunEvent | None = None
    if run.status.is_final:
        first = await anext(events, None)
        if first is None:
            return Response(status_code=HTTPStatus.NO_CONTENT)
    return EventAnswer(_stream(first, events), separator="\r\n")


async def _stream(first: RunEvent | None, events: AsyncGenerator[RunEvent]) -> AsyncGenerator[ServerSentEvent]:
    async with aclosing(events):
        if first is not None:
            yield _render(first)
        async for each in events:
            yield _render(each)


def _render(event: RunEvent) -> ServerSentEvent:
    return ServerSentEvent(data=json_text(event.data), event=event.type, id=event.cursor)
