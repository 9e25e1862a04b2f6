"""Package tools: functions that are heavy on the processor, in other processes of this machine.

In: a packed function and its arguments. Out: what it returned, or the error it raised. Both directions cross as bytes
that we packed, so that a value or an error that cannot travel breaks its own call and not the pool.

What must never happen here: one call's timeout, crash or cancellation ends another call.
"""

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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, cast

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, ToolExecutionError, TryAgain, message_of
from ensemble_ray.errors.texts import format_with_class, user_traceback
from ensemble_ray.errors.travel import Chain
from ensemble_ray.events.telemetry.active import use_span
from ensemble_ray.process.forks import abandon, after_fork, new_lock, track
from ensemble_ray.tools.tool import ToolContext, ToolResult, use_tool_context
from ensemble_ray.tools.waiting import collect_here, render_value


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What one call gave."""

    #: full text for the model, before any truncation (S-ENG-71)
    text: str
    #: `failure`: the tool said no; `error`: it raised, or its arguments did not fit, or it took too long
    outcome: Literal["success", "failure", "error"] = "success"
    #: payload of a `ToolResult`, for events and traces
    structured_output: Any = None
    #: where the user's code raised, for the log; "" where it did not
    traceback: str = field(default="", repr=False, compare=False)
    #: whether the tool raised `TryAgain`: the text is what it says, and no error
    asks_again: bool = False
    #: what was repaired in the arguments before the call (S-LLM-43)
    repairs: tuple[str, ...] = ()


def outcome_of_result(result: ToolResult) -> ToolOutcome:
    """Return the outcome of an AgentTool's result (S-TOOL-22)."""
    if result.is_success:
        return ToolOutcome(render_value(result.output), "success", result.structured_output)
    return ToolOutcome(f"Error: {result.error_message}", "failure")


def outcome_of_return(value: object, tool_name: str = "") -> ToolOutcome:
    """Return the outcome of a `@tool` function's value (S-TOOL-14); a string that begins `Error:` is a failure (S-TOOL-15).

    Raises:
        ResultError: the value has no text (S-LLM-47).
    """
    if isinstance(value, ToolResult):
        return outcome_of_result(value)
    failed = isinstance(value, str) and value.startswith("Error:")
    return ToolOutcome(render_value(value, f"Tool '{tool_name}'"), "failure" if failed else "success")


def outcome_of_error(error: BaseException, *, prefix: str = "Tool error") -> ToolOutcome:
    """Return the outcome of an error, with its class (S-ENG-51, S-ENG-52); the place is for the log alone.

    What it says with `TryAgain` is the text as it is (S-TOOL-54).
    """
    if isinstance(error, TryAgain):
        return ToolOutcome(str(error), "failure", asks_again=True)
    message = f"the tool called sys.exit({error.code!r})" if isinstance(error, SystemExit) else format_with_class(error)
    return ToolOutcome(f"{prefix}: {message}", "error", traceback=user_traceback(error))


def unknown_tool(name: str) -> ToolOutcome:
    """Return the outcome of a call of an unknown tool (S-ENG-55, S-SET-25)."""
    return ToolOutcome(f"Error: Unknown tool '{name}'", "failure")


class CannotTravelError(Exception):
    """A function or its arguments cannot be carried to another process, or not be loaded there."""


def pack(value: object) -> bytes:
    """Pack a function or value as bytes; what a script defines travels by value.

    Raises:
        CannotTravelError: it holds something that does not pickle.
    """
    from ensemble_ray.process.config import dumps  # most processes never need it

    try:
        return dumps(value)
    except Exception as error:
        raise CannotTravelError(message_of(error)) from error


def pack_tool(function: Callable[..., object]) -> bytes:
    """Wrap a `@tool` function for a `CpuPool`; running it there gives a `ToolOutcome`.

    Raises:
        CannotTravelError: it holds something that does not pickle.
    """
    return pack(partial(_perform, function))


def call_packed(function: bytes, arguments: bytes) -> bytes:
    """Load, call and pack what came of it, in the other process; raise nothing."""
    try:
        callee = cast("Callable[..., object]", pickle.loads(function))  # noqa: S301  packed by us in the parent
        named = cast("Mapping[str, object]", pickle.loads(arguments))  # noqa: S301  same
    except Exception as error:  # noqa: BLE001  whatever importing user modules raises
        return pack((None, CannotTravelError(message_of(error))))
    try:
        reply: tuple[object, BaseException | Chain | None] = (callee(**named), None)
    except Exception as error:  # noqa: BLE001  user code
        reply = (None, Chain(error))
    except SystemExit as error:
        reply = (None, RuntimeError(f"SystemExit: {error}"))
    try:
        return pack(reply)
    except CannotTravelError as error:
        return pack((None, TypeError(f"what it returned cannot travel between processes: {error}")))


def unpack_reply(reply: bytes) -> object:
    """Return the value that `call_packed` packed, or raise its error."""
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
    """One call of a tool in the other process; of the context only logger and key exist there (S-SET-35)."""
    context = ToolContext(tool_name=tool_name, idempotency_key=idempotency_key)
    with use_tool_context(context), use_span(traceparent):
        try:
            return outcome_of_return(collect_here(function(*positional, **named)), tool_name)
        except (ExitEarlyError, IllegalStateError):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  told to the model
            return outcome_of_error(error)


#: The model's text for a call whose process died.
_DIED = "the process that ran it ended unexpectedly (out of memory, or a crash in native code)"


