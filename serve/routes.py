"""Routes of the endpoint, except those of the OpenAI API and MCP."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from ensemble_ray.access.admission import Right
from ensemble_ray.events.messages import FOLLOWED_TYPES, SKIPPED_TYPE
from ensemble_ray.serve import schemas
from ensemble_ray.serve.callers import Caller, Callers
from ensemble_ray.serve.middleware import (
    FAILURES,
    CallerDependency,
    OwnRoute,
    answer,
    failure_answer,
    json_text,
    traceparent_of,
)
from ensemble_ray.serve.run_service import DEFAULT_PAGE, LARGEST_PAGE, Sample, render_samples
from ensemble_ray.serve.schemas import Refusal, RunStatus
from ensemble_ray.serve.visible_runs import (
    ServiceDependency,
    chosen_ensemble,
    revealed_run,
    visible_run,
    visible_team,
    visible_teams,
)
from ensemble_ray.studio.http_server import EventAnswer
from ensemble_ray.text.foreign_text import whole_json
from ensemble_ray.values.ids import new_run_id

#: Limit of `wait`, s. Few proxies allow more.
LONGEST_WAIT_S = 3600.0
_WAIT = re.compile(r"\s*wait\s*=\s*\"?(\d{1,9})\"?\s*(?:;.*)?", re.IGNORECASE | re.DOTALL)


def preferred_wait(prefer: str | None) -> float | None:
    """Return the seconds of a `Prefer` header, or None.

    Examples:
        >>> preferred_wait("respond-async, wait=10")
        10.0
    """
    for part in (prefer or "").split(","):
        if found := _WAIT.fullmatch(part):
            return min(float(found[1]), LONGEST_WAIT_S)
    return None


runs_router: APIRouter = APIRouter(tags=["runs"], responses=FAILURES, route_class=OwnRoute)
_LOCATION = {"Location": {"description": "Path of the run", "schema": {"type": "string"}}}


@runs_router.post(
    "/runs",
    status_code=HTTPStatus.ACCEPTED,
    response_model=schemas.AcceptedRun,
    responses={
        200: {"model": schemas.RunDetail, "description": "The run ended while the client waited", "headers": _LOCATION},
        202: {"description": "The run was accepted", "headers": _LOCATION},
    },
)
async def post_run(
    asked: schemas.NewRun,
    service: ServiceDependency,
    caller: CallerDependency,
    request: Request,
    *,
    wait: Annotated[float | None, Query(ge=0, le=LONGEST_WAIT_S)] = None,
    prefer: Annotated[str | None, Header()] = None,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> JSONResponse:
    """Start a run. With `wait`, answer with its result if it ends within this many seconds."""
    caller.check(Right.RUN)
    if asked.changes_tasks:
        caller.check(Right.ADMIN)  # a changed task can use any tool of the endpoint
    if asked.webhook is not None:
        caller.check(Right.READ)  # it receives what this right shows
    ensemble = await chosen_ensemble(service, caller, asked.ensemble)
    span = traceparent_of(request, asked.traceparent)
    named = caller.sign(asked.model_copy(update={"ensemble": ensemble, "traceparent": span}))
    taken = await service.start(named, idempotency_key=caller.own_key(idempotency_key), account=caller.account)
    headers = {"location": f"{request.scope.get('root_path', '')}/runs/{taken.run_id}"}
    preferred = preferred_wait(prefer)
    seconds = preferred if wait is None else wait
    if seconds is None:
        return answer(taken, HTTPStatus.ACCEPTED, headers)
    if wait is None:
        headers["preference-applied"] = f"wait={seconds:.0f}"
    found = await service.wait(taken.run_id, seconds)
    if not found.status.is_final:
        return answer(
            taken.model_copy(update={"status": found.status, "queue": found.queue}), HTTPStatus.ACCEPTED, headers
        )
    if found.error is not None:
        return failure_answer(found.error, headers)
    return answer(found, HTTPStatus.OK, headers)


@runs_router.get("/runs", response_model=schemas.RunPage)
async def get_runs(
    service: ServiceDependency,
    caller: CallerDependency,
    *,
    status: RunStatus | None = None,
    tag: Annotated[list[str], Query(max_length=16, description="NAME:VALUE; a run must have all of them")] = [],  # noqa: B006  FastAPI copies it
    ensemble: Annotated[list[str], Query(max_length=64)] = [],  # noqa: B006  as above
    since: schemas.Instant | None = None,
    cursor: str | None = None,
    limit: Annotated[int, Query(ge=1, le=LARGEST_PAGE)] = DEFAULT_PAGE,
) -> JSONResponse:
    """List runs, newest first."""
    caller.check(Right.READ)
    ensembles = frozenset(ensemble) if ensemble else None
    if caller.ensembles is not None:
        ensembles = caller.ensembles if ensembles is None else ensembles & caller.ensembles
    tags = [each.partition(":") for each in tag]
    if not all(name and colon for name, colon, _ in tags):
        raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", "query.tag: say NAME:VALUE")
    named = {name: value for name, _, value in tags}
    wanted = schemas.RunFilter(status=status, ensembles=ensembles, tags=named, since=since)
    return answer(await service.list(wanted, cursor=cursor, size=limit))


@runs_router.get("/runs/{run_id}", response_model=schemas.RunDetail)
async def get_run(
    run_id: str, service: ServiceDependency, caller: CallerDependency, *, reveal: bool = False
) -> JSONResponse:
    """Return a run with its result or its error; with `reveal`, with the values of its redactor."""
    caller.check(Right.READ)
    found = await visible_run(service, caller, run_id)
    return answer(await revealed_run(found, caller) if reveal else found)


@runs_router.post("/runs/{run_id}/cancel", status_code=HTTPStatus.ACCEPTED, response_model=schemas.RunDetail)
async def post_cancel(run_id: str, service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """Cancel a run. No more tasks start, and running tasks are stopped."""
    caller.check(Right.RUN)
    await visible_run(service, caller, run_id)
    return answer(await service.cancel(run_id), HTTPStatus.ACCEPTED)


@runs_router.get("/runs/{run_id}/deliveries", response_model=schemas.DeliveryList)
async def get_deliveries(run_id: str, service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """List the webhooks of a run with their attempts."""
    caller.check(Right.READ)
    await visible_run(service, caller, run_id)
    return answer(schemas.DeliveryList(deliveries=list(await service.deliveries(run_id))))


@runs_router.post(
    "/runs/{run_id}/deliveries/{delivery_id}/redeliver",
    status_code=HTTPStatus.ACCEPTED,
    response_model=schemas.WebhookDelivery,
)
async def post_redelivery(
    run_id: str, delivery_id: str, service: ServiceDependency, caller: CallerDependency
) -> JSONResponse:
    """Send a webhook again, with the same id and content."""
    caller.check(Right.RUN)
    await visible_run(service, caller, run_id)
    return answer(await service.redeliver(run_id, delivery_id), HTTPStatus.ACCEPTED)


control_router: APIRouter = APIRouter(tags=["runs"], responses=FAILURES, route_class=OwnRoute)


@control_router.post("/runs/{run_id}/inject", response_model=schemas.RunDetail)
async def post_directive(
    run_id: str, directive: schemas.NewDirective, service: ServiceDependency, caller: CallerDependency
) -> JSONResponse:
    """Send a directive to the tasks of a run that start from now on. It is recorded before the answer."""
    caller.check(Right.RUN)
    await visible_run(service, caller, run_id)
    return answer(await service.inject(run_id, directive, by=caller.name), HTTPStatus.OK)


@control_router.post("/runs/{run_id}/model", response_model=schemas.RunDetail)
async def post_model(
    run_id: str, model: schemas.NewModel, service: ServiceDependency, caller: CallerDependency
) -> JSONResponse:
    """Switch the model of the tasks of a run that start from now on. The switch is recorded before the answer."""
    caller.check(Right.RUN)
    await visible_run(service, caller, run_id)
    return answer(await service.switch_model(run_id, model, by=caller.name), HTTPStatus.OK)


reviews_router: APIRouter = APIRouter(tags=["reviews"], responses=FAILURES, route_class=OwnRoute)


@reviews_router.get("/reviews", response_model=schemas.ReviewList)
async def get_reviews(service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """List the open gates, oldest first."""
    if Right.REVIEW not in caller.rights:  # reviewers see gates without the right to read
        caller.check(Right.READ)
    return answer(schemas.ReviewList(reviews=list(await service.reviews(caller.ensembles))))


@reviews_router.post(
    "/reviews/{run_id}/{gate_id}",
    response_model=schemas.DecidedReview,
    responses={
        409: {"model": schemas.ReviewConflict, "description": "The gate was decided before; `first` is that decision"}
    },
)
async def post_decision(
    run_id: str, gate_id: str, decision: schemas.NewDecision, service: ServiceDependency, caller: CallerDependency
) -> JSONResponse:
    """Decide a gate. The run continues without another request."""
    caller.check(Right.REVIEW)
    await visible_run(service, caller, run_id)
    decided = await service.decide(run_id, gate_id, decision, by=caller.name, roles=caller.roles)
    return answer(decided, HTTPStatus.CONFLICT if isinstance(decided, schemas.ReviewConflict) else HTTPStatus.OK)


schedules_router: APIRouter = APIRouter(tags=["schedules"], responses=FAILURES, route_class=OwnRoute)


@schedules_router.get("/schedules", response_model=schemas.ScheduleList)
async def get_schedules(service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """List the schedules of the teams, with their next times."""
    caller.check(Right.READ)
    return answer(schemas.ScheduleList(schedules=list(await service.schedules(caller.ensembles))))


@schedules_router.get("/schedules/{ensemble}/{name}", response_model=schemas.ScheduleDetail)
async def get_schedule(ensemble: str, name: str, service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """Return a schedule with its newest runs and skipped times."""
    caller.check(Right.READ)
    await visible_team(service, caller, ensemble)
    return answer(await service.schedule(ensemble, name))


@schedules_router.post("/schedules/{ensemble}/{name}/pause", response_model=schemas.ScheduleInfo)
async def post_pause(ensemble: str, name: str, service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """Pause a schedule: no run starts until it is resumed."""
    caller.check(Right.RUN)
    await visible_team(service, caller, ensemble)
    return answer(await service.pause_schedule(ensemble, name, is_paused=True))


@schedules_router.post("/schedules/{ensemble}/{name}/resume", response_model=schemas.ScheduleInfo)
async def post_resume(ensemble: str, name: str, service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """Resume a paused schedule. The times of the pause are not made up for."""
    caller.check(Right.RUN)
    await visible_team(service, caller, ensemble)
    return answer(await service.pause_schedule(ensemble, name, is_paused=False))


@schedules_router.post(
    "/schedules/{ensemble}/{name}/run",
    status_code=HTTPStatus.ACCEPTED,
    response_model=schemas.AcceptedRun,
    responses={202: {"description": "The run was accepted", "headers": _LOCATION}},
)
async def post_scheduled_run(
    ensemble: str, name: str, service: ServiceDependency, caller: CallerDependency, request: Request
) -> JSONResponse:
    """Start a run of a schedule now, in addition to its times."""
    caller.check(Right.RUN)
    await visible_team(service, caller, ensemble)
    taken = await service.run_schedule(
        ensemble, name, run_id=new_run_id(), user=caller.name or None, account=caller.account
    )
    headers = {"location": f"{request.scope.get('root_path', '')}/runs/{taken.run_id}"}
    return answer(taken, HTTPStatus.ACCEPTED, headers)


events_router: APIRouter = APIRouter(tags=["events"], responses=FAILURES, route_class=OwnRoute)
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


@events_router.get(
    "/runs/{run_id}/events",
    response_class=EventSourceResponse,
    responses={
        200: {"description": "`event:` is a type, `data:` its JSON, `id:` a cursor", "content": _STREAM},
        204: {"description": "The run has no more events. The client should not reconnect"},
    },
)
async def get_events(
    run_id: str,
    service: ServiceDependency,
    caller: CallerDependency,
    *,
    after: str | None = None,
    events: Annotated[list[str], Query(max_length=64, description="Types, separated by commas; none: all")] = [],  # noqa: B006  FastAPI copies it
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Stream the events of a run, from its start or behind an event, until its end.

    With `events` it streams only these types and `ensemble_completed`. An `id:` without an event is the cursor of the others.
    """
    caller.check(Right.READ)
    types = _types_of(events)
    run = await visible_run(service, caller, run_id)
    found = service.events(run_id, last_event_id or after, types=types)
    first: schemas.RunEvent | None = None
    if run.status.is_final:
        first = await anext(found, None)
        if first is None:
            return Response(status_code=HTTPStatus.NO_CONTENT)

    async def stream() -> AsyncGenerator[ServerSentEvent]:
        async with aclosing(found):
            event = first or await anext(found, None)
            while event is not None:
                if event.type == SKIPPED_TYPE:  # browsers keep the id, and dispatch no event
                    yield ServerSentEvent(id=event.cursor)
                else:
                    yield ServerSentEvent(data=json_text(event.data), event=event.type, id=event.cursor)
                event = await anext(found, None)

    return EventAnswer(stream(), separator="\r\n")


