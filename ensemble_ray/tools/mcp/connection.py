"""The session with one MCP server: one task opens, uses and closes it. Package: tools.

In: work to do with the session, sent through a queue from any loop of the process. Out: what it gave.
Rules: the session's cancel scopes stay in its owner's task. Work that is cancelled is cancelled at the server. A server
that is lost ends the owner, and the next work opens a new session. Work that reached the lost server is done again once,
if it may be. A session that nobody uses is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TextIO, TypeVar, cast

from ensemble_ray.errors import ToolConfigurationError, message_of
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.loop import bridge
from ensemble_ray.tools.mcp.address import ServerAddress
from ensemble_ray.tools.mcp.questions import elicitation_callback, sampling_callback

if TYPE_CHECKING:
    import httpx2
    from mcp import Client

__all__ = ["ServerConnection", "ServerLostError", "connection_to"]

T = TypeVar("T")

_log = bounded_logger(__name__)
#: How long a session without work stays open, s.
_IDLE_S = 60.0
#: Lines of a program's standard error that an error shows.
_SHOWN_LINES = 10
#: What the SDK answers requests of a session that an HTTP server no longer knows: they were not carried out.
_FORGOTTEN = "Session terminated"
_INSTALL = "MCP needs the package mcp, which is not installed: pip install 'ensemble-ray[mcp]'"


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

    def fail(self, error: BaseException) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


#: Each server that this process has asked; only the library's loop touches them.
_connections: dict[ServerAddress, ServerConnection] = {}


def connection_to(address: ServerAddress) -> ServerConnection:
    """Return this process's connection to a server; equal addresses have the same."""
    return _connections.setdefault(address, ServerConnection(address))


