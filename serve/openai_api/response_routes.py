"""`/v1/responses`: a team answers, in the newer form of the OpenAI API (S-SRV-125 to S-SRV-128)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from sse_starlette import ServerSentEvent

from ensemble_ray.access.keys import Right
from ensemble_ray.process.forks import SystemClock
from ensemble_ray.serve.answers import answer
from ensemble_ray.serve.asked_run import AskedRun
from ensemble_ray.serve.openai_api.asking import AskingDependency, model_of
from ensemble_ray.serve.openai_api.bodies import MessageBody, ResponseBody
from ensemble_ray.serve.openai_api.endings import TeamAnswer, answer_of
from ensemble_ray.serve.openai_api.errors import API_ERRORS, RUN_HEADER, ApiRoute, run_error
from ensemble_ray.serve.openai_api.messages import inputs_of
from ensemble_ray.serve.openai_api.responses import (
    ResponseEvents,
    ResponseObject,
    make_answered,
    make_begun,
    response_of,
)
from ensemble_ray.serve.openai_api.streams import AnswerStream, render, texts_of
from ensemble_ray.serve.rights import CallerDependency
from ensemble_ray.serve.routes.service import ServiceDependency
from ensemble_ray.serve.routes.visible_runs import visible_run
from ensemble_ray.serve.run_schemas import EnsembleInfo
from ensemble_ray.values.messages import Reasoning

response_router: APIRouter = APIRouter(prefix="/v1", tags=["openai"], responses=API_ERRORS, route_class=ApiRoute)
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


@response_router.post(
    "/responses",
    response_model=ResponseObject,
    responses={200: {"description": "The answer; with `stream`, events about it", "content": _STREAM}},
)
async def post_response(body: ResponseBody, asking: AskingDependency) -> Response:
    """Have a team answer."""
    body.check()
    info = await model_of(asking.service, asking.caller, body.model)
    said = [MessageBody(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    inputs = inputs_of(said, info, place="input", instructions=body.instructions)
    run = await asking.begin(info, inputs, body.metadata or {})
    response = make_begun(
        run.run_id,
        model=info.name,
        created_at=int(SystemClock().now()),
        metadata=body.metadata or {},
        instructions=body.instructions,
    )
    if body.stream:
        return AnswerStream(run, _events(run, info, ResponseEvents(response)))
    found = answer_of(await run.end_for(asking.request.receive))
    if not isinstance(found, TeamAnswer):
        return run_error(found, run.run_id)
    return answer(make_answered(response, found), HTTPStatus.OK, {RUN_HEADER: run.run_id})


@response_router.get("/responses/{response_id}", response_model=ResponseObject)
async def get_response(response_id: str, service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """Return a run as a response, however it stands and however it was begun."""
    caller.check(Right.READ)
    run = await visible_run(service, caller, response_id)
    return answer(response_of(run), HTTPStatus.OK, {RUN_HEADER: run.run_id})


async def _events(run: AskedRun, info: EnsembleInfo, events: ResponseEvents) -> AsyncGenerator[ServerSentEvent]:
    for event in events.first():
        yield render(event, str(event["type"]))
    async with aclosing(texts_of(run, info.chat.streamed_task)) as texts:
        async for each in texts:
            if isinstance(each, str):
                found = [] if isinstance(each, Reasoning) else events.piece(each)
            else:
                found = events.last(each) if isinstance(each, TeamAnswer) else events.make_failure(each)
            for event in found:
                yield render(event, str(event["type"]))
