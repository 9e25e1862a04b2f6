"""What changes in a run, as server-sent events.

Rules: `steps` has what changed since the last one, and comes under the position up to which it tells; who comes back with that position
misses nothing. A `token` comes between, and never again, and so does an `answer`, when a model is asked whose tokens follow. `end` is the last one, and comes when nothing more happens by itself.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Header, Request
from fastapi.responses import Response
from sse_starlette import ServerSentEvent

from ensemble_ray.access.keys import Right
from ensemble_ray.events import LlmIterationStartedEvent, TokenEvent
from ensemble_ray.process.forks import bridge
from ensemble_ray.studio.event_answer import EventAnswer
from ensemble_ray.studio.refusals import StudioRefusal
from ensemble_ray.studio.routes.answers import StudioDependency, json_text
from ensemble_ray.text.foreign_text import whole_text

if TYPE_CHECKING:
    from ensemble_ray.events import Event
    from ensemble_ray.record.following import LiveEvents
    from ensemble_ray.studio.service import Studio
    from ensemble_ray.studio.visitors import Visitor

router = APIRouter()
#: Who follows is looked at again so often, s: a key may be revoked meanwhile.
_ADMITTED_S = 10.0
#: How often a record is looked at, s.
_POLL_S = 0.3
_POSITION = re.compile("[0-9]{1,18}")


@router.get("/runs/{run_id}/live")
async def get_live(
    run_id: str,
    studio: StudioDependency,
    request: Request,
    *,
    after: int = 0,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Stream what changes in a run, from a position to its end."""
    visitor = await studio.guard.admit(request, Right.READ)
    await bridge(studio.reader.run(run_id, visitor))  # a run that there is not is refused before the stream begins
    begin = int(last_event_id) if last_event_id and _POSITION.fullmatch(last_event_id) else after
    live = None if studio.live is None else studio.live(run_id)
    return EventAnswer(_stream(studio, request, run_id, visitor=visitor, after=begin, live=live))


async def _stream(
    studio: Studio, request: Request, run_id: str, *, visitor: Visitor, after: int, live: LiveEvents | None
) -> AsyncGenerator[ServerSentEvent]:
    stamp, tokens, admitted_at = None, 0, time.monotonic()
    while True:
        if time.monotonic() - admitted_at >= _ADMITTED_S:
            try:
                visitor = await studio.guard.admit(request, Right.READ, is_counted=False)
                await bridge(studio.reader.check_visible(run_id, visitor))
            except StudioRefusal:
                return  # who comes back with that key is told why
            admitted_at = time.monotonic()
        look = await bridge(studio.reader.look(run_id, visitor, after=after, stamp=stamp))
        stamp = look.stamp
        if look.changes is not None:
            after = look.changes.cursor
            yield ServerSentEvent(data=json_text(look.changes), event="steps", id=str(after))
        if live is not None:
            events, tokens, _ = live.log.read(tokens)
            for sent in filter(None, map(_live_event, events)):
                yield sent
        if look.is_over:
            yield ServerSentEvent(data="{}", event="end", id=str(after))
            return
        if live is None or live.is_closed:
            await asyncio.sleep(_POLL_S)
        else:
            await bridge(live.log.wait_until_changed(tokens, timeout_s=_POLL_S))


def _live_event(event: Event) -> ServerSentEvent | None:
    match event:
        case LlmIterationStartedEvent():
            return ServerSentEvent(data=json.dumps({"step": event.instance}), event="answer")
        case TokenEvent():
            data: dict[str, object] = {"step": event.instance, "text": whole_text(event.token)}
            if event.is_reasoning:
                data["is_reasoning"] = True
            return ServerSentEvent(data=json.dumps(data), event="token")
        case _:
            return None
