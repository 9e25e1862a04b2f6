"""The default transport: HTTP requests with aiohttp.

Models share one session per event loop. The number of connections is unlimited, because declared concurrency limits the
calls. No key is ever logged.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import io
import os
import sys
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, TypeVar
from urllib.parse import SplitResult, urljoin, urlsplit

from msgspec import Struct

from ensemble_ray.errors.bodies import CLIENT_ERROR, tls_flaw
from ensemble_ray.llm.failures import CallFailure
from ensemble_ray.llm.protocol.wire import ERROR_BODY_BYTES, AnswerLimits, TooMuchError
from ensemble_ray.process.concurrency import abandon, after_fork, threads, track
from ensemble_ray.text.foreign_text import one_line

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
_Closer = Callable[[], Awaitable[object]]

#: Servers such as uvicorn close an idle connection after 5 s; a request at that moment is lost.
_KEEP_ALIVE_S = 4.0
_CONNECT_TIMEOUT_S = 30.0  # a fan-out opens a thousand connections together
_LARGE_BODY_BYTES = 2**20  # aiohttp warns about larger bodies in one piece
_END_OF_BODY_S = 0.5
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_LIMITS = AnswerLimits()
MOST_REDIRECTS = 3
_REDIRECTS_WITH_BODY = frozenset({307, 308})  # other redirects would turn the request into a GET
_DEFAULT_PORTS = {"http": 80, "https": 443}
_URL_LENGTH = 200

_streamed_at: dict[str, float] = {}  # when the last stream of a server was read to the end, monotonic s
_closing: set[str] = set()  # servers that close the connection after a stream


class CallFailedError(Exception):
    """Carries a `CallFailure` inside this package."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(failure)
        self.failure = failure


class Answered(Struct, frozen=True):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def failure(self) -> CallFailure | None:
        if self.status < CLIENT_ERROR:
            return None
        headers = {name.lower(): value for name, value in self.headers.items()}
        return CallFailure(status=self.status, body=self.body, headers=headers)


async def post(
    url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float, limits: AnswerLimits = _LIMITS
) -> Answered:
    session = _sessions[_is_local(url), False].get() or await _open_session(url, once=False)
    timeout = _timeout(min(timeout_s, limits.time_s), streaming=False, total_s=None)
    try:
        async with await _answer(session, url, body, headers, timeout) as response:
            return Answered(response.status, response.headers, await _body(response, limits))
    except _failures() as error:
        raise CallFailedError(_no_answer(error, timeout_s)) from error


@contextlib.asynccontextmanager
async def open_stream(
    url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float, limits: AnswerLimits = _LIMITS
) -> AsyncGenerator[tuple[Answered, AsyncIterator[bytes]]]:
    """Yield the head, with the body of a failure, and the pieces of a successful body."""
    server = _server_of(url)
    once = server in _closing
    session = _sessions[_is_local(url), once].get() or await _open_session(url, once=once)
    status: int | None = None
    timeout = _timeout(timeout_s, streaming=True, total_s=limits.time_s)
    try:
        async with await _answer(session, url, body, headers, timeout) as response:
            status = response.status
            whole = b"" if status < CLIENT_ERROR else await _body(response, limits)

            async def pieces() -> AsyncGenerator[bytes]:
                received_bytes = 0
                async for piece in response.content.iter_any():
                    received_bytes += len(piece)
                    limits.check_stream(received_bytes)
                    yield piece

            yield Answered(status, response.headers, whole), pieces()
            _streamed_at[server] = time.monotonic()
    except _failures() as error:
        import aiohttp

        # aiohttp reports silence as a `ServerTimeoutError`; this is the limit of the whole stream.
        if status is not None and isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ServerTimeoutError):
            raise CallFailedError(CallFailure(status=status, reason=limits.too_late)) from error
        raise CallFailedError(_no_answer(error, timeout_s)) from error


async def read_to_end(pieces: AsyncIterator[bytes]) -> None:
    """Read the rest after the end mark, so that the connection can be reused (S-STR-11)."""
    with contextlib.suppress(*_failures(), TooMuchError, CallFailedError):
        async with asyncio.timeout(_END_OF_BODY_S):
            async for _ in pieces:
                pass


