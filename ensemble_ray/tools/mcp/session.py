"""Sessions with MCP servers: one per server and process, shared by all event loops.

One task owns a session, for the SDK's cancel scopes; work arrives through a queue. A session that lost its server accepts no
more work, and the next request opens a new one. An idle session is closed.
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
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Generic, Literal, TextIO, TypeVar, cast

import httpx2
import msgspec
import pydantic
from msgspec import Struct
from pydantic_core import to_json

from ensemble_ray.errors import ToolConfigurationError, message_of
from ensemble_ray.errors.bodies import tls_flaw
from ensemble_ray.process.concurrency import abandon, after_fork, bridge, library_loop
from ensemble_ray.process.context import bounded_logger
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

_IDLE_S = 60.0  # without work
_UNREADABLE = -32700
_EXIT_S = 6.0  # longer than the SDK needs to kill a server


class ServerLostError(Exception):
    """`may_be_done`: it may have done the work."""

    def __init__(self, text: str, *, may_be_done: bool = True) -> None:
        super().__init__(text)
        self.may_be_done = may_be_done


class _Request(Struct, Generic[T], frozen=True, eq=False):
    work: Callable[[Client], Awaitable[T]]
    outcome: asyncio.Future[T]
    limit_s: float | None = None
    delivery: McpDelivery = msgspec.field(default_factory=McpDelivery)

    def fail(self, error: BaseException) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


#: They accept work. Only the library's loop uses them.
_sessions: dict[ServerAddress, _Session] = {}
_owners: set[asyncio.Task[None]] = set()


async def ask_server(
    address: ServerAddress, work: Callable[[Client], Awaitable[T]], *, may_repeat: bool, limit_s: float | None = None
) -> T:
    """Run work with a server's session, from any event loop; repeat it once on a lost server if that is safe."""

    async def ask() -> T:
        is_repeated = False
        while True:
            session = _sessions.get(address)
            if session is None:
                session = _sessions[address] = _Session(address)
                owner = asyncio.create_task(session.run(), name=f"mcp {address.shown}")
                _owners.add(owner)
                owner.add_done_callback(_owners.discard)
            outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            session.inbox.put_nowait(cast("_Request[object]", _Request(work, outcome, limit_s)))
            try:
                return await outcome
            except ServerLostError as lost:
                if is_repeated or (lost.may_be_done and not may_repeat):
                    raise
                _log.warning("%s; the request is repeated", lost)
            is_repeated = True

    return await bridge(ask())


@after_fork
def _abandon_sessions() -> None:
    abandon(*_sessions.values(), *_owners)
    _sessions.clear()
    _owners.clear()


@atexit.register
def _close_at_exit() -> None:
    """A server program may not notice the end of its input."""

    async def close_all() -> None:
        owners = tuple(_owners)
        for owner in owners:
            owner.cancel()
        await asyncio.wait(owners)

    if _owners:
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(close_all(), library_loop()).result(timeout=_EXIT_S)


