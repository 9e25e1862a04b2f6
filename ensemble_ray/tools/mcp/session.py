"""The session with one MCP server: one task opens, uses and closes it.

In: work to do with the session, sent through a queue from any loop of the process. Out: what it gave.
Rules: the session's cancel scopes stay in its owner's task. Work that is cancelled is cancelled at the server. A server
that is lost takes no more work, and the next opens a new session; what goes on in the old one may end there. Work that reached the lost
server is done again once, if it may be; what never reached it is, whatever it is. A session that nobody uses is closed, and all are when
the process ends.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Generic, Literal, TextIO, TypeVar, cast

import httpx2
import pydantic
from pydantic_core import to_json

from ensemble_ray.errors import ToolConfigurationError, message_of
from ensemble_ray.errors.bodies import tls_flaw
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import abandon, after_fork, bridge, library_loop
from ensemble_ray.text.foreign_text import one_line
from ensemble_ray.text.unpacking import ACCEPTED_CODINGS, bound_response
from ensemble_ray.tools.foreign_schema import LONGEST_NAME, SchemaError, hash_name, normalise_parameters
from ensemble_ray.tools.mcp.address import (
    MESSAGE_BYTES,
    McpDelivery,
    ReadMessages,
    ServerAddress,
    current_delivery,
    is_lost,
)
from ensemble_ray.tools.mcp.questions import elicitation_callback, sampling_callback
from ensemble_ray.tools.tool import make_tool_name

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import ReadStream, TransportStreams
    from mcp.shared.message import SessionMessage
    from mcp_types import PaginatedResult


T = TypeVar("T")
Page = TypeVar("Page", bound="PaginatedResult")

_log = bounded_logger(__name__)
#: Of one listing.
_MOST_PAGES, _MOST_ENTRIES = 100, 1_000
#: Where a listing is stored in a result.
_LISTINGS = ("tools", "prompts", "resources", "resourceTemplates")
#: In the metadata of a listing: its entries and bytes as the server sent them.
_SIZE = "ensemble-ray/size"
#: Tools in a log line, and characters about each.
_MOST_SHOWN, _SHOWN = 5, 150
#: The protocol that has the narrowest words for a tool.
_VERSION = "2025-11-25"


def tool_names(names: Sequence[str], prefix: str) -> dict[str, str]:
    """Return what a model calls each of a server's tools by: different names of at most 64 letters, digits and underscores.

    A name does not depend on the order of the others (S-LLM-62).
    """
    made = {name: prefix + make_tool_name(name) for name in names}
    made = {name: f"_{fitting}" if fitting[:1].isdigit() else fitting for name, fitting in made.items()}
    often = Counter(made.values())
    return {
        name: hash_name(fitting, name)
        if len(fitting) > LONGEST_NAME or (often[fitting] > 1 and fitting != prefix + name)
        else fitting
        for name, fitting in made.items()
    }


def mend_listing(tools: Sequence[object], server: str) -> list[dict[str, Any]]:
    """Return the tools of a listing that can be read: wrong members are left out, and tools that are wrong without them.

    Args:
        tools: As the server sent them.
        server: For log lines.
    """
    kept: dict[str, dict[str, Any]] = {}
    flaws: list[str] = []
    for tool in tools:
        name = cast("dict[str, object]", tool).get("name") if isinstance(tool, dict) else None
        if not isinstance(name, str) or not name.strip():
            flaws.append("one without a name")
        elif name in kept:
            flaws.append(f"a second '{name[:100]}'")
        else:
            try:
                kept[name] = _mend(dict(cast("dict[str, Any]", tool)))
            except (SchemaError, pydantic.ValidationError) as error:
                flaws.append(f"'{name[:100]}': {error}")
    log_left_out(server, flaws)
    return list(kept.values())


def log_left_out(server: str, flaws: Sequence[str]) -> None:
    """Log the tools of a listing that are left out, in one line."""
    if flaws:
        shown = "; ".join(one_line(flaw, _SHOWN) for flaw in flaws[:_MOST_SHOWN])
        more = "; ..." if len(flaws) > _MOST_SHOWN else ""
        _log.warning("MCP server '%s': %d of its tools are left out: %s%s", server, len(flaws), shown, more)


def _mend(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool without wrong members.

    Raises:
        SchemaError: the schema of its arguments cannot be mended.
        pydantic.ValidationError: something else cannot.
    """
    from mcp_types.methods import validate_server_result

    try:
        validate_server_result("tools/list", _VERSION, {"tools": [tool]})
    except pydantic.ValidationError as error:
        for member in {str(member) for fault in error.errors() for member in fault["loc"][2:3]}:  # tools, 0, member
            if member == "inputSchema":
                tool[member] = normalise_parameters(tool.get(member) or {}).parameters
            else:
                tool.pop(member, None)
        validate_server_result("tools/list", _VERSION, {"tools": [tool]})
    return tool


