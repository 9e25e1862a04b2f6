"""Where a run's own callables are asked: guardrails, handlers, delegation policies. Room: execute.

One process holds one copy of each (S-SET-31): inline this process, on Ray the run's `CallableHost`. The path names the
callable: `draft/input/0`, `draft/output/1`, `draft/handler/0`; `/policy/0` is one of the run itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from ensemble_ray.delegation import DelegationPolicyResult, DelegationRequest
from ensemble_ray.errors import IllegalStateError
from ensemble_ray.threads import call_user
from ensemble_ray.tools.tool import AbstractAgentTool, AgentTool, ToolContext, use_tool_context

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ensemble_ray.execute.handler import TaskHandlerContext

__all__ = ["Callables", "HasCallables", "LocalCallables", "callable_path", "policy_name"]


def callable_path(key: str, kind: str, index: int = 0) -> str:
    """Path of one callable of a task, or of the run where the key is empty.

    `kind` is `input`, `output` or `handler`, and `policy` for a run's.
    """
    return f"{key}/{kind}/{index}"


class Callables(Protocol):
    """Asks a callable of the run."""

    async def evaluate(self, path: str, argument: object) -> object:
        """Call it with that argument; what it raises is raised here."""
        ...


class HasCallables(Protocol):
    """A task, as far as its callables go."""

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

    def __init__(self, tasks: Mapping[str, HasCallables], policies: Sequence[object] = ()) -> None:
        self._tasks = tasks
        self._policies = policies

    async def evaluate(self, path: str, argument: object) -> object:
        """Call it here: async on the loop, sync in a thread (S-CONV-16)."""
        return await call_user(self._find(path), argument)

    def _find(self, path: str) -> Callable[[object], object]:
        key, kind, position = path.rsplit("/", 2)
        if kind == "policy":
            return _as_asked(self._policies[int(position)])
        task = self._tasks[key]
        if kind == "handler":
            found: object = task.handler
        else:
            found = (task.input_guardrails if kind == "input" else task.output_guardrails)[int(position)]
        return _as_handler(found) if isinstance(found, AgentTool) else cast("Callable[[object], object]", found)


def _as_handler(tool: AgentTool) -> Callable[[object], Awaitable[object]]:
    """A tool as a handler: its input is the text of the last context output, else the description (S-DET-2)."""

    async def handle(argument: object) -> object:
        context = cast("TaskHandlerContext", argument)
        text = context.context_outputs[-1].raw if context.context_outputs else context.description
        if isinstance(tool, AbstractAgentTool):
            with use_tool_context(ToolContext(tool_name=tool.name, idempotency_key=context.idempotency_key)):
                return await tool.aexecute(text)
        return await call_user(tool.execute, text)

    return handle


def _as_asked(policy: object) -> Callable[[object], Awaitable[object]]:
    """A delegation policy as a callable of its pair of arguments, its answer checked (S-DEL-43)."""
    evaluate = getattr(policy, "evaluate", policy)

    async def ask(argument: object) -> object:
        request, context = cast("tuple[object, object]", argument)
        answer: object = await call_user(cast("Callable[..., object]", evaluate), request, context)
        if not isinstance(answer, DelegationPolicyResult):
            given = "None" if answer is None else type(answer).__name__
            raise IllegalStateError(
                f"Delegation policy '{policy_name(policy)}' returned {given}, expected DelegationPolicyResult. Return "
                "DelegationPolicyResult.allow(), .reject(reason) or .modify(request)"
            )
        if answer.verdict == "modify" and not isinstance(answer.request, DelegationRequest):
            raise IllegalStateError(
                f"Delegation policy '{policy_name(policy)}' modified the request to {type(answer.request).__name__}, "
                "expected DelegationRequest. Return DelegationPolicyResult.modify(request.replace(...))"
            )
        return answer

    return ask


def policy_name(policy: object) -> str:
    """What a policy is called in logs and messages: the function's name, or its object's class."""
    return str(getattr(policy, "__name__", type(policy).__name__))
