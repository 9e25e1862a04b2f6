"""The application of studio: the page and its data. It has no OpenAPI pages, since these load files from other servers."""

from __future__ import annotations

import asyncio
import json
import math
import re
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import IO, Annotated, Literal, Protocol, cast, get_args

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from msgspec import Struct
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError
from sse_starlette import ServerSentEvent
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from ensemble_ray import errors
from ensemble_ray.access.admission import Right
from ensemble_ray.events import Event, LlmIterationStartedEvent, TokenEvent
from ensemble_ray.process.concurrency import bridge, threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.following import LiveEvents
from ensemble_ray.studio import http_server, schemas
from ensemble_ray.studio.documents import FOLDER, FilesFolder, FlowView, in_script, single_file
from ensemble_ray.studio.local_actions import StudioActions
from ensemble_ray.studio.processes import RunProcesses
from ensemble_ray.studio.reading import GroupKey, RunSearch, SortKey, StudioReader
from ensemble_ray.studio.views.steps import cut_detail, text_of
from ensemble_ray.text.foreign_text import whole_data, whole_text
from ensemble_ray.values.attachments import shown_type

_MOST_DOCUMENTS = 4  # exports and files that are sent at the same time (S-STU-175)


ScheduleAction = Literal["pause", "resume", "run"]


class ScheduleBook(Protocol):
    """The schedules of an endpoint."""

    async def schedules(self, visitor: http_server.Visitor) -> schemas.ScheduleTable:
        """Return the schedules that a visitor may see."""
        ...

    async def control(
        self, ensemble: str, name: str, action: ScheduleAction, visitor: http_server.Visitor
    ) -> schemas.ControlledSchedule:
        """Pause, resume or run a schedule. Raises `StudioRefusal`."""
        ...


class Studio(Struct, frozen=True, kw_only=True):
    reader: StudioReader
    title: str
    guard: http_server.Guard = msgspec.field(default_factory=http_server.LocalGuard)
    actions: StudioActions | None = None  # None: read only
    offers: tuple[schemas.Action, ...] = ("cancel", "resume", "fork", "decide", "delete")
    read_only_reason: str | None = None
    processes: RunProcesses | None = None
    live: Callable[[str], LiveEvents | None] | None = None  # live events of a run of this process
    files: FilesFolder | None = None
    deliveries: Callable[[str], Coroutine[None, None, Sequence[schemas.DeliverySchema]]] | None = None  # by run id
    #: state of the endpoint that serves the page, with or without versions of its teams
    endpoint: Callable[[http_server.Visitor, bool], Awaitable[schemas.EndpointState]] | None = None
    schedules: ScheduleBook | None = None
    #: held by an export or a file
    documents: asyncio.Semaphore = msgspec.field(default_factory=lambda: asyncio.Semaphore(_MOST_DOCUMENTS))

    def info(self, visitor: http_server.Visitor) -> schemas.StudioInfo:
        return schemas.StudioInfo(
            version=version("ensemble-ray"),
            actions=list(self.offers) if self.actions is not None else [],
            has_actors=self.processes is not None,
            has_files=self.files is not None and visitor.sees_all,
            has_deliveries=self.deliveries is not None,
            has_teams=self.endpoint is not None,
            has_schedules=self.schedules is not None,
            title=self.title,
            read_only_reason=self.read_only_reason,
            roles=None if visitor.roles is None else sorted(visitor.roles),
            has_quotas=visitor.standing is not None,
        )


_log = bounded_logger(__name__)


def _studio_of(request: Request) -> Studio:
    studio: Studio = request.app.state.studio
    return studio


StudioDependency = Annotated[Studio, Depends(_studio_of)]


def json_text(value: BaseModel) -> str:
    """Return one line of JSON, for any text."""
    try:
        return value.model_dump_json(by_alias=True)
    except (PydanticSerializationError, UnicodeEncodeError):  # half of a surrogate pair, in an id
        return json.dumps(whole_data(value.model_dump(mode="python", by_alias=True)), ensure_ascii=False)


