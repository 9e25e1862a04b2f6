"""Call the user's callables: guardrails, handlers, policies. A run has one copy of each (S-SET-31)."""

from __future__ import annotations

import asyncio
import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, cast

from ensemble_ray.definition.task import Task
from ensemble_ray.errors import (
    AgentExecutionError,
    ExitEarlyError,
    GuardrailViolationError,
    IllegalStateError,
    TryAgain,
)
from ensemble_ray.errors.texts import agent_failure, brief, format_with_class
from ensemble_ray.execute.guardrails import (
    GuardrailInput,
    GuardrailOutput,
    GuardrailResult,
    GuardrailType,
    check_verdict,
)
from ensemble_ray.execute.orders import TaskOrder
from ensemble_ray.execute.scope import Callables
from ensemble_ray.ports import ask_driver
from ensemble_ray.process.concurrency import USER_ERRORS, call_user
from ensemble_ray.process.config import dumps
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.run_context import OUTSIDE_RUN, CurrentRun, DepsT_co, current_run_context, use_run
from ensemble_ray.tools.approval import current_reviews
from ensemble_ray.tools.tool import AbstractAgentTool, AgentTool, ToolContext, use_tool_context
from ensemble_ray.tools.user_code import call_to_end
from ensemble_ray.values.attachments import Attachment
from ensemble_ray.values.delegation import DelegationPolicyResult, DelegationRequest
from ensemble_ray.values.task_output import TaskOutput

