"""Connections to agents of the A2A protocol: the card, a client of it by the official SDK, and what its errors mean. Package: tools.

In: where an agent is. Out: a client of one of its interfaces. Rule: keys go to the hosts that the developer named, and nowhere else.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from ensemble_ray.errors import ToolConfigurationError, message_of
from ensemble_ray.errors.tls import tls_flaw
from ensemble_ray.process.context import current_traceparent
from ensemble_ray.text.unpacking import ACCEPTED_CODINGS, STEP_BYTES, UnpackingError, bound_response
from ensemble_ray.tools.a2a.address import AgentAddress
from ensemble_ray.tools.a2a.answers import is_final

if TYPE_CHECKING:
    import httpx
    from a2a.client import Client
    from a2a.types import AgentCard
    from a2a.utils.errors import A2AError

__all__ = [
    "ANSWER_S",
    "Losses",
    "NewestAnswer",
    "RemoteAgentError",
    "cause_of",
    "connect",
    "fetch_card",
    "is_beyond_limits",
    "is_refusal",
    "is_too_deep",
    "open_http_client",
    "says_nothing_of_the_work",
    "sdk_errors",
    "was_not_taken",
]

#: The longest wait for an answer that takes no work: the card, or how a task stands, s.
ANSWER_S = 120.0
#: Longest card, answer, stream and body of a failure, bytes after unpacking.
_CARD_BYTES, _ANSWER_BYTES, _STREAM_BYTES, _FAILURE_BYTES = 2**20, 16 * 2**20, 64 * 2**20, 64 * 2**10
_CARD_PATH = "/.well-known/agent-card.json"
#: A lost connection is made again after so long, s, so often in a row.
_AGAIN_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_INSTALL = "RemoteAgent needs the package a2a-sdk, which is not installed: pip install 'ensemble-ray[a2a]'"
_TRACEPARENT = "traceparent"
#: Statuses that ask for the same request a little later; after the first it may have been taken all the same.
_LATER = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


class RemoteAgentError(Exception):
    """A remote agent gave no answer; `may_be_done`: it may have worked on what it was asked, and nobody knows how far."""

    def __init__(self, text: str, *, may_be_done: bool = False) -> None:
        super().__init__(text)
        self.may_be_done = may_be_done

    def __str__(self) -> str:
        return str(self.args[0])


class Losses:
    """How often an agent was lost in a row."""

    def __init__(self, deadline: float) -> None:
        """Begin with none.

        Args:
            deadline: When the answer is given up, by the clock of the loop.
        """
        self._deadline = deadline
        self._count = 0

    def forget(self) -> None:
        """Take notice that the agent is there."""
        self._count = 0

    async def wait(self) -> bool:
        """Wait a little before the agent is asked again; return False at once where it was lost too often, or no time is left."""
        if self._count >= len(_AGAIN_S):
            return False
        pause_s = _AGAIN_S[self._count]
        if asyncio.get_running_loop().time() + pause_s >= self._deadline:
            return False
        self._count += 1
        await asyncio.sleep(pause_s)
        return True


class NewestAnswer:
    """The newest answer of an agent as it came; of a stream the events that the newest piece is part of."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._is_stream = False

    @property
    def is_final(self) -> bool:
        """Whether it ends the task, or is a message in place of one."""
        text = self._text.decode(errors="replace")
        if not self._is_stream:
            return is_final(text)
        events = re.split(r"\r?\n\r?\n", text)
        return any(is_final("\n".join(re.findall(r"^data: ?(.*?)\r?$", event, re.MULTILINE))) for event in events)

    def begin(self, *, is_stream: bool) -> None:
        """Begin another answer."""
        self._text.clear()
        self._is_stream = is_stream

    def add(self, piece: bytes) -> None:
        """Add a piece; events that ended before it were read."""
        if self._is_stream:
            recent = max(len(self._text) - STEP_BYTES - 3, 0)  # ends before it were found before
            end = max(self._text.rfind(mark, recent) for mark in (b"\n\n", b"\n\r\n"))
            del self._text[: max(end, 0)]
        self._text += piece


# Connecting.


@asynccontextmanager
async def open_http_client(
    address: AgentAddress, timeout_s: float, newest: NewestAnswer | None = None
) -> AsyncGenerator[httpx.AsyncClient]:
    """Open a client of HTTP whose requests are part of the span of the work here (S-INT-37).

    Args:
        address: Where it is used.
        timeout_s: Longest silence within an answer and before it: an agent without streams says nothing until it is done, s.
        newest: Takes the newest answer.

    Raises:
        ToolConfigurationError: the SDK is not installed.
    """
    if importlib.util.find_spec("a2a") is None:
        raise ToolConfigurationError(_INSTALL)
    import httpx

    limits = httpx.Timeout(timeout_s, connect=address.connect_timeout_s)
    span = current_traceparent()
    headers = httpx.Headers({"Accept-Encoding": ACCEPTED_CODINGS, **({_TRACEPARENT: span} if span else {})})
    headers.update(dict(address.headers))  # those of the user win
    hooks: dict[str, list[Callable[..., object]]] = {"response": [partial(_bound, newest or NewestAnswer())]}
    async with httpx.AsyncClient(headers=headers, timeout=limits, follow_redirects=False, event_hooks=hooks) as http:
        yield http


async def _bound(newest: NewestAnswer, response: httpx.Response) -> None:
    is_failure = response.status_code >= HTTPStatus.BAD_REQUEST
    is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
    max_bytes = _ANSWER_BYTES
    if response.request.url.path.endswith(_CARD_PATH):
        max_bytes = _CARD_BYTES
    elif is_stream:
        max_bytes = _STREAM_BYTES
    cut_bytes = _FAILURE_BYTES if is_failure else None
    newest.begin(is_stream=is_stream)
    bound_response(response, UnpackingError, max_bytes=max_bytes, cut_bytes=cut_bytes, on_piece=newest.add)