async def collect_pages(fetch: Callable[[str | None], Awaitable[Page]], entries: Callable[[Page], list[T]]) -> list[T]:
    """Return the entries of all pages of a listing.

    Args:
        fetch: Asks for the page of a cursor; None: the first one.
        entries: Those of a page.

    Raises:
        ToolConfigurationError: there are too many pages or entries, or they are too long.
    """
    found: list[T] = []
    cursor, listed, listed_bytes = None, 0, 0
    for _ in range(_MOST_PAGES):
        page = await fetch(cursor)
        found += entries(page)
        size: tuple[int, int] = (page.meta or {}).get(_SIZE, (0, 0))
        listed += size[0]
        listed_bytes += size[1]
        if listed > _MOST_ENTRIES or listed_bytes > MESSAGE_BYTES:
            break
        if not (cursor := page.next_cursor):
            return found
    raise ToolConfigurationError(
        f"the server lists more than {_MOST_ENTRIES} entries, {_MOST_PAGES} pages or {MESSAGE_BYTES} bytes, the limits of a listing"
    )


@asynccontextmanager
async def mend_transport(
    transport: AbstractAsyncContextManager[TransportStreams], server: str, on_fault: Callable[[str], None]
) -> AsyncGenerator[TransportStreams]:
    """Open a transport; listings of tools that come in are mended before the SDK reads them.

    Args:
        transport: The SDK's, or one of ours.
        server: For log lines.
        on_fault: Called with what the server did wrong when a message cannot be read: which request it answers is not known.
    """
    async with transport as (received, sent):
        yield _MendedStream(received, server, on_fault), sent


class _MendedStream(ReadMessages):
    """The stream of messages from a server, which ends with the first one that cannot be read."""

    def __init__(
        self, inner: ReadStream[SessionMessage | Exception], server: str, on_fault: Callable[[str], None]
    ) -> None:
        self._inner = inner
        self._server = server
        self._on_fault = on_fault

    @property
    def last_context(self) -> object:
        """The sender's context, which the SDK asks for."""
        return getattr(self._inner, "last_context", None)

    async def aclose(self) -> None:
        """Close the stream inside."""
        await self._inner.aclose()

    async def receive(self) -> SessionMessage | Exception:
        """Return the next message.

        Raises:
            anyio.EndOfStream: no other comes, or it cannot be read.
        """
        from anyio import EndOfStream
        from mcp_types import PARSE_ERROR, JSONRPCError

        item = await self._inner.receive()
        if isinstance(item, Exception):
            self._on_fault(f"sent a message that cannot be read: {message_of(item)}")
            raise EndOfStream
        message = item.message
        if isinstance(message, JSONRPCError) and message.id is None and message.error.code == PARSE_ERROR:
            self._on_fault(f"cannot read a message: {message.error.message}")
            raise EndOfStream
        result: object = getattr(message, "result", None)
        if isinstance(result, dict) and not result.keys().isdisjoint(_LISTINGS):
            # Beside the loop, on which limits of time run: megabytes of schemas take seconds.
            await asyncio.to_thread(_bound_listing, cast("dict[str, object]", result), self._server)
        return item


def _bound_listing(result: dict[str, object], server: str) -> None:
    """Cut a listing short, note how long it was, and mend its tools."""
    listings = {
        name: cast("list[object]", entries) for name in _LISTINGS if isinstance(entries := result.get(name), list)
    }
    size = (sum(map(len, listings.values())), len(to_json(result)))
    meta = result.get("_meta")
    result["_meta"] = {**(cast("dict[str, object]", meta) if isinstance(meta, dict) else {}), _SIZE: size}
    for entries in listings.values():
        del entries[_MOST_ENTRIES + 1 :]
    if "tools" in listings:
        result["tools"] = mend_listing(listings["tools"], server)