class _Session:
    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self.inbox: asyncio.Queue[_Request[object] | None] = asyncio.Queue()
        self._running: dict[asyncio.Task[None], _Request[object]] = {}
        self._fault = ""  # violation of the protocol

    async def run(self) -> None:
        is_open = False
        error: BaseException | None = None
        stderr = ErrorLines()

        def end(why: str) -> None:  # answers can no longer be matched to requests (S-INT-88)
            self._fault = why
            self._fail(why, dict(self._running))

        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(open_session(self._address, stderr, end))
                is_open = True
                await self._serve(client)
        except (Exception, asyncio.CancelledError) as ended:  # noqa: BLE001  all open requests raise it
            error = ended
        finally:
            self._release()
            stderr.close()
        failure = None if is_open else self._unreachable(error, await stderr.last())
        for request in self._running.values():
            request.fail(failure or self._make_lost(error, may_be_done=request.delivery.sent > 0))
        for task in self._running:
            task.cancel()
        while not self.inbox.empty():
            waiting = self.inbox.get_nowait()
            if waiting is not None:
                waiting.fail(failure or self._make_lost(error, may_be_done=False))

    async def _serve(self, client: Client) -> None:
        while True:
            try:
                request = await asyncio.wait_for(self.inbox.get(), _IDLE_S)
            except TimeoutError:
                if self._running:
                    continue
                self._release()  # closing takes time, and new work needs a new session
                return
            if request is None:
                if self._running:  # other requests may still be answered
                    await asyncio.wait(tuple(self._running))
                return
            if request.outcome.done():
                continue
            task = asyncio.create_task(self._perform(client, request))
            self._running[task] = request
            task.add_done_callback(lambda done: self._running.pop(done, None))
            request.outcome.add_done_callback(
                lambda outcome, task=task: task.cancel() if outcome.cancelled() else None  # type: ignore[misc]
            )

    async def _perform(self, client: Client, request: _Request[object]) -> None:
        from mcp import MCPError

        current_delivery.set(request.delivery)
        timer = None
        if request.limit_s is not None and (task := asyncio.current_task()) is not None:
            # Not a timeout: the SDK may delay a cancellation to notify the server.
            late = f"did not answer within {request.limit_s:g} s"
            timer = asyncio.get_running_loop().call_later(request.limit_s, self._fail, late, {task: request})
        try:
            result = await request.work(client)
        except asyncio.CancelledError:  # by the caller, or by `run`, which fails the request
            raise
        except MCPError as error:
            if not is_lost(error):
                request.fail(error)
                return
            self._release()  # repeated work must find a new session
            request.fail(self._make_lost(error, may_be_done=request.delivery.sent > 0))
            self.inbox.put_nowait(None)
        except Exception as error:  # noqa: BLE001  the SDK's error for an answer belongs to the caller
            request.fail(error)
        else:
            if not request.outcome.done():
                request.outcome.set_result(result)
        finally:
            if timer is not None:
                timer.cancel()

    def _fail(self, why: str, requests: Mapping[asyncio.Task[None], _Request[object]]) -> None:
        self._release()
        for task, request in requests.items():
            text = f"MCP server '{self._address.shown}' {why}"
            request.fail(ServerLostError(text, may_be_done=request.delivery.sent > 0))
            task.cancel()
        self.inbox.put_nowait(None)

    def _release(self) -> None:
        if _sessions.get(self._address) is self:
            del _sessions[self._address]

    def _make_lost(self, error: BaseException | None, *, may_be_done: bool) -> ServerLostError:
        event = "sent an answer that cannot be read" if getattr(error, "code", None) == _UNREADABLE else "went away"
        why = self._fault or f"{event}{'' if error is None else f': {reason_of(error)}'}"
        return ServerLostError(f"MCP server '{self._address.shown}' {why}", may_be_done=may_be_done)

    def _unreachable(self, error: BaseException | None, stderr: str) -> Exception:
        if isinstance(error, ToolConfigurationError):
            return error
        action = "started" if self._address.command else "reached"
        why = f"no answer within {self._address.connect_timeout_s:g} s" if isinstance(error, TimeoutError) else None
        if self._fault:
            why = f"it {self._fault}"
        text = f"MCP server '{self._address.shown}' cannot be {action}: {why or reason_of(error)}"
        return ToolConfigurationError(f"{text}. It wrote:\n{stderr}" if stderr else text)


#: statuses of a server with only the older SSE transport; the excluded ones are about keys and limits
_REFUSALS = frozenset(range(400, 500)) - {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.TOO_MANY_REQUESTS}
_INSTALL = "MCP needs the package mcp, which is not installed: pip install 'ensemble-ray[mcp]'"


