"""Requests to an endpoint over HTTP. Package: llm; a body's bytes go in, an answer's bytes come out.

One session per event loop, shared by all models of the process, made on first use and closed with its loop. No limit
on connections: how many calls run at once is decided by the declared concurrency, not by a pool. A connection is used
again once its answer was read to the end. Nothing here knows what the bytes mean, and no key is ever logged. Must never
happen: more of an answer in memory than its limits allow, a prompt or a key at another origin than the endpoint's.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ensemble_ray.errors.tls import tls_flaw
from ensemble_ray.llm.protocol.answer_limits import ERROR_BODY_BYTES, AnswerLimits, TooMuchError
from ensemble_ray.llm.protocol.errors import CallFailure
from ensemble_ray.llm.protocol.event_loop_resources import PerLoop
from ensemble_ray.llm.protocol.redirects import (
    RedirectRefusedError,
    follow_redirect,
    is_redirect,
)
from ensemble_ray.process.threads import threads

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Answered", "CallFailedError", "open_stream", "post", "read_to_end"]

#: Servers of the uvicorn kind close an idle connection after 5 s; sending on one at that moment loses the request.
_KEEP_ALIVE_S = 4.0
#: Generous, since a fan-out opens a thousand connections at once.
_CONNECT_TIMEOUT_S = 30.0
#: aiohttp warns about larger bodies handed over in one piece.
_LARGE_BODY_BYTES = 2**20
#: After a stream's end mark only the end of the body is due; a server that keeps the body open longer is not waited for.
_END_OF_BODY_S = 0.5
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_LIMITS = AnswerLimits()


class CallFailedError(Exception):
    """Carries a `CallFailure` up to where it becomes the provider's error; never leaves this package."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(failure)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Answered:
    """A response's status and body, whatever they say."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def failure(self) -> CallFailure | None:
        """The failure that its status means; None for success."""
        if self.status < 400:  # noqa: PLR2004  HTTP's own classes
            return None
        return CallFailure(status=self.status, body=self.body, headers=_lower_names(self.headers))


async def post(
    url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float, limits: AnswerLimits = _LIMITS
) -> Answered:
    """Send a body and read the whole answer.

    Raises:
        CallFailedError: there was no answer: no connection, a cut one, or no time left; or it is beyond a limit.
    """
    timeout = _timeout(min(timeout_s, limits.time_s), streaming=False, total_s=None)
    try:
        async with await _answer(url, body, headers, timeout) as response:
            return Answered(response.status, response.headers, await _body(response, limits))
    except _failures() as error:
        raise CallFailedError(_no_answer(error, timeout_s)) from error


@contextlib.asynccontextmanager
async def open_stream(
    url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float, limits: AnswerLimits = _LIMITS
) -> AsyncGenerator[tuple[Answered, AsyncIterator[bytes]]]:
    """Send a body and read the answer as it comes.

    Gives the answer's status (with its whole body when the status is a failure), and the pieces of its body otherwise.
    `timeout_s` is on silence between pieces; the limits are on the whole answer.

    Raises:
        CallFailedError: no connection, a cut one, silence for too long; or the answer is beyond a limit.
    """
    status: int | None = None
    within = _timeout(timeout_s, streaming=True, total_s=limits.time_s)
    try:
        async with await _answer(url, body, headers, within, ends=_origin(url) in _ending) as response:
            status = response.status
            whole = b"" if status < 400 else await _body(response, limits)  # noqa: PLR2004  HTTP's classes
            yield Answered(status, response.headers, whole), _pieces(response, limits)
            _streamed_at[_origin(url)] = time.monotonic()
    except _failures() as error:
        if status is not None and _is_whole_time_up(error):
            raise CallFailedError(CallFailure(status=status, reason=limits.too_late)) from error
        raise CallFailedError(_no_answer(error, timeout_s)) from error


async def read_to_end(pieces: AsyncIterator[bytes]) -> None:
    """Read what follows a stream's end mark, so that its connection can be used again (S-STR-11).

    The answer is whole by now: a server that fails, or does not come to an end, costs the connection and no more.
    """
    with contextlib.suppress(*_failures(), TooMuchError, CallFailedError):
        async with asyncio.timeout(_END_OF_BODY_S):
            async for _ in pieces:
                pass


async def _answer(
    url: str, body: bytes, headers: Mapping[str, str], within: aiohttp.ClientTimeout, *, ends: bool = False
) -> aiohttp.ClientResponse:
    """Send a body, also to another path of the same origin where the endpoint says so (S-SEC-54).

    Args:
        url: Where to.
        body: What is sent.
        headers: What goes with it.
        within: How long it may take.
        ends: The connection is not used again.

    Returns:
        The answer with its head read; whoever gets it reads its body and leaves it, as a context manager.
    """
    session = _get_session(url, ends=ends) or await _open(url, ends=ends)
    followed = 0
    while is_redirect((response := await _send(session, url, body, headers, within)).status):
        async with response:
            try:
                location = response.headers.get("Location")
                url = follow_redirect(url, response.status, location, followed=followed)
            except RedirectRefusedError as error:
                raise CallFailedError(CallFailure(status=response.status, reason=str(error))) from None
        followed += 1
    return response


async def _send(
    session: aiohttp.ClientSession, url: str, body: bytes, headers: Mapping[str, str], within: aiohttp.ClientTimeout
) -> aiohttp.ClientResponse:
    """Send a body and wait for the answer's head.

    Some servers close the connection after a stream without having said so, and the next request on it is lost unread.
    Such a request is sent again, under the same key; from then on that origin's streams end their connection (S-STR-12).
    """
    import aiohttp

    origin = _origin(url)
    streamed_at = _streamed_at.get(origin)
    # A connection is idle for no longer than this, so later ones carried no stream.
    is_after_stream = streamed_at is not None and time.monotonic() - streamed_at < _KEEP_ALIVE_S + 1
    may_be_closed = is_after_stream and origin not in _ending

    async def send() -> aiohttp.ClientResponse:
        return await session.post(url, data=_payload(body), headers=headers, timeout=within, allow_redirects=False)

    try:
        return await send()
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
        # A connector's error: there was no connection at all.
        if not may_be_closed or isinstance(error, aiohttp.ClientConnectorError):
            raise
    _ending.add(origin)
    return await send()


async def _body(response: aiohttp.ClientResponse, limits: AnswerLimits) -> bytes:
    """Read the whole body, or of a failure as much as can be told."""
    received = bytearray()
    async for piece in response.content.iter_any():
        received += piece
        if response.status >= 400 and len(received) >= ERROR_BODY_BYTES:  # noqa: PLR2004  HTTP's own classes
            return bytes(received[:ERROR_BODY_BYTES])
        try:
            limits.check_body(len(received))
        except TooMuchError as error:
            raise CallFailedError(CallFailure(status=response.status, reason=str(error))) from None
    return bytes(received)


async def _pieces(response: aiohttp.ClientResponse, limits: AnswerLimits) -> AsyncGenerator[bytes]:
    """Yield the pieces of a stream as they come."""
    received_bytes = 0
    async for piece in response.content.iter_any():
        received_bytes += len(piece)
        limits.check_stream(received_bytes)
        yield piece


def _payload(body: bytes) -> bytes | io.BytesIO:
    return body if len(body) < _LARGE_BODY_BYTES else io.BytesIO(body)


def _lower_names(headers: Mapping[str, str]) -> Mapping[str, str]:
    return {name.lower(): value for name, value in headers.items()}


@lru_cache(maxsize=1)
def _failures() -> tuple[type[Exception], ...]:
    import aiohttp

    # TimeoutError and OSError cover what escapes aiohttp's own tree in the middle of a body.
    return (aiohttp.ClientError, TimeoutError, OSError)


def _no_answer(error: Exception, timeout_s: float) -> CallFailure:
    import aiohttp

    if isinstance(error, aiohttp.ConnectionTimeoutError) and timeout_s > _CONNECT_TIMEOUT_S:
        return CallFailure(reason=f"no connection within {_CONNECT_TIMEOUT_S:g} s", cause=error)
    if isinstance(error, TimeoutError):
        return CallFailure(timed_out=True, cause=error)
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return CallFailure(reason=f"the host name '{error.host}' cannot be resolved", cause=error)
    flaw = tls_flaw(error)
    if flaw:
        return CallFailure(reason=flaw, cause=error, is_lasting=True)
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return CallFailure(reason=os.strerror(number) if number else str(error.os_error), cause=error)
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return CallFailure(reason="it closed the connection without an answer", cause=error)
    if isinstance(error, aiohttp.ClientPayloadError):
        return CallFailure(reason="it cut the connection in the middle of the answer", cause=error)
    return CallFailure(reason=str(error) or type(error).__name__, cause=error)


def _is_whole_time_up(error: Exception) -> bool:
    """Whether the limit on a whole stream was met, and not that on its silence, which the library tells apart."""
    import aiohttp

    return isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ServerTimeoutError)


@lru_cache(maxsize=64)
def _timeout(timeout_s: float, *, streaming: bool, total_s: float | None) -> aiohttp.ClientTimeout:
    import aiohttp

    connect_s = min(timeout_s, _CONNECT_TIMEOUT_S)
    if streaming:
        return aiohttp.ClientTimeout(total=total_s, sock_connect=connect_s, sock_read=timeout_s)
    return aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s)


# ---- sessions


@lru_cache(maxsize=256)
def _is_local(url: str) -> bool:
    return urlsplit(url).hostname in _LOOPBACK


@lru_cache(maxsize=256)
def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _get_session(url: str, *, ends: bool = False) -> aiohttp.ClientSession | None:
    """Return the running loop's session for that URL; `ends`: the one whose connections are used once."""
    return _sessions[_is_local(url), ends].get()


async def _open(url: str, *, ends: bool = False) -> aiohttp.ClientSession:
    """Make that session; a proxy of the environment is never used for this machine."""
    if "aiohttp" not in sys.modules:
        await threads.run(importlib.import_module, "aiohttp")  # a fifth of a second of CPU: not on the loop
    from urllib.request import getproxies

    import aiohttp

    held = _get_session(url, ends=ends)  # others may have been waiting for the import too
    if held is not None:
        return held
    local = _is_local(url)
    if ends:
        connector = aiohttp.TCPConnector(limit=0, force_close=True, ttl_dns_cache=300)
    else:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ttl_dns_cache=300)
    session = aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=not local and bool(getproxies()),
    )
    return _sessions[local, ends].put(session)


def _per_loop() -> PerLoop[aiohttp.ClientSession]:
    return PerLoop(close=lambda session: session.close(), forget=lambda session: session.detach())


#: by whether they are for this machine, and whether their connections are used once
_sessions = {(is_local, ends): _per_loop() for is_local in (False, True) for ends in (False, True)}
#: origin -> when its newest stream was read to the end, monotonic s
_streamed_at: dict[str, float] = {}
#: origins that were found to close the connection after a stream
_ending: set[str] = set()
