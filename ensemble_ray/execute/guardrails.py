"""What guardrails see and say, and what follows from it. Pure: calls nobody; the runner asks them.

In: what a guardrail returned. Out: a verdict, or the error that ends the task. Must never happen: an answer that gets
past because a guardrail gave something that is no verdict; guardrails fail closed (S-GRD-11).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ensemble_ray.errors import GuardrailViolationError
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.value import FrozenSequence, Value


class GuardrailType(StrEnum):
    """Which side of a task a guardrail watches."""

    INPUT = "input"
    OUTPUT = "output"


class GuardrailInput(Value):
    """What an input guardrail is asked about.

    Attributes:
        task_description: With its variables resolved.
        expected_output: With its variables resolved.
        context_outputs: Outputs of the context tasks, in the order of the task's context.
        agent_role: `(deterministic)` for a handler task.
    """

    task_description: str
    expected_output: str = ""
    context_outputs: FrozenSequence[TaskOutput] = ()
    agent_role: str = ""


class GuardrailOutput(Value):
    """What an output guardrail is asked about.

    Attributes:
        raw_response: The answer's text.
        parsed_output: The parsed object, or what a handler returned; None where there is neither.
        task_description: With its variables resolved.
        agent_role: `(deterministic)` for a handler task.
    """

    raw_response: str
    parsed_output: Any = None
    task_description: str = ""
    agent_role: str = ""


@dataclass(frozen=True, slots=True)
class GuardrailResult:
    """What a guardrail says; made by `success` and `failure`.

    Examples:
        >>> GuardrailResult.failure("no names, please").message
        'no names, please'
        >>> GuardrailResult.success().is_success
        True
    """

    is_success: bool
    #: the reason of a failure; "" for success
    message: str = ""
    #: of a failure: the guardrail raised `TryAgain`, so that the model is asked again where that is possible
    asks_again: bool = False

    @classmethod
    def success(cls) -> GuardrailResult:
        """Go on."""
        return cls(is_success=True)

    @classmethod
    def failure(cls, reason: str) -> GuardrailResult:
        """Stop the task, for that reason.

        Raises:
            ValueError: reason is None.
        """
        if reason is None:
            msg = "GuardrailResult failure reason must not be None"
            raise ValueError(msg)
        return cls(is_success=False, message=reason)


def check_verdict(returned: object, guardrail: str) -> GuardrailResult:
    """Return the verdict of a guardrail, or refuse anything else that it returned.

    Args:
        returned: Whatever it returned.
        guardrail: Its name or path, for the message.

    Raises:
        TypeError: it is something else; the message names the guardrail (S-GRD-11).
    """
    if isinstance(returned, GuardrailResult):
        return returned
    msg = (
        f"Guardrail '{guardrail}' returned {type(returned).__name__}, expected GuardrailResult. "
        "Return GuardrailResult.success() or GuardrailResult.failure(reason)"
    )
    raise TypeError(msg)


def violation_of(
    verdict: GuardrailResult, guardrail_type: GuardrailType, *, task_description: str, agent_role: str
) -> GuardrailViolationError | None:
    """Return the error that a verdict means for its task; None when it means none (S-GRD-7)."""
    if verdict.is_success:
        return None
    return GuardrailViolationError(guardrail_type, verdict.message, task_description, agent_role)
