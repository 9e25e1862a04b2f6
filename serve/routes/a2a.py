"""`/a2a/{ensemble}`: teams as agents of the A2A protocol (S-INT-70 to S-INT-79).

The protocol's own errors are answers 200, as JSON-RPC has it; keys, rights and limits are refused as on every other route.
"""

from __future__ import annotations

import importlib.util
import json
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ensemble_ray.access.keys import Right
from ensemble_ray.serve.answers import FAILURES
from ensemble_ray.serve.callers import Caller
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.rights import CallerDependency
from ensemble_ray.serve.routes.service import ServiceDependency
from ensemble_ray.serve.run_schemas import EnsembleInfo
from ensemble_ray.serve.run_service import RunService
from ensemble_ray.text.foreign_text import whole_json

a2a_router: APIRouter = APIRouter(tags=["a2a"], responses=FAILURES)
_INSTALL = "A2A needs the package a2a-sdk, which is not installed: pip install 'ensemble-ray[a2a]'"
_ANSWER: dict[str, Any] = {
    "application/json": {"schema": {"type": "object"}},
    "text/event-stream": {"schema": {"type": "string"}},
}
_CARD: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "An agent card of the protocol",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "jsonrpc": {"const": "2.0"},
                        "id": {"type": ["string", "integer", "null"]},
                        "method": {"type": "string", "examples": ["SendMessage", "SendStreamingMessage", "GetTask"]},
                        "params": {"type": "object"},
                    },
                    "required": ["jsonrpc", "method"],
                }
            }
        },
    }
}
_PARSE_ERROR = {"code": -32700, "message": "The body is no JSON object in UTF-8"}


@a2a_router.get("/.well-known/agent-card.json", responses=_CARD)
async def get_only_card(request: Request, service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """Return the card of the only team that the caller has."""
    caller.check(Right.READ)
    known = [each for each in await service.ensembles() if caller.sees(each.name)]
    if len(known) != 1:
        paths = ", ".join(f"/a2a/{each.name}/.well-known/agent-card.json" for each in known)
        text = f"There is more than one team, or none. Their cards: [{paths}]"
        raise Refusal(HTTPStatus.NOT_FOUND, "ENSEMBLE_REQUIRED", text)
    return _card(request, known[0])


@a2a_router.get("/a2a/{ensemble}/.well-known/agent-card.json", responses=_CARD)
async def get_card(
    ensemble: str, request: Request, service: ServiceDependency, caller: CallerDependency
) -> JSONResponse:
    """Return the card of a team."""
    caller.check(Right.READ)
    return _card(request, await _team(service, caller, ensemble))


@a2a_router.post(
    "/a2a/{ensemble}",
    response_class=Response,
    responses={200: {"description": "What JSON-RPC answers; of a streaming method, events", "content": _ANSWER}},
    openapi_extra=_BODY,
)
async def post_message(
    ensemble: str, request: Request, service: ServiceDependency, caller: CallerDependency
) -> Response:
    """Take a message for a team, by JSON-RPC."""
    if not caller.rights & {Right.RUN, Right.READ, Right.REVIEW}:
        caller.check(Right.RUN)
    info = await _team(service, caller, ensemble)
    _check_installed()
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # A page can send other types of bodies to any site without asking that site before.
        text = "The body must be JSON. What to do: send the header Content-Type: application/json"
        raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "NOT_JSON", text)
    try:
        body: object = json.loads(whole_json((await request.body()).decode()))
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        return JSONResponse({"jsonrpc": "2.0", "id": None, "error": _PARSE_ERROR})
    request._json = body  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  what the SDK asks for, without halves of surrogate pairs
    from ensemble_ray.serve.a2a.dispatching import dispatch

    return await dispatch(request, service, caller, info)


async def _team(service: RunService, caller: Caller, name: str) -> EnsembleInfo:
    """Return a team of the caller's.

    Raises:
        Refusal: it has none of that name.
    """
    known = [each for each in await service.ensembles() if caller.sees(each.name)]
    for each in known:
        if each.name == name:
            return each
    shown = ", ".join(each.name for each in known)
    raise Refusal(HTTPStatus.NOT_FOUND, "ENSEMBLE_NOT_FOUND", f"There is no team '{name[:200]}'. There are: [{shown}]")


def _card(request: Request, info: EnsembleInfo) -> JSONResponse:
    _check_installed()
    from ensemble_ray.serve.a2a.dispatching import card_data

    return JSONResponse(card_data(request, info))


def _check_installed() -> None:
    if importlib.util.find_spec("a2a") is None:
        raise Refusal(HTTPStatus.NOT_IMPLEMENTED, "NOT_INSTALLED", _INSTALL)
