"""One question to an agent of the A2A protocol, from its card to its answer, by the official SDK. Package: tools.

In: a message with an id. Out: pieces of text as they come, then the answer. Rules: a message that may have arrived is not sent again unless
that is harmless; a task whose stream is lost is asked for by its id; one that is not waited for any more is cancelled there; keys go to the
hosts that the developer named, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ensemble_ray.errors import ToolConfigurationError, message_of
from ensemble_ray.process.clock import SystemClock
from ensemble_ray.tools.a2a.address import AgentAddress
from ensemble_ray.tools.a2a.answers import RemoteAnswer, RemoteTask

if TYPE_CHECKING:
    import httpx
    from a2a.client import Client
    from a2a.types import AgentCard, SendMessageRequest, StreamResponse

__all__ = ["RemoteAgentError", "ask_agent", "fetch_card"]

_INSTALL = "RemoteAgent needs the package a2a-sdk, which is not installed: pip install 'ensemble-ray[a2a]'"
#: Silence in a stream, and the longest wait for one answer, s; comments of servers come more often.
_READ_S = 120.0
#: A lost connection is made again after so long, s, so often in a row.
_AGAIN_S = (0.5, 1.0, 2.0, 4.0, 8.0)
#: A task without a stream is looked at after so long, s, and seldomer with time.
_FIRST_LOOK_S, _LAST_LOOK_S = 0.25, 5.0
#: How long a cancellation there may take, s.
_CANCEL_S = 5.0
#: Where the deadline stands among the metadata of a message; the protocol has no field for one.
_DEADLINE = "deadline"


class RemoteAgentError(Exception):
    """A remote agent gave no answer; `may_be_done`: it may have worked on what it was asked, and nobody knows how far."""

    def __init__(self, text: str, *, may_be_done: bool = False) -> None:
        super().__init__(text)
        self.may_be_done = may_be_done

    def __str__(self) -> str:
        return str(self.args[0])


async def ask_agent(
    address: AgentAddress, text: str, *, message_id: str, may_repeat: bool, timeout_s: float
) -> AsyncGenerator[str | RemoteAnswer]:
    """Yield the pieces of an answer as they come, then the answer.

    Args:
        address: The agent.
        text: What it is asked.
        message_id: Names the message; the same when it is asked again after a crash.
        may_repeat: Whether the message may be sent again when nobody knows whether it arrived.
        timeout_s: Longest time for all of it, s.

    Raises:
        RemoteAgentError: it cannot be reached, refuses, fails, asks for input, or takes too long.
        ToolConfigurationError: the SDK is not installed.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    task = RemoteTask()
    request = (text, message_id, SystemClock().now() + timeout_s)
    async with aclosing(_asked(address, request, task, may_repeat=may_repeat)) as pieces:
        while True:
            # Around each step, and not around what is yielded: the time would be up in whoever reads it.
            try:
                async with asyncio.timeout_at(deadline):
                    piece = await anext(pieces, None)
            except TimeoutError:
                late = f"Remote agent {address.url}: no answer within {timeout_s:g} s"
                raise RemoteAgentError(late, may_be_done=task.task_id is not None) from None
            if piece is None:
                break
            yield piece
    answer = task.answer()
    if answer.failure is not None:
        raise RemoteAgentError(f"Remote agent {address.url}: {answer.failure}")
    yield answer


