"""Asks a task's guardrails, in order, and raises for the first that says no. Package: execute.

The rules about verdicts are in `guardrails`; here they are only asked (S-GRD-4 to S-GRD-6, S-GRD-11).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

from ensemble_ray.errors import AgentExecutionError, ExitEarlyError, IllegalStateError
from ensemble_ray.errors.texts import agent_failure, brief
from ensemble_ray.execute.callables import callable_path
from ensemble_ray.execute.guardrails import GuardrailInput, GuardrailOutput, GuardrailType, violation_of
from ensemble_ray.execute.ports import Callables
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.threads import USER_ERRORS

if TYPE_CHECKING:
    from ensemble_ray.execute.guardrails import GuardrailResult
    from ensemble_ray.execute.orders import TaskOrder

__all__ = ["check_guardrails"]

_log = bounded_logger(__name__)
#: Why no model is asked for another answer.
_WHY_NOT = {
    "input": "TryAgain from an input guardrail: there is no answer yet",
    "output": "TryAgain from an output guardrail: no further answer is asked for",
}


async def check_guardrails(
    order: TaskOrder,
    callables: Callables,
    *,
    stage: Literal["input", "output"],
    text: str = "",
    parsed: object = None,
    may_ask_again: bool = False,
) -> str | None:
    """Ask the guardrails of that side.

    Args:
        order: The task.
        callables: Asks them.
        stage: The side.
        text: The answer, for output guardrails.
        parsed: The parsed answer.
        may_ask_again: Whether the model can be asked for another answer.

    Returns:
        What to tell the model where one raised `TryAgain`, and later ones were not asked; None: all are content.

    Raises:
        GuardrailViolationError: one said no; later ones are not asked.
        AgentExecutionError: one raised, or gave something that is no verdict (S-GRD-11).
    """
    count = order.input_guardrails if stage == "input" else order.output_guardrails
    if not count:
        return None
    subject: GuardrailInput | GuardrailOutput
    if stage == "input":
        subject = GuardrailInput(
            task_description=order.task.description,
            expected_output=order.task.expected_output,
            context_outputs=tuple(order.context),
            agent_role=order.agent_role,
        )
    else:
        subject = GuardrailOutput(
            raw_response=text,
            parsed_output=parsed,
            task_description=order.task.description,
            agent_role=order.agent_role,
        )
    for index in range(count):
        path = callable_path(order.key, stage, index)
        try:
            verdict = cast("GuardrailResult", await callables.evaluate(path, subject))
        except (asyncio.CancelledError, ExitEarlyError, IllegalStateError, AgentExecutionError):
            raise
        except USER_ERRORS as error:  # it could not be asked
            text = agent_failure(order.agent_role, error)
            raise AgentExecutionError(text, order.agent_role, order.task.description) from error
        if verdict.asks_again:
            if may_ask_again:
                return verdict.message
            verdict = replace(verdict, message=f"{verdict.message} ({_WHY_NOT[stage]})")
        violation = violation_of(
            verdict, GuardrailType(stage), task_description=order.task.description, agent_role=order.agent_role
        )
        if violation is not None:
            why, task = brief(violation.violation_message), brief(order.task.description[:80])
            _log.info("Guardrail: %s [task: %s]", why, task)  # whoever asked for the task is told
            raise violation
    return None