#: Lines of a program's standard error that an error shows.
_SHOWN_LINES = 10
#: What is read of one of them, characters; the rest of a line is dropped.
_LINE_CHARS = 2**14
#: How long the last lines of a program that ended are waited for, s; one that it started may hold the pipe open.
_LAST_LINES_S = 0.5
#: Statuses with which a server of the older SSE transport answers what it does not know; others are about keys and limits.
_REFUSALS = frozenset(range(400, 500)) - {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.TOO_MANY_REQUESTS}
_INSTALL = "MCP needs the package mcp, which is not installed: pip install 'ensemble-ray[mcp]'"


@asynccontextmanager
async def open_session(
    address: ServerAddress, stderr: ErrorLines, on_fault: Callable[[str], None]
) -> AsyncGenerator[Client]:
    """Open a session, which is closed in the same task; a URL that refuses streamable HTTP is tried with the older SSE transport.

    Args:
        address: The server.
        stderr: Takes what a program writes to its standard error.
        on_fault: Called with what the server did wrong when it ends the session.

    Raises:
        ToolConfigurationError: the SDK is not installed, or neither transport works.
        TimeoutError: it takes longer than `connect_timeout_s`.
    """
    try:
        from mcp import Client
        from mcp.client.sse import sse_client
        from mcp.client.streamable_http import streamable_http_client

        from ensemble_ray.tools.mcp.program import open_program
    except ImportError:
        raise ToolConfigurationError(_INSTALL) from None

    def client(transport: AbstractAsyncContextManager[TransportStreams], mode: Literal["auto", "legacy"]) -> Client:
        return Client(
            mend_transport(transport, address.shown, on_fault),
            raise_exceptions=True,
            mode=mode,
            elicitation_callback=elicitation_callback if address.has_reviewer else None,
            sampling_callback=sampling_callback if address.max_samples else None,
        )

    async with AsyncExitStack() as stack:

        async def enter(opened: Client) -> Client:
            async with asyncio.timeout(address.connect_timeout_s):
                return await stack.enter_async_context(opened)

        if address.command:
            yield await enter(client(open_program(address, stderr.open()), "auto"))
            return
        opening = McpDelivery()
        current_delivery.set(opening)  # of this session's task; each call has its own
        http = await stack.enter_async_context(http_client(address))
        try:
            transport = streamable_http_client(address.url, http_client=http, max_sse_event_size=MESSAGE_BYTES)
            opened = await enter(client(transport, "auto"))
        except Exception as error:
            if (status := opening.status or 0) not in _REFUSALS:
                raise
            refusal = f"it refuses streamable HTTP (HTTP status {status}: {reason_of(error)})"
            sse = sse_client(address.url, httpx_client_factory=partial(sse_http_client, address))
            try:
                opened = await enter(client(sse, "legacy"))
            except Exception as older:
                why = reason_of(older)
                if isinstance(older, TimeoutError):
                    why = f"no answer within {address.connect_timeout_s:g} s"
                elif (opening.status or 0) >= HTTPStatus.BAD_REQUEST:
                    why = f"HTTP status {opening.status}"
                raise ToolConfigurationError(
                    f"MCP server '{address.shown}' cannot be reached: {refusal}, and the older SSE transport failed, too: {why}"
                ) from older
        yield opened


def reason_of(error: BaseException | None) -> str:
    """Return the text of what ended a session: of the first error, where several came together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "it closed the connection" if error is None else tls_flaw(error) or message_of(error)


class ErrorLines:
    """The newest lines of a program's standard error; a thread reads them, and logs them on DEBUG."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._stream: TextIO | None = None
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def open(self) -> TextIO:
        """Return what the program is given to write to."""
        read_end, write_end = os.pipe()
        self._stream = os.fdopen(write_end, "w")
        threading.Thread(target=self._read, args=(read_end,), name="mcp stderr", daemon=True).start()
        return self._stream

    async def last(self) -> str:
        """Return the last lines of a program that ended, after `close`."""
        if self._stream is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_LINES_S):
                    await self._ended.wait()
        return "\n".join(self._lines)

    def close(self) -> None:
        """Close this process's end; the thread ends with the program, and with what it left running."""
        if self._stream is not None:
            self._stream.close()

    def _read(self, read_end: int) -> None:
        with contextlib.suppress(OSError), os.fdopen(read_end, errors="replace") as lines:
            is_rest = False
            while line := lines.readline(_LINE_CHARS):
                if not is_rest:
                    self._lines.append(line.rstrip("\n")[:500])
                    _log.debug("%s", line.rstrip("\n"))
                is_rest = not line.endswith("\n")
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._ended.set)