def answer(value: BaseModel, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(json_text(value), status_code=status, media_type="application/json")


_STATUS: tuple[tuple[type[BaseException], HTTPStatus], ...] = (
    (errors.ReviewDecidedError, HTTPStatus.CONFLICT),
    (errors.ReviewRoleError, HTTPStatus.FORBIDDEN),
    (errors.RunExistsError, HTTPStatus.CONFLICT),
    (errors.IllegalStateError, HTTPStatus.CONFLICT),
    (errors.RecordError, HTTPStatus.INTERNAL_SERVER_ERROR),
    (errors.ValidationError, HTTPStatus.BAD_REQUEST),
    (errors.EnsembleError, HTTPStatus.BAD_GATEWAY),
)
_WORD = re.compile(r"(?<!^)(?<![A-Z])(?=[A-Z])")  # where the code of an error class has a `_`


def add_failure_handlers(app: FastAPI) -> None:
    """Answer every failure in one form."""
    for kind in (
        http_server.StudioRefusal,
        errors.EnsembleError,
        errors.IllegalStateError,
        RequestValidationError,
        HTTPException,
        Exception,
    ):
        app.add_exception_handler(kind, _answer_failure)


def _answer_failure(request: Request, error: Exception) -> JSONResponse:
    name, path = "InvalidRequest", request.url.path[:200]
    match error:
        case http_server.StudioRefusal(status=status, code=code, message=message):
            pass
        case errors.EnsembleError() | errors.IllegalStateError():
            status = next(status for kind, status in _STATUS if isinstance(error, kind))
            name, message = type(error).__name__, errors.message_of(error)
            code = _WORD.sub("_", name).upper()
        case RequestValidationError():
            status, code = HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST"
            found = error.errors()[:5]
            message = "; ".join(f"{'.'.join(map(str, each['loc']))[:100]}: {each['msg']}" for each in found)
        case HTTPException():
            status = HTTPStatus(error.status_code)
            code, message = status.name, f"{request.method} {path}: {status.phrase}"
        case _:
            _log.error("%s of studio failed", path, exc_info=error)
            status, code, name = HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL_ERROR", "InternalError"
            message = f"{type(error).__name__} in studio. The log of its process says more"
    failure = schemas.FailureSchema(error=name, code=code, message=message)
    return JSONResponse(failure.model_dump(mode="json"), status_code=status)


router = APIRouter()
_ADMITTED_S = 10.0  # interval of the checks of a key, which may be revoked
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
    visitor = await studio.guard.admit(request, Right.READ)
    await bridge(studio.reader.run(run_id, visitor))  # refuses an unknown run before the stream begins
    begin = int(last_event_id) if last_event_id and _POSITION.fullmatch(last_event_id) else after
    live = None if studio.live is None else studio.live(run_id)
    return http_server.EventAnswer(_stream(studio, request, run_id, visitor=visitor, after=begin, live=live))


async def _stream(
    studio: Studio, request: Request, run_id: str, *, visitor: http_server.Visitor, after: int, live: LiveEvents | None
) -> AsyncGenerator[ServerSentEvent]:
    stamp, tokens, admitted_at = None, 0, time.monotonic()
    while True:
        if time.monotonic() - admitted_at >= _ADMITTED_S:
            try:
                visitor = await studio.guard.admit(request, Right.READ, is_counted=False)
                await bridge(studio.reader.check_visible(run_id, visitor))
            except http_server.StudioRefusal:
                return  # the next request with that key gets the reason
            admitted_at = time.monotonic()
        try:
            look = await bridge(studio.reader.look(run_id, visitor, after=after, stamp=stamp))
        except http_server.StudioRefusal:
            return  # the run was deleted
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


@router.get("/runs/{run_id}/deliveries")
async def get_deliveries(run_id: str, studio: StudioDependency, request: Request) -> Response:
    visitor = await studio.guard.admit(request, Right.READ)
    await bridge(studio.reader.check_visible(run_id, visitor))
    found = [] if studio.deliveries is None else await bridge(studio.deliveries(run_id))
    return answer(schemas.DeliveryListSchema(deliveries=[*found]))


_Spec = Annotated[schemas.Argument, Query(alias="from", min_length=1, max_length=1000)]


@router.get("/runs/{run_id}/resume-preview")
async def get_resume_preview(run_id: str, studio: StudioDependency, request: Request) -> Response:
    actions, _ = await _actions(studio, request, Right.READ, run_id)
    return answer(await bridge(actions.preview_resume(run_id)))


@router.get("/runs/{run_id}/fork-preview")
async def get_fork_preview(run_id: str, studio: StudioDependency, request: Request, *, spec: _Spec) -> Response:
    """This loads the team."""
    actions, _ = await _actions(studio, request, Right.RUN, run_id)
    if request.headers.get("sec-fetch-site", "none") not in {"same-origin", "none"}:
        raise http_server.StudioRefusal(
            HTTPStatus.FORBIDDEN, "ORIGIN_NOT_ALLOWED", "Another site's page may not ask this"
        )
    return answer(await bridge(actions.preview_fork(run_id, spec)))


@router.post("/runs/{run_id}/cancel")
async def post_cancel(run_id: str, studio: StudioDependency, request: Request) -> Response:
    actions, _ = await _actions(studio, request, Right.RUN, run_id)
    await bridge(actions.cancel(run_id))
    return answer(schemas.AcceptedAction(run_id=run_id), HTTPStatus.ACCEPTED)


@router.delete("/runs/{run_id}")
async def delete_run(run_id: str, studio: StudioDependency, request: Request) -> Response:
    actions, _ = await _actions(studio, request, Right.RUN, run_id)
    try:
        await bridge(actions.delete(run_id))
    finally:
        studio.reader.evict(run_id)
    return answer(schemas.AcceptedAction(run_id=run_id))


@router.post("/runs/{run_id}/resume")
async def post_resume(run_id: str, studio: StudioDependency, request: Request) -> Response:
    actions, _ = await _actions(studio, request, Right.RUN, run_id)
    return answer(schemas.AcceptedAction(run_id=await bridge(actions.resume(run_id))), HTTPStatus.ACCEPTED)


@router.post("/runs/{run_id}/fork")
async def post_fork(run_id: str, asked: schemas.NewFork, studio: StudioDependency, request: Request) -> Response:
    actions, _ = await _actions(studio, request, Right.RUN, run_id)
    return answer(schemas.AcceptedAction(run_id=await bridge(actions.fork(run_id, asked))), HTTPStatus.ACCEPTED)


@router.post("/reviews/{run_id}/{gate_id}")
async def post_decision(
    run_id: str, gate_id: str, decision: schemas.Decision, studio: StudioDependency, request: Request
) -> Response:
    actions, visitor = await _actions(studio, request, Right.REVIEW, run_id)
    roles = visitor.roles
    if roles is None and decision.role is not None:
        roles = frozenset((decision.role,))  # its reader has confirmed the role, and no key says more
    return answer(await bridge(actions.decide(run_id, gate_id, decision, by=visitor.name, roles=roles)))


async def _actions(
    studio: Studio, request: Request, right: Right, run_id: str
) -> tuple[StudioActions, http_server.Visitor]:
    visitor = await studio.guard.admit(request, right)
    if studio.actions is None:
        reason = studio.read_only_reason or "This page only shows runs"
        raise http_server.StudioRefusal(HTTPStatus.FORBIDDEN, "READ_ONLY", reason)
    await bridge(studio.reader.check_visible(run_id, visitor))
    return studio.actions, visitor


_PIECE_BYTES = 65_536
_STALLED_S = 60.0  # a client that reads no piece for so long is disconnected
_LEAST_BYTES_PER_S = 65_536  # lowest average rate after that time


class SpooledAnswer(Response):
    """Writes the body to an unnamed file and sends it in pieces: a slow client holds one piece in memory.

    `Studio.documents` limits the concurrent answers.
    """

    def __init__(
        self,
        studio: Studio,
        write: Callable[[IO[bytes]], Awaitable[object]],
        *,
        media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._slots = studio.documents
        self._write = write
        self.status_code = HTTPStatus.OK
        self.media_type = media_type
        self.background = None
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._slots.locked():
            text = "Too many exports and files are being sent. What to do: try again when one of them has ended"
            raise http_server.StudioRefusal(HTTPStatus.TOO_MANY_REQUESTS, "TOO_MANY_EXPORTS", text)
        async with self._slots:
            with tempfile.TemporaryFile(prefix="ensemble-ray-") as file:
                await self._write(file)
                del self._write  # frees the texts that it holds
                self.headers["content-length"] = str(file.tell())
                file.seek(0)
                try:
                    await self._send(file, send)
                except TimeoutError:
                    await http_server.disconnect(scope, receive)

    async def _send(self, file: IO[bytes], send: Send) -> None:
        loop = asyncio.get_running_loop()
        latest_at = loop.time() + _STALLED_S
        async with asyncio.timeout_at(latest_at):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        is_more = True
        while is_more:
            piece = await threads.run(file.read, _PIECE_BYTES)
            is_more = bool(piece)
            async with asyncio.timeout_at(min(latest_at, loop.time() + _STALLED_S)):
                await send({"type": "http.response.body", "body": piece, "more_body": is_more})
            latest_at += len(piece) / _LEAST_BYTES_PER_S


_MOST_DETAILS = 2000  # steps with details in an export; failed steps come first


class ExportedFlows(schemas.StudioSchema):
    declared: schemas.FlowSchema | None = None
    ran: schemas.FlowSchema | None = None


class ExportedRun(schemas.StudioSchema):
    """An export without its last member `details`: full details by step."""

    version: str
    exported_at: schemas.Millis
    info: schemas.StudioInfo
    run: schemas.RunDetailSchema
    steps: list[schemas.StepSchema]
    flows: ExportedFlows = ExportedFlows()
    actors: schemas.Actors | None = None


async def write_run(
    reader: StudioReader,
    run_id: str,
    visitor: http_server.Visitor,
    info: schemas.StudioInfo,
    write: Callable[[str], object],
) -> None:
    run = await reader.run(run_id, visitor)
    steps = (await reader.steps(run_id, visitor, after=0)).steps
    begun = [each for each in steps if each.started_at is not None and not each.is_unit]
    chosen = sorted(begun, key=lambda each: each.status != "failed")[:_MOST_DETAILS]
    exported = ExportedRun(
        version=info.version,
        exported_at=round(time.time() * 1000),
        info=info.model_copy(
            update={
                "actions": [],
                "has_actors": False,
                "has_files": False,
                "has_deliveries": False,
                "has_teams": False,
                "has_schedules": False,
            }
        ),
        run=run,
        steps=steps,
        flows=ExportedFlows(
            declared=await reader.flow(run_id, visitor, "declared"), ran=await reader.flow(run_id, visitor, "ran")
        ),
    )
    await threads.run(write, f'{json_text(exported)[:-1]},"details":{{')
    comma = ""
    async for step_id, detail in reader.step_details(run_id, [each.id for each in chosen], visitor):
        await threads.run(write, f"{comma}{json.dumps(whole_text(step_id))}:{json_text(detail)}")
        comma = ","
    await threads.run(write, "}}")


_View = Annotated[FlowView, Query(alias="as")]
_Run = Annotated[str, Query(min_length=1, max_length=256)]


@router.get("/runs/{run_id}/flow")
async def get_flow(run_id: str, studio: StudioDependency, request: Request, *, view: _View = "declared") -> Response:
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await bridge(studio.reader.flow(run_id, visitor, view)))


@router.get("/compare")
async def get_comparison(studio: StudioDependency, request: Request, *, a: _Run, b: _Run) -> Response:
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await bridge(studio.reader.compare(a, b, visitor)))


