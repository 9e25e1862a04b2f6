"""ProcessControl: runs that are asked for over HTTP and driven in the process that answers, beside a page about its runs.

In: an ensemble, the template of all runs; tools and models that requests may name. Out: a web application for `/api`, and handlers of messages of
a WebSocket. The routes and the rules are those of the endpoint (`routes`, `DrivenRuns`); what is accepted is kept in memory, so that it ends
with the process. It asks nobody who they are: whatever mounts it decides who may come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import pydantic

from ensemble_ray.definition.fields import check_models
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.runtime import connect
from ensemble_ray.serve.catalog import ToolCatalog
from ensemble_ray.serve.driving.driven_runs import DrivenRuns
from ensemble_ray.serve.driving.ledger import Ledger
from ensemble_ray.serve.driving.requests import EndpointLimits
from ensemble_ray.serve.failures import describe_refusal
from ensemble_ray.serve.schemas import (
    NewDirective,
    NewModel,
    Refusal,
    RunControl,
    RunRequestMessage,
    Subscribe,
    problems_of,
)
from ensemble_ray.serve.team import served_team
from ensemble_ray.studio import check_installed

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ensemble_ray import ChatModel, Runtime
    from ensemble_ray.serve.run_service import RunService
    from ensemble_ray.serve.schemas import Failure, RunDetail
    from ensemble_ray.teamfile import Runnable


_log = bounded_logger(__name__)
#: How long the end of a run is waited for in one go, s.
_WAIT_S = 60.0


class SocketClient(Protocol):
    """One connection, as whoever holds it has it."""

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to it, behind those that were sent before; do nothing where it has gone."""
        ...

    def subscribe(self, types: frozenset[str] | None, run_id: str | None) -> None:
        """Send it, of what is sent to everybody, messages of these types about this run alone; None: of all."""
        ...


class SocketControl:
    """Answers messages of clients."""

    def __init__(self, service: RunService) -> None:
        self._service = service
        #: what waits for ends of runs, by the client that asked for them
        self._waiting: dict[SocketClient, set[asyncio.Task[None]]] = {}

    @property
    def handlers(self) -> Mapping[str, Callable[[SocketClient, Mapping[str, Any]], Awaitable[None]]]:
        """What handles a message, by its type."""
        return {"run_request": self._request, "run_control": self._control, "subscribe": self._subscribe}

    def forget(self, client: SocketClient) -> None:
        """Take notice that a client has gone; its runs go on."""
        for each in self._waiting.pop(client, ()):
            each.cancel()

    async def close(self) -> None:
        """Wait for no run any more."""
        waiting = [each for tasks in self._waiting.values() for each in tasks]
        for each in waiting:
            each.cancel()
        self._waiting.clear()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _request(self, client: SocketClient, message: Mapping[str, Any]) -> None:
        """Begin a run, and send its result when it has ended."""
        answer: dict[str, Any] = {"type": "run_ack", "request_id": _text(message, "request_id")}
        try:
            asked = RunRequestMessage.model_validate(message)
            taken = await self._service.start(asked.new_run)
        except (pydantic.ValidationError, Refusal) as error:
            await client.send({**answer, "status": "rejected", "error": _data(_failure(error))})
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
            _log.warning("The result of run %s is not sent: %s", run_id, refusal)
            return
        await client.send({"type": "run_result", "request_id": request_id, **found.model_dump(mode="json")})

    async def _control(self, client: SocketClient, message: Mapping[str, Any]) -> None:
        """Cancel a run, tell it something, or let it ask another model."""
        answer: dict[str, Any] = {
            "type": "run_control_ack",
            "request_id": _text(message, "request_id"),
            "run_id": _text(message, "run_id"),
            "action": _text(message, "action"),
        }
        try:
            found = await self._carry_out(RunControl.model_validate(message))
        except (pydantic.ValidationError, Refusal) as error:
            await client.send({**answer, "status": "rejected", "error": _data(_failure(error))})
            return
        await client.send({**answer, "status": found.status.value})

    async def _carry_out(self, asked: RunControl) -> RunDetail:
        match asked.action:
            case "cancel":
                return await self._service.cancel(asked.run_id)
            case "inject":
                return await self._service.inject(asked.run_id, NewDirective(text=asked.text or "", ttl_s=asked.ttl_s))
            case "switch_model":
                return await self._service.switch_model(asked.run_id, NewModel(model=asked.model, agent=asked.agent))

    async def _subscribe(self, client: SocketClient, message: Mapping[str, Any]) -> None:
        """Send the client what it wants of what is sent to everybody."""
        answer: dict[str, Any] = {"type": "subscribe_ack", "request_id": _text(message, "request_id")}
        try:
            asked = Subscribe.model_validate(message)
        except pydantic.ValidationError as error:
            await client.send({**answer, "status": "rejected", "error": _data(_failure(error))})
            return
        client.subscribe(asked.types, asked.run_id)
        shown = ["*"] if asked.types is None else sorted(asked.types)
        await client.send({**answer, "status": "accepted", "events": shown, "run_id": asked.run_id})


def _text(message: Mapping[str, Any], name: str) -> str | None:
    """Return a field that is repeated in an answer, where it is a text of a bearable length."""
    found = message.get(name)
    return found[:256] if isinstance(found, str) else None


def _failure(error: pydantic.ValidationError | Refusal) -> Failure:
    return describe_refusal(error if isinstance(error, Refusal) else problems_of(error))


def _data(failure: Failure) -> dict[str, Any]:
    return failure.model_dump(mode="json")


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
        from ensemble_ray.serve.routes import (
            capabilities_router,
            control_router,
            ensembles_router,
            events_router,
            reviews_router,
            runs_router,
        )

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
