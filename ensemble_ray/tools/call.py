"""Call one tool, or several at the same time."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

from msgspec import Struct
from pydantic import BaseModel
from pydantic_core import from_json, to_json

from ensemble_ray.errors import AgentExecutionError, ExitEarlyError, IllegalStateError
from ensemble_ray.events import Event
from ensemble_ray.ports import CustomToolMetrics, ask_driver, services
from ensemble_ray.process.concurrency import USER_ERRORS
from ensemble_ray.process.context import CallLog, bounded_logger, current_traceparent
from ensemble_ray.process.run_context import CurrentRun, use_run
from ensemble_ray.text.foreign_text import TextLine, one_line, whole_text
from ensemble_ray.tools.approval import approve, preview
from ensemble_ray.tools.cpu import CannotTravelError, pack, pack_tool
from ensemble_ray.tools.registry import BoundAgentTool, BoundFunction, BoundTool
from ensemble_ray.tools.schema import ArgumentError, repair_arguments, signature_of
from ensemble_ray.tools.tool import (
    AbstractAgentTool,
    ContextAgentTool,
    CustomSchemaAgentTool,
    ToolContext,
    ToolOutcome,
    ToolResult,
    TypedAgentTool,
    as_result,
    input_type_of,
    outcome_of_error,
    outcome_of_result,
    outcome_of_return,
    parse_input,
    use_tool_context,
)
from ensemble_ray.tools.user_code import TimeLimit, call_to_end, collect

T = TypeVar("T")

_log = bounded_logger(__name__)

BATCH_LIMIT_S = 300.0
#: If a tool's own limit ends together with the batch's, the model still receives its text (S-SET-34).
_GRACE_S = 0.25


async def call_tool(bound: BoundTool, arguments: str, *, context: ToolContext) -> ToolOutcome:
    """Call a tool once. Errors become outcomes, except `ExitEarlyError` and `IllegalStateError` (S-TOOL-23)."""
    started_s = time.perf_counter()
    context = replace(context, emit=_LoopEmitter(context.emit))
    repairs: list[str] = []
    try:
        with CallLog() as log:
            outcome = await _perform(bound, arguments, context, repairs)
    except IllegalStateError as error:
        cut = one_line(cut_for_log(arguments, context.log_truncate_length), None)
        _log.info("[%s] Tool configuration error: %s(%s) -> %s", context.agent_role, bound.name, cut, error)
        raise
    text = whole_text(outcome.text)
    if text is not outcome.text or repairs or log.lines:
        outcome = replace(outcome, text=text, repairs=tuple(repairs), log=log.lines or outcome.log)
    _log_call(bound.name, arguments, outcome, context, started_s)
    return outcome


async def call_batch(
    calls: Sequence[Callable[[], Awaitable[T]]],
    *,
    agent_role: str,
    task_description: str = "",
    limit_s: float | None = BATCH_LIMIT_S,
) -> list[T]:
    """Run calls together. The first error is raised at the end (S-TOOL-80, S-TOOL-85)."""
    if len(calls) == 1:
        return [await calls[0]()]

    async def started(call: Callable[[], Awaitable[T]]) -> T | _Stopped:
        try:
            return await call()
        except (SystemExit, KeyboardInterrupt) as stop:  # it would end the loop
            return _Stopped(stop)

    tasks = [asyncio.ensure_future(started(call)) for call in calls]
    try:
        pending = set(tasks)
        for wait_s in (limit_s, _GRACE_S):
            if pending:
                _, pending = await asyncio.wait(pending, timeout=wait_s)
        if pending and limit_s is not None:
            minutes = limit_s / 60
            length = f"{minutes:g} minutes" if minutes.is_integer() else f"{limit_s:g} seconds"
            msg = f"Parallel tool execution for agent '{agent_role}' timed out after {length}"
            raise AgentExecutionError(msg, agent_role, task_description)
    finally:
        for task in tasks:
            task.cancel()
    results: list[T] = []
    for task in tasks:
        result = task.result()
        if isinstance(result, _Stopped):
            raise result.stop
        results.append(result)
    return results


def truncate_output(text: str, max_length: int) -> str:
    if max_length < 0 or len(text) <= max_length:
        return text
    return f"{text[:max_length]}... [truncated, full length: {len(text)} chars]"


def cut_for_log(text: str, length: int) -> str:
    """Return the part of a text for a log line (S-ENG-72): -1 all, 0 none."""
    if length < 0 or len(text) <= length:
        return text
    return f"{text[:length]}..." if length else ""


class _TimedOutError(Exception):
    """A `TimeoutError`, in contrast, may be the tool's own."""