@router.get("/runs/{run_id}/export")
async def get_export(
    run_id: str,
    studio: StudioDependency,
    request: Request,
    *,
    form: Annotated[Literal["html", "json"], Query(alias="format")] = "html",
) -> Response:
    """JSON, or a page that opens without a server."""
    visitor = await studio.guard.admit(request, Right.READ)
    is_page = form == "html"

    async def write(file: IO[bytes]) -> None:
        head, tail = await threads.run(single_file, f"Run {run_id}") if is_page else ("", "")
        file.write(head.encode())

        def write_piece(piece: str) -> None:
            file.write((in_script(piece) if is_page else piece).encode())

        await bridge(write_run(studio.reader, run_id, visitor, studio.info(visitor), write_piece))
        file.write(tail.encode())

    name = re.sub("[^A-Za-z0-9._-]", "_", run_id)[:128]
    headers = {"content-disposition": f'attachment; filename="run-{name}.{form}"'}
    media_type = "text/html; charset=utf-8" if is_page else "application/json"
    return SpooledAnswer(studio, write, media_type=media_type, headers=headers)


@router.get("/files")
async def get_files(studio: StudioDependency, request: Request) -> Response:
    return answer(await threads.run((await _folder(studio, request)).files))


@router.get("/files/{name}")
async def get_file(name: str, studio: StudioDependency, request: Request) -> Response:
    folder = await _folder(studio, request)

    async def write(file: IO[bytes]) -> None:
        await threads.run(file.write, await threads.run(folder.content, name))

    return SpooledAnswer(studio, write, media_type="application/json")