@asynccontextmanager
async def open_session(
    address: ServerAddress, stderr: ErrorLines, on_fault: Callable[[str], None]
) -> AsyncGenerator[Client]:
    """Open a session, of the older SSE transport if streamable HTTP is refused, and close it in the same task."""
    try:
        from mcp import Client
        from mcp.client.sse import sse_client
        from mcp.client.streamable_http import streamable_http_client

        from ensemble_ray.tools.mcp.program import open_program
    except ImportError:
        raise ToolConfigurationError(_INSTALL) from None

    def client(transport: AbstractAsyncContextManager[TransportStreams], mode: Literal["auto", "legacy"]) -> Client:
        return Client(
            _repair_transport(transport, address.shown, on_fault),
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
        current_delivery.set(opening)  # each call sets its own
        http = await stack.enter_async_context(HttpClient(address))
        try:
            transport = streamable_http_client(address.url, http_client=http, max_sse_event_size=MESSAGE_BYTES)
            opened = await enter(client(transport, "auto"))
        except Exception as error:
            if (status := opening.status or 0) not in _REFUSALS:
                raise
            refusal = f"it refuses streamable HTTP (HTTP status {status}: {reason_of(error)})"
            sse = sse_client(
                address.url,
                httpx_client_factory=lambda headers=None, timeout=None, auth=None: SseHttpClient(address),  # noqa: ARG005
            )
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
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "it closed the connection" if error is None else tls_flaw(error) or message_of(error)


_SHOWN_LINES = 10
_LINE_CHARS = 2**14
_LAST_LINES_S = 0.5  # another program may keep the pipe open


class ErrorLines:
    """The last lines of a program's standard error, which a thread logs on DEBUG."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._stream: TextIO | None = None
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def open(self) -> TextIO:
        read_end, write_end = os.pipe()
        self._stream = os.fdopen(write_end, "w")
        threading.Thread(target=self._read, args=(read_end,), name="mcp stderr", daemon=True).start()
        return self._stream

    async def last(self) -> str:
        if self._stream is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_LINES_S):
                    await self._ended.wait()
        return "\n".join(self._lines)

    def close(self) -> None:
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
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ended.set)


_MOST_PAGES, _MOST_ENTRIES = 100, 1_000
_LISTINGS = ("tools", "prompts", "resources", "resourceTemplates")
_SIZE = "ensemble-ray/size"  # number and bytes of a listing's entries, in its metadata
_MOST_SHOWN, _SHOWN = 5, 150
_VERSION = "2025-11-25"  # with the strictest definition of a tool


def tool_names(names: Sequence[str], prefix: str) -> dict[str, str]:
    """Map a server's tool names to unique names for a model (S-LLM-62)."""
    made = {name: prefix + make_tool_name(name) for name in names}
    made = {name: f"_{fitting}" if fitting[:1].isdigit() else fitting for name, fitting in made.items()}
    counts = Counter(made.values())
    return {
        name: hash_name(fitting, name)
        if len(fitting) > LONGEST_NAME or (counts[fitting] > 1 and fitting != prefix + name)
        else fitting
        for name, fitting in made.items()
    }


async def collect_pages(fetch: Callable[[str | None], Awaitable[Page]], entries: Callable[[Page], list[T]]) -> list[T]:
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


def repair_listing(tools: Sequence[object], server: str) -> list[dict[str, Any]]:
    """Return the readable tools, without invalid members."""
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
                kept[name] = _repair_tool(dict(cast("dict[str, Any]", tool)))
            except (SchemaError, pydantic.ValidationError) as error:
                flaws.append(f"'{name[:100]}': {error}")
    log_left_out(server, flaws)
    return list(kept.values())


def log_left_out(server: str, flaws: Sequence[str]) -> None:
    if flaws:
        shown = "; ".join(one_line(flaw, _SHOWN) for flaw in flaws[:_MOST_SHOWN])
        more = "; ..." if len(flaws) > _MOST_SHOWN else ""
        _log.warning("MCP server '%s': %d of its tools are left out: %s%s", server, len(flaws), shown, more)


def _repair_tool(tool: dict[str, Any]) -> dict[str, Any]:
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


@asynccontextmanager
async def _repair_transport(
    transport: AbstractAsyncContextManager[TransportStreams], server: str, on_fault: Callable[[str], None]
) -> AsyncGenerator[TransportStreams]:
    async with transport as (received, sent):
        yield _RepairedMessages(received, server, on_fault), sent


class _RepairedMessages(ReadMessages):
    """Messages with repaired listings; an unreadable message ends the stream and calls `on_fault`."""

    def __init__(
        self, inner: ReadStream[SessionMessage | Exception], server: str, on_fault: Callable[[str], None]
    ) -> None:
        self._inner = inner
        self._server = server
        self._on_fault = on_fault

    @property
    def last_context(self) -> object:
        return getattr(self._inner, "last_context", None)  # the SDK reads it

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def receive(self) -> SessionMessage | Exception:
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
            # megabytes of schemas take seconds, and the loop runs time limits
            await asyncio.to_thread(_bound_listing, cast("dict[str, object]", result), self._server)
        return item


def _bound_listing(result: dict[str, object], server: str) -> None:
    listings = {name: cast("list[object]", result[name]) for name in _LISTINGS if isinstance(result.get(name), list)}
    size = (sum(map(len, listings.values())), len(to_json(result)))
    meta = result.get("_meta")
    result["_meta"] = {**(cast("dict[str, object]", meta) if isinstance(meta, dict) else {}), _SIZE: size}
    for entries in listings.values():
        del entries[_MOST_ENTRIES + 1 :]
    if "tools" in listings:
        result["tools"] = repair_listing(listings["tools"], server)


_SESSION_ID = "mcp-session-id"
_FAILURE_BYTES = 64 * 2**10


class HttpClient(httpx2.AsyncClient):
    """Records the delivery of a request in `current_delivery`."""

    def __init__(self, address: ServerAddress) -> None:
        headers = httpx2.Headers({"Accept-Encoding": ACCEPTED_CODINGS})
        headers.update(dict(address.headers))
        timeout = httpx2.Timeout(address.connect_timeout_s, read=None)
        super().__init__(headers=headers, timeout=timeout, event_hooks={"response": [_bound]})

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        delivery = current_delivery.get() or McpDelivery()
        delivery.sent += 1
        if request.method == "DELETE":  # do not wait for a server that hangs
            request.extensions["timeout"] = httpx2.Timeout(self.timeout.connect).as_dict()
        try:
            response = await super().send(request, **options)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout):
            delivery.sent -= 1
            raise
        delivery.status = response.status_code
        # the protocol's answer for an ended session
        delivery.is_forgotten = response.status_code == HTTPStatus.NOT_FOUND and _SESSION_ID in request.headers
        if delivery.is_forgotten:
            delivery.sent -= 1
        return response


