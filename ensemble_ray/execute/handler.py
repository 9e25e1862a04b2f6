"""Tasks without a model: the user's handler does the work. Room: execute.

Rules: a handler may be a function of a `TaskHandlerContext` or an `AgentTool` (S-DET-1, S-DET-2); it returns a
`ToolResult` or a string (S-DET-9); its structured output counts only with an output type (S-DET-6).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble_ray.errors import AgentExecutionError, ExitEarlyError, message_of
from ensemble_ray.execute.callables import Callables, callable_path
from ensemble_ray.threads import USER_ERRORS
from ensemble_ray.tools.tool import ToolResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.execute.orders import TaskOrder
    from ensemble_ray.outputs import TaskOutput

__all__ = ["TaskHandlerContext", "run_handler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHandlerContext:
    """What a handler is given (S-DET-1). Nothing in it is None; context outputs are in context order."""

    description: str
    expected_output: str
    context_outputs: Sequence[TaskOutput] = ()

    def __post_init__(self) -> None:
        for name in ("description", "expected_output", "context_outputs"):
            if getattr(self, name) is None:
                raise ValueError(f"TaskHandlerContext {name} must not be None")
        object.__setattr__(self, "context_outputs", tuple(self.context_outputs))


async def run_handler(order: TaskOrder, callables: Callables) -> tuple[str, object]:
    """Call the handler; gives the text and the structured output (None without an output type).

    Raises:
        AgentExecutionError: it raised, returned None or a failure (S-DET-5).
        ExitEarlyError: it asked to end the run (S-DET-10).
    """
    context = TaskHandlerContext(
        description=order.task.description,
        expected_output=order.task.expected_output,
        context_outputs=order.context,
    )
    try:
        given = await callables.evaluate(callable_path(order.key, "handler"), context)
    except (asyncio.CancelledError, ExitEarlyError):
        raise
    except USER_ERRORS as error:
        raise _failure(order, f"Deterministic task handler threw an exception: {message_of(error)}") from error
    if given is None:
        raise _failure(order, f"Deterministic task handler returned null for task: {order.task.description}")
    if not isinstance(given, ToolResult):
        return str(given), None
    if not given.is_success:
        raise _failure(order, f"Deterministic task failed: {given.error_message}")
    return given.output, given.structured_output if order.task.output_type is not None else None


def _failure(order: TaskOrder, text: str) -> AgentExecutionError:
    return AgentExecutionError(text, order.agent_role, order.task.description)