class _LoopEmitter:
    __slots__ = ("_emit", "_loop", "_thread")

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def __call__(self, event: Event) -> None:
        if threading.get_ident() == self._thread:
            self._emit(event)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._emit, event)


async def _perform(bound: BoundTool, arguments: str, context: ToolContext, repairs: list[str]) -> ToolOutcome:
    prefix = "Error" if isinstance(bound, BoundAgentTool) else "Tool error"
    try:
        if isinstance(bound, BoundAgentTool):
            text = _input_of(bound, arguments, repairs)
            async with _time_limit(bound.timeout_s, context):
                if isinstance(bound.tool, AbstractAgentTool):
                    with use_tool_context(context):
                        return outcome_of_result(await bound.tool.aexecute(text))
                # A plain AgentTool must not see the context of an outer tool.
                with use_tool_context(context if isinstance(bound.tool, ContextAgentTool) else None):
                    returned = await call_to_end(bound.tool.execute, text)
                return outcome_of_result(as_result(returned, bound.name))
        return await _call_function(bound, arguments, context, repairs)
    except (ExitEarlyError, IllegalStateError):
        raise
    except _TimedOutError:
        return ToolOutcome(f"{prefix}: timed out after {bound.timeout_s:g} s", "error")
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return outcome_of_error(error, prefix=prefix)  # raised by the tool
    except USER_ERRORS as error:
        return outcome_of_error(error, prefix=prefix)


@asynccontextmanager
async def _time_limit(timeout_s: float | None, context: ToolContext) -> AsyncGenerator[None]:
    limit = TimeLimit(timeout_s, context.time_limits)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.is_over:
            raise _TimedOutError from None
        raise


def _input_of(bound: BoundAgentTool, arguments: str, repairs: list[str]) -> str:
    if bound.takes_arguments:
        # Tools with their own schema check arguments themselves.
        is_valid = False
        if isinstance(bound.tool, TypedAgentTool) and not isinstance(bound.tool, CustomSchemaAgentTool):
            kind = input_type_of(cast("TypedAgentTool[BaseModel]", bound.tool))
            is_valid = arguments.lstrip().startswith("{") and isinstance(parse_input(arguments, kind), BaseModel)
        return arguments if is_valid else _repaired(bound, arguments, repairs)
    value = _value_of_input(arguments)
    if value is None and (repaired := repair_arguments(arguments, bound.spec.parameters)) is not None:
        value = _value_of_input(repaired.text)
        repairs.extend(repaired.repairs if value is not None else ())
    if value is None:
        return arguments
    return value if isinstance(value, str) else to_json(value).decode()


def _value_of_input(arguments: str) -> object:
    try:
        data: object = from_json(arguments)
    except ValueError:
        return None
    return cast("Mapping[str, object]", data).get("input") if isinstance(data, dict) else None


def _repaired(bound: BoundTool, arguments: str, repairs: list[str]) -> str:
    repaired = repair_arguments(arguments, bound.spec.parameters)
    if repaired is None:
        return arguments
    repairs.extend(repaired.repairs)
    return repaired.text


async def _call_function(bound: BoundFunction, arguments: str, context: ToolContext, repairs: list[str]) -> ToolOutcome:
    text = arguments
    try:
        positional, named = bound.signature.read(text)
    except ArgumentError:
        text = _repaired(bound, arguments, repairs)
        if text is arguments:
            raise
        positional, named = bound.signature.read(text)
    if bound.asks_first:
        request = f"Tool '{bound.name}': {preview(text)}"
        approved = await approve(context.review_handler, bound.name, request, text)
        if approved is None:
            return outcome_of_result(ToolResult.failure(f"Rejected by reviewer: {text}"))
        if approved != text:
            positional, named = bound.signature.read(approved)
    if bound.cpu or bound.signature.context:
        outcome = await _call_elsewhere(bound, positional, named, context)
        if outcome is not None:
            return outcome
    if bound.signature.context:
        positional, named = bound.signature.with_context(context, positional, named)
    async with _time_limit(bound.timeout_s, context):
        with use_tool_context(context):
            if bound.is_async:
                returned = await collect(bound.function(*positional, **named))
            else:
                returned = await call_to_end(bound.function, *positional, **named)
        return outcome_of_return(returned, bound.name)


async def _call_elsewhere(
    bound: BoundFunction, positional: tuple[object, ...], named: Mapping[str, object], context: ToolContext
) -> ToolOutcome | None:
    """Return None if the function runs in this process."""
    if bound.cpu:
        return await _call_in_pool(bound, positional, named, context)
    return await _call_in_driver(bound, positional, named, context) if context.run.has_deps_elsewhere else None