class ServerConnection:
    """Opens the session when it is needed, and again when it was lost."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        #: of the owner that takes work; None: there is none
        self._inbox: asyncio.Queue[_Request[object] | None] | None = None
        self._owners: set[asyncio.Task[None]] = set()

    async def ask(self, work: Callable[[Client], Awaitable[T]], *, may_repeat: bool) -> T:
        """Do work with the session, from any loop.

        Args:
            work: What to do with the SDK's client.
            may_repeat: Whether it may be done twice when the server is lost meanwhile.

        Raises:
            ServerLostError: the server went away, and the work may have been done, or went away twice.
            ToolConfigurationError: it cannot be started or reached, or the SDK is not installed.
            MCPError: the server refused it.
        """
        return await bridge(self._ask(work, may_repeat=may_repeat))

    async def _ask(self, work: Callable[[Client], Awaitable[T]], *, may_repeat: bool) -> T:
        try:
            return await self._ask_once(work)
        except ServerLostError as lost:
            if lost.may_be_done and not may_repeat:
                raise
            _log.warning("%s; it is asked again", lost)
        return await self._ask_once(work)

    async def _ask_once(self, work: Callable[[Client], Awaitable[T]]) -> T:
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        request = _Request(work, outcome)
        if self._inbox is None:
            self._inbox = asyncio.Queue()
            owner = asyncio.create_task(self._own(self._inbox), name=f"mcp {self._address.shown}")
            self._owners.add(owner)
            owner.add_done_callback(self._owners.discard)
        self._inbox.put_nowait(cast("_Request[object]", request))
        return await outcome

    # The owner.

    async def _own(self, inbox: asyncio.Queue[_Request[object] | None]) -> None:
        """Hold one session from its opening to its end; whatever still waits is told why it ended."""
        running: dict[asyncio.Task[None], _Request[object]] = {}
        is_open = False
        error: BaseException | None = None
        stderr = _ErrorLines()
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._address.connect_timeout_s):
                    client = await stack.enter_async_context(_opened(self._address, stderr))
                is_open = True
                await self._serve(client, inbox, running)
        except (Exception, asyncio.CancelledError) as ended:  # noqa: BLE001  told to all who wait
            error = ended
        finally:
            self._release(inbox)
            stderr.close()
        failure = self._lost(error) if is_open else self._unreachable(error, stderr)
        for request in running.values():
            request.fail(failure)
        for task in running:
            task.cancel()
        not_begun = ServerLostError(str(failure), may_be_done=False) if is_open else failure
        while not inbox.empty():
            request_left = inbox.get_nowait()
            if request_left is not None:
                request_left.fail(not_begun)

    async def _serve(
        self,
        client: Client,
        inbox: asyncio.Queue[_Request[object] | None],
        running: dict[asyncio.Task[None], _Request[object]],
    ) -> None:
        """Begin work as it comes, until the server is lost or nobody has used it for a while."""
        while True:
            try:
                request = await asyncio.wait_for(inbox.get(), _IDLE_S)
            except TimeoutError:
                if running:
                    continue
                self._release(inbox)
                return
            if request is None:
                return
            if request.outcome.done():  # cancelled before it began
                continue
            task = asyncio.create_task(self._carry_out(client, request, inbox))
            running[task] = request
            task.add_done_callback(lambda done: running.pop(done, None))
            request.outcome.add_done_callback(
                lambda outcome, task=task: task.cancel() if outcome.cancelled() else None  # type: ignore[misc]
            )

    async def _carry_out(
        self, client: Client, request: _Request[object], inbox: asyncio.Queue[_Request[object] | None]
    ) -> None:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        try:
            result = await request.work(client)
        except asyncio.CancelledError:  # by who asked; or with the session, whose owner tells why
            raise
        except MCPError as error:
            is_forgotten = error.message == _FORGOTTEN
            if error.code != CONNECTION_CLOSED and not is_forgotten:
                request.fail(error)
                return
            self._release(inbox)  # first: work that is done again must find a new session
            request.fail(self._lost(error, may_be_done=not is_forgotten))
            inbox.put_nowait(None)
        except Exception as error:  # noqa: BLE001  what the SDK makes of an answer belongs to who asked
            request.fail(error)
        else:
            if not request.outcome.done():
                request.outcome.set_result(result)

    def _release(self, inbox: asyncio.Queue[_Request[object] | None]) -> None:
        """Take no more work: the next opens a session of its own."""
        if self._inbox is inbox:
            self._inbox = None

    def _lost(self, error: BaseException | None, *, may_be_done: bool = True) -> ServerLostError:
        why = "" if error is None else f": {_reason(error)}"
        return ServerLostError(f"MCP server '{self._address.shown}' went away{why}", may_be_done=may_be_done)

    def _unreachable(self, error: BaseException | None, stderr: _ErrorLines) -> Exception:
        if isinstance(error, ToolConfigurationError):
            return error
        what = "started" if self._address.command else "reached"
        why = f"no answer within {self._address.connect_timeout_s:g} s" if isinstance(error, TimeoutError) else None
        text = f"MCP server '{self._address.shown}' cannot be {what}: {why or _reason(error)}"
        return ToolConfigurationError(f"{text}. It wrote:\n{stderr.text}" if stderr.text else text)


@asynccontextmanager
async def _opened(address: ServerAddress, stderr: _ErrorLines) -> AsyncGenerator[Client]:
    """Open a session, which is closed in the same task."""
    try:
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client
    except ImportError:
        raise ToolConfigurationError(_INSTALL) from None
    async with AsyncExitStack() as stack:
        if address.command:
            program, *arguments = address.command
            parameters = StdioServerParameters(command=program, args=arguments, env=dict(address.env), cwd=address.cwd)
            transport = stdio_client(parameters, errlog=stderr.open())
        else:
            http = await stack.enter_async_context(_http_client(address))
            transport = streamable_http_client(address.url, http_client=http)
        asks_person = elicitation_callback if address.has_reviewer else None
        asks_model = sampling_callback if address.has_model else None
        client = Client(
            transport, raise_exceptions=True, elicitation_callback=asks_person, sampling_callback=asks_model
        )
        yield await stack.enter_async_context(client)


def _http_client(address: ServerAddress) -> httpx2.AsyncClient:
    import httpx2

    # How long an answer may take is the matter of each call.
    timeout = httpx2.Timeout(address.connect_timeout_s, read=None)
    return httpx2.AsyncClient(headers=dict(address.headers), timeout=timeout)


def _reason(error: BaseException | None) -> str:
    """Return the text of what ended a session: of the first error, where several came together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "it closed the connection" if error is None else message_of(error)


class _ErrorLines:
    """The newest lines of a program's standard error; a thread reads them, and logs them on DEBUG."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._stream: TextIO | None = None
        self._reader: threading.Thread | None = None

    def open(self) -> TextIO:
        """Return what the program is given to write to."""
        read_end, write_end = os.pipe()
        self._stream = os.fdopen(write_end, "w")
        self._reader = threading.Thread(target=self._read, args=(read_end,), name="mcp stderr", daemon=True)
        self._reader.start()
        return self._stream

    @property
    def text(self) -> str:
        """Its lines."""
        return "\n".join(self._lines)

    def close(self) -> None:
        """Close this process's end; the thread ends with the program."""
        if self._stream is not None:
            self._stream.close()
        if self._reader is not None:
            self._reader.join(timeout=0.5)

    def _read(self, read_end: int) -> None:
        with contextlib.suppress(OSError), os.fdopen(read_end, errors="replace") as lines:
            for line in lines:
                self._lines.append(line.rstrip("\n")[:500])
                _log.debug("%s", line.rstrip("\n"))
