"""Requests of the A2A protocol, carried out by the SDK's dispatcher (S-INT-70)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from a2a.server.request_handlers.response_helpers import agent_card_to_dict
from a2a.server.routes.jsonrpc_dispatcher import JsonRpcDispatcher
from fastapi.responses import Response
from sse_starlette import EventSourceResponse

from ensemble_ray.serve.a2a.cards import agent_card
from ensemble_ray.serve.a2a.handler import TeamHandler
from ensemble_ray.serve.trace_context import traceparent_of
from ensemble_ray.studio.event_answer import SEND_TIMEOUT_S, STREAM_HEADERS

if TYPE_CHECKING:
    from fastapi import Request

    from ensemble_ray.serve.callers import Caller
    from ensemble_ray.serve.run_schemas import EnsembleInfo
    from ensemble_ray.serve.run_service import RunService

#: Loggers of the SDK's dispatcher, for both versions of the protocol.
_LOGGERS = ("a2a.server.routes.jsonrpc_dispatcher", "a2a.compat.v0_3.jsonrpc_adapter")
#: How what they say of its own defects begins.
_DEFECTS = ("Unhandled", "Error during stream")


def _is_of_a_defect(record: logging.LogRecord) -> bool:
    """Keep what is said of defects; each wrong request of a client is logged with a traceback and parts of it otherwise."""
    return record.msg.startswith(_DEFECTS) if isinstance(record.msg, str) else True


for _name in _LOGGERS:
    logging.getLogger(_name).addFilter(_is_of_a_defect)


async def dispatch(request: Request, service: RunService, caller: Caller, info: EnsembleInfo) -> Response:
    """Answer a request about a team.

    Raises:
        Refusal: it is refused with a status of HTTP.
    """
    handler = TeamHandler(service, caller, info, request.receive, traceparent=traceparent_of(request))
    answer = await JsonRpcDispatcher(handler, enable_v0_3_compat=True).handle_requests(request)
    if handler.refusal is not None:
        raise handler.refusal
    if isinstance(answer, EventSourceResponse):
        answer.send_timeout = SEND_TIMEOUT_S
        answer.headers.update(STREAM_HEADERS)
    return answer


def card_data(request: Request, info: EnsembleInfo) -> dict[str, Any]:
    """Return the card of a team as JSON data."""
    public: str | None = request.app.state.public_url
    base = (public or str(request.base_url)).rstrip("/")
    return agent_card_to_dict(
        agent_card(info, f"{base}/a2a/{quote(info.name)}", asks_for_keys=request.app.state.asks_for_keys)
    )