TOOL_SERVICE = "tool"  # of the driver


class _DriverCall(Struct, frozen=True, kw_only=True):
    """A call of a tool for the process that has the run's deps."""

    function: Callable[..., object]
    positional: tuple[object, ...]
    named: Mapping[str, object]
    tool_name: str
    agent_role: str
    idempotency_key: str
    instance: str
    task_index: int


async def _call_in_driver(
    bound: BoundFunction, positional: tuple[object, ...], named: Mapping[str, object], context: ToolContext
) -> ToolOutcome:
    """Call a function in the process that started the run, which has its deps (S-CTX-31)."""
    call = _DriverCall(
        function=bound.function,
        positional=positional,
        named=named,
        tool_name=bound.name,
        agent_role=context.agent_role,
        idempotency_key=context.idempotency_key,
        instance=context.instance,
        task_index=context.task_index,
    )
    async with _time_limit(bound.timeout_s, context):
        answer = await ask_driver(TOOL_SERVICE, {"body": pack(call)})
    return cast("ToolOutcome", answer)


async def answer_tool_call(
    body: bytes, run: CurrentRun, metrics: CustomToolMetrics, emit: Callable[[Event], None]
) -> ToolOutcome:
    """Call the tool that another process of the run asked for, in this process."""
    call = cast("_DriverCall", pickle.loads(body))  # noqa: S301  bytes of our own cluster
    context = ToolContext(
        tool_name=call.tool_name,
        agent_role=call.agent_role,
        metrics=metrics,
        idempotency_key=call.idempotency_key,
        emit=_LoopEmitter(emit),
        run_id=run.run_id,
        instance=call.instance,
        task_index=call.task_index,
        run=run,
    )
    signature = signature_of(call.function, tool_name=call.tool_name, context_type=ToolContext)
    positional, named = signature.with_context(context, call.positional, call.named)
    log = CallLog()
    try:
        with use_run(run), use_tool_context(context), log:
            outcome = outcome_of_return(await call_to_end(call.function, *positional, **named), call.tool_name)
    except (ExitEarlyError, IllegalStateError):
        raise
    except USER_ERRORS as error:
        outcome = outcome_of_error(error)
    return replace(outcome, log=log.lines)


#: packed functions; None: it cannot be packed, which was logged
_packed: WeakKeyDictionary[Callable[..., object], bytes | None] = WeakKeyDictionary()


async def _call_in_pool(
    bound: BoundFunction, positional: tuple[object, ...], named: Mapping[str, object], context: ToolContext
) -> ToolOutcome | None:
    """Call a CPU-bound function in another process; None if it cannot travel (S-SET-35)."""
    process_services = services()
    if process_services is None:
        return None
    function = bound.function
    try:
        if function not in _packed:
            _packed[function] = pack_tool(function)
        packed = _packed[function]
        if packed is None:
            return None
        call: dict[str, object] = {
            "positional": positional,
            "named": named,
            "tool_name": bound.name,
            "idempotency_key": context.idempotency_key,
            "traceparent": current_traceparent(),
        }
        may_repeat = bound.effect != "once"
        returned = await process_services.cpu.run(packed, call, timeout_s=bound.timeout_s, may_repeat=may_repeat)
        return cast("ToolOutcome", returned)
    except CannotTravelError as error:
        _packed[function] = None
        _log.warning("Tool '%s' runs in a thread, since it cannot travel to another process: %s", bound.name, error)
        return None
    except TimeoutError:
        raise _TimedOutError from None


def _log_call(name: str, arguments: str, outcome: ToolOutcome, context: ToolContext, started_s: float) -> None:
    is_success = outcome.outcome == "success"
    level = logging.INFO if is_success else logging.WARNING
    if not _log.isEnabledFor(level):
        return
    duration_ms = round((time.perf_counter() - started_s) * 1000)
    event = "Tool call" if is_success else "Tool error"
    # A text with line breaks could imitate log lines.
    length = context.log_truncate_length
    shown, returned = (one_line(cut_for_log(text, length), None) for text in (arguments, outcome.text))
    tracebacks = TextLine("".join(f"\n{each}" for each in (outcome.traceback, *context.tracebacks) if each))
    line = "[%s] %s: %s(%s) -> %s [%dms]%s"
    _log.log(level, line, context.agent_role, event, name, shown, returned, duration_ms, tracebacks)
    _log.debug("[%s] %s full input: %s | full output: %s", context.agent_role, name, arguments, outcome.text)


class _Stopped(Struct, frozen=True):
    stop: BaseException
