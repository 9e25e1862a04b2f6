"""Where an endpoint has studio: at `/studio`, loaded by the first request for it (S-STU-80).

A replica that is never asked for the page does not load its modules.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ensemble_ray.process.forks import threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI
    from starlette.types import ASGIApp, Receive, Scope, Send

    from ensemble_ray.serve.run_service import RunService

#: Where the page is.
_BASE = "/studio"


def is_page(path: str) -> bool:
    """Whether a path is that of a file of the page, which holds no data and needs no key."""
    return path == _BASE or (path.startswith(f"{_BASE}/") and not path.startswith(f"{_BASE}/api/"))


def add_studio(api: FastAPI, service: Callable[[], RunService]) -> None:
    """Add the page, and what it asks for, to an endpoint.

    Args:
        api: The endpoint.
        service: Gives its runs, once it has started.
    """
    api.mount(_BASE, _LazyStudio(service))


class _LazyStudio:
    """Studio, made when somebody asks."""

    def __init__(self, service: Callable[[], RunService]) -> None:
        self._service = service
        self._made: ASGIApp | None = None
        self._making = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._making:
            if self._made is None:
                self._made = await threads.run(self._make)
        await self._made(scope, receive, send)

    def _make(self) -> ASGIApp:
        from ensemble_ray.serve.studio import endpoint_studio

        return endpoint_studio(self._service)