async def _answer(
    session: aiohttp.ClientSession, url: str, body: bytes, headers: Mapping[str, str], within: aiohttp.ClientTimeout
) -> aiohttp.ClientResponse:
    """Follow redirects within the origin (S-SEC-54); the body of the response is unread.

    Some servers close the connection after a stream without notice, and the next request on it is lost. It is sent
    again under the same key, and later streams of that server close their connection (S-STR-12).
    """
    import aiohttp

    followed = 0
    while True:
        server = _server_of(url)
        streamed_at = _streamed_at.get(server)
        # An idle connection is closed before that, so a later one has carried no stream.
        is_after_stream = streamed_at is not None and time.monotonic() - streamed_at < _KEEP_ALIVE_S + 1
        may_be_closed = is_after_stream and server not in _closing
        data = body if len(body) < _LARGE_BODY_BYTES else io.BytesIO(body)
        try:
            response = await session.post(url, data=data, headers=headers, timeout=within, allow_redirects=False)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            # A `ClientConnectorError` means that there was no connection.
            if not may_be_closed or isinstance(error, aiohttp.ClientConnectorError):
                raise
            _closing.add(server)
            continue
        if not is_redirect(response.status):
            return response
        async with response:
            try:
                url = follow_redirect(url, response.status, response.headers.get("Location"), followed=followed)
            except RedirectRefusedError as error:
                raise CallFailedError(CallFailure(status=response.status, reason=str(error))) from None
        followed += 1


async def _body(response: aiohttp.ClientResponse, limits: AnswerLimits) -> bytes:
    content = response.content
    # Most answers arrive with their head.
    received = bytearray(content.read_nowait() if content.is_eof() else b"")
    while True:
        if response.status >= CLIENT_ERROR and len(received) >= ERROR_BODY_BYTES:
            return bytes(received[:ERROR_BODY_BYTES])
        try:
            limits.check_body(len(received))
        except TooMuchError as error:
            raise CallFailedError(CallFailure(status=response.status, reason=str(error))) from None
        piece = b"" if content.at_eof() else await content.readany()
        if not piece:
            return bytes(received)
        received += piece


@lru_cache(maxsize=1)
def _failures() -> tuple[type[Exception], ...]:
    import aiohttp

    # aiohttp raises the builtin errors in the middle of a body.
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


@lru_cache(maxsize=64)
def _timeout(timeout_s: float, *, streaming: bool, total_s: float | None) -> aiohttp.ClientTimeout:
    import aiohttp

    connect_s = min(timeout_s, _CONNECT_TIMEOUT_S)
    if streaming:
        return aiohttp.ClientTimeout(total=total_s, sock_connect=connect_s, sock_read=timeout_s)
    return aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s)


async def _open_session(url: str, *, once: bool) -> aiohttp.ClientSession:
    """Open the running loop's session; `once` selects one without connection reuse."""
    is_local = _is_local(url)
    sessions = _sessions[is_local, once]
    if "aiohttp" not in sys.modules:
        await threads.run(importlib.import_module, "aiohttp")  # it takes a fifth of a second of CPU
    from urllib.request import getproxies

    import aiohttp

    if (session := sessions.get()) is not None:  # another caller has created it during the import
        return session
    if once:
        connector = aiohttp.TCPConnector(limit=0, force_close=True, ttl_dns_cache=300)
    else:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ttl_dns_cache=300)
    session = aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=not is_local and bool(getproxies()),  # no proxy for this machine
    )
    return sessions.put(session)


@lru_cache(maxsize=256)
def _is_local(url: str) -> bool:
    return urlsplit(url).hostname in _LOOPBACK


@lru_cache(maxsize=256)
def _server_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


