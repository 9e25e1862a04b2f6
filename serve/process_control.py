"""ProcessControl: runs that are asked for over HTTP and driven in the process that answers, beside a page about its runs.

In: an ensemble, the template of all runs; tools and models that requests may name. Out: a web application for `/api`, and handlers of messages of
a WebSocket. The routes and the rules are those of the endpoint (`routes`, `DrivenRuns`); what is accepted is kept in memory, so that it ends
with the process. It asks nobody who they are: whatever mounts it decides who may come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ensemble_ray.definition.fields import check_models
from ensemble_ray.runtime import connect
from ensemble_ray.serve.catalog import ToolCatalog
from ensemble_ray.serve.driving.driven_runs import DrivenRuns
from ensemble_ray.serve.driving.ledger import Ledger
from ensemble_ray.serve.driving.limits import EndpointLimits
from ensemble_ray.serve.socket_control import SocketControl
from ensemble_ray.serve.team import served_team
from ensemble_ray.studio.installed import check_installed

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ensemble_ray import ChatModel, Runtime
    from ensemble_ray.serve.run_service import RunService
    from ensemble_ray.teamfile import Runnable

#: What runs of the template are called.
_TEMPLATE = "ensemble"
#: Runs at a time, and runs that are kept after their end (S-CTL-1).
_MAX_RUNNING, _KEPT_RUNS = 5, 100


class ProcessControl:
    """Runs that other programs ask this process for."""

    def __init__(
        self,
        template: Runnable | None = None,
        *,
        runtime: Runtime | str | None = None,
        tools: object = (),
        models: Mapping[str, ChatModel | str] | None = None,
        max_running: int = _MAX_RUNNING,
        kept_runs: int = _KEPT_RUNS,
    ) -> None:
        """Make it; entered, it answers. It may be left and entered again, as a dashboard is stopped and started.

        Args:
            template: What requests run; None: they are refused until `use_template` names one.
            runtime: Where runs live, as for `Ensemble.run`.
            tools: Those that may be called, and that tasks of requests may name.
            models: Those that runs can be told to ask, by name; models, or what stands for one as `llm`.
            max_running: Runs at a time; more are refused.
            kept_runs: Runs that are kept after their end.

        Raises:
            ValidationError: a tool is none, the template cannot run, or the extra `studio` is not installed.
        """
        check_installed("ProcessControl")
        # Here, so that the name can be imported without the extra.
        from ensemble_ray.serve.api import build_api
        from ensemble_ray.serve.routes.capabilities import capabilities_router
        from ensemble_ray.serve.routes.control import control_router
        from ensemble_ray.serve.routes.ensembles import ensembles_router
        from ensemble_ray.serve.routes.events import events_router
        from ensemble_ray.serve.routes.reviews import reviews_router
        from ensemble_ray.serve.routes.runs import runs_router

        self._template: Runnable | None = None
        limits = EndpointLimits(max_running=max_running, max_queued=0, kept_runs=kept_runs)
        self._runs = DrivenRuns(
            {},
            connect(runtime),
            Ledger(None),
            limits,
            tools=ToolCatalog(tools),
            models=check_models(models, "ProcessControl"),
        )
        self._sockets = SocketControl(self._runs)
        # What is served beside a page, a router a topic (S-CTL-30).
        topics = (runs_router, control_router, events_router, reviews_router, capabilities_router, ensembles_router)
        self._app = build_api(self, routers=topics, allowed_hosts=("*",))
        if template is not None:
            self.use_template(template)

    @property
    def app(self) -> FastAPI:
        """The web application, to be mounted; it checks neither `Host` nor `Origin`, which what mounts it does."""
        return self._app

    @property
    def sockets(self) -> SocketControl:
        """Handles messages of a WebSocket."""
        return self._sockets

    def use_template(self, template: Runnable) -> None:
        """Let requests run this from now on; runs that go on are not concerned.

        Raises:
            ValidationError: it cannot run.
        """
        if template is not self._template:
            self._runs.serve(_TEMPLATE, served_team(_TEMPLATE, template))
            self._template = template

    async def __aenter__(self) -> RunService:
        self._app.state.service = self._runs  # a mounted application is not entered by what mounts it
        return self._runs

    async def __aexit__(self, *_: object) -> None:
        """Answer no more until it is entered again; runs go on."""
        await self._sockets.close()
