"""Requests to an endpoint over HTTP. Room: llm; a body's bytes go in, an answer's bytes come out.

One session per event loop, shared by all models of the process, made on first use and closed with its loop. No limit
on connections: how many calls run at once is decided by the declared concurrency, not by a pool. Nothing here knows
what the bytes mean, and no key is ever logged.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ensemble_ray.llm.loop_resources import PerLoop
from ensemble_ray.llm.openai_errors import Failure
from ensemble_ray.threads import threads

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Answered", "CallFailedError", "open_stream", "post"]

#: Servers of the uvicorn kind close an idle connection after 5 s; sending on one at that moment loses the request.
_KEEP_ALIVE_S = 4.0
#: Generous, since a fan-out opens a thousand connections at once.
_CONNECT_TIMEOUT_S = 30.0
#: aiohttp warns about larger bodies handed over in one piece.
_LARGE_BODY_BYTES = 2**20
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class CallFailedError(Exception):
    """Carries a `Failure` up to where it becomes the provider's error; never leaves this room."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Answered:
    """A response's status and body, whatever they say."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def failure(self) -> Failure | None:
        """The failure that its status means; None for success."""
        if self.status < 400:  # noqa: PLR2004  HTTP's own classes
            return None
        return Failure(status=self.status, body=self.body, headers=_lowered(self.headers))


async def post(url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float) -> Answered:
    """Send a body and read the whole answer.

    Raises:
        CallFailedError: there was no answer: no connection, a cut one, or no time left.
    """
    session = _held(url) or await _open(url)
    try:
        async with session.post(
            url, data=_payload(body), headers=headers, timeout=_timeout(timeout_s, streaming=False)
        ) as response:
            return Answered(response.status, response.headers, await response.read())
    except _failures() as error:
        raise CallFailedError(_no_answer(error, timeout_s)) from error


@contextlib.asynccontextmanager
async def open_stream(
    url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float
) -> AsyncGenerator[tuple[Answered, AsyncIterator[bytes]]]:
    """Send a body and read the answer as it comes.

    Gives the answer's status (with its whole body when the status is a failure or it is no event stream), and the
    pieces of its body otherwise. The time limit is on silence between pieces. Leaving the block drops the connection.

    Raises:
        CallFailedError: no connection, a cut one, or silence for too long.
    """
    session = _held(url) or await _open(url)
    # Not used again: a widespread server closes the connection after a stream and says that it keeps it.
    headers = {**headers, "Connection": "close"}
    try:
        async with session.post(
            url, data=_payload(body), headers=headers, timeout=_timeout(timeout_s, streaming=True)
        ) as response:
            streams = response.status < 400 and "event-stream" in response.content_type  # noqa: PLR2004  HTTP's classes
            whole = b"" if streams else await response.read()
            yield Answered(response.status, response.headers, whole), response.content.iter_any()
    except _failures() as error:
        raise CallFailedError(_no_answer(error, timeout_s)) from error


def _payload(body: bytes) -> bytes | io.BytesIO:
    return body if len(body) < _LARGE_BODY_BYTES else io.BytesIO(body)


def _lowered(headers: Mapping[str, str]) -> Mapping[str, str]:
    return {name.lower(): value for name, value in headers.items()}


@lru_cache(maxsize=1)
def _failures() -> tuple[type[Exception], ...]:
    import aiohttp

    # TimeoutError and OSError cover what escapes aiohttp's own tree in the middle of a body.
    return (aiohttp.ClientError, TimeoutError, OSError)


def _no_answer(error: Exception, timeout_s: float) -> Failure:
    import aiohttp

    if isinstance(error, aiohttp.ConnectionTimeoutError) and timeout_s > _CONNECT_TIMEOUT_S:
        return Failure(reason=f"no connection within {_CONNECT_TIMEOUT_S:g} s", cause=error)
    if isinstance(error, TimeoutError):
        return Failure(timed_out=True, cause=error)
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return Failure(reason=f"the host name '{error.host}' cannot be resolved", cause=error)
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return Failure(reason=os.strerror(number) if number else str(error.os_error), cause=error)
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return Failure(reason="it closed the connection without an answer", cause=error)
    if isinstance(error, aiohttp.ClientPayloadError):
        return Failure(reason="it cut the connection in the middle of the answer", cause=error)
    return Failure(reason=str(error) or type(error).__name__, cause=error)


@lru_cache(maxsize=64)
def _timeout(timeout_s: float, *, streaming: bool) -> aiohttp.ClientTimeout:
    import aiohttp

    connect_s = min(timeout_s, _CONNECT_TIMEOUT_S)
    if streaming:
        return aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=timeout_s)
    return aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s)


# ---- sessions


@lru_cache(maxsize=256)
def _is_local(url: str) -> bool:
    return urlsplit(url).hostname in _LOOPBACK


def _held(url: str) -> aiohttp.ClientSession | None:
    """The running loop's session for that URL."""
    return (_local_sessions if _is_local(url) else _sessions).get()


async def _open(url: str) -> aiohttp.ClientSession:
    """Make that session; a proxy of the environment is never used for this machine."""
    if "aiohttp" not in sys.modules:
        await threads.run(importlib.import_module, "aiohttp")  # a fifth of a second of CPU: not on the loop
    from urllib.request import getproxies

    import aiohttp

    held = _held(url)  # others may have been waiting for the import too
    if held is not None:
        return held
    local = _is_local(url)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ttl_dns_cache=300),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=not local and bool(getproxies()),
    )
    return (_local_sessions if local else _sessions).put(session)


def _per_loop() -> PerLoop[aiohttp.ClientSession]:
    return PerLoop(close=lambda session: session.close(), forget=lambda session: session.detach())


_sessions = _per_loop()
_local_sessions = _per_loop()