class LokyCpuPool:
    """The `CpuPool` of one machine without Ray: as many processes as processors, started when first needed.

    A call that is given up (timeout, cancellation) cannot be stopped alone: its group of processes takes no new call,
    finishes what else it runs, and is killed then. A process that dies takes the calls of its group with it; those that
    may be repeated are tried once more alone, so that only the one that kills its process fails.
    """

    def __init__(self, *, workers: int | None = None, idle_s: float = 60.0) -> None:
        self._workers = workers
        self._idle_s = idle_s
        self._group: _Group | None = None
        self._groups: weakref.WeakSet[_Group] = weakref.WeakSet()
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = new_lock()
        track(self)

    def after_fork(self) -> None:
        """Begin without processes."""
        abandon(self._group)
        self._group = None
        self._groups.clear()

    async def run(
        self, function: bytes, arguments: Mapping[str, object], *, timeout_s: float | None, may_repeat: bool = True
    ) -> object:
        """Call a packed function with keyword arguments in another process and give its result.

        The time runs from when a processor is free for the call. What the function raises is raised here.

        Raises:
            CannotTravelError: function or arguments cannot be loaded there.
            TimeoutError: the time is up; the process is ended.
            ToolExecutionError: the process died (out of memory, a crash in native code).
        """
        packed = pack(dict(arguments))
        async with self._slot():
            try:
                reply = await self._call(self._current(), function, packed, timeout_s)
            except _ProcessDiedError as error:
                if not may_repeat:
                    raise ToolExecutionError(_DIED) from error
                alone = _Group(1, self._idle_s)
                self._groups.add(alone)
                try:
                    reply = await self._call(alone, function, packed, timeout_s)
                except _ProcessDiedError as died:
                    raise ToolExecutionError(_DIED) from died
                finally:
                    alone.retire()
        return unpack_reply(reply)

    def close(self) -> None:
        """End all processes now, whatever they are doing."""
        self._group = None
        for group in list(self._groups):
            group.kill()

    async def _call(self, group: _Group, function: bytes, arguments: bytes, timeout_s: float | None) -> bytes:
        try:
            return await group.call(function, arguments, timeout_s=timeout_s)
        finally:
            if group.is_retired and self._group is group:
                self._group = None

    def _current(self) -> _Group:
        with self._lock:
            if self._group is None:
                self._group = _Group(self._workers or _processors(), self._idle_s)
                self._groups.add(self._group)
            return self._group

    def _slot(self) -> asyncio.Semaphore:
        """One per processor and event loop, so that a call's time begins when it really runs."""
        return self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._workers or _processors()))


class _ProcessDiedError(Exception):
    """A process of the group died; whose call it was is not known."""


class _LokyExecutor(Protocol):
    """What we use of loky, which has no types."""

    def submit(self, function: Callable[[bytes, bytes], bytes], /, *arguments: bytes) -> Future[bytes]: ...
    def shutdown(self, wait: bool = True, kill_workers: bool = False) -> None: ...  # noqa: FBT001, FBT002  theirs


class _Group:
    """One set of worker processes and the calls that it runs."""

    def __init__(self, workers: int, idle_s: float) -> None:
        loky = importlib.import_module("loky")  # slow to import, and few runs need it
        self._died: type[BaseException] = loky.process_executor.BrokenProcessPool
        self._executor: _LokyExecutor = loky.ProcessPoolExecutor(max_workers=workers, timeout=idle_s)
        self._open = 0
        self.is_retired = False
        self._lock = new_lock()
        _groups.add(self)

    async def call(self, function: bytes, arguments: bytes, *, timeout_s: float | None) -> bytes:
        """Run one call; retire the group if it has to be given up or if a process died."""
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
                if not future.cancel() and not future.done():  # it runs on, with nobody waiting
                    self.is_retired = True
        except self._died as error:
            self.is_retired = True
            raise _ProcessDiedError from error
        finally:
            with self._lock:
                self._open -= 1
            self._end_if_done()

    def retire(self) -> None:
        """Take no new call, and end when nothing is waited for."""
        self.is_retired = True
        self._end_if_done()

    def kill(self) -> None:
        """End the processes now."""
        self.is_retired = True
        self._executor.shutdown(wait=False, kill_workers=True)

    def _end_if_done(self) -> None:
        if self.is_retired and self._open == 0:
            self.kill()


def _processors() -> int:
    """Processors that this process may use: affinity and control groups counted."""
    return cast("int", importlib.import_module("loky").cpu_count())


#: Groups that may have processes, for the end of this process.
_groups: weakref.WeakSet[_Group] = weakref.WeakSet()
_hooked = threading.Event()


@after_fork
def _leave_groups() -> None:
    if _groups:  # `multiprocessing` ends or joins them when a process ends, and would do so in the child
        children = cast("set[object]", importlib.import_module("multiprocessing.process")._children)  # noqa: SLF001  as in its own children
        children.difference_update([each for each in children if type(each).__module__.startswith("loky.")])
    abandon(*_groups)
    _groups.clear()
    _hooked.clear()


@contextlib.contextmanager
def _may_have_children() -> Generator[None]:
    """Let a process of a `multiprocessing.Pool`, which is a daemon, start others: loky's end by themselves when they are idle."""
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
    """Once, have every group killed when this process ends; loky's hook would wait for a call that never returns.

    `atexit` is too late, since threads are joined before it. The hooks of `threading`, which loky and the executors of
    the standard library use too, run last in first out: ours is set after loky's, which comes with the first call. A process
    of `multiprocessing` joins its children before that, and has finalisers of its own.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is None or _hooked.is_set():
        return
    _hooked.set()
    importlib.import_module("multiprocessing.util").Finalize(None, _kill_all, exitpriority=100)
    with contextlib.suppress(RuntimeError):  # this process is ending already
        register(_kill_all)


def _kill_all() -> None:
    for group in list(_groups):
        group.kill()