async def _folder(studio: Studio, request: Request) -> FilesFolder:
    """A file does not name its team, so the visitor needs access to all runs."""
    visitor = await studio.guard.admit(request, Right.READ)
    if studio.files is None or not visitor.sees_all:
        raise http_server.not_found("folder", "files")
    return studio.files


_Short = Annotated[str, Query(max_length=1000)]
_Digest = Annotated[str, PathParameter(pattern="^[0-9a-f]{64}$")]
_Sort = Annotated[str, Query(pattern=f"^-?({'|'.join(get_args(SortKey))})$")]  # descending with `-`
_MILLIS_DIGITS = 11
_DATE_CHARACTERS, _DAY_S = 10, 86_400
_LONG_BYTES = 1_048_576


@router.get("/quota")
async def get_quota(studio: StudioDependency, request: Request) -> Response:
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(schemas.QuotaSchema.of(visitor.standing))


@router.get("/info")
async def get_info(studio: StudioDependency, request: Request) -> Response:
    return answer(studio.info(await studio.guard.admit(request, Right.READ)))


@router.get("/endpoint")
async def get_endpoint(studio: StudioDependency, request: Request, *, versions: bool = False) -> Response:
    visitor = await studio.guard.admit(request, Right.READ)
    if studio.endpoint is None:
        raise http_server.not_found("endpoint", studio.title)
    return answer(await studio.endpoint(visitor, versions))