async def fetch_card(address: AgentAddress) -> AgentCard:
    """Return what an agent says of itself, which is asked once.

    Raises:
        RemoteAgentError: there is no card.
        ToolConfigurationError: the SDK is not installed.
    """
    from a2a.utils.errors import A2AError

    async with open_http_client(address, ANSWER_S) as http:
        try:
            return await _card(address, http)
        except A2AError as error:
            raise _no_card(address, error) from error


async def connect(address: AgentAddress, http: httpx.AsyncClient, losses: Losses) -> Client:
    """Return a client of one of the interfaces that the card names.

    Raises:
        RemoteAgentError: there is no card, or none of its interfaces may be asked, or is understood.
    """
    from a2a.client import ClientConfig, ClientFactory
    from a2a.utils.constants import TransportProtocol

    card = await _patient_card(address, http, losses)
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


async def _patient_card(address: AgentAddress, http: httpx.AsyncClient, losses: Losses) -> AgentCard:
    """Return the card, also of an agent that is being restarted: asking for it does nothing."""
    from a2a.utils.errors import A2AError

    while True:
        try:
            card = await _card(address, http)
        except A2AError as error:
            if not _is_lost(error) or not await losses.wait():
                raise _no_card(address, error) from error
        else:
            losses.forget()
            return card


async def _card(address: AgentAddress, http: httpx.AsyncClient) -> AgentCard:
    import httpx
    from a2a.client import A2ACardResolver

    limits = httpx.Timeout(ANSWER_S, connect=address.connect_timeout_s)
    with sdk_errors():
        async with asyncio.timeout(ANSWER_S):
            return await A2ACardResolver(http, address.url).get_agent_card(http_kwargs={"timeout": limits})


def _no_card(address: AgentAddress, error: A2AError) -> RemoteAgentError:
    return RemoteAgentError(f"Remote agent {address.url}: its card cannot be read: {cause_of(error)}")


# What errors mean.


@contextmanager
def sdk_errors() -> Generator[None]:
    """Have everything that the SDK raises in the block be an `A2AError`: of an answer that it cannot read it raises what comes."""
    from a2a.client.errors import A2AClientTimeoutError
    from a2a.utils.errors import InvalidAgentResponseError
    from google.protobuf.json_format import ParseError

    try:
        yield
    except TimeoutError as error:
        raise A2AClientTimeoutError("nothing came from it in time") from error
    except (ParseError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = "it is nested too deeply" if _is_depth(error) else f"{type(error).__name__}: {message_of(error)}"
        why = message_of(error) if isinstance(error, UnpackingError) else why
        raise InvalidAgentResponseError(f"its answer cannot be read: {why}") from error


def is_too_deep(error: A2AError) -> bool:
    """Return whether the answer is nested beyond what the protocol's messages can hold."""
    return _is_depth(error.__cause__)


def is_beyond_limits(error: A2AError) -> bool:
    """Return whether the same answer would be refused again: it is nested too deeply, or too long."""
    return is_too_deep(error) or isinstance(error.__cause__, UnpackingError)


def _is_depth(error: BaseException | None) -> bool:
    from google.protobuf.json_format import ParseError

    return isinstance(error, RecursionError) or (isinstance(error, ParseError) and "too deep" in str(error))


def is_refusal(error: A2AError) -> bool:
    """Return whether the agent said that it does not do what it was asked."""
    from a2a.client.errors import A2AClientError

    status = _status_of(error)
    if status is not None:
        return status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in _LATER
    return not (isinstance(error, A2AClientError) or says_nothing_of_the_work(error))


def says_nothing_of_the_work(error: A2AError) -> bool:
    """Return whether it is an answer that leaves open what was done: the agent broke, or what it said cannot be read."""
    from a2a.utils.errors import InternalError, InvalidAgentResponseError

    return isinstance(error, InternalError | InvalidAgentResponseError)


def was_not_taken(error: A2AError) -> bool:
    """Return whether the request certainly began nothing, and may be made again whatever it asks for."""
    import httpx

    if isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return True
    return _status_of(error) in {HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}


def cause_of(error: A2AError) -> str:
    """Return what went wrong; the SDK's words for a refusal name the URL with whatever stands in it, its cause's do not."""
    import httpx

    cause = error.__cause__
    if isinstance(cause, httpx.HTTPStatusError):
        status = cause.response.status_code
        return f"HTTP {status} {cause.response.reason_phrase}{_explain(status)}"
    if isinstance(cause, httpx.ConnectTimeout):
        return "no connection in time"
    if flaw := tls_flaw(cause):
        return flaw
    if isinstance(cause, httpx.RequestError):
        return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
    return message_of(error)


def _is_lost(error: A2AError) -> bool:
    """Return whether the agent was not there, or asks for the same request later."""
    import httpx

    status = _status_of(error)
    if status is not None:
        return status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _LATER
    return isinstance(error.__cause__, httpx.RequestError) and not tls_flaw(error)


def _status_of(error: A2AError) -> int | None:
    import httpx

    cause = error.__cause__
    return cause.response.status_code if isinstance(cause, httpx.HTTPStatusError) else None


def _explain(status: int) -> str:
    match status:
        case HTTPStatus.UNAUTHORIZED | HTTPStatus.FORBIDDEN:
            return ". It wants a key that it knows: give it in headers"
        case _ if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
            return ". Redirects are not followed: give the address that is meant"
        case _:
            return ""