async def _asked(
    address: AgentAddress, asked: tuple[str, str, float], task: RemoteTask, *, may_repeat: bool
) -> AsyncGenerator[str]:
    """Yield what is said until the task is settled; one that is left before is cancelled."""
    async with _connected(address) as http:
        client = await _client(address, http)
        text, message_id, deadline = asked
        try:
            request = _message(text, message_id, deadline=deadline)
            async with aclosing(_told(address, client, request, task, may_repeat=may_repeat)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if task.task_id is not None and not task.is_over:
                await _cancel(client, task.task_id)


async def fetch_card(address: AgentAddress) -> AgentCard:
    """Return what an agent says of itself.

    Raises:
        RemoteAgentError: there is no card.
        ToolConfigurationError: the SDK is not installed.
    """
    async with _connected(address) as http:
        return await _card(address, http)


@asynccontextmanager
async def _connected(address: AgentAddress) -> AsyncGenerator[httpx.AsyncClient]:
    if importlib.util.find_spec("a2a") is None:
        raise ToolConfigurationError(_INSTALL)
    import httpx

    limits = httpx.Timeout(_READ_S, connect=address.connect_timeout_s)
    async with httpx.AsyncClient(headers=dict(address.headers), timeout=limits, follow_redirects=False) as http:
        yield http


async def _card(address: AgentAddress, http: httpx.AsyncClient) -> AgentCard:
    from a2a.client import A2ACardResolver
    from a2a.client.errors import A2AClientError

    try:
        return await A2ACardResolver(http, address.url).get_agent_card()
    except A2AClientError as error:
        raise RemoteAgentError(f"Remote agent {address.url}: its card cannot be read: {_why(error)}") from error


async def _client(address: AgentAddress, http: httpx.AsyncClient) -> Client:
    """Return a client of one of the interfaces that the card names.

    Raises:
        RemoteAgentError: none of them may be asked, or is understood.
    """
    from a2a.client import ClientConfig, ClientFactory
    from a2a.utils.constants import TransportProtocol

    card = await _card(address, http)
    named = [each.url for each in card.supported_interfaces]
    allowed = [each for each in card.supported_interfaces if address.allows(each.url)]
    if named and not allowed:
        raise RemoteAgentError(
            f"Remote agent {address.url}: its card says that it is asked at [{', '.join(named)}], which is another host. "
            "If that is meant, name the host in hosts=[...]"
        )
    del card.supported_interfaces[:]
    card.supported_interfaces.extend(allowed)
    bindings = [TransportProtocol.JSONRPC.value, TransportProtocol.HTTP_JSON.value]
    config = ClientConfig(
        httpx_client=http,
        streaming=True,
        polling=not card.capabilities.streaming,  # else nobody knows the task while it goes on
        supported_protocol_bindings=bindings,
        accepted_output_modes=["text/plain", "application/json"],
    )
    try:
        return ClientFactory(config).create(card)
    except ValueError as error:
        raise RemoteAgentError(
            f"Remote agent {address.url}: its card names no interface that is understood here: [{', '.join(bindings)}]"
        ) from error


def _message(text: str, message_id: str, *, deadline: float) -> SendMessageRequest:
    from a2a.types import Message, Part, Role, SendMessageRequest

    message = Message(message_id=message_id, role=Role.ROLE_USER, parts=[Part(text=text)])
    request = SendMessageRequest(message=message)
    request.metadata.update({_DEADLINE: datetime.fromtimestamp(deadline, UTC).isoformat()})
    return request


async def _told(
    address: AgentAddress, client: Client, request: SendMessageRequest, task: RemoteTask, *, may_repeat: bool
) -> AsyncGenerator[str]:
    """Send the message and yield what is said, until the task is settled.

    Raises:
        RemoteAgentError: the agent refuses, or is lost.
    """
    from a2a.client.errors import A2AClientError
    from a2a.utils.errors import A2AError, UnsupportedOperationError

    lost = 0
    while not task.is_settled:
        try:
            async with aclosing(_coming(client, request, task)) as coming:
                async for each in coming:
                    lost = 0
                    if piece := task.take(each):
                        yield piece
        except UnsupportedOperationError:  # no streams; or it ended meanwhile
            pass
        except A2AClientError as error:
            lost = await _take_loss(address, error, task, lost, may_repeat=may_repeat)
            if task.task_id is None:
                continue
        except A2AError as error:
            raise RemoteAgentError(f"Remote agent {address.url} refuses: {_why(error)}") from error
        lost = await _look(address, client, task, lost)


async def _coming(client: Client, request: SendMessageRequest, task: RemoteTask) -> AsyncGenerator[StreamResponse]:
    """Yield what the agent tells: of the message, or of the task once that is known."""
    from a2a.types import SubscribeToTaskRequest

    if task.task_id is None:
        coming = client.send_message(request)
    else:
        coming = client.subscribe(SubscribeToTaskRequest(id=task.task_id))
    try:
        async for each in coming:
            yield each
    finally:
        close = getattr(coming, "aclose", None)
        if close is not None:
            await close()


async def _look(address: AgentAddress, client: Client, task: RemoteTask, lost: int) -> int:
    """Ask how a task stands until it is settled; return how often the agent was lost in a row.

    Raises:
        RemoteAgentError: it is lost, knows no such task, or told of none.
    """
    from a2a.client.errors import A2AClientError
    from a2a.types import GetTaskRequest
    from a2a.utils.errors import A2AError

    if task.task_id is None and not task.is_settled:
        raise RemoteAgentError(f"Remote agent {address.url}: its answer has neither a task nor a message")
    pause = _FIRST_LOOK_S
    while not task.is_settled:
        try:
            task.take_task(await client.get_task(GetTaskRequest(id=task.task_id or "")))
            lost = 0
        except A2AClientError as error:
            lost = await _take_loss(address, error, task, lost, may_repeat=True)
        except A2AError as error:
            text = f"Remote agent {address.url} says of its task '{task.task_id}': {_why(error)}"
            raise RemoteAgentError(text, may_be_done=True) from error
        if not task.is_settled:
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LAST_LOOK_S)
    return lost