@router.get("/runs")
async def get_runs(
    studio: StudioDependency,
    request: Request,
    *,
    q: _Short = "",
    status: _Short = "",
    ensemble: _Short = "",
    tag: _Short = "",
    since: _Short = "",
    until: _Short = "",
    sort: _Sort = "-started",
    group: GroupKey | None = None,
    within: _Short | None = None,
    cursor: _Short = "",
    limit: int = 50,
) -> Response:
    visitor = await studio.guard.admit(request, Right.READ)
    search = RunSearch(
        text=q.strip(),
        statuses=frozenset(each.strip() for each in status.split(",") if each.strip()),
        ensemble=ensemble.strip(),
        tag=tag.strip(),
        since=_instant("since", since, 0.0),
        until=_instant("until", until, math.inf, is_end=True),
        sort=cast("SortKey", sort.removeprefix("-")),
        is_descending=sort.startswith("-"),
        group=group,
        within=within,
    )
    return answer(await bridge(studio.reader.runs(search, visitor, cursor=cursor, limit=limit)))


@router.get("/trends")
async def get_trends(
    studio: StudioDependency,
    request: Request,
    *,
    days: Annotated[int, Query(ge=1, le=366)] = 30,
    offset: Annotated[int, Query(ge=-1440, le=1440)] = 0,
    ensemble: _Short = "",
) -> Response:
    """`offset`: minutes of the reader's clock east of UTC."""
    visitor = await studio.guard.admit(request, Right.READ)
    reader = studio.reader
    return answer(await bridge(reader.trends(visitor, days=days, offset_min=offset, ensemble=ensemble.strip())))


