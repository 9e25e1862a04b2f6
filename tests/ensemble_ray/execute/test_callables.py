"""Handlers and guardrails as the process that holds them asks them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ensemble_ray import (
    AbstractAgentTool,
    AgentTool,
    DelegationPolicyResult,
    IllegalStateError,
    Task,
    TaskHandlerContext,
    TaskOutput,
    ToolPipeline,
    ToolResult,
)
from ensemble_ray.definition.task import Handler
from ensemble_ray.execute.callables import LocalCallables, callable_path
from ensemble_ray.values.value import utc_of


class Shout(AbstractAgentTool):
    name = "shout"
    description = "Repeats loudly"

    def do_execute(self, text: str, /) -> ToolResult:
        return ToolResult.success(text.upper())


class Echo(AgentTool):
    name = "echo"
    description = "Repeats"

    async def execute(self, text: str, /) -> ToolResult:
        return ToolResult.success(text)


def _output(raw: str) -> TaskOutput:
    return TaskOutput(
        raw=raw, task_description="before", agent_role="r", completed_at=utc_of(5), duration=timedelta(seconds=1)
    )


async def _asked(handler: Handler, *before: str) -> object:
    task = Task(name="t", description="the description", expected_output="e", handler=handler)
    context = TaskHandlerContext(
        description=task.description,
        expected_output=task.expected_output,
        context_outputs=tuple(_output(raw) for raw in before),
    )
    return await LocalCallables({"t": task}).evaluate(callable_path("t", "handler"), context)


async def test_function_is_given_the_context_when_it_is_the_handler() -> None:
    """S-DET-1: a handler is a function of a context, sync or async."""

    def now(context: TaskHandlerContext) -> str:
        return context.description

    async def later(context: TaskHandlerContext) -> str:
        return context.context_outputs[0].raw

    assert await _asked(now) == "the description"
    assert await _asked(later, "one") == "one"


@pytest.mark.parametrize(
    ("before", "latest"), [((), "the description"), (("one", "two"), "two")], ids=["without context", "with context"]
)
async def test_tool_is_given_the_last_context_output_when_it_is_the_handler(
    before: tuple[str, ...], latest: str
) -> None:
    """S-DET-2: a tool of any kind, a pipeline too; without context its input is the description."""
    assert await _asked(Echo(), *before) == ToolResult.success(latest)
    assert await _asked(Shout(), *before) == ToolResult.success(latest.upper())
    assert await _asked(ToolPipeline.of(Echo(), Shout()), *before) == ToolResult.success(latest.upper())


@pytest.mark.parametrize(
    ("answer", "problem"),
    [(None, "returned None"), (DelegationPolicyResult.modify("Writer"), "modified the request to str")],  # type: ignore[arg-type]  what a user may write
)
async def test_policy_is_named_when_its_answer_is_none(answer: object, problem: str) -> None:
    """S-DEL-43: what it gives must be a verdict, and what it puts in place of a request one itself."""

    def judge(_request: object, _context: object) -> object:
        return answer

    with pytest.raises(IllegalStateError, match=f"Delegation policy 'judge' {problem}, expected"):
        await LocalCallables({}, [judge]).evaluate(callable_path("", "policy"), (None, None))
