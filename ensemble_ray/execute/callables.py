"""Where a run's own callables are asked: guardrails, handlers, delegation policies.

One process holds one copy of each (S-SET-31): inline this process, on Ray the run's `CallableHost`. The path names the
callable: `draft/input/0`, `draft/output/1`, `draft/handler/0`; `/policy/0` is one of the run itself.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, cast

from ensemble_ray.errors import AgentExecutionError, ExitEarlyError, IllegalStateError, TryAgain
from ensemble_ray.errors.texts import agent_failure, brief, format_with_class
from ensemble_ray.execute.guardrails import (
    GuardrailInput,
    GuardrailOutput,
    GuardrailResult,
    GuardrailType,
    check_verdict,
    violation_of,
)
from ensemble_ray.execute.scope import Callables
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import USER_ERRORS, call_user
from ensemble_ray.tools.approval import current_reviews
from ensemble_ray.tools.tool import AbstractAgentTool, AgentTool, ToolContext, use_tool_context
from ensemble_ray.tools.waiting import call_to_end
from ensemble_ray.values.delegation import DelegationPolicyResult, DelegationRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ensemble_ray.definition.task import Task
    from ensemble_ray.execute.orders import TaskOrder
    from ensemble_ray.values.task_output import TaskOutput


def callable_path(key: str, category: str, index: int = 0) -> str:
    """Path of one callable of a task, or of the run where the key is empty.

    `category` is `input`, `output` or `handler`, and `policy` for a run's.
    """
    return f"{key}/{category}/{index}"


class HasCallables(Protocol):
    """What travels of a task to the process of its callables."""

    @property
    def handler(self) -> object:
        """Does it; None: its agent does."""
        ...

    @property
    def input_guardrails(self) -> Sequence[object]:
        """Asked before anything else."""
        ...

    @property
    def output_guardrails(self) -> Sequence[object]:
        """Asked about the answer."""
        ...


class LocalCallables:
    """Callables of a run that live in this process."""

    def __init__(self, tasks: Mapping[str, Task | HasCallables], policies: Sequence[object] = ()) -> None:
        self._tasks = tasks
        self._policies = policies

    async def evaluate(self, path: str, argument: object) -> object:
        """Call it here: async on the loop, sync in a thread (S-CONV-16).

        Raises:
            AgentExecutionError: a guardrail raised, or gave no verdict; only here is its name known (S-GRD-11).
        """
        function = self._find(path)
        if isinstance(argument, GuardrailInput | GuardrailOutput):
            return await _verdict(function, argument)
        return await call_to_end(function, argument)

    def _find(self, path: str) -> Callable[[object], object]:
        key, category, position = path.rsplit("/", 2)
        if category == "policy":
            return _as_asked(self._policies[int(position)])
        task = self._tasks[key]
        if category == "handler":
            found: object = task.handler
        else:
            found = (task.input_guardrails if category == "input" else task.output_guardrails)[int(position)]
        return _as_handler(found) if isinstance(found, AgentTool) else cast("Callable[[object], object]", found)


async def _verdict(guardrail: Callable[[object], object], subject: GuardrailInput | GuardrailOutput) -> GuardrailResult:
    """Return what a guardrail says of its subject; it fails closed."""
    name, role = callable_name(guardrail), subject.agent_role
    try:
        returned = await call_user(guardrail, subject)
    except (asyncio.CancelledError, ExitEarlyError, IllegalStateError):
        raise
    except TryAgain as again:
        return GuardrailResult(is_success=False, message=str(again), asks_again=True)
    except USER_ERRORS as error:
        text = f"Agent '{brief(role)}': guardrail '{name}' raised {brief(format_with_class(error))}"
        failure = AgentExecutionError(text, role, subject.task_description)
        failure.is_of_callable = True
        raise failure from error
    try:
        return check_verdict(returned, name)
    except TypeError as error:
        raise AgentExecutionError(agent_failure(role, error), role, subject.task_description) from error


def _as_handler(tool: AgentTool) -> Callable[[object], Awaitable[object]]:
    """Wrap a tool as a handler: its input is the text of the last context output, else the description (S-DET-2)."""

    async def handle(argument: object) -> object:
        context = cast("TaskHandlerContext", argument)
        text = context.context_outputs[-1].raw if context.context_outputs else context.description
        if isinstance(tool, AbstractAgentTool):
            found = ToolContext(
                tool_name=tool.name, idempotency_key=context.idempotency_key, review_handler=current_reviews()
            )
            with use_tool_context(found):
                return await tool.aexecute(text)
        return await call_to_end(tool.execute, text)

    return handle


def _as_asked(policy: object) -> Callable[[object], Awaitable[object]]:
    """Wrap a delegation policy as a callable of its pair of arguments, its answer checked (S-DEL-43)."""
    evaluate = getattr(policy, "evaluate", policy)

    async def ask(argument: object) -> object:
        request, context = cast("tuple[object, object]", argument)
        answer: object = await call_user(cast("Callable[..., object]", evaluate), request, context)
        if not isinstance(answer, DelegationPolicyResult):
            returned = "None" if answer is None else type(answer).__name__
            raise IllegalStateError(
                f"Delegation policy '{callable_name(policy)}' returned {returned}, expected DelegationPolicyResult. Return "
                "DelegationPolicyResult.allow(), .reject(reason) or .modify(request)"
            )
        if answer.verdict == "modify" and not isinstance(answer.request, DelegationRequest):
            raise IllegalStateError(
                f"Delegation policy '{callable_name(policy)}' modified the request to {type(answer.request).__name__}, "
                "expected DelegationRequest. Return DelegationPolicyResult.modify(request.replace(...))"
            )
        return answer

    return ask


def callable_name(function: object) -> str:
    """Return what logs and messages call a guardrail or a policy: the function's name, else its object's class."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[object]", function).func
    return str(getattr(function, "__name__", type(function).__name__))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHandlerContext:
    """What a handler is given. Nothing in it is None; context outputs are in context order."""

    description: str
    expected_output: str
    context_outputs: Sequence[TaskOutput] = ()
    #: the same when the handler is called again after a crash, so that it can do its work once; empty outside a run
    idempotency_key: str = ""

    def __post_init__(self) -> None:
        for name in ("description", "expected_output", "context_outputs"):
            if getattr(self, name) is None:
                raise ValueError(f"TaskHandlerContext {name} must not be None")
        object.__setattr__(self, "context_outputs", tuple(self.context_outputs))
