"""The application: the page, and what it asks for.

It knows neither its address nor its port, so that it is mounted where somebody serves it: by itself, beside a dashboard, behind an
endpoint. Never: a document of its interface, whose pages would ask others' servers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from ensemble_ray.studio.response_headers import ResponseHeaders
from ensemble_ray.studio.routes import actions, documents, files, live, runs
from ensemble_ray.studio.routes.answers import add_failure_handlers
from ensemble_ray.studio.routes.page import POLICY, page_router

if TYPE_CHECKING:
    from ensemble_ray.studio.service import Studio


def mount_studio(app: FastAPI, studio: Studio, base: str = "") -> None:
    """Add what the page asks for to an application, at `BASE/api/studio`.

    Args:
        app: The application; routes that it has already come before these.
        studio: What the page is served from.
        base: A path such as `/studio`; empty: the application's root.
    """
    data = FastAPI(title="studio", openapi_url=None, docs_url=None, redoc_url=None)
    data.state.studio = studio
    add_failure_handlers(data)
    for each in (live, actions, documents, files, runs):
        data.include_router(each.router)
    app.mount(f"{base}/api/studio", ResponseHeaders(data, policy=POLICY))


def mount_page(app: FastAPI, base: str = "") -> None:
    """Add the page's files to an application, at `BASE/`; at its root this comes last, since it answers every path."""
    page = FastAPI(title="page", openapi_url=None, docs_url=None, redoc_url=None)
    add_failure_handlers(page)
    page.include_router(page_router())
    app.mount(base or "/", ResponseHeaders(page, policy=POLICY))


def studio_app(studio: Studio) -> FastAPI:
    """Return an application that is the page and nothing else."""
    app = FastAPI(title="studio", openapi_url=None, docs_url=None, redoc_url=None)
    mount_studio(app, studio)
    mount_page(app)
    return app
