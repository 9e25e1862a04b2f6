"""`/v1/chat/completions`: a team answers a conversation (S-SRV-100 to S-SRV-123)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus

from fastapi import APIRouter
from fastapi.responses import Response
from sse_starlette import ServerSentEvent

from ensemble_ray.process.forks import SystemClock
from ensemble_ray.serve.answers import answer
from ensemble_ray.serve.asked_run import AskedRun
from ensemble_ray.serve.openai_api.asking import AskingDependency, model_of
from ensemble_ray.serve.openai_api.bodies import ChatBody
from ensemble_ray.serve.openai_api.completions import ChatChunks, ChatCompletion
from ensemble_ray.serve.openai_api.endings import TeamAnswer, answer_of
from ensemble_ray.serve.openai_api.errors import API_ERRORS, RUN_HEADER, ApiRoute, api_error, run_error
from ensemble_ray.serve.openai_api.messages import inputs_of
from ensemble_ray.serve.openai_api.streams import AnswerStream, render, texts_of
from ensemble_ray.serve.run_schemas import EnsembleInfo
from ensemble_ray.values.messages import Reasoning

chat_router: APIRouter = APIRouter(prefix="/v1", tags=["openai"], responses=API_ERRORS, route_class=ApiRoute)
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


@chat_router.post(
    "/chat/completions",
    response_model=ChatCompletion,
    responses={200: {"description": "The answer; with `stream`, chunks of it", "content": _STREAM}},
)
async def post_chat(body: ChatBody, asking: AskingDependency) -> Response:
    """Have a team answer the user's last message."""
    body.check()
    info = await model_of(asking.service, asking.caller, body.model)
    inputs = inputs_of(body.messages, info, place="messages")
    run = await asking.begin(info, inputs, body.metadata or {})
    created = int(SystemClock().now())
    if body.stream:
        has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        chunks = ChatChunks(run_id=run.run_id, model=info.name, created=created, has_usage=has_usage)
        return AnswerStream(run, _events(run, info, chunks))
    found = answer_of(await run.end_for(asking.request.receive))
    if not isinstance(found, TeamAnswer):
        return run_error(found, run.run_id)
    completion = ChatCompletion.of(found, run_id=run.run_id, model=info.name, created=created)
    return answer(completion, HTTPStatus.OK, {RUN_HEADER: run.run_id})


async def _events(run: AskedRun, info: EnsembleInfo, chunks: ChatChunks) -> AsyncGenerator[ServerSentEvent]:
    yield render(chunks.first())
    async with aclosing(texts_of(run, info.chat.streamed_task)) as texts:
        async for each in texts:
            if isinstance(each, str):
                yield render(chunks.thought(each) if isinstance(each, Reasoning) else chunks.piece(each))
            elif isinstance(each, TeamAnswer):
                for chunk in chunks.last(each):
                    yield render(chunk)
            else:
                yield render(api_error(each).model_dump())
    yield ServerSentEvent(data="[DONE]", sep="\n")
