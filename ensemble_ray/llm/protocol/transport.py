"""Requests to an endpoint over HTTP. Package: llm; a body's bytes go in, an answer's bytes come out.

One session per event loop, shared by all models of the process, made on first use and closed with its loop. No limit
on connections: how many calls run at once is decided by the declared concurrency, not by a pool. A connection is used
again once its answer was read to the end. Nothing here knows what the bytes mean, and no key is ever logged. Must never
happen: more of an answer in memory than its limits allow, a prompt or a key at another origin than the endpoint's.
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
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, TypeVar
from urllib.parse import SplitResult, urljoin, urlsplit

from ensemble_ray.errors.bodies import tls_flaw
from ensemble_ray.llm.failures import CallFailure
from ensemble_ray.llm.protocol.wire import ERROR_BODY_BYTES, AnswerLimits, TooMuchError
from ensemble_ray.process.forks import abandon, after_fork, threads, track
from ensemble_ray.text.foreign_text import one_line

if TYPE_CHECKING:
    import aiohttp


T = TypeVar("T")

_Closer = Callable[[], Awaitable[object]]
_closers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[list[_Closer], AsyncGenerator[None]]] = (
    weakref.WeakKeyDictionary()
)


class PerLoop(Generic[T]):
    """One resource per running event loop.

    Args:
        close: Ends a resource, in the loop it was made in.
        forget: Lets go of a resource whose loop was closed without being shut down; its sockets died with it.
    """

    def __init__(self, close: Callable[[T], Awaitable[object]], forget: Callable[[T], object] | None = None) -> None:
        self._close = close
        self._forget = forget
        self._held: dict[asyncio.AbstractEventLoop, T] = {}
        track(self)

    def after_fork(self) -> None:
        """Begin without resources."""
        abandon(self._held)
        self._held = {}

    def get(self) -> T | None:
        """Return the running loop's resource; None while there is none."""
        return self._held.get(asyncio.get_running_loop())

    def put(self, resource: T) -> T:
        """Make it the running loop's resource, closed when the loop ends; one held before is closed then too."""
        loop = asyncio.get_running_loop()
        for other in [other for other in self._held if other.is_closed()]:
            forgotten = self._held.pop(other)
            if self._forget is not None:
                self._forget(forgotten)
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
        generator = _run_at_end(closers)
        # One step makes the generator known to the loop; it suspends at its first yield without waiting.
        with contextlib.suppress(StopIteration):
            generator.asend(None).send(None)
        entry = _closers[loop] = (closers, generator)
    return entry[0]


async def _run_at_end(closers: list[_Closer]) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        await _close_all(closers)


async def _close_all(closers: list[_Closer]) -> None:
    while closers:
        with contextlib.suppress(Exception):
            await closers.pop()()


@after_fork
def _begin_without_loops() -> None:
    for loop, (closers, generator) in list(_closers.items()):
        abandon(loop, generator, *closers)
        closers.clear()  # the child may end the loop that its parent forked in
    _closers.clear()


@atexit.register
def _close_at_exit() -> None:
    """Close what a loop in another thread still holds, so that nothing is said about it while the process ends."""
    for loop, (closers, _) in list(_closers.items()):
        if loop.is_running() and closers:
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(_close_all(closers), loop).result(timeout=1)


#: Redirects in a row that are followed.
MOST_REDIRECTS = 3
#: These keep method and body; after the others a client would ask with GET, which no endpoint of the protocol answers.
_KEEPING = frozenset({307, 308})
_DEFAULT_PORTS = {"http": 80, "https": 443}
#: Characters of a place in a text.
_SHOWN = 200


class RedirectRefusedError(ValueError):
    """An answer sends the request where it must not go; the text says where."""


def is_redirect(status: int) -> bool:
    """Return whether that HTTP status is no answer but a word about where there is one."""
    return 300 <= status <= 399  # noqa: PLR2004  HTTP's own classes


def follow_redirect(url: str, status: int, location: str | None, *, followed: int) -> str:
    """Return where a request goes next.

    Args:
        url: Where it was sent.
        status: The status of the answer; one of a redirect.
        location: The answer's `Location`.
        followed: Redirects of this request that were followed before.

    Raises:
        RedirectRefusedError: it names another origin or none, the method would not be kept, or it is one too many.
    """
    if followed >= MOST_REDIRECTS:
        raise RedirectRefusedError(f"it redirects more than {MOST_REDIRECTS} times. Check `base_url`")
    if status not in _KEEPING or not location:
        raise RedirectRefusedError(
            f"it is a redirect (HTTP {status}) that a request with a body cannot follow. Check `base_url`"
        )
    try:
        target = urljoin(url, location)
        origin, here = _origin(urlsplit(target)), _origin(urlsplit(url))
    except ValueError:
        raise RedirectRefusedError(
            f"it redirects (HTTP {status}) to what is no URL: {one_line(location, _SHOWN)}. Check `base_url`"
        ) from None
    if origin != here:
        raise RedirectRefusedError(
            f"it redirects (HTTP {status}) to another origin, {one_line(_format_origin(origin), _SHOWN)}, where neither prompt "
            "nor key was sent. Set `base_url` to it if it is meant"
        )
    return target


def _origin(parts: SplitResult) -> tuple[str, str, int | None]:
    return parts.scheme, parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme)


def _format_origin(origin: tuple[str, str, int | None]) -> str:
    scheme, host, port = origin
    place = f"[{host}]" if ":" in host else host
    return f"{scheme}://{place}" + ("" if port == _DEFAULT_PORTS.get(scheme) else f":{port}")


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
        async with await _answer(url, body, headers, within, ends=_origin_transport(url) in _ending) as response:
            status = response.status
            whole = b"" if status < 400 else await _body(response, limits)  # noqa: PLR2004  HTTP's classes
            yield Answered(status, response.headers, whole), _pieces(response, limits)
            _streamed_at[_origin_transport(url)] = time.monotonic()
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

    origin = _origin_transport(url)
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
def _origin_transport(url: str) -> str:
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
