"""SocketControl: the control API as messages of a WebSocket (S-CTL-3).

In: messages of a client: `run_request`, `run_control`, `subscribe`. Out: their answers to that client, and `run_result` when a run that it asked for
has ended. Rules: each message has one answer, also where it is refused; a client that leaves ends no run. It knows no web framework.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import pydantic

from ensemble_ray.process.context import bounded_logger
from ensemble_ray.serve.control_schemas import NewDirective, NewModel
from ensemble_ray.serve.failures import describe_refusal
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.socket_schemas import RunControl, RunRequestMessage, Subscribe, problems_of

if TYPE_CHECKING:
    from ensemble_ray.serve.run_schemas import RunDetail
    from ensemble_ray.serve.run_service import RunService
    from ensemble_ray.serve.schemas import Failure

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
