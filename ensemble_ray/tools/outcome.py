"""Package tools: what came of one tool call. In: a result, a return value, an error. Out: text for the model and a verdict.

Pure, and importable in the processes that run processor-heavy tools.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ensemble_ray.errors import TryAgain
from ensemble_ray.errors.texts import format_with_class, user_traceback
from ensemble_ray.tools.rendering import render_value
from ensemble_ray.tools.tool import ToolResult

__all__ = ["ToolOutcome", "outcome_of_error", "outcome_of_result", "outcome_of_return", "unknown_tool"]


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