#: How long a session without work stays open, s.
_IDLE_S = 60.0
#: The protocol's code for what cannot be read.
_UNREADABLE = -32700
#: How long the end of a process waits for its servers, s: longer than the SDK takes to end one that does not listen.
_EXIT_S = 6.0


class ServerLostError(Exception):
    """The server went away; `may_be_done`: it may have carried out what it was asked."""

    def __init__(self, text: str, *, may_be_done: bool = True) -> None:
        super().__init__(text)
        self.may_be_done = may_be_done

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True, eq=False)
class _Request(Generic[T]):
    """Work for the owner, and where its outcome goes."""

    work: Callable[[Client], Awaitable[T]]
    outcome: asyncio.Future[T]
    #: longest time until its outcome, s
    limit_s: float | None = None
    delivery: McpDelivery = field(default_factory=McpDelivery)

    def fail(self, error: BaseException) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


#: The sessions that take work, by their servers. Only the library's loop touches them, and those that end.
_sessions: dict[ServerAddress, _Session] = {}
_owners: set[asyncio.Task[None]] = set()


async def ask_server(
    address: ServerAddress, work: Callable[[Client], Awaitable[T]], *, may_repeat: bool, limit_s: float | None = None
) -> T:
    """Do work with this process's session with a server, from any loop; equal addresses have the same.

    Args:
        address: The server.
        work: What to do with the SDK's client.
        may_repeat: Whether it may be done twice when the server is lost meanwhile.
        limit_s: Longest time for it in an open session, s; the server counts as lost then. None: whoever asks has one.

    Raises:
        ServerLostError: the server went away, and the work may have been done, or went away twice.
        ToolConfigurationError: it cannot be started or reached, or the SDK is not installed.
        MCPError: the server refused it.
    """
    return await bridge(_ask(address, work, limit_s, may_repeat=may_repeat))


async def _ask(
    address: ServerAddress, work: Callable[[Client], Awaitable[T]], limit_s: float | None, *, may_repeat: bool
) -> T:
    try:
        return await _ask_once(address, work, limit_s)
    except ServerLostError as lost:
        if lost.may_be_done and not may_repeat:
            raise
        _log.warning("%s; it is asked again", lost)
    return await _ask_once(address, work, limit_s)


async def _ask_once(address: ServerAddress, work: Callable[[Client], Awaitable[T]], limit_s: float | None) -> T:
    session = _sessions.get(address)
    if session is None:
        session = _sessions[address] = _Session(address)
        owner = asyncio.create_task(session.own(), name=f"mcp {address.shown}")
        _owners.add(owner)
        owner.add_done_callback(_owners.discard)
    outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    session.take(cast("_Request[object]", _Request(work, outcome, limit_s)))
    return await outcome


@after_fork
def _leave_sessions() -> None:
    abandon(*_sessions.values(), *_owners)
    _sessions.clear()
    _owners.clear()


@atexit.register
def _close_at_exit() -> None:
    """End the servers of this process: a program may not hear of the end of its input."""
    if _owners:
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(_close_all(), library_loop()).result(timeout=_EXIT_S)


async def _close_all() -> None:
    owners = tuple(_owners)
    for owner in owners:
        owner.cancel()
    await asyncio.wait(owners)