def _types_of(given: list[str]) -> frozenset[str] | None:
    names = frozenset(name.strip() for each in given for name in each.split(","))
    if unknown := sorted(names - FOLLOWED_TYPES):
        known = ", ".join(sorted(FOLLOWED_TYPES))
        text = f"query.events: unknown types [{', '.join(unknown[:10])[:200]}]. Known: [{known}]"
        raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", text, param="events")
    return names or None


capabilities_router: APIRouter = APIRouter(tags=["capabilities"], responses=FAILURES, route_class=OwnRoute)


@capabilities_router.get("/capabilities", response_model=schemas.Capabilities)
async def get_capabilities(service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """List the callable tools, and the models and tasks of the teams."""
    caller.check(Right.READ)
    found = await service.capabilities()
    tasks = [each for each in found.tasks if caller.sees(each.ensemble)]
    models = [each for each in found.models if caller.sees(each.ensemble)]
    return answer(found.model_copy(update={"tasks": tasks, "models": models}))


@capabilities_router.post("/tools/{name}/invoke", response_model=schemas.ToolReply)
async def post_tool_call(
    name: str, body: schemas.ToolCallBody, service: ServiceDependency, caller: CallerDependency
) -> JSONResponse:
    """Call a tool outside of a run."""
    caller.check(Right.ADMIN)
    return answer(await service.invoke_tool(name, body))


ensembles_router: APIRouter = APIRouter(tags=["ensembles"], responses=FAILURES, route_class=OwnRoute)


@ensembles_router.get("/ensembles", response_model=schemas.EnsembleList)
async def get_ensembles(service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """List the teams and the inputs that their runs must set."""
    caller.check(Right.READ)
    return answer(schemas.EnsembleList(ensembles=await visible_teams(service, caller)))


quota_router: APIRouter = APIRouter(tags=["quotas"], responses=FAILURES, route_class=OwnRoute)


@quota_router.get("/quota", response_model=schemas.QuotaList)
async def get_quota(request: Request, caller: CallerDependency) -> JSONResponse:
    """Return today's usage and the quotas of the caller's key, and with the right `admin` those of the other keys."""
    if Right.RUN not in caller.rights:
        caller.check(Right.READ)
    callers: Callers | None = request.app.state.callers
    found = () if callers is None else await callers.standings(caller)
    return answer(schemas.QuotaList(keys=[schemas.KeyUsage.of(each) for each in found]))


operations_router: APIRouter = APIRouter(tags=["operations"], responses=FAILURES, route_class=OwnRoute)


@operations_router.get("/ensembles/{ensemble}/versions", response_model=schemas.TeamVersionList)
async def get_versions(ensemble: str, service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """List the loaded versions of a team's file with their shares of new runs, newest first."""
    caller.check(Right.READ)
    await visible_team(service, caller, ensemble)
    return answer(await service.versions(ensemble))


@operations_router.post("/ensembles/{ensemble}/versions", response_model=schemas.TeamVersionList)
async def post_version(
    ensemble: str,
    service: ServiceDependency,
    caller: CallerDependency,
    asked: schemas.NewVersion = schemas.NewVersion(),  # noqa: B008  frozen
) -> JSONResponse:
    """Load the operator's file of a team again. Runs that were accepted before keep their version."""
    caller.check(Right.ADMIN)
    await visible_team(service, caller, ensemble)
    return answer(await service.load_version(ensemble, asked))


@operations_router.post("/ensembles/{ensemble}/versions/{version}", response_model=schemas.TeamVersionList)
async def post_share(
    ensemble: str, version: str, asked: schemas.NewShare, service: ServiceDependency, caller: CallerDependency
) -> JSONResponse:
    """Change the share of new runs that a loaded version gets."""
    caller.check(Right.ADMIN)
    await visible_team(service, caller, ensemble)
    return answer(await service.share_version(ensemble, version, asked))


def _check_operator(caller: Caller) -> None:
    caller.check(Right.ADMIN)
    if caller.ensembles is not None:
        text = "A drain concerns all teams, and this key is for some of them. What to do: use a key with --teams '*'"
        raise Refusal(HTTPStatus.FORBIDDEN, "FORBIDDEN", text)


@operations_router.get("/drain", response_model=schemas.DrainInfo)
async def get_drain(service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """Report whether the endpoint refuses new runs, and its open runs."""
    _check_operator(caller)
    return answer(await service.drain_info())


@operations_router.post("/drain", response_model=schemas.DrainInfo)
async def post_drain(
    service: ServiceDependency,
    caller: CallerDependency,
    asked: schemas.NewDrain = schemas.NewDrain(),  # noqa: B008  frozen
) -> JSONResponse:
    """Refuse new runs from now on. Accepted runs continue."""
    _check_operator(caller)
    return answer(await service.drain(asked, by=caller.name))


@operations_router.post("/drain/end", response_model=schemas.DrainInfo)
async def post_drain_end(service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """Accept new runs again."""
    _check_operator(caller)
    return answer(await service.end_drain())


health_router: APIRouter = APIRouter(tags=["health"], responses=FAILURES, route_class=OwnRoute)
_PATIENCE_S = 5.0


@health_router.get("/healthz")
async def get_health() -> schemas.Health:
    """Report that this process answers."""
    return schemas.Health(status="ok")


@health_router.get("/readyz")
async def get_readiness(service: ServiceDependency) -> schemas.Health:
    """Report whether runs can start: the driver answers, its teams are loaded, and it does not drain."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await service.ensembles()
            found = await service.drain_info()
    except TimeoutError:
        text = "The driver of the runs does not answer"
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NOT_READY", text, retry_after_s=5) from None
    if found.state != "serving":
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "DRAINING", f"The endpoint is {found.state}", retry_after_s=10)
    return schemas.Health(status="ok")


metrics_router: APIRouter = APIRouter(tags=["health"], responses=FAILURES, route_class=OwnRoute)
_TEXT = {"text/plain": {"schema": {"type": "string"}}}


@metrics_router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "The text format of Prometheus", "content": _TEXT}},
)
async def get_metrics(service: ServiceDependency, caller: CallerDependency) -> PlainTextResponse:
    """Return counters of runs, tokens and cost of the caller's teams. A caller with all teams also gets refusals."""
    caller.check(Right.READ)

    def is_visible(sample: Sample) -> bool:
        if (
            key := sample.label("key")
        ) is not None:  # names of keys are for administrators of all teams, and for the key
            return key == caller.name or (caller.ensembles is None and Right.ADMIN in caller.rights)
        return caller.ensembles is None or (sample.team is not None and caller.sees(sample.team))

    seen = [each for each in await service.metrics() if is_visible(each)]
    return PlainTextResponse(render_samples(seen))


a2a_router: APIRouter = APIRouter(tags=["a2a"], responses=FAILURES)
_INSTALL = "A2A needs the package a2a-sdk, which is not installed: pip install 'ensemble-ray[a2a]'"
_ANSWER: dict[str, Any] = {
    "application/json": {"schema": {"type": "object"}},
    "text/event-stream": {"schema": {"type": "string"}},
}
_CARD: dict[int | str, dict[str, Any]] = {
    200: {"description": "An A2A agent card", "content": {"application/json": {"schema": {"type": "object"}}}}
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
    """Return the card of the caller's team, if it has only one."""
    caller.check(Right.READ)
    known = await visible_teams(service, caller)
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
    return _card(request, await visible_team(service, caller, ensemble))


@a2a_router.post(
    "/a2a/{ensemble}",
    response_class=Response,
    responses={200: {"description": "A JSON-RPC answer, or events if the method streams", "content": _ANSWER}},
    openapi_extra=_BODY,
)
async def post_message(
    ensemble: str, request: Request, service: ServiceDependency, caller: CallerDependency
) -> Response:
    """Receive a JSON-RPC message for a team."""
    if not caller.rights & {Right.RUN, Right.READ, Right.REVIEW}:
        caller.check(Right.RUN)
    info = await visible_team(service, caller, ensemble)
    _check_installed()
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # Browsers send other content types across origins without a preflight request.
        text = "The body must be JSON. What to do: send the header Content-Type: application/json"
        raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "NOT_JSON", text)
    try:
        body: object = json.loads(whole_json((await request.body()).decode()))
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        return JSONResponse({"jsonrpc": "2.0", "id": None, "error": _PARSE_ERROR})
    request._json = body  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    from ensemble_ray.serve.a2a import dispatch

    return await dispatch(request, service, caller, info)


def _card(request: Request, info: schemas.EnsembleInfo) -> JSONResponse:
    _check_installed()
    from ensemble_ray.serve.a2a import card_data

    return JSONResponse(card_data(request, info))


def _check_installed() -> None:
    if importlib.util.find_spec("a2a") is None:
        raise Refusal(HTTPStatus.NOT_IMPLEMENTED, "NOT_INSTALLED", _INSTALL)
