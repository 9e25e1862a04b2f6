"""Run a task with the user's handler: a function, or an `AgentTool` (S-DET-1)."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from contextlib import suppress
from typing import cast

import pydantic

from ensemble_ray.errors import AgentExecutionError, ExitEarlyError
from ensemble_ray.errors.texts import brief, describe
from ensemble_ray.execute.agent.structured import (
    UNKNOWN_TYPE,
    ParseResult,
    adapter_of,
    mistakes_of,
    parse_output,
    restore_output,
)
from ensemble_ray.execute.attachments import load_attachments
from ensemble_ray.execute.callables import TaskHandlerContext, callable_path
from ensemble_ray.execute.effects import CallOutcome
from ensemble_ray.execute.orders import TaskOrder
from ensemble_ray.execute.review.gates import can_repeat_at_gate, tool_reviews
from ensemble_ray.execute.scope import TaskScope
from ensemble_ray.execute.tools.unknown import HANDLER, is_unrepeatable, key_of, lost_intent, resolve_unknown
from ensemble_ray.facts.effects import ToolIntended, ToolReturned
from ensemble_ray.ports import Persistence
from ensemble_ray.process.concurrency import USER_ERRORS
from ensemble_ray.process.context import CallLog, bounded_logger
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.tools.approval import use_reviews
from ensemble_ray.tools.tool import ToolResult
from ensemble_ray.tools.user_code import ResultError, name_value, render_value
from ensemble_ray.values.ids import effect_name
from ensemble_ray.values.task_output import OutputType, Shown, type_name

_log = bounded_logger(__name__)
_LONGEST = 280


async def run_handler(scope: TaskScope) -> tuple[str, object]:
    """Call the handler, unless its result is recorded (S-DUR-25). Return text and structured output.

    A failure or misfit raises `AgentExecutionError` (S-DET-5, S-DET-6). A handler may end the run or wait at a gate.
    """
    name = effect_name(scope.order.instance, 0, HANDLER)
    if (recorded := scope.find_recorded(name, ToolReturned)) is not None:
        return _read_result(scope, recorded.data)
    effect = scope.order.task.handler_effect
    intent = scope.find_recorded(name, ToolIntended) or lost_intent(scope, name, HANDLER, "", effect)
    may_repeat = can_repeat_at_gate(scope, name, asks_first=False)
    if intent is not None and not may_repeat and is_unrepeatable(intent.data, effect):
        text = await resolve_unknown(scope, intent)
        if text is not None:
            return _read_result(scope, await _note_result(scope, name, "unknown", text, began=intent.at))
    # Also before a repeated call: the journal stops a replaced process before the effect.
    until = Persistence.QUEUED if effect == "none" else Persistence.SYNCED
    try:
        await scope.note(name, ToolIntended(tool_name=HANDLER, arguments="", effect=effect), until=until)
    except asyncio.CancelledError:
        scope.effects.is_outcome_unknown = True  # the record may contain the intent of a call that was not made
        raise
    return await _call(scope, name)


async def _call(scope: TaskScope, name: str) -> tuple[str, object]:
    """Call the handler and note its result. The task's output or failure commits it."""
    order, began = scope.order, scope.ports.clock.now()
    context = TaskHandlerContext(
        description=order.task.description,
        expected_output=order.task.expected_output,
        context_outputs=order.context,
        idempotency_key=key_of(scope, name),
        attachments=await load_attachments(order.task.attachments, scope.ports.journal),
    )
    reviews, log = tool_reviews(scope, name, ()), CallLog()
    try:
        with use_reviews(reviews), log:
            returned = await scope.ports.callables.evaluate(callable_path(order.key, "handler"), context)
    except (asyncio.CancelledError, ExitEarlyError) as stopped:
        scope.effects.is_outcome_unknown = isinstance(stopped, asyncio.CancelledError)
        raise
    except USER_ERRORS as error:
        if reviews is not None:
            reviews.check_decided()
        text = f"Deterministic task handler threw an exception: {describe(error)}"
        await _note_result(scope, name, "error", text, began=began, log=log.lines)
        raise _failure(order, text) from error
    finally:
        if reviews is not None:
            reviews.close()
    if reviews is not None:
        reviews.check_decided()
    value: object = None
    outcome: CallOutcome = "failure"
    if returned is None:
        text = f"Deterministic task handler returned null for task: {brief(order.task.description)}"
    elif isinstance(returned, ToolResult) and not returned.is_success:
        text = f"Deterministic task failed: {returned.error_message}"
    else:
        text, value = _text_and_value(returned)
        converted = _convert(text, value, order.task.output_type)
        if converted.error_message is None:
            value, outcome = converted.value, "success"
        else:
            text, value = f"Deterministic task handler returned {converted.error_message}", None
    result = await _note_result(scope, name, outcome, text, value, began=began, log=log.lines)
    if not result.is_success:
        raise _failure(order, result.text)
    return result.text, result.structured_output


def _text_and_value(returned: object) -> tuple[str, object]:
    """Return the text, and the value for further handlers (S-DET-6, S-DET-9)."""
    if isinstance(returned, ToolResult):
        return returned.output, returned.structured_output
    if isinstance(returned, str | Shown):
        return render_value(returned), None
    try:
        return render_value(returned), returned
    except ResultError:
        return name_value(returned), returned


def _convert(text: str, value: object, output_type: OutputType | None) -> ParseResult[object]:
    """Convert the value itself, or else its text (S-DET-6)."""
    if output_type is None:
        return ParseResult(value=value)
    problem = ""
    try:
        if value is not None:
            return ParseResult(value=adapter_of(cast("Hashable", output_type)).validate_python(value))
    except pydantic.ValidationError as error:
        problem = mistakes_of(error)
    except UNKNOWN_TYPE as error:
        problem = error.message
        with suppress(TypeError):  # `list[Index]` has no instances
            if isinstance(value, output_type):
                return ParseResult(value=value)
    parsed = parse_output(text, output_type)
    if parsed.is_success or value is None:
        return ParseResult(value=parsed.value)
    return ParseResult(
        error_message=f"a {type(value).__name__}, which is no {type_name(output_type)}: {brief(problem)}"
    )


async def _note_result(
    scope: TaskScope,
    name: str,
    outcome: CallOutcome,
    text: str,
    structured: object = None,
    *,
    began: float,
    log: tuple[str, ...] = (),
) -> ToolReturned:
    result = ToolReturned(
        outcome=outcome,
        text=scope.clean(whole_text(text)),
        structured_output=scope.clean(structured),
        started_at=began,
        duration_s=max(0.0, scope.ports.clock.now() - began) if outcome != "unknown" else 0.0,
        log=scope.clean(log),
    )
    await scope.note(name, result)
    return result


def _read_result(scope: TaskScope, recorded: ToolReturned) -> tuple[str, object]:
    text, structured = recorded.text, recorded.structured_output
    if recorded.outcome in {"error", "failure"}:
        raise _failure(scope.order, text)
    scope.effects.is_outcome_unknown = recorded.is_unknown
    output_type = scope.order.task.output_type
    if output_type is None or structured is None:
        return text, structured
    restored = restore_output(structured, output_type)
    if restored.is_success:
        return text, restored.value
    _log.warning(
        "Task '%s': its recorded structured output no longer fits %s and stays JSON data: %s",
        scope.order.key, type_name(output_type), brief(restored.error_message or ""),
    )  # fmt: skip
    return text, structured


def _failure(order: TaskOrder, text: str) -> AgentExecutionError:
    return AgentExecutionError(brief(text, _LONGEST), order.agent_role, order.task.description)