@router.get("/evaluations")
async def get_evaluations(studio: StudioDependency, request: Request) -> Response:
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await bridge(studio.reader.evaluations(visitor)))


@router.get("/evaluations/{evaluation}")
async def get_evaluation(
    evaluation: str, studio: StudioDependency, request: Request, *, compare: _Short = ""
) -> Response:
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await bridge(studio.reader.evaluation(evaluation, visitor, compare=compare.strip())))


@router.get("/runs/{run_id}")
async def get_run(run_id: str, studio: StudioDependency, request: Request) -> Response:
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await bridge(studio.reader.run(run_id, visitor)))


@router.post("/runs/{run_id}/reveal")
async def post_reveal(run_id: str, studio: StudioDependency, request: Request) -> Response:
    """Send the values of a run's placeholders. It changes nothing, but the log names the reader."""
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await bridge(studio.reader.reveal(run_id, visitor)))


@router.get("/runs/{run_id}/series")
async def get_series(run_id: str, studio: StudioDependency, request: Request) -> Response:
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await bridge(studio.reader.series(run_id, visitor)))


@router.get("/runs/{run_id}/steps")
async def get_steps(run_id: str, studio: StudioDependency, request: Request, *, after: int = 0) -> Response:
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await bridge(studio.reader.steps(run_id, visitor, after=after)))


@router.get("/runs/{run_id}/steps/{step_id:path}/text")
async def get_text(run_id: str, step_id: str, studio: StudioDependency, request: Request, *, field: _Short) -> Response:
    visitor = await studio.guard.admit(request, Right.READ)
    text = text_of(await bridge(studio.reader.step(run_id, step_id, visitor)), field)
    if text is None:
        raise http_server.not_found("text", field)
    return _long_answer(studio, whole_text(text).encode(), media_type="text/plain; charset=utf-8")


def _long_answer(studio: Studio, body: bytes, *, media_type: str, headers: Mapping[str, str] | None = None) -> Response:
    if len(body) <= _LONG_BYTES:
        return Response(body, media_type=media_type, headers=headers)

    async def write(file: IO[bytes]) -> None:
        await threads.run(file.write, body)

    return SpooledAnswer(studio, write, media_type=media_type, headers=headers)


@router.get("/runs/{run_id}/attachments/{digest}")
async def get_attachment(run_id: str, digest: _Digest, studio: StudioDependency, request: Request) -> Response:
    """The type is that of the content. A content of another type than pictures and audio is a download."""
    visitor = await studio.guard.admit(request, Right.READ)
    body = await bridge(studio.reader.attachment(run_id, digest, visitor))
    media_type, headers = shown_type(body), {"content-security-policy": "default-src 'none'; sandbox"}
    if media_type is None:
        headers["content-disposition"] = "attachment"
    return _long_answer(studio, body, media_type=media_type or "application/octet-stream", headers=headers)


@router.get("/runs/{run_id}/steps/{step_id:path}")
async def get_step(run_id: str, step_id: str, studio: StudioDependency, request: Request) -> Response:
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(cut_detail(await bridge(studio.reader.step(run_id, step_id, visitor))))


@router.get("/reviews")
async def get_reviews(studio: StudioDependency, request: Request) -> Response:
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await bridge(studio.reader.reviews(visitor)))


