"""The page's files. Rule: only what lies in its folder can be had, by exactly the name that it has there (S-WEB-75)."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ensemble_ray.studio.refusals import not_found

#: Where the page's files lie.
FOLDER = Path(__file__).parent.parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".webmanifest": "application/manifest+json",
}
#: No script, style or connection but our own; nothing inline.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_router(folder: Path = FOLDER) -> APIRouter:
    """Return the routes of the files in a folder, as they are named when this is called."""
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
            raise not_found("page", name)
        content = await asyncio.to_thread(path.read_bytes)
        tag = f'"{sha256(content).hexdigest()[:32]}"'
        headers = {"cache-control": "no-cache", "etag": tag, "content-security-policy": POLICY}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(content, media_type=_TYPES[path.suffix], headers=headers)

    router.add_route("/", get_file, methods=["GET", "HEAD"])
    router.add_route("/{name:path}", get_file, methods=["GET", "HEAD"])
    return router
