"""Run a program as an MCP server. It and its process group end with the session, and with this process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from anyio import BrokenResourceError, CancelScope, ClosedResourceError, EndOfStream
from mcp.client.stdio import StdioServerParameters, get_default_environment, stdio_client
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from ensemble_ray.process.concurrency import after_fork
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.text.foreign_text import one_line
from ensemble_ray.tools.mcp.address import (
    MESSAGE_BYTES,
    McpDelivery,
    MessageStream,
    ReadMessages,
    ServerAddress,
    current_delivery,
)

if TYPE_CHECKING:
    from mcp.client._transport import ReadStream, TransportStreams, WriteStream


_log = bounded_logger(__name__)
_GRACE_S = 2.0  # after the end of its input, and after SIGTERM
_POLL_S = 0.01
_SHOWN = 200
_SHELL = "/bin/sh"
_HAS_SHELL = Path(_SHELL).exists()
_HAS_GROUPS = hasattr(os, "killpg")  # not on Windows, where event loops cannot read pipes either
#: Starts the program with the shell's process id. In its group, a guard shell waits for the end of a pipe that only this
#: process holds open, and then kills the group. It is no child of the program, which may wait for all its children.
_GUARDED = (
    '( (trap "" TERM INT HUP; { read -r _; kill -KILL 0; } <"/dev/fd/$0") </dev/null >/dev/null 2>&1 & ); exec "$@"'
)
_held: set[int] = set()  # our ends of those pipes


@after_fork
def _release_ends() -> None:
    """Close the ends in a forked child, which would keep its parent's programs alive."""
    for end in _held:
        os.close(end)
    _held.clear()


@asynccontextmanager
async def open_program(address: ServerAddress, stderr: TextIO) -> AsyncGenerator[TransportStreams]:
    name, *arguments = address.command
    if not _HAS_GROUPS:
        parameters = StdioServerParameters(command=name, args=arguments, env=dict(address.env), cwd=address.cwd)
        async with stdio_client(parameters, errlog=stderr) as (received, sent):
            yield _ReceivedBySdk(received), _SentBySdk(sent)
        return
    env = get_default_environment() | dict(address.env)
    with _guard(name, arguments, address.cwd, env.get("PATH", os.defpath)) as (guarded, watched):
        # Not by the event loop: uvloop leaves files of this process open in the program and its guard.
        process = subprocess.Popen(  # noqa: ASYNC220, S603  the developer's own program; it takes some milliseconds
            guarded,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=env,
            cwd=address.cwd,
            start_new_session=True,
            pass_fds=watched,
            bufsize=0,
        )
        try:
            loop, lines = asyncio.get_running_loop(), asyncio.StreamReader(limit=MESSAGE_BYTES)
            reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), process.stdout)
            writing, protocol = await loop.connect_write_pipe(
                lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), process.stdin
            )
            stdin = asyncio.StreamWriter(writing, protocol, None, loop)
            try:
                yield _Received(lines, address.shown), _Sent(stdin)
            finally:
                with CancelScope(shield=True):
                    stdin.close()
                    await _end(process, lines)
                reading.close()
                writing.abort()
        finally:
            if process.poll() is None:  # the group still has this id
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _guard(
    name: str, arguments: Sequence[str], cwd: str | None, path: str
) -> Generator[tuple[Sequence[str], Sequence[int]]]:
    """Yield the command with its guard, which kills it after the block."""
    where = os.path.join(cwd or os.curdir, name) if os.sep in name else name  # noqa: PTH118  a Path drops "./"
    found = shutil.which(where, path=path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such program", name)
    command = [str(Path(found).absolute()), *arguments]
    if not _HAS_SHELL:
        yield command, ()
        return
    watched, held = os.pipe()
    _held.add(held)
    try:
        yield [_SHELL, "-c", _GUARDED, str(watched), *command], [watched]
    finally:
        if held in _held:  # not in a forked child
            _held.discard(held)
            os.close(held)
            os.close(watched)


async def _end(process: subprocess.Popen[bytes], lines: asyncio.StreamReader) -> None:

    async def drain() -> None:  # a program that blocks on a write does not end
        while await lines.read(MESSAGE_BYTES):
            pass

    draining = asyncio.ensure_future(drain())
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if await _has_ended(process):
                break
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        await _has_ended(process)
    finally:
        draining.cancel()
        await asyncio.wait([draining])


async def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    for _ in range(int(_GRACE_S / _POLL_S)):
        if process.poll() is not None:
            return True
        await asyncio.sleep(_POLL_S)
    return False


class _Received(ReadMessages):
    def __init__(self, lines: asyncio.StreamReader, shown: str) -> None:
        self._lines = lines
        self._server = shown
        self._has_spoken = self._has_warned = False

    async def receive(self) -> SessionMessage | Exception:
        """Programs may print a greeting before the first message."""
        while True:
            await asyncio.sleep(0)  # reading buffered lines does not yield
            try:
                line = await self._lines.readline()
            except ValueError:
                return ValueError(f"it is longer than {MESSAGE_BYTES} bytes, the limit of a message")
            if not line:
                raise EndOfStream
            if not line.strip():
                continue
            try:
                message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
            except ValueError:
                shown = one_line(line.decode(errors="replace").strip(), _SHOWN)
                if self._has_spoken or shown.startswith("{"):
                    return ValueError(f"{shown!r} is no message of the protocol. Logs belong on standard error")
                level = logging.DEBUG if self._has_warned else logging.WARNING
                _log.log(level, "MCP server '%s' wrote to its standard output: %s", self._server, shown)
                self._has_warned = True
            else:
                self._has_spoken = True
                return message


class _Sent(MessageStream):
    def __init__(self, stdin: asyncio.StreamWriter) -> None:
        self._stdin = stdin

    async def send(self, item: SessionMessage, /) -> None:
        delivery = current_delivery.get() or McpDelivery()
        text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
        delivery.sent += 1  # before writing: a cancelled sender may have written it
        try:
            self._stdin.write(f"{text}\n".encode())
            await self._stdin.drain()
        except (OSError, RuntimeError):  # uvloop raises RuntimeError for a closed pipe
            delivery.sent -= 1
            raise BrokenResourceError from None


class _ReceivedBySdk(ReadMessages):
    def __init__(self, inner: ReadStream[SessionMessage | Exception]) -> None:
        self._inner = inner
        self._has_spoken = False

    async def receive(self) -> SessionMessage | Exception:
        while isinstance(item := await self._inner.receive(), Exception) and not self._has_spoken:
            pass
        self._has_spoken = True
        return item

    async def aclose(self) -> None:
        await self._inner.aclose()


class _SentBySdk(MessageStream):
    def __init__(self, inner: WriteStream[SessionMessage]) -> None:
        self._inner = inner

    async def send(self, item: SessionMessage, /) -> None:
        delivery = current_delivery.get() or McpDelivery()
        delivery.sent += 1  # before sending: a cancelled sender may have passed it on
        try:
            await self._inner.send(item)
        except (BrokenResourceError, ClosedResourceError):
            delivery.sent -= 1
            raise

    async def aclose(self) -> None:
        await self._inner.aclose()
