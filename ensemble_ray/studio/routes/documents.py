"""Graphs, comparisons and exports of runs. All of them only read."""

from __future__ import annotations

from typing import IO, Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from ensemble_ray.access.keys import Right
from ensemble_ray.process.forks import bridge, threads
from ensemble_ray.studio.bundle import in_script, single_file
from ensemble_ray.studio.exporting import write_run
from ensemble_ray.studio.flows import FlowView
from ensemble_ray.studio.routes.answers import StudioDependency, answer
from ensemble_ray.studio.spooled_answer import SpooledAnswer

router = APIRouter()
_View = Annotated[FlowView, Query(alias="as")]
_Run = Annotated[str, Query(min_length=1, max_length=256)]


@router.get("/runs/{run_id}/flow")
async def get_flow(run_id: str, studio: StudioDependency, request: Request, *, view: _View = "declared") -> Response:
    """Return the graph of a run, with places."""
    visitor = await studio.guard.admit(request, Right.READ)
    return answer(await bridge(studio.reader.flow(run_id, visitor, view)))


@router.get("/compare")
async def get_comparison(studio: StudioDependency, request: Request, *, a: _Run, b: _Run) -> Response:
    """Return two runs side by side."""
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
    """Return a run as one document: JSON, or a page that opens without a server."""
    visitor = await studio.guard.admit(request, Right.READ)
    is_page = form == "html"

    async def write(file: IO[bytes]) -> None:
        head, tail = await threads.run(single_file, f"Run {run_id}") if is_page else ("", "")
        file.write(head.encode())
        await bridge(
            write_run(
                studio.reader,
                run_id,
                visitor,
                studio.info(visitor),
                lambda piece: file.write((in_script(piece) if is_page else piece).encode()),
            )
        )
        file.write(tail.encode())

    headers = {"content-disposition": f'attachment; filename="run-{_file_name(run_id)}.{form}"'}
    media_type = "text/html; charset=utf-8" if is_page else "application/json"
    return SpooledAnswer(studio, write, media_type=media_type, headers=headers)


def _file_name(run_id: str) -> str:
    """Return a run's id as a part of a file's name."""
    return "".join(each if each.isascii() and (each.isalnum() or each in "._-") else "_" for each in run_id)[:128]