class SseHttpClient(HttpClient):
    """Closes the stream of answers when the server refuses a message."""

    def __init__(self, address: ServerAddress) -> None:
        super().__init__(address)
        self._answers: _Answers | None = None

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        try:
            response = await super().send(request, **options)
            if request.method != "GET":
                async with contextlib.aclosing(response):
                    await response.aread()  # the SDK does not need the body, and hangs if it is unreadable
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
                delivery.sent -= 1  # the server did not process it
            await self._answers.aclose()
            return httpx2.Response(HTTPStatus.ACCEPTED, request=request)
        return response


class _Answers(httpx2.AsyncByteStream):
    """A broken connection ends the stream without an error."""

    def __init__(self, inner: httpx2.AsyncByteStream | httpx2.SyncByteStream) -> None:
        self._inner = cast("httpx2.AsyncByteStream", inner)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with contextlib.suppress(httpx2.TransportError, httpx2.StreamError):
            async for part in self._inner:
                yield part

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Unreadable(_Answers):
    def __init__(self, inner: httpx2.AsyncByteStream | httpx2.SyncByteStream, error: httpx2.StreamError) -> None:
        super().__init__(inner)
        self._error = error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        raise self._error
        yield b""


async def _bound(response: httpx2.Response) -> None:
    """Limit the size of an answer. The SDK limits each event of a stream."""
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
        response.stream = _Unreadable(response.stream, error)  # raising it would end the whole session
