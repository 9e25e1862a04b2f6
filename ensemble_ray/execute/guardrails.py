"""Inputs and results of guardrails."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.value import FrozenSequence, Value


class GuardrailType(StrEnum):
    """Whether a guardrail checks the input or the output of a task."""

    INPUT = "input"
    OUTPUT = "output"


class GuardrailInput(Value):
    """Argument of an input guardrail.

    Attributes:
        task_description: Description with its variables resolved.
        expected_output: Expected output with its variables resolved.
        context_outputs: Outputs of the context tasks, in the order of the task's context.
        agent_role: `(deterministic)` for a handler task.
    """

    task_description: str
    expected_output: str = ""
    context_outputs: FrozenSequence[TaskOutput] = ()
    agent_role: str = ""


class GuardrailOutput(Value):
    """Argument of an output guardrail.

    Attributes:
        raw_response: The answer's text.
        parsed_output: The parsed object, or the value that a handler returned; else None.
        task_description: Description with its variables resolved.
        agent_role: `(deterministic)` for a handler task.
    """

    raw_response: str
    parsed_output: Any = None
    task_description: str = ""
    agent_role: str = ""


@dataclass(frozen=True, slots=True)
class GuardrailResult:
    """Verdict of a guardrail. Build it with `success` or `failure`.

    Examples:
        >>> GuardrailResult.failure("no names, please").message
        'no names, please'
        >>> GuardrailResult.success().is_success
        True
    """

    is_success: bool
    message: str = ""  # reason of a failure; "" for success
    asks_again: bool = False  # the guardrail raised `TryAgain`: the model is called again if a retry is allowed

    @classmethod
    def success(cls) -> GuardrailResult:
        """Let the task continue."""
        return cls(is_success=True)

    @classmethod
    def failure(cls, reason: str) -> GuardrailResult:
        """Stop the task.

        Raises:
            ValueError: reason is None.
        """
        if reason is None:
            msg = "GuardrailResult failure reason must not be None"
            raise ValueError(msg)
        return cls(is_success=False, message=reason)


def check_verdict(returned: object, guardrail: str) -> GuardrailResult:
    """Return a guardrail's verdict, or raise `TypeError` with its name for any other value (S-GRD-11)."""
    if isinstance(returned, GuardrailResult):
        return returned
    msg = (
        f"Guardrail '{guardrail}' returned {type(returned).__name__}, expected GuardrailResult. "
        "Return GuardrailResult.success() or GuardrailResult.failure(reason)"
    )
    raise TypeError(msg)