@router.get("/actors")
async def get_actors(studio: StudioDependency, request: Request) -> Response:
    return await _get_processes(studio, request, None)


@router.get("/runs/{run_id}/actors")
async def get_actors_of_run(run_id: str, studio: StudioDependency, request: Request) -> Response:
    return await _get_processes(studio, request, run_id)


async def _get_processes(studio: Studio, request: Request, run_id: str | None) -> Response:
    visitor = await studio.guard.admit(request, Right.READ)
    if studio.processes is None:
        return answer(schemas.Actors(note="This page shows no processes"))
    return answer(await bridge(studio.processes.actors(visitor, run_id)))


@router.get("/schedules")
async def get_schedules(studio: StudioDependency, request: Request) -> Response:
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await _book(studio).schedules(visitor))


@router.post("/schedules/{ensemble}/{name}/{action}")
async def post_schedule(
    ensemble: str, name: str, action: ScheduleAction, studio: StudioDependency, request: Request
) -> Response:
    visitor = await studio.guard.admit(request, Right.RUN)
    return answer(await _book(studio).control(ensemble, name, action, visitor), HTTPStatus.ACCEPTED)


def _book(studio: Studio) -> ScheduleBook:
    if studio.schedules is None:
        raise http_server.not_found("page", "schedules")
    return studio.schedules


def _instant(name: str, text: str, default: float, *, is_end: bool = False) -> float:
    """Parse ms of Unix time, or a date in UTC: its begin, or its end. An empty text is the default."""
    text = text.strip()
    if not text:
        return default
    try:
        if text.isdecimal() and len(text) >= _MILLIS_DIGITS:
            return int(text) / 1000
        found = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        message = f"{name}: neither ms of Unix time nor a date such as 2026-01-31"
        raise http_server.StudioRefusal(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", message) from None
    instant = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    return instant + _DAY_S if is_end and len(text) <= _DATE_CHARACTERS else instant


_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".webmanifest": "application/manifest+json",
}
#: Scripts, styles and connections of this origin, and no inline code. Pictures and audio of runs need a key, so the page loads
#: them as data.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_router(folder: Path = FOLDER) -> APIRouter:
    """Return routes for the current files of a folder."""
    files = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.suffix in _TYPES
    }
    router = APIRouter()

    async def get_file(request: Request) -> Response:
        name = request.path_params.get("name", "") or "index.html"
        path = files.get(name)
        if path is None:
            raise http_server.not_found("page", name)
        content = await asyncio.to_thread(path.read_bytes)
        tag = f'"{sha256(content).hexdigest()[:32]}"'
        headers = {"cache-control": "no-cache", "etag": tag, "content-security-policy": POLICY}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(content, media_type=_TYPES[path.suffix], headers=headers)

    router.add_route("/", get_file, methods=["GET", "HEAD"])
    router.add_route("/{name:path}", get_file, methods=["GET", "HEAD"])
    return router


def mount_studio(app: FastAPI, studio: Studio, base: str = "") -> None:
    """Add the data of the page, at `BASE/api/studio`."""
    data = FastAPI(title="studio", openapi_url=None, docs_url=None, redoc_url=None)
    data.state.studio = studio
    add_failure_handlers(data)
    data.include_router(router)
    app.mount(f"{base}/api/studio", http_server.ResponseHeaders(data, policy=POLICY))


def mount_page(app: FastAPI, base: str = "") -> None:
    """Add the files of the page, at `BASE/`. Mount them last at the root: they answer every path."""
    page = FastAPI(title="page", openapi_url=None, docs_url=None, redoc_url=None)
    add_failure_handlers(page)
    page.include_router(page_router())
    app.mount(base or "/", http_server.ResponseHeaders(page, policy=POLICY))


def studio_app(studio: Studio) -> FastAPI:
    app = FastAPI(title="studio", openapi_url=None, docs_url=None, redoc_url=None)
    mount_studio(app, studio)
    mount_page(app)
    return app