class _Session:
    """Takes work from its opening until the server is lost, or nobody has used it for a while."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        #: None: take no more
        self._inbox: asyncio.Queue[_Request[object] | None] = asyncio.Queue()
        self._running: dict[asyncio.Task[None], _Request[object]] = {}
        #: what the server did wrong when it ended the session
        self._fault = ""

    def take(self, request: _Request[object]) -> None:
        """Have it done, or told why not."""
        self._inbox.put_nowait(request)

    async def own(self) -> None:
        """Hold the session from its opening to its end; whatever still waits is told why it ended."""
        is_open = False
        error: BaseException | None = None
        stderr = ErrorLines()
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(open_session(self._address, stderr, self._break))
                is_open = True
                await self._serve(client)
        except (Exception, asyncio.CancelledError) as ended:  # noqa: BLE001  told to all who wait
            error = ended
        finally:
            self._release()
            stderr.close()
        failure = None if is_open else self._unreachable(error, await stderr.last())
        for request in self._running.values():
            request.fail(failure or self._make_lost(error, may_be_done=request.delivery.sent > 0))
        for task in self._running:
            task.cancel()
        while not self._inbox.empty():
            request_left = self._inbox.get_nowait()
            if request_left is not None:
                request_left.fail(failure or self._make_lost(error, may_be_done=False))

    async def _serve(self, client: Client) -> None:
        """Begin work as it comes, until there shall be no more."""
        while True:
            try:
                request = await asyncio.wait_for(self._inbox.get(), _IDLE_S)
            except TimeoutError:
                if self._running:
                    continue
                self._release()  # at once: closing takes a while, and work that comes meanwhile needs a session
                return
            if request is None:
                if self._running:  # of an endpoint that lost one request, others may still be answered
                    await asyncio.wait(tuple(self._running))
                return
            if request.outcome.done():  # cancelled before it began
                continue
            task = asyncio.create_task(self._carry_out(client, request))
            self._running[task] = request
            task.add_done_callback(lambda done: self._running.pop(done, None))
            request.outcome.add_done_callback(
                lambda outcome, task=task: task.cancel() if outcome.cancelled() else None  # type: ignore[misc]
            )

    async def _carry_out(self, client: Client, request: _Request[object]) -> None:
        from mcp import MCPError

        current_delivery.set(request.delivery)  # of this task alone
        timer = None
        if request.limit_s is not None and (task := asyncio.current_task()) is not None:
            # Not a timeout in this task: the SDK may hold up a cancellation to tell the server of it.
            late = f"did not answer within {request.limit_s:g} s"
            timer = asyncio.get_running_loop().call_later(request.limit_s, self._fail, late, {task: request})
        try:
            result = await request.work(client)
        except asyncio.CancelledError:  # by who asked; or with the session, whose owner tells why
            raise
        except MCPError as error:
            if not is_lost(error):
                request.fail(error)
                return
            self._release()  # first: work that is done again must find a new session
            request.fail(self._make_lost(error, may_be_done=request.delivery.sent > 0))
            self._inbox.put_nowait(None)
        except Exception as error:  # noqa: BLE001  what the SDK makes of an answer belongs to who asked
            request.fail(error)
        else:
            if not request.outcome.done():
                request.outcome.set_result(result)
        finally:
            if timer is not None:
                timer.cancel()

    def _break(self, why: str) -> None:
        """End the session, in which nobody knows what answers which request any more (S-INT-88)."""
        self._fault = why
        self._fail(why, dict(self._running))

    def _fail(self, why: str, requests: Mapping[asyncio.Task[None], _Request[object]]) -> None:
        """Fail requests, and take no more; others that go on may still be answered."""
        self._release()
        for task, request in requests.items():
            text = f"MCP server '{self._address.shown}' {why}"
            request.fail(ServerLostError(text, may_be_done=request.delivery.sent > 0))
            task.cancel()
        self._inbox.put_nowait(None)

    def _release(self) -> None:
        """Take no more work: the next opens a session of its own."""
        if _sessions.get(self._address) is self:
            del _sessions[self._address]

    def _make_lost(self, error: BaseException | None, *, may_be_done: bool) -> ServerLostError:
        what = "sent an answer that cannot be read" if getattr(error, "code", None) == _UNREADABLE else "went away"
        why = self._fault or f"{what}{'' if error is None else f': {reason_of(error)}'}"
        return ServerLostError(f"MCP server '{self._address.shown}' {why}", may_be_done=may_be_done)

    def _unreachable(self, error: BaseException | None, stderr: str) -> Exception:
        if isinstance(error, ToolConfigurationError):
            return error
        what = "started" if self._address.command else "reached"
        why = f"no answer within {self._address.connect_timeout_s:g} s" if isinstance(error, TimeoutError) else None
        if self._fault:
            why = f"it {self._fault}"
        text = f"MCP server '{self._address.shown}' cannot be {what}: {why or reason_of(error)}"
        return ToolConfigurationError(f"{text}. It wrote:\n{stderr}" if stderr else text)


_SESSION_ID = "mcp-session-id"
#: What is read of the body of a failure.
_FAILURE_BYTES = 64 * 2**10


class _WatchedClient(httpx2.AsyncClient):
    """Tells the work that a request is part of whether it may have arrived, and with which status it was answered."""

    def __init__(self, address: ServerAddress) -> None:
        headers = httpx2.Headers({"Accept-Encoding": ACCEPTED_CODINGS})
        headers.update(dict(address.headers))
        timeout = httpx2.Timeout(address.connect_timeout_s, read=None)
        super().__init__(headers=headers, timeout=timeout, event_hooks={"response": [_bound]})

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request; one for which there was no connection was not sent."""
        delivery = current_delivery.get() or McpDelivery()
        delivery.sent += 1
        if request.method == "DELETE":  # of a session that has ended: a server that hangs is not waited for
            request.extensions["timeout"] = httpx2.Timeout(self.timeout.connect).as_dict()
        try:
            response = await super().send(request, **options)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout):
            delivery.sent -= 1
            raise
        delivery.status = response.status_code
        # So the protocol says of a session that has ended; the SDK's own server has a text of its own for it.
        delivery.is_forgotten = response.status_code == HTTPStatus.NOT_FOUND and _SESSION_ID in request.headers
        if delivery.is_forgotten:
            delivery.sent -= 1
        return response


