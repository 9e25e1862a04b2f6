"""What may be done with runs. Where nothing may be done, all of these are refused."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from ensemble_ray.access.keys import Right
from ensemble_ray.process.forks import bridge
from ensemble_ray.studio.actions import StudioActions
from ensemble_ray.studio.refusals import StudioRefusal
from ensemble_ray.studio.routes.answers import StudioDependency, answer
from ensemble_ray.studio.schemas.actions import AcceptedAction, Decision, NewFork
from ensemble_ray.studio.schemas.wire import Argument
from ensemble_ray.studio.service import Studio
from ensemble_ray.studio.visitors import Visitor

router = APIRouter()
_Spec = Annotated[Argument, Query(alias="from", min_length=1, max_length=1000)]


@router.get("/runs/{run_id}/resume-preview")
async def get_resume_preview(run_id: str, studio: StudioDependency, request: Request) -> Response:
    """Return what a run would take from its record if it went on."""
    actions, _ = await _actions(studio, request, Right.READ, run_id)
    return answer(await bridge(actions.preview_resume(run_id)))


@router.get("/runs/{run_id}/fork-preview")
async def get_fork_preview(run_id: str, studio: StudioDependency, request: Request, *, spec: _Spec) -> Response:
    """Return what a fork would take from the record; the team is loaded for it."""
    actions, _ = await _actions(studio, request, Right.RUN, run_id)
    if request.headers.get("sec-fetch-site", "none") not in {"same-origin", "none"}:
        raise StudioRefusal(HTTPStatus.FORBIDDEN, "ORIGIN_NOT_ALLOWED", "Another site's page may not ask this")
    return answer(await bridge(actions.preview_fork(run_id, spec)))


@router.post("/runs/{run_id}/cancel")
async def post_cancel(run_id: str, studio: StudioDependency, request: Request) -> Response:
    """Ask for the end of a run."""
    actions, _ = await _actions(studio, request, Right.RUN, run_id)
    await bridge(actions.cancel(run_id))
    return answer(AcceptedAction(run_id=run_id), HTTPStatus.ACCEPTED)


@router.post("/runs/{run_id}/resume")
async def post_resume(run_id: str, studio: StudioDependency, request: Request) -> Response:
    """Let a run go on."""
    actions, _ = await _actions(studio, request, Right.RUN, run_id)
    return answer(AcceptedAction(run_id=await bridge(actions.resume(run_id))), HTTPStatus.ACCEPTED)


@router.post("/runs/{run_id}/fork")
async def post_fork(run_id: str, asked: NewFork, studio: StudioDependency, request: Request) -> Response:
    """Begin a fork of a run."""
    actions, _ = await _actions(studio, request, Right.RUN, run_id)
    return answer(AcceptedAction(run_id=await bridge(actions.fork(run_id, asked))), HTTPStatus.ACCEPTED)


@router.post("/reviews/{run_id}/{gate_id}")
async def post_decision(
    run_id: str, gate_id: str, decision: Decision, studio: StudioDependency, request: Request
) -> Response:
    """Decide at a gate."""
    actions, visitor = await _actions(studio, request, Right.REVIEW, run_id)
    return answer(await bridge(actions.decide(run_id, gate_id, decision, by=visitor.name)))


async def _actions(studio: Studio, request: Request, right: Right, run_id: str) -> tuple[StudioActions, Visitor]:
    """Return what carries out actions, and who asks.

    Raises:
        StudioRefusal: nothing may be done here, or by them, or with that run.
    """
    visitor = await studio.guard.admit(request, right)
    if studio.actions is None:
        reason = studio.read_only_reason or "This page only shows runs"
        raise StudioRefusal(HTTPStatus.FORBIDDEN, "READ_ONLY", reason)
    await bridge(studio.reader.check_visible(run_id, visitor))
    return studio.actions, visitor