async def _take_loss(address: AgentAddress, error: Exception, task: RemoteTask, lost: int, *, may_repeat: bool) -> int:
    """Wait a little where it may be asked again; return how often it was lost in a row.

    Raises:
        RemoteAgentError: it refused, was lost too often, or a message that may have arrived must not be sent again.
    """
    import httpx

    cause = error.__cause__
    text = f"Remote agent {address.url}: {_why(error)}"
    if isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code < 500:  # noqa: PLR2004  HTTP's own faults
        raise RemoteAgentError(text) from error
    never_sent = isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
    has_begun = task.task_id is not None
    if lost >= len(_AGAIN_S) or not (has_begun or never_sent or may_repeat):
        raise RemoteAgentError(text, may_be_done=has_begun or not never_sent) from error
    await asyncio.sleep(_AGAIN_S[lost])
    return lost + 1


async def _cancel(client: Client, task_id: str) -> None:
    """Have the agent stop working on a task that nobody waits for; it may be over, or not be there any more."""
    from a2a.types import CancelTaskRequest
    from a2a.utils.errors import A2AError

    async def cancel() -> None:
        with contextlib.suppress(A2AError, TimeoutError):
            async with asyncio.timeout(_CANCEL_S):
                await client.cancel_task(CancelTaskRequest(id=task_id))

    cancelling = asyncio.ensure_future(cancel())
    try:
        await asyncio.shield(cancelling)
    except asyncio.CancelledError:  # asked twice: it is short
        await cancelling
        raise


def _why(error: Exception) -> str:
    """Return what went wrong; the SDK's words for a refusal name the URL with whatever stands in it, its cause's do not."""
    import httpx

    cause = error.__cause__
    if isinstance(cause, httpx.HTTPStatusError):
        status = cause.response.status_code
        return f"HTTP {status} {cause.response.reason_phrase}{_explained(status)}"
    if isinstance(cause, httpx.ConnectTimeout):
        return "no connection in time"
    if isinstance(cause, httpx.RequestError):
        return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
    return message_of(error)


def _explained(status: int) -> str:
    match status:
        case 401 | 403:
            return ". It wants a key that it knows: give it in headers"
        case _ if 300 <= status < 400:  # noqa: PLR2004  HTTP's redirects
            return ". Redirects are not followed: give the address that is meant"
        case _:
            return ""
