"""The session with one MCP server: one task opens, uses and closes it. Package: tools.

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
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from ensemble_ray.errors import ToolConfigurationError
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.forks import abandon, after_fork
from ensemble_ray.process.loop import bridge, library_loop
from ensemble_ray.tools.mcp.address import ServerAddress
from ensemble_ray.tools.mcp.delivery import McpDelivery, current_delivery, is_lost
from ensemble_ray.tools.mcp.opening import ErrorLines, open_session, reason_of

if TYPE_CHECKING:
    from mcp import Client

__all__ = ["ServerLostError", "ask_server"]

T = TypeVar("T")

_log = bounded_logger(__name__)
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
