"""Run CPU-bound functions in other processes. An unpicklable one fails only its own call."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import pickle
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Protocol, cast

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, ToolExecutionError, message_of
from ensemble_ray.errors.travel import ErrorChain
from ensemble_ray.events.telemetry.listener import use_span
from ensemble_ray.process.concurrency import abandon, after_fork, new_lock, track
from ensemble_ray.tools.tool import ToolContext, ToolOutcome, outcome_of_error, outcome_of_return, use_tool_context
from ensemble_ray.tools.user_code import collect_here


class CannotTravelError(Exception): ...


def pack(value: object) -> bytes:
    from ensemble_ray.process.config import dumps

    try:
        return dumps(value)
    except Exception as error:
        raise CannotTravelError(message_of(error)) from error


def pack_tool(function: Callable[..., object]) -> bytes:
    return pack(partial(_perform, function))


def call_packed(function: bytes, arguments: bytes) -> bytes:
    """Call a packed function in the other process; return its packed value or error."""
    try:
        callee = cast("Callable[..., object]", pickle.loads(function))  # noqa: S301  packed by our parent process
        named = cast("Mapping[str, object]", pickle.loads(arguments))  # noqa: S301  same
    except Exception as error:  # noqa: BLE001  importing user modules may raise any error
        return pack((None, CannotTravelError(message_of(error))))
    try:
        reply: tuple[object, BaseException | ErrorChain | None] = (callee(**named), None)
    except Exception as error:  # noqa: BLE001  user code
        reply = (None, ErrorChain(error))
    except SystemExit as error:
        reply = (None, RuntimeError(f"SystemExit: {error}"))
    try:
        return pack(reply)
    except CannotTravelError as error:
        return pack((None, TypeError(f"its result cannot travel between processes: {error}")))


def unpack_reply(reply: bytes) -> object:
    value, error = cast("tuple[object, BaseException | None]", pickle.loads(reply))  # noqa: S301  from our own worker
    if error is not None:
        raise error
    return value


def _perform(
    function: Callable[..., object],
    *,
    positional: tuple[object, ...],
    named: Mapping[str, object],
    tool_name: str,
    idempotency_key: str,
    traceparent: str = "",
) -> ToolOutcome:
    """Call a tool in the other process, with a logger and the key as context (S-SET-35)."""
    context = ToolContext(tool_name=tool_name, idempotency_key=idempotency_key)
    with use_tool_context(context), use_span(traceparent):
        try:
            return outcome_of_return(collect_here(function(*positional, **named)), tool_name)
        except (ExitEarlyError, IllegalStateError):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  the model reads it
            return outcome_of_error(error)


_DIED = "the process that ran it ended unexpectedly (out of memory, or a crash in native code)"


class LokyCpuPool:
    """The `CpuPool` of one machine without Ray.

    A single call cannot be stopped: after a timeout, its group of processes ends with its other calls. If a process dies, each
    call of its group that may be repeated runs once more in a group of one process.
    """

    def __init__(self, *, workers: int | None = None, idle_s: float = 60.0) -> None:
        self._workers = workers
        self._idle_s = idle_s
        self._group: _Group | None = None
        self._groups: weakref.WeakSet[_Group] = weakref.WeakSet()
        # A call's time starts when a processor is free for it.
        self._slots = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()
        self._lock = new_lock()
        track(self)

    def after_fork(self) -> None:
        abandon(self._group)
        self._group = None
        self._groups.clear()

    async def run(
        self, function: bytes, arguments: Mapping[str, object], *, timeout_s: float | None, may_repeat: bool = True
    ) -> object:
        packed = pack(dict(arguments))
        async with self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._size())):
            try:
                with self._lock:
                    if self._group is None:
                        self._group = self._open_group(self._size())
                    group = self._group
                reply = await self._call(group, function, packed, timeout_s)
            except _ProcessDiedError as error:
                if not may_repeat:
                    raise ToolExecutionError(_DIED) from error
                alone = self._open_group(1)
                try:
                    reply = await self._call(alone, function, packed, timeout_s)
                except _ProcessDiedError as died:
                    raise ToolExecutionError(_DIED) from died
                finally:
                    alone.retire()
        return unpack_reply(reply)

    def close(self) -> None:
        self._group = None
        for group in list(self._groups):
            group.kill()

    async def _call(self, group: _Group, function: bytes, arguments: bytes, timeout_s: float | None) -> bytes:
        try:
            return await group.call(function, arguments, timeout_s=timeout_s)
        finally:
            if group.is_retired and self._group is group:
                self._group = None

    def _open_group(self, workers: int) -> _Group:
        group = _Group(workers, self._idle_s)
        self._groups.add(group)
        return group

    def _size(self) -> int:
        # within the process's affinity and control group
        return self._workers or cast("int", importlib.import_module("loky").cpu_count())


class _ProcessDiedError(Exception): ...


class _LokyExecutor(Protocol):
    def submit(self, function: Callable[[bytes, bytes], bytes], /, *arguments: bytes) -> Future[bytes]: ...
    def shutdown(self, wait: bool = True, kill_workers: bool = False) -> None: ...  # noqa: FBT001, FBT002  loky's


class _Group:
    def __init__(self, workers: int, idle_s: float) -> None:
        loky = importlib.import_module("loky")  # slow to import
        self._died: type[BaseException] = loky.process_executor.BrokenProcessPool
        self._executor: _LokyExecutor = loky.ProcessPoolExecutor(max_workers=workers, timeout=idle_s)
        self._open = 0
        self.is_retired = False
        self._lock = new_lock()
        _groups.add(self)

    async def call(self, function: bytes, arguments: bytes, *, timeout_s: float | None) -> bytes:
        with self._lock:
            self._open += 1
        try:
            with _may_have_children():
                future = self._executor.submit(call_packed, function, arguments)
            _kill_at_exit()
            try:
                async with asyncio.timeout(timeout_s):
                    return await asyncio.wrap_future(future)
            finally:
                if not future.cancel() and not future.done():  # it keeps running
                    self.is_retired = True
        except self._died as error:
            self.is_retired = True
            raise _ProcessDiedError from error
        finally:
            with self._lock:
                self._open -= 1
            self._kill_if_idle()

    def retire(self) -> None:
        self.is_retired = True
        self._kill_if_idle()

    def kill(self) -> None:
        self.is_retired = True
        self._executor.shutdown(wait=False, kill_workers=True)

    def _kill_if_idle(self) -> None:
        if self.is_retired and self._open == 0:
            self.kill()


_groups: weakref.WeakSet[_Group] = weakref.WeakSet()
_hooked = threading.Event()


@after_fork
def _abandon_groups() -> None:
    if _groups:  # the child would kill or join the parent's processes at its end
        children = cast("set[object]", importlib.import_module("multiprocessing.process")._children)  # noqa: SLF001  as `multiprocessing` does in its own children
        children.difference_update([each for each in children if type(each).__module__.startswith("loky.")])
    abandon(*_groups)
    _groups.clear()
    _hooked.clear()


@contextlib.contextmanager
def _may_have_children() -> Generator[None]:
    """Allow a daemon to start processes."""
    config = cast("dict[str, object]", getattr(multiprocessing.current_process(), "_config", {}))
    before = config.get("daemon", False)
    if before:
        config["daemon"] = False
    try:
        yield
    finally:
        if before:
            config["daemon"] = before


def _kill_at_exit() -> None:
    """Register, once, that all groups are killed at the end of this process. loky's own hook waits for every call.

    `atexit` is too late, because threads are joined before it. The hooks of `threading` run in reverse order, this one before
    loky's. A process of `multiprocessing` joins its children even earlier, after its finalizers.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is None or _hooked.is_set():
        return
    _hooked.set()
    importlib.import_module("multiprocessing.util").Finalize(None, _kill_all, exitpriority=100)
    with contextlib.suppress(RuntimeError):
        register(_kill_all)


def _kill_all() -> None:
    for group in list(_groups):
        group.kill()
