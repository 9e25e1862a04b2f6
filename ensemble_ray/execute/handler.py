"""Tasks without a model: the user's handler does the work.

Rules: a handler may be a function of a `TaskHandlerContext` or an `AgentTool` (S-DET-1, S-DET-2). What it returns has a
text, as a tool's result has (S-DET-9), and is itself the parsed output, of the output type if there is one (S-DET-6). It
is an effect: a handler whose result is recorded is not called again (S-DUR-25).
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, cast

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
from ensemble_ray.execute.callables import TaskHandlerContext, callable_path
from ensemble_ray.execute.review.tool_reviews import stands_at_gate, tool_reviews
from ensemble_ray.execute.tools.unknown import HANDLER, effect_of, key_of, lost_call, resolve_unknown
from ensemble_ray.facts.effects import ToolIntended, ToolReturned
from ensemble_ray.ports import Persistence
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import USER_ERRORS
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.tools.approval import use_reviews
from ensemble_ray.tools.tool import ToolResult
from ensemble_ray.tools.waiting import ResultError, name_value, render_value
from ensemble_ray.values.ids import effect_name
from ensemble_ray.values.task_output import OutputType, Shown, type_name

if TYPE_CHECKING:
    from ensemble_ray.execute.effects import CallOutcome
    from ensemble_ray.execute.orders import TaskOrder
    from ensemble_ray.execute.scope import TaskScope


_log = bounded_logger(__name__)
#: Characters of a failure's text: what the user wrote, and the words before it.
_LONGEST = 280


async def run_handler(scope: TaskScope) -> tuple[str, object]:
    """Call the handler, unless its result is recorded; return text and structured output.

    Raises:
        AgentExecutionError: it raised, or returned None, a failure, or something of another type (S-DET-5, S-DET-6).
        ExitEarlyError: it asked to end the run (S-DET-10).
        ReviewOpenError: it waits at an open gate (S-REV-115).
        UnknownOutcomeError: it was begun before a crash, and nobody knows whether it was done (S-DUR-25).
    """
    name = effect_name(scope.order.instance, 0, HANDLER)
    recorded = scope.find_recorded(name, ToolReturned)
    if recorded is not None:
        return _result_of(scope, recorded.data)
    effect = scope.order.task.handler_effect
    intent = scope.find_recorded(name, ToolIntended)
    if intent is None:
        intent = lost_call(scope, name, HANDLER, "", effect)
    is_at_gate = stands_at_gate(scope, name, asks_first=False)
    if intent is not None and not is_at_gate and effect_of(intent.data, effect) == "once":
        lost = await resolve_unknown(scope, intent)
        if lost is not None:
            return _result_of(scope, await _note(scope, name, "unknown", lost, began=intent.at))
    await _note_intent(scope, name)
    return await _call(scope, name)


async def _note_intent(scope: TaskScope, name: str) -> None:
    effect = scope.order.task.handler_effect
    # Also when it is called again: a process that was replaced is stopped here, before the effect.
    until = Persistence.QUEUED if effect == "none" else Persistence.SYNCED
    try:
        await scope.note(name, ToolIntended(tool_name=HANDLER, arguments="", effect=effect), until=until)
    except asyncio.CancelledError:
        # It was not called, but what is recorded of it by then looks as if it might have been.
        scope.effects.is_outcome_unknown = True
        raise


async def _call(scope: TaskScope, name: str) -> tuple[str, object]:
    """Call it, and note what came of it; the output or the failure of the task, which follow, are waited for."""
    order, began = scope.order, scope.ports.clock.now()
    context = TaskHandlerContext(
        description=order.task.description,
        expected_output=order.task.expected_output,
        context_outputs=order.context,
        idempotency_key=key_of(scope, name),
    )
    reviews = tool_reviews(scope, name, ())
    try:
        with use_reviews(reviews):
            returned = await scope.ports.callables.evaluate(callable_path(order.key, "handler"), context)
    except (asyncio.CancelledError, ExitEarlyError) as stopped:
        scope.effects.is_outcome_unknown = isinstance(stopped, asyncio.CancelledError)
        raise
    except USER_ERRORS as error:
        if reviews is not None:
            reviews.check_decided()
        text = f"Deterministic task handler threw an exception: {describe(error)}"
        await _note(scope, name, "error", text, began=began)
        raise _failure(order, text) from error
    finally:
        if reviews is not None:
            reviews.close()
    if reviews is not None:
        reviews.check_decided()
    if returned is None:
        text = f"Deterministic task handler returned null for task: {brief(order.task.description)}"
        result = await _note(scope, name, "failure", text, began=began)
    elif isinstance(returned, ToolResult) and not returned.is_success:
        text = f"Deterministic task failed: {returned.error_message}"
        result = await _note(scope, name, "failure", text, began=began)
    else:
        text, value = _text_and_value(returned)
        fitting = _fit(text, value, order.task.output_type)
        if fitting.error_message is None:
            result = await _note(scope, name, "success", text, fitting.value, began=began)
        else:
            text = f"Deterministic task handler returned {fitting.error_message}"
            result = await _note(scope, name, "failure", text, began=began)
    if not result.is_success:
        raise _failure(order, result.text)
    return result.text, result.structured_output


def _text_and_value(returned: object) -> tuple[str, object]:
    """Return the text of what a handler returned, and what further handlers are given of it (S-DET-6, S-DET-9)."""
    if isinstance(returned, ToolResult):
        return returned.output, returned.structured_output
    if isinstance(returned, str | Shown):
        return render_value(returned), None
    try:
        return render_value(returned), returned
    except ResultError:
        return name_value(returned), returned


def _fit(text: str, value: object, output_type: OutputType | None) -> ParseResult[object]:
    """Return a handler's value as the type of its task: itself, or what its text is parsed into (S-DET-6)."""
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


async def _note(
    scope: TaskScope, name: str, outcome: CallOutcome, text: str, structured: object = None, *, began: float
) -> ToolReturned:
    """Note the result."""
    result = ToolReturned(
        outcome=outcome,
        text=whole_text(text),
        structured_output=structured,
        started_at=began,
        duration_s=max(0.0, scope.ports.clock.now() - began) if outcome != "unknown" else 0.0,
    )
    await scope.note(name, result)
    return result


def _result_of(scope: TaskScope, recorded: ToolReturned) -> tuple[str, object]:
    """Return what a recorded result says; its structured output is of the task's type again."""
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
        "Task '%s': its recorded structured output is no %s any more and stays data: %s",
        scope.order.key, type_name(output_type), brief(restored.error_message or ""),
    )  # fmt: skip
    return text, structured


def _failure(order: TaskOrder, text: str) -> AgentExecutionError:
    """Return the failure of the task; the record has the whole text."""
    return AgentExecutionError(brief(text, _LONGEST), order.agent_role, order.task.description)
