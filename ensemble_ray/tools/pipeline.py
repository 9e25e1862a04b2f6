"""Package tools: several tools as one. In: the first step's input. Out: the last step's result; no model call between.

Steps run one after the other inside a single call of the pipeline, each as it would alone: sync code in a thread, its
own timeout, its own metrics.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import cast

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, TryAgain, ValidationError
from ensemble_ray.errors.texts import format_with_class, user_traceback
from ensemble_ray.tools.rendering import render_value
from ensemble_ray.tools.time_limit import TimeLimit
from ensemble_ray.tools.tool import (
    DEFAULT_TIMEOUT_S,
    AbstractAgentTool,
    AgentTool,
    ToolResult,
    as_result,
    check_effect,
    current_tool_context,
    strongest_effect,
    timeout_seconds,
    use_tool_context,
)
from ensemble_ray.tools.waiting import call_to_end
from ensemble_ray.values.messages import Effect

__all__ = ["PipelineErrorStrategy", "StepAdapter", "ToolPipeline"]

#: Makes the next step's input of a step's result; may be `async`.
StepAdapter = Callable[[ToolResult], str | Awaitable[str | None] | None]
#: A step, with what passes its result on if not its plain output.
PipelineStep = AgentTool | tuple[AgentTool, StepAdapter]


class PipelineErrorStrategy(StrEnum):
    """What a failed step does to the pipeline."""

    FAIL_FAST = "fail_fast"
    CONTINUE_ON_FAILURE = "continue_on_failure"


class ToolPipeline(AbstractAgentTool):
    """Tools that run in order as one tool.

    Args:
        name: What the model calls it by.
        description: Tells the model what it is for.
        steps: Tools, or pairs of a tool and an adapter from its result to the next step's input.
        error_strategy: `fail_fast` returns the first failure; `continue_on_failure` makes its message the next input.
        timeout: How long the whole may take; each step's own timeout holds too.

    Raises:
        ValidationError: name or description is blank, or a step, adapter or strategy is missing; a step's
            effect is none.
    """

    def __init__(
        self,
        name: str = "",
        description: str = "",
        steps: Sequence[PipelineStep] = (),
        error_strategy: PipelineErrorStrategy | str = PipelineErrorStrategy.FAIL_FAST,
        *,
        timeout: float | timedelta | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.name = _not_blank("name", name)
        self.description = _not_blank("description", description)
        self.timeout = timeout
        self._links = tuple(_link(step) for step in steps)
        effects: list[Effect] = [check_effect(tool.effect, f"ToolPipeline step '{tool.name}'") for tool in self.steps]
        #: the strongest of its steps (S-DUR-21)
        self.effect = strongest_effect(*effects)
        self._error_strategy = _strategy(error_strategy)

    @classmethod
    def of(cls, first: PipelineStep, *rest: PipelineStep) -> ToolPipeline:
        """Build a pipeline named after its steps: `a_then_b`; a single step gives its own name."""
        names = [_link(step)[0].name for step in (first, *rest)]
        return cls("_then_".join(names), f"Pipeline: {' -> '.join(names)}", (first, *rest))

    @classmethod
    def of_named(cls, name: str, description: str, first: PipelineStep, *rest: PipelineStep) -> ToolPipeline:
        """Build a pipeline with a name and description of its own."""
        return cls(name, description, (first, *rest))

    @property
    def steps(self) -> tuple[AgentTool, ...]:
        """The tools, in order."""
        return tuple(tool for tool, _ in self._links)

    @property
    def error_strategy(self) -> PipelineErrorStrategy:
        """What a failed step does."""
        return self._error_strategy

    async def do_execute(self, text: str | None, /) -> ToolResult:
        """Run the steps."""
        passed = text or ""
        result = ToolResult.success(passed)
        for index, (tool, adapter) in enumerate(self._links):
            is_last = index == len(self._links) - 1
            result = await _step(tool, passed, index)
            if result.is_success and not is_last and adapter is not None:
                passed, result = await _adapt(tool, adapter, result)
            else:
                passed = result.output if result.is_success else result.error_message or ""
            if not result.is_success and self._error_strategy is PipelineErrorStrategy.FAIL_FAST:
                return result
        return result


async def _step(tool: AgentTool, text: str, index: int) -> ToolResult:
    """One step's result; what it raises is a failure (S-TOOL-74)."""
    timeout_s = timeout_seconds(tool.timeout)
    timer = TimeLimit(timeout_s, current_tool_context().time_limits)
    try:
        async with timer:
            if isinstance(tool, AbstractAgentTool):
                with use_tool_context(current_tool_context().renamed(tool.name, step=index)):
                    return await tool.aexecute(text)
            with use_tool_context(None):  # a plain tool gets no context (S-TOOL-77)
                returned = await call_to_end(tool.execute, text)
            return as_result(returned, tool.name)
    except (ExitEarlyError, IllegalStateError, TryAgain):
        raise
    except TimeoutError as error:
        return ToolResult.failure(f"timed out after {timeout_s:g} s") if timer.is_over else _threw(tool, error)
    except Exception as error:  # noqa: BLE001  user code
        return _threw(tool, error)


async def _adapt(tool: AgentTool, adapter: StepAdapter, result: ToolResult) -> tuple[str, ToolResult]:
    """Return the next step's input; an adapter that raises makes its step a failed one."""
    try:
        return render_value(await call_to_end(adapter, result), "An adapter"), result
    except (ExitEarlyError, IllegalStateError, TryAgain):
        raise
    except Exception as error:  # noqa: BLE001  user code
        failed = _threw(tool, error)
        return failed.error_message or "", failed


def _threw(tool: AgentTool, error: Exception) -> ToolResult:
    message = format_with_class(error) if str(error) else ToolResult.failure(None).error_message
    context = current_tool_context()
    if context.run_id:  # in a run, whose log line of the call shows it
        context.tracebacks.append(user_traceback(error))
    return ToolResult.failure(f"Step '{tool.name}' threw: {message}")


def _link(step: object) -> tuple[AgentTool, StepAdapter | None]:
    tool: object = step
    adapter: object = None
    if isinstance(step, tuple):
        tool, adapter = cast("tuple[object, object]", step)
        if not callable(adapter):
            raise ValidationError(f"ToolPipeline adapter must be callable, got: {adapter!r}")
    if tool is None:
        raise ValidationError("ToolPipeline step must not be None")
    if not isinstance(tool, AgentTool):
        raise ValidationError(f"ToolPipeline step must be an AgentTool, got: {type(tool).__name__}")
    return tool, cast("StepAdapter | None", adapter)


def _not_blank(field: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValidationError(f"ToolPipeline {field} must not be blank")
    return value


def _strategy(value: object) -> PipelineErrorStrategy:
    try:
        return PipelineErrorStrategy(cast("str", value))
    except ValueError:
        allowed = ", ".join(PipelineErrorStrategy)
        raise ValidationError(f"ToolPipeline error_strategy must be one of [{allowed}], got: {value!r}") from None