class _SseClient(_WatchedClient):
    """Closes the connection for the SDK when the server refuses a message: no answer to that will come, and the session is over."""

    def __init__(self, address: ServerAddress) -> None:
        super().__init__(address)
        self._answers: _Answers | None = None

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request; a message that was refused was not worked on. The SDK logs what is raised here, with the URL."""
        try:
            response = await super().send(request, **options)
            if request.method != "GET":
                async with contextlib.aclosing(response):
                    await response.aread()  # here: the SDK, which needs none of it, hangs where it cannot be read
        except (httpx2.TransportError, httpx2.StreamError):
            if self._answers is None:
                raise
            await self._answers.aclose()
            return httpx2.Response(HTTPStatus.ACCEPTED, request=request)
        if request.method == "GET":
            if response.is_success:
                response.stream = self._answers = _Answers(response.stream)
        elif response.status_code >= HTTPStatus.BAD_REQUEST and self._answers is not None:
            if response.is_client_error and (delivery := current_delivery.get()) is not None:
                delivery.sent -= 1
            await self._answers.aclose()
            return httpx2.Response(HTTPStatus.ACCEPTED, request=request)
        return response


class _Answers(httpx2.AsyncByteStream):
    """The stream of a server's answers, which ends where it breaks off."""

    def __init__(self, inner: httpx2.AsyncByteStream | httpx2.SyncByteStream) -> None:
        self._inner = cast("httpx2.AsyncByteStream", inner)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with contextlib.suppress(httpx2.TransportError, httpx2.StreamError):
            async for part in self._inner:
                yield part

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Unreadable(httpx2.AsyncByteStream):
    """A body that is not read."""

    def __init__(self, inner: httpx2.AsyncByteStream | httpx2.SyncByteStream, error: httpx2.StreamError) -> None:
        self._inner = cast("httpx2.AsyncByteStream", inner)
        self._error = error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        raise self._error
        yield b""

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _bound(response: httpx2.Response) -> None:
    """Bound an answer; a stream may be long, and the SDK bounds each of its events."""
    is_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
    try:
        bound_response(
            response,
            httpx2.StreamError,
            max_bytes=sys.maxsize if is_stream else MESSAGE_BYTES,
            cut_bytes=_FAILURE_BYTES if response.is_error else None,
        )
    except httpx2.StreamError as error:
        if response.request.method == "GET":  # the client closes it
            raise
        response.stream = _Unreadable(response.stream, error)  # else the SDK ends the whole session


def http_client(address: ServerAddress) -> httpx2.AsyncClient:
    """Return the client of a session; how long an answer may take is the matter of each call."""
    return _WatchedClient(address)


def sse_http_client(
    address: ServerAddress,
    headers: dict[str, str] | None = None,  # noqa: ARG001  the SDK's idea of the client is passed over
    timeout: httpx2.Timeout | None = None,  # noqa: ARG001  as above
    auth: httpx2.Auth | None = None,  # noqa: ARG001  as above
) -> httpx2.AsyncClient:
    """Return the client of a session over the older SSE transport."""
    return _SseClient(address)
