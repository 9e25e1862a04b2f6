"""Runs that clients of a live page start over HTTP or a WebSocket, driven in this process.

It has the endpoint's routes and rules. The application that mounts it must check access. Runs end with the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import pydantic

from ensemble_ray import ChatModel, Runtime
from ensemble_ray.definition.fields import check_models
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.runtime import connect
from ensemble_ray.serve import schemas
from ensemble_ray.serve.callers import describe_refusal
from ensemble_ray.serve.catalog import ToolCatalog, served_team
from ensemble_ray.serve.driving.driven_runs import DrivenRuns
from ensemble_ray.serve.driving.ledger import Ledger
from ensemble_ray.serve.driving.requests import EndpointLimits
from ensemble_ray.serve.run_service import RunService
from ensemble_ray.serve.schemas import Refusal
from ensemble_ray.studio import check_installed
from ensemble_ray.teamfile import Runnable

if TYPE_CHECKING:
    from fastapi import FastAPI


_log = bounded_logger(__name__)
_WAIT_S = 60.0
_TEMPLATE = "ensemble"
#: Limits of S-CTL-1.
_MAX_RUNNING, _KEPT_RUNS = 5, 100


class SocketClient(Protocol):
    async def send(self, message: Mapping[str, Any]) -> None:
        """Send a message in order. No effect after a disconnect."""
        ...

    def subscribe(self, types: frozenset[str] | None, run_id: str | None) -> None:
        """Select broadcast messages by type and run; None: all."""
        ...


class SocketControl:
    def __init__(self, service: RunService) -> None:
        self._service = service
        self._waiting: dict[SocketClient, set[asyncio.Task[None]]] = {}

    @property
    def handlers(self) -> Mapping[str, Callable[[SocketClient, Mapping[str, Any]], Awaitable[None]]]:
        return {"run_request": self._request, "run_control": self._control, "subscribe": self._subscribe}

    def drop(self, client: SocketClient) -> None:
        """Drop a client that has disconnected. Its runs continue."""
        for each in self._waiting.pop(client, ()):
            each.cancel()

    async def close(self) -> None:
        waiting = [each for tasks in self._waiting.values() for each in tasks]
        for each in waiting:
            each.cancel()
        self._waiting.clear()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _request(self, client: SocketClient, message: Mapping[str, Any]) -> None:
        answer: dict[str, Any] = {"type": "run_ack", "request_id": _text(message, "request_id")}
        try:
            asked = schemas.RunRequestMessage.model_validate(message)
            taken = await self._service.start(asked.new_run)
        except (pydantic.ValidationError, Refusal) as error:
            await client.send({**answer, **_rejection(error)})
            return
        await client.send({**answer, **taken.model_dump(mode="json")})
        task = asyncio.create_task(self._send_result(client, taken.run_id, asked.request_id))
        tasks = self._waiting.setdefault(client, set())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _send_result(self, client: SocketClient, run_id: str, request_id: str | None) -> None:
        try:
            while not (found := await self._service.wait(run_id, _WAIT_S)).status.is_final:
                pass
        except Refusal as refusal:
            _log.warning("Could not send the result of run %s: %s", run_id, refusal)
            return
        await client.send({"type": "run_result", "request_id": request_id, **found.model_dump(mode="json")})

    async def _control(self, client: SocketClient, message: Mapping[str, Any]) -> None:
        repeated = {name: _text(message, name) for name in ("request_id", "run_id", "action")}
        answer: dict[str, Any] = {"type": "run_control_ack", **repeated}
        try:
            found = await self._carry_out(schemas.RunControl.model_validate(message))
        except (pydantic.ValidationError, Refusal) as error:
            await client.send({**answer, **_rejection(error)})
            return
        await client.send({**answer, "status": found.status.value})

    async def _carry_out(self, asked: schemas.RunControl) -> schemas.RunDetail:
        match asked.action:
            case "cancel":
                return await self._service.cancel(asked.run_id)
            case "inject":
                return await self._service.inject(
                    asked.run_id, schemas.NewDirective(text=asked.text or "", ttl_s=asked.ttl_s)
                )
            case "switch_model":
                return await self._service.switch_model(
                    asked.run_id, schemas.NewModel(model=asked.model, agent=asked.agent)
                )

    async def _subscribe(self, client: SocketClient, message: Mapping[str, Any]) -> None:
        answer: dict[str, Any] = {"type": "subscribe_ack", "request_id": _text(message, "request_id")}
        try:
            asked = schemas.Subscribe.model_validate(message)
        except pydantic.ValidationError as error:
            await client.send({**answer, **_rejection(error)})
            return
        client.subscribe(asked.types, asked.run_id)
        shown = ["*"] if asked.types is None else sorted(asked.types)
        await client.send({**answer, "status": "accepted", "events": shown, "run_id": asked.run_id})


def _text(message: Mapping[str, Any], name: str) -> str | None:
    """Return the start of a field that an answer repeats, if it is a text."""
    found = message.get(name)
    return found[:256] if isinstance(found, str) else None


def _rejection(error: pydantic.ValidationError | Refusal) -> dict[str, Any]:
    failure = describe_refusal(error if isinstance(error, Refusal) else schemas.problems_of(error))
    return {"status": "rejected", "error": failure.model_dump(mode="json")}


class ProcessControl:
    """Lets other programs start runs in this process."""

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
        """Prepare the application. It answers while the object is entered, and can be entered repeatedly.

        Args:
            template: Ensemble that requests run; None: requests are refused until `use_template` sets one.
            runtime: Runtime of the runs, as for `Ensemble.run`.
            tools: Tools that clients may call and that tasks of requests may name.
            models: Models to which runs can switch, by name; each a model or a value of `llm`.
            max_running: Simultaneous runs; more are refused.
            kept_runs: Number of ended runs that are kept.

        Raises:
            ValidationError: a tool is invalid, the template cannot run, or the extra `studio` is not installed.
        """
        check_installed("ProcessControl")
        # The class can be imported without the extra.
        from ensemble_ray.serve import routes
        from ensemble_ray.serve.api import build_api

        self._template: Runnable | None = None
        limits = EndpointLimits(max_running=max_running, max_queued=0, kept_runs=kept_runs)
        known = check_models(models, "ProcessControl")
        self._runs = DrivenRuns({}, connect(runtime), Ledger(None), limits, tools=ToolCatalog(tools), models=known)
        self._sockets = SocketControl(self._runs)
        # S-CTL-30
        topics = (
            routes.runs_router,
            routes.control_router,
            routes.events_router,
            routes.reviews_router,
            routes.capabilities_router,
            routes.ensembles_router,
        )
        self._app = build_api(self, routers=topics, allowed_hosts=("*",))
        if template is not None:
            self.use_template(template)

    @property
    def app(self) -> FastAPI:
        """The application to mount. It checks neither `Host` nor `Origin`; the mounting application must."""
        return self._app

    @property
    def sockets(self) -> SocketControl:
        """Handler of WebSocket messages."""
        return self._sockets

    def use_template(self, template: Runnable) -> None:
        """Use this ensemble for new runs. Running ones are not affected.

        Raises:
            ValidationError: it cannot run.
        """
        if template is not self._template:
            self._runs.serve(_TEMPLATE, served_team(_TEMPLATE, template))
            self._template = template

    async def __aenter__(self) -> RunService:
        self._app.state.service = self._runs  # Starlette runs no lifespan of a mounted application
        return self._runs

    async def __aexit__(self, *_: object) -> None:
        """Close the clients. Runs continue."""
        await self._sockets.close()
