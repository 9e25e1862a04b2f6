"""Graphs and traces of a folder (S-VIZ-70). All of them only read."""

from __future__ import annotations

from typing import IO

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ensemble_ray.access.keys import Right
from ensemble_ray.process.forks import bridge, threads
from ensemble_ray.studio.files import FilesFolder
from ensemble_ray.studio.refusals import not_found
from ensemble_ray.studio.routes.answers import StudioDependency, answer
from ensemble_ray.studio.service import Studio
from ensemble_ray.studio.spooled_answer import SpooledAnswer

router = APIRouter()


@router.get("/files")
async def get_files(studio: StudioDependency, request: Request) -> Response:
    """Return the files of the folder."""
    return answer(await bridge((await _folder(studio, request)).files()))


@router.get("/files/{name}")
async def get_file(name: str, studio: StudioDependency, request: Request) -> Response:
    """Return one of them whole."""
    folder = await _folder(studio, request)

    async def write(file: IO[bytes]) -> None:
        await threads.run(file.write, await bridge(folder.content(name)))

    return SpooledAnswer(studio, write, media_type="application/json")


async def _folder(studio: Studio, request: Request) -> FilesFolder:
    """Return the folder, for those who may see all runs: a file does not say whose it is.

    Raises:
        StudioRefusal: there is none, or none for who asks.
    """
    visitor = await studio.guard.admit(request, Right.READ)
    if studio.files is None or not visitor.sees_all:
        raise not_found("folder", "files")
    return studio.files