class PerLoop(Generic[T]):
    """One resource per event loop: `close` closes it in its loop, `drop` drops it after the loop is closed."""

    def __init__(self, close: Callable[[T], Awaitable[object]], drop: Callable[[T], object] | None = None) -> None:
        self._close = close
        self._drop = drop
        self._held: dict[asyncio.AbstractEventLoop, T] = {}
        track(self)

    def after_fork(self) -> None:
        abandon(self._held)
        self._held = {}

    def get(self) -> T | None:
        return self._held.get(asyncio.get_running_loop())

    def put(self, resource: T) -> T:
        """Set the running loop's resource, which is closed with the loop."""
        loop = asyncio.get_running_loop()
        for other in [other for other in self._held if other.is_closed()]:
            forgotten = self._held.pop(other)
            if self._drop is not None:
                self._drop(forgotten)
        self._held[loop] = resource

        async def close() -> None:
            if self._held.get(loop) is resource:
                del self._held[loop]
            await self._close(resource)

        _closers_of(loop).append(close)
        return resource


def _closers_of(loop: asyncio.AbstractEventLoop) -> list[_Closer]:
    entry = _closers.get(loop)
    if entry is None:
        closers: list[_Closer] = []

        async def close_at_end() -> AsyncGenerator[None]:
            try:
                yield
            finally:
                await _close_all(closers)

        generator = close_at_end()
        # One step registers the generator with the loop, and suspends without waiting.
        with contextlib.suppress(StopIteration):
            generator.asend(None).send(None)
        entry = _closers[loop] = (closers, generator)
    return entry[0]


_closers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[list[_Closer], AsyncGenerator[None]]] = (
    weakref.WeakKeyDictionary()
)


async def _close_all(closers: list[_Closer]) -> None:
    while closers:
        with contextlib.suppress(Exception):
            await closers.pop()()


@after_fork
def _begin_without_loops() -> None:
    for loop, (closers, generator) in list(_closers.items()):
        abandon(loop, generator, *closers)
        closers.clear()  # the child may end the loop in which its parent forked
    _closers.clear()


@atexit.register
def _close_at_exit() -> None:
    """Otherwise resources of running loops in other threads log warnings."""
    for loop, (closers, _) in list(_closers.items()):
        if loop.is_running() and closers:
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(_close_all(closers), loop).result(timeout=1)


#: by whether the server is on this machine, and whether connections are used once
_sessions: dict[tuple[bool, bool], PerLoop[aiohttp.ClientSession]] = {
    (is_local, once): PerLoop(close=lambda session: session.close(), drop=lambda session: session.detach())
    for is_local in (False, True)
    for once in (False, True)
}


class RedirectRefusedError(ValueError):
    """A redirect must not be followed."""


def is_redirect(status: int) -> bool:
    return status in range(300, CLIENT_ERROR)


def follow_redirect(url: str, status: int, location: str | None, *, followed: int) -> str:
    """Return the next URL, after `followed` redirects; raise if it has another origin (S-SEC-54)."""
    if followed >= MOST_REDIRECTS:
        raise RedirectRefusedError(f"it redirects more than {MOST_REDIRECTS} times. Check `base_url`")
    if status not in _REDIRECTS_WITH_BODY or not location:
        raise RedirectRefusedError(
            f"it is a redirect (HTTP {status}) that a request with a body cannot follow. Check `base_url`"
        )
    try:
        target = urljoin(url, location)
        origin, here = _origin(urlsplit(target)), _origin(urlsplit(url))
    except ValueError:
        raise RedirectRefusedError(
            f"it redirects (HTTP {status}) to an invalid URL: {one_line(location, _URL_LENGTH)}. Check `base_url`"
        ) from None
    if origin != here:
        scheme, host, port = origin
        place = f"{scheme}://[{host}]" if ":" in host else f"{scheme}://{host}"
        shown = place if port == _DEFAULT_PORTS.get(scheme) else f"{place}:{port}"
        raise RedirectRefusedError(
            f"it redirects (HTTP {status}) to another origin, {one_line(shown, _URL_LENGTH)}, where "
            "neither prompt nor key was sent. Set `base_url` to it if this is intended"
        )
    return target


def _origin(parts: SplitResult) -> tuple[str, str, int | None]:
    return parts.scheme, parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme)
