"""An agent of another system, made with the official SDK alone, behind a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from a2a.helpers import new_task_from_user_message
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import AgentCapabilities, AgentCard, AgentInterface, AgentSkill, Message, Part, Role
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Value
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.serve.http_server import served_app


class Remote(AgentExecutor):
    """Does what a message says behind `say-`; remembers what it was asked and sent."""

    def __init__(self) -> None:
        self.asked: list[Message] = []
        self.is_asked = threading.Event()
        #: its client knows the task
        self.is_told = threading.Event()
        self.metadata: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.headers: list[dict[str, str]] = []
        #: answers of the card in place of the server's own; requests are cut so often
        self.card_url: str | None = None
        self.cuts = 0
        self.refusal: int | None = None
        #: by the method, or `card`: statuses and bodies of the next answers in place of the server's own
        self.instead: dict[str, list[int | str]] = {}
        #: streams of `instead` stay open until their client is gone
        self.keeps_open = False
        #: methods that were asked, and `card`
        self.methods: list[str] = []
        #: on the loop of the server
        self.is_looked_at = asyncio.Event()

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Carry out a message."""
        message = context.message
        assert message is not None
        self.asked.append(message)
        self.is_asked.set()
        self.metadata.append(dict(context.metadata))
        word = re.findall(r"say-(\w+)", message.parts[0].text)[-1]
        if word == "reply":
            reply = Message(message_id="r", role=Role.ROLE_AGENT, parts=[Part(text="at once")])
            await event_queue.enqueue_event(reply)
            return
        if word == "mute":
            await asyncio.Event().wait()
        await event_queue.enqueue_event(new_task_from_user_message(message))
        updater = TaskUpdater(event_queue, context.task_id or "", context.context_id or "")
        await updater.start_work()
        match word:
            case "ask":
                await updater.requires_input(updater.new_agent_message([Part(text="Which colour?")]))
            case "fail":
                await updater.failed(updater.new_agent_message([Part(text="no ink")]))
            case "hang":
                await asyncio.Event().wait()
            case "quiet":
                await asyncio.wait_for(self.is_looked_at.wait(), timeout=60)
                await updater.complete(updater.new_agent_message([Part(text="after all")]))
            case "data":
                data = Part(data=ParseDict({"fins": 2, "name": "ray"}, Value()))
                await updater.add_artifact([data], artifact_id="a")
                await updater.complete()
            case "slow":
                await updater.add_artifact([Part(text="one ")], artifact_id="a")
                await asyncio.sleep(0.3)
                await updater.add_artifact([Part(text="two")], artifact_id="a", append=True)
                await updater.complete()
            case _:
                await updater.add_artifact([Part(text="one ")], artifact_id="a")
                await updater.add_artifact([Part(text="two")], artifact_id="a", append=True)
                await updater.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Take notice of a cancellation."""
        self.cancelled.append(context.task_id or "")
        await TaskUpdater(event_queue, context.task_id or "", context.context_id or "").cancel()


class _Watched:
    """Remembers headers and methods, answers in the server's place what it is told to, and cuts answers."""

    def __init__(self, app: ASGIApp, remote: Remote) -> None:
        self._app = app
        self._remote = remote

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._remote.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
            if self._remote.refusal is not None:
                headers = [(b"location", b"http://127.0.0.2:1/elsewhere")]
                await send({"type": "http.response.start", "status": self._remote.refusal, "headers": headers})
                await send({"type": "http.response.body", "body": b""})
                return
            request = await _whole(receive)
            body = request["body"]
            method = json.loads(body)["method"] if body else "card"
            self._remote.methods.append(method)
            if method == "GetTask":
                self._remote.is_looked_at.set()
            if self._remote.instead.get(method):
                keeps_open = self._remote.keeps_open
                await _answer(send, self._remote.instead[method].pop(0), receive if keeps_open else None)
                return
            receive = _again(request, receive)
        sent = 0

        async def cutting(message: Any) -> None:
            nonlocal sent
            sent += message["type"] == "http.response.body"
            await send(message)
            if b'"task"' in message.get("body", b""):
                self._remote.is_told.set()
            if scope.get("method") == "POST" and self._remote.cuts > 0 and sent == 2:
                self._remote.cuts -= 1
                raise ConnectionResetError

        await self._app(scope, receive, cutting)


async def _whole(receive: Receive) -> dict[str, Any]:
    """A request's message with its whole body."""
    body, is_more = b"", True
    while is_more:
        message = await receive()
        body += message.get("body", b"")
        is_more = message.get("more_body", False)
    return {"type": "http.request", "body": body, "more_body": False}


def _again(request: dict[str, Any], receive: Receive) -> Receive:
    """Give a request that was read already, then what comes after it."""
    left = [request]

    async def give() -> Any:
        return left.pop() if left else await receive()

    return give


async def _answer(send: Send, answer: int | str, client: Receive | None) -> None:
    """Answer with a status alone, with JSON, or, of a text that begins with `data:` or `event:`, with a stream.

    A stream ends when its client is gone, if there is one.
    """
    kind = b"text/event-stream" if str(answer).startswith(("data:", "event:")) else b"application/json"
    status = answer if isinstance(answer, int) else 200
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
    is_open = client is not None and kind == b"text/event-stream"
    body = b"" if isinstance(answer, int) else answer.encode()
    await send({"type": "http.response.body", "body": body, "more_body": is_open})
    if client is not None and is_open:
        while (await client())["type"] != "http.disconnect":
            pass


@contextmanager
def served_remote(remote: Remote, *, streams: bool = True) -> Iterator[str]:
    """Serve it; gives its address."""
    card = AgentCard(
        name="Painter",
        description="Paints what it is told",
        version="1",
        capabilities=AgentCapabilities(streaming=streams),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        skills=[AgentSkill(id="paint", name="Paint", description="Paints", tags=["paint"])],
        supported_interfaces=[
            AgentInterface(url="http://unknown/", protocol_binding="JSONRPC", protocol_version="1.0")
        ],
    )
    handler = DefaultRequestHandler(agent_executor=remote, task_store=InMemoryTaskStore(), agent_card=card)
    app = Starlette(routes=[*create_agent_card_routes(card), *create_jsonrpc_routes(handler, rpc_url="/rpc")])
    with served_app(_Watched(app, remote)) as url:
        card.supported_interfaces[0].url = remote.card_url or f"{url}/rpc"
        yield url
