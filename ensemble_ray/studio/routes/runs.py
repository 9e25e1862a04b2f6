"""The run list, one run, its steps. All of them only read."""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus
from typing import IO, Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse, Response

from ensemble_ray.access.keys import Right
from ensemble_ray.process.forks import bridge, threads
from ensemble_ray.studio.refusals import StudioRefusal, not_found
from ensemble_ray.studio.routes.answers import StudioDependency, answer
from ensemble_ray.studio.run_list import RunSearch
from ensemble_ray.studio.schemas.actors import Actors
from ensemble_ray.studio.service import Studio
from ensemble_ray.studio.spooled_answer import SpooledAnswer
from ensemble_ray.studio.views.step_detail import cut_detail, text_of
from ensemble_ray.studio.visitors import Visitor
from ensemble_ray.text.foreign_text import whole_text

router = APIRouter()
_Short = Annotated[str, Query(max_length=1000)]
_MILLIS_DIGITS = 11
#: Longer texts are sent from a file.
_LONG_BYTES = 1_048_576


@router.get("/info")
async def get_info(studio: StudioDependency, request: Request) -> Response:
    """Return what the page can do here."""
    return answer(studio.info(await studio.guard.admit(request, Right.READ)))


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
    cursor: _Short = "",
    limit: int = 50,
) -> Response:
    """Return a page of the runs, newest first."""
    visitor = await studio.guard.admit(request, Right.READ)
    search = RunSearch(
        text=q.strip(),
        statuses=frozenset(each.strip() for each in status.split(",") if each.strip()),
        ensemble=ensemble.strip(),
        tag=tag.strip(),
        since=_instant(since),
    )
    return answer(await bridge(studio.reader.runs(search, visitor, cursor=cursor, limit=limit)))


@router.get("/runs/{run_id}")
async def get_run(run_id: str, studio: StudioDependency, request: Request) -> Response:
    """Return a run."""
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await bridge(studio.reader.run(run_id, visitor)))


@router.get("/runs/{run_id}/series")
async def get_series(run_id: str, studio: StudioDependency, request: Request) -> Response:
    """Return a run among those before and behind it."""
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await bridge(studio.reader.series(run_id, visitor)))


@router.get("/runs/{run_id}/steps")
async def get_steps(run_id: str, studio: StudioDependency, request: Request, *, after: int = 0) -> Response:
    """Return the steps of a run that changed behind a position."""
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await bridge(studio.reader.steps(run_id, visitor, after=after)))


@router.get("/runs/{run_id}/steps/{step_id:path}/text")
async def get_text(run_id: str, step_id: str, studio: StudioDependency, request: Request, *, field: _Short) -> Response:
    """Return one text of a step, whole."""
    visitor = await studio.guard.admit(request, Right.READ)
    text = text_of(await bridge(studio.reader.step(run_id, step_id, visitor)), field)
    if text is None:
        raise not_found("text", field)
    body = whole_text(text).encode()
    if len(body) <= _LONG_BYTES:
        return PlainTextResponse(body)

    async def write(file: IO[bytes]) -> None:
        await threads.run(file.write, body)

    return SpooledAnswer(studio, write, media_type="text/plain; charset=utf-8")


@router.get("/runs/{run_id}/steps/{step_id:path}")
async def get_step(run_id: str, step_id: str, studio: StudioDependency, request: Request) -> Response:
    """Return a step in all detail."""
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(cut_detail(await bridge(studio.reader.step(run_id, step_id, visitor))))


@router.get("/reviews")
async def get_reviews(studio: StudioDependency, request: Request) -> Response:
    """Return the reviews that wait for somebody."""
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await bridge(studio.reader.reviews(visitor)))


@router.get("/actors")
async def get_actors(studio: StudioDependency, request: Request) -> Response:
    """Return the processes that there are."""
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await _actors(studio, visitor, None))


@router.get("/runs/{run_id}/actors")
async def get_actors_of_run(run_id: str, studio: StudioDependency, request: Request) -> Response:
    """Return the processes that work for a run."""
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await _actors(studio, visitor, run_id))


async def _actors(studio: Studio, visitor: Visitor, run_id: str | None) -> Actors:
    if studio.processes is None:
        return Actors(note="Nothing is known of processes here")
    return await bridge(studio.processes.actors(visitor, run_id))


def _instant(text: str) -> float:
    """Return an instant that was written as ms of Unix time or as a date; 0: none was.

    Raises:
        StudioRefusal: it is neither.
    """
    if not text.strip():
        return 0.0
    try:
        if text.strip().isdecimal() and len(text.strip()) >= _MILLIS_DIGITS:
            return int(text) / 1000
        found = datetime.fromisoformat(text.strip())
    except (ValueError, OverflowError):
        raise StudioRefusal(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "INVALID_REQUEST",
            "since: neither ms of Unix time nor a date such as 2026-01-31",
        ) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