_log = bounded_logger(__name__)
_NO_RETRY = {
    "input": "TryAgain from an input guardrail: there is no answer yet",
    "output": "TryAgain from an output guardrail: no further answer is asked for",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHandlerContext(Generic[DepsT_co]):
    """Argument of a task's handler. No field is None; context outputs are in context order."""

    description: str
    expected_output: str
    context_outputs: Sequence[TaskOutput] = ()
    idempotency_key: str = ""  # the same for each call of one task, also after a crash; empty outside a run
    attachments: Sequence[Attachment] = ()  # with their contents
    run: CurrentRun[DepsT_co] = field(default=cast("Any", OUTSIDE_RUN), repr=False, compare=False)

    @property
    def deps(self) -> DepsT_co:
        """The deps of the run.

        Raises:
            IllegalStateError: the run has no deps.
        """
        return self.run.deps

    @property
    def run_id(self) -> str:
        """Id of the run; empty outside a run."""
        return self.run.run_id

    @property
    def inputs(self) -> Mapping[str, str]:
        """The run's inputs, as the texts that the templates receive."""
        return self.run.inputs

    @property
    def tags(self) -> Mapping[str, str]:
        """Tags of the team and of the run."""
        return self.run.tags

    @property
    def user(self) -> str:
        """For whom the run is; empty: unknown."""
        return self.run.user

    def __post_init__(self) -> None:
        for name in ("description", "expected_output", "context_outputs"):
            if getattr(self, name) is None:
                raise ValueError(f"TaskHandlerContext {name} must not be None")
        object.__setattr__(self, "context_outputs", tuple(self.context_outputs))


def callable_path(key: str, category: Literal["input", "output", "handler", "policy"], index: int = 0) -> str:
    """Return a path such as `draft/input/0`; the key of a policy is empty."""
    return f"{key}/{category}/{index}"


def callable_name(function: object) -> str:
    while isinstance(function, functools.partial):
        function = cast("functools.partial[object]", function).func
    return str(getattr(function, "__name__", type(function).__name__))


async def check_guardrails(
    order: TaskOrder,
    callables: Callables,
    *,
    stage: Literal["input", "output"],
    text: str = "",
    parsed: object = None,
    may_ask_again: bool = False,
) -> str | None:
    """Call a task's guardrails in order, up to the first that objects.

    Return the text of `TryAgain` if the model may answer again; else None. A refusal raises `GuardrailViolationError`
    (S-GRD-7), a failed guardrail `AgentExecutionError` (S-GRD-11).
    """
    count = order.input_guardrails if stage == "input" else order.output_guardrails
    if not count:
        return None
    description, role = order.task.description, order.agent_role
    subject: GuardrailInput | GuardrailOutput
    if stage == "input":
        subject = GuardrailInput(
            task_description=description,
            expected_output=order.task.expected_output,
            context_outputs=tuple(order.context),
            agent_role=role,
        )
    else:
        subject = GuardrailOutput(
            raw_response=text, parsed_output=parsed, task_description=description, agent_role=role
        )
    for index in range(count):
        try:
            verdict = cast("GuardrailResult", await callables.evaluate(callable_path(order.key, stage, index), subject))
        except (asyncio.CancelledError, ExitEarlyError, IllegalStateError, AgentExecutionError):
            raise
        except USER_ERRORS as error:  # the callable cannot be reached
            raise AgentExecutionError(agent_failure(role, error), role, description) from error
        if verdict.asks_again:
            if may_ask_again:
                return verdict.message
            verdict = replace(verdict, message=f"{verdict.message} ({_NO_RETRY[stage]})")
        if not verdict.is_success:
            violation = GuardrailViolationError(GuardrailType(stage), verdict.message, description, role)
            _log.info("Guardrail: %s [task: %s]", brief(violation.violation_message), brief(description[:80]))
            raise violation
    return None


class HasCallables(Protocol):
    """The callables of a task, sent to the process that calls them."""

    @property
    def handler(self) -> object:
        """None: an agent does the task."""
        ...

    @property
    def input_guardrails(self) -> Sequence[object]: ...

    @property
    def output_guardrails(self) -> Sequence[object]: ...


class LocalCallables:
    """Callables in this process. Implements `Callables`."""

    def __init__(self, tasks: Mapping[str, Task | HasCallables], policies: Sequence[object] = ()) -> None:
        self._tasks = tasks
        self._policies = policies

    async def evaluate(self, path: str, argument: object) -> object:
        """Call an async callable on the loop and a sync one in a thread (S-CONV-16)."""
        key, category, position = path.rsplit("/", 2)
        if category == "policy":
            function: object = self._policies[int(position)]
        elif category == "handler":
            function = self._tasks[key].handler
        else:
            task = self._tasks[key]
            function = (task.input_guardrails if category == "input" else task.output_guardrails)[int(position)]
        run = current_run_context()
        if run.has_deps_elsewhere and not isinstance(function, AgentTool):
            return await _call_in_driver(function, category, argument)
        return await _call(function, category, argument, run)


CALLABLE_SERVICE = "callable"  # of the driver


async def _call_in_driver(function: object, category: str, argument: object) -> object:
    """Call it in the process that started the run, which has its deps (S-CTX-32)."""
    return await ask_driver(CALLABLE_SERVICE, {"body": dumps((function, category, argument))})


async def answer_callable(body: bytes, run: CurrentRun) -> object:
    """Call what another process of the run asked for, in this process."""
    called: tuple[object, str, object] = pickle.loads(body)  # noqa: S301  bytes of our own cluster
    with use_run(run):
        return await _call(*called, run)


async def _call(function: object, category: str, argument: object, run: CurrentRun) -> object:
    if category == "policy":
        return await _call_policy(function, argument)
    if isinstance(argument, TaskHandlerContext):
        argument = replace(cast("TaskHandlerContext", argument), run=run)
        if isinstance(function, AgentTool):
            return await _call_tool_as_handler(function, argument)
    called = cast("Callable[[object], object]", function)
    if isinstance(argument, GuardrailInput | GuardrailOutput):
        return await _call_guardrail(called, argument)
    return await call_to_end(called, argument)


async def _call_guardrail(
    guardrail: Callable[[object], object], subject: GuardrailInput | GuardrailOutput
) -> GuardrailResult:
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


async def _call_tool_as_handler(tool: AgentTool, context: TaskHandlerContext) -> object:
    """Pass the text of the last context output, or the description, to the tool (S-DET-2)."""
    text = context.context_outputs[-1].raw if context.context_outputs else context.description
    if not isinstance(tool, AbstractAgentTool):
        return await call_to_end(tool.execute, text)
    tool_context = ToolContext(
        tool_name=tool.name,
        idempotency_key=context.idempotency_key,
        review_handler=current_reviews(),
        run_id=context.run_id,
        run=context.run,
    )
    with use_tool_context(tool_context):
        return await call_to_end(tool.aexecute, text)


async def _call_policy(policy: object, argument: object) -> DelegationPolicyResult:
    """Call a delegation policy, and check its result (S-DEL-43)."""
    request, context = cast("tuple[object, object]", argument)
    evaluate = cast("Callable[..., object]", getattr(policy, "evaluate", policy))
    answer: object = await call_user(evaluate, request, context)
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
