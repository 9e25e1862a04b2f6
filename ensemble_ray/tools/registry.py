"""Resolve the entries of a tool list to tools that an agent can call, and run tools as a pipeline (S-ENG-60)."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum
from typing import cast

from msgspec import Struct, structs
from pydantic import BaseModel

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, TryAgain, ValidationError
from ensemble_ray.errors.texts import format_with_class, user_traceback
from ensemble_ray.process.concurrency import call_user, is_async_callable
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.tools.foreign_schema import SchemaError, hash_name, normalise_parameters
from ensemble_ray.tools.schema import TEXT_INPUT, Signature, model_parameters, signature_of
from ensemble_ray.tools.tool import (
    DEFAULT_TIMEOUT_S,
    AbstractAgentTool,
    AgentTool,
    ContextAgentTool,
    CustomSchemaAgentTool,
    DynamicToolProvider,
    FunctionTool,
    ToolContext,
    ToolResult,
    TypedAgentTool,
    as_result,
    check_effect,
    check_tool_name,
    current_tool_context,
    input_type_of,
    marked_functions,
    strongest_effect,
    timeout_seconds,
    tool_mark,
    use_tool_context,
)
from ensemble_ray.tools.user_code import TimeLimit, call_to_end, render_value
from ensemble_ray.values.messages import Effect, ToolSpec
from ensemble_ray.values.task_output import full_name

_log = bounded_logger(__name__)

TRACE = 5  # below DEBUG, for the schemas of tools (S-TOOL-90)


class _Bound(Struct, frozen=True, kw_only=True):
    spec: ToolSpec
    timeout_s: float | None
    effect: Effect

    @property
    def name(self) -> str:
        return self.spec.name


class BoundAgentTool(_Bound, frozen=True, kw_only=True):
    tool: AgentTool
    takes_arguments: bool  # the input is the model's complete argument text (S-TOOL-24)

    @property
    def asks_first(self) -> bool:
        return isinstance(self.tool, AbstractAgentTool) and self.tool.require_approval


class BoundFunction(_Bound, frozen=True, kw_only=True):
    function: Callable[..., object]
    signature: Signature
    is_async: bool
    cpu: bool
    asks_first: bool = False  # before any effect


BoundTool = BoundAgentTool | BoundFunction


class ResolvedTools:
    __slots__ = ("_by_name", "specs")

    def __init__(self, tools: Iterable[BoundTool] = ()) -> None:
        by_name: dict[str, BoundTool] = {}
        for tool in tools:
            if tool.name in by_name:
                raise ValidationError(f"Duplicate tool name: '{tool.name}'")
            by_name[tool.name] = tool
        self._by_name: Mapping[str, BoundTool] = by_name
        self.specs: tuple[ToolSpec, ...] = tuple(tool.spec for tool in by_name.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def get(self, name: str) -> BoundTool | None:
        return self._by_name.get(name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[BoundTool]:
        return iter(self._by_name.values())


def check_tool_entry(entry: object, index: int, *, prefix: str = "Tool") -> str | None:
    """Return the problem of an entry, or None (S-DOM-5 to S-DOM-8, S-DOM-23)."""
    if entry is None:
        return f"{prefix} at index {index} must not be None"
    if isinstance(entry, AgentTool):
        problem = check_tool_name(getattr(entry, "name", None))
        if problem is None:
            try:
                check_effect(entry.effect, f"Tool '{entry.name}'")
            except ValidationError as error:
                problem = str(error)
        return problem
    if isinstance(entry, DynamicToolProvider):
        return None
    if tool_mark(entry) is not None:
        _warn_of_gaps(cast("Callable[..., object]", entry))
        return None
    if methods := _method_names(entry):
        for name in methods:
            _warn_of_gaps(getattr(entry, name))
        return None
    problem = f"{prefix} at index {index} ({type(entry).__name__}) is neither an AgentTool nor has @tool methods"
    if inspect.isfunction(entry):
        return f"{problem}: put @tool before the function '{entry.__name__}'"
    return problem


_warned: set[tuple[str, str]] = set()  # module and qualified name of functions


def _warn_of_gaps(function: Callable[..., object]) -> None:
    mark = tool_mark(function)
    key = (getattr(function, "__module__", ""), getattr(function, "__qualname__", ""))
    if mark is None or key in _warned:
        return
    untyped = [name for name, each in inspect.signature(function).parameters.items() if each.annotation is each.empty]
    gaps = [] if mark.description else ["no docstring: the model does not know its purpose"]
    gaps += [f"no type for {', '.join(untyped)}: the model may pass any value"] if untyped else []
    if gaps:
        _warned.add(key)
        _log.warning("Tool '%s' has %s", mark.name, "; ".join(gaps))


async def expand_providers(entries: Sequence[object]) -> tuple[object, ...]:
    expanded: list[object] = []
    for entry in entries:
        if isinstance(entry, DynamicToolProvider):
            expanded.extend(await call_user(entry.resolve))
        else:
            expanded.append(entry)
    return tuple(expanded)


def resolve_tools(entries: Sequence[object], *, reserved: Sequence[str] = ()) -> ResolvedTools:
    """Return all tools of entries without async providers; a server's tool gets no `reserved` name."""
    resolved = ResolvedTools(_make_unique([tool for entry in entries for tool in _bind(entry)], reserved))
    if _log.isEnabledFor(TRACE):
        for spec in resolved.specs:
            shown = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
            _log.log(TRACE, "Tool spec: %s", json.dumps(shown, default=str))
    return resolved


_logged: set[tuple[str, tuple[str, ...]]] = set()


def log_dropped_keywords(tool: str, dropped: tuple[str, ...]) -> None:
    if dropped and (tool, dropped) not in _logged:
        _logged.add((tool, dropped))
        _log.info("%s: not every endpoint accepts all of its schema, models do not see: %s", tool, ", ".join(dropped))


def _make_unique(tools: Sequence[BoundTool], reserved: Sequence[str]) -> Iterator[BoundTool]:
    taken = {*reserved, *(tool.name for tool in tools if not _origin_of(tool))}
    for tool in tools:
        origin, name = _origin_of(tool), tool.name
        while origin and name in taken:
            origin = f"{origin}/{tool.name}"
            name = hash_name(tool.name, origin)
        taken.add(name)
        yield tool if name == tool.name else structs.replace(tool, spec=replace(tool.spec, name=name))


def _origin_of(tool: BoundTool) -> str:
    return tool.tool.origin if isinstance(tool, BoundAgentTool) and isinstance(tool.tool, ContextAgentTool) else ""


def _bind(entry: object) -> Iterator[BoundTool]:
    mark = tool_mark(entry)
    if isinstance(entry, AgentTool):
        yield _bind_agent_tool(entry)
    elif mark is not None:
        yield _bind_function(cast("Callable[..., object]", entry), mark)
    elif isinstance(entry, DynamicToolProvider):
        offered = entry.resolve()
        if inspect.isawaitable(offered):
            close = getattr(offered, "close", None)
            if close is not None:
                close()
            kind = type(entry).__name__
            raise ValidationError(f"{kind}.resolve is async: expand_providers must have been awaited first")
        for inner in offered:
            yield from _bind(inner)
    else:
        methods = _method_names(entry)
        if not methods:
            kind = full_name(type(entry))
            raise ValidationError(f"Tool object of type '{kind}' is neither an AgentTool nor has @tool methods")
        for name in methods:
            method = getattr(entry, name)
            yield _bind_function(method, cast("FunctionTool", tool_mark(method)))


def _method_names(entry: object) -> tuple[str, ...]:
    return () if inspect.isclass(entry) else marked_functions(type(entry))


def _bind_agent_tool(tool: AgentTool) -> BoundAgentTool:
    problem = check_tool_name(getattr(tool, "name", None))
    if problem is not None:
        raise ValidationError(problem)
    takes_arguments = True
    parameters: Mapping[str, object]
    if isinstance(tool, ContextAgentTool):
        parameters = tool.parameter_schema
    elif isinstance(tool, CustomSchemaAgentTool):
        try:
            schema = normalise_parameters(tool.parameter_schema)
        except SchemaError as error:
            raise ValidationError(f"Tool '{tool.name}': {error}") from None
        log_dropped_keywords(f"Tool '{tool.name}'", schema.dropped)
        parameters = schema.parameters
    elif isinstance(tool, TypedAgentTool):
        parameters = model_parameters(input_type_of(cast("TypedAgentTool[BaseModel]", tool)))
    else:
        parameters, takes_arguments = TEXT_INPUT, False
    return BoundAgentTool(
        spec=ToolSpec(tool.name, getattr(tool, "description", None) or "", parameters),
        timeout_s=timeout_seconds(tool.timeout),
        tool=tool,
        takes_arguments=takes_arguments,
        effect=check_effect(tool.effect, f"Tool '{tool.name}'"),
    )


def _bind_function(function: Callable[..., object], mark: FunctionTool) -> BoundFunction:
    is_method = inspect.ismethod(function)
    if mark.cpu and is_method:
        raise ValidationError(
            f"Tool '{mark.name}' is a bound method, but @tool(cpu=True) is for stateless functions that run in another "
            "process. Make it a module-level function, or leave cpu out."
        )
    owner, _, _ = getattr(function, "__qualname__", "").rpartition(".")
    is_in_class = owner and not owner.endswith("<locals>") and not is_method
    if is_in_class and next(iter(inspect.signature(function).parameters), "") in {"self", "cls"}:
        raise ValidationError(
            f"Tool '{mark.name}' is a method of {owner}: list the object or its bound method, not the function"
        )
    signature = signature_of(function, tool_name=mark.name, context_type=ToolContext)
    if mark.cpu and signature.context:
        raise ValidationError(
            f"Tool '{mark.name}' has the context '{signature.context}', but @tool(cpu=True) runs in another process, which "
            "has no context of the run. Pass the values that it needs as arguments, or leave cpu out."
        )
    return BoundFunction(
        spec=ToolSpec(mark.name, mark.description, signature.parameters),
        timeout_s=mark.timeout_s,
        function=function,
        signature=signature,
        is_async=is_async_callable(function),
        cpu=mark.cpu,
        effect=mark.effect,
        asks_first=mark.approval,
    )


#: from a step's result to the next step's input
StepAdapter = Callable[[ToolResult], str | Awaitable[str | None] | None]
PipelineStep = AgentTool | tuple[AgentTool, StepAdapter]


class PipelineErrorStrategy(StrEnum):
    """Effect of a failed step on its pipeline."""

    FAIL_FAST = "fail_fast"
    CONTINUE_ON_FAILURE = "continue_on_failure"


class ToolPipeline(AbstractAgentTool):
    """Tools that run in order as one tool.

    Args:
        name: Name for the model.
        description: Explains to the model when to use the pipeline.
        steps: Tools, or pairs of a tool and an adapter from its result to the next step's input.
        error_strategy: `fail_fast` returns the first failure; `continue_on_failure` makes its message the next input.
        timeout: Time limit of the whole pipeline; each step's own timeout also applies.

    Raises:
        ValidationError: the name or description is blank, or a step, adapter, effect or strategy is invalid.
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
        self.effect = strongest_effect(*effects)
        try:
            self._error_strategy = PipelineErrorStrategy(error_strategy)
        except ValueError:
            allowed = ", ".join(PipelineErrorStrategy)
            message = f"ToolPipeline error_strategy must be one of [{allowed}], got: {error_strategy!r}"
            raise ValidationError(message) from None

    @classmethod
    def of(cls, first: PipelineStep, *rest: PipelineStep) -> ToolPipeline:
        """Build a pipeline that is named after its steps: `a_then_b`."""
        names = [_link(step)[0].name for step in (first, *rest)]
        return cls("_then_".join(names), f"Pipeline: {' -> '.join(names)}", (first, *rest))

    @classmethod
    def of_named(cls, name: str, description: str, first: PipelineStep, *rest: PipelineStep) -> ToolPipeline:
        """Build a pipeline with this name and description."""
        return cls(name, description, (first, *rest))

    @property
    def steps(self) -> tuple[AgentTool, ...]:
        """The tools, in order."""
        return tuple(tool for tool, _ in self._links)

    @property
    def error_strategy(self) -> PipelineErrorStrategy:
        """Effect of a failed step."""
        return self._error_strategy

    async def do_execute(self, text: str | None, /) -> ToolResult:
        passed = text or ""
        result = ToolResult.success(passed)
        for index, (tool, adapter) in enumerate(self._links):
            is_last = index == len(self._links) - 1
            result = await _run_step(tool, passed, index)
            if result.is_success and not is_last and adapter is not None:
                try:
                    passed = render_value(await call_to_end(adapter, result), "An adapter")
                except (ExitEarlyError, IllegalStateError, TryAgain):
                    raise
                except Exception as error:  # noqa: BLE001  user code
                    result = _step_failure(tool, error)
                    passed = result.error_message or ""
            else:
                passed = result.output if result.is_success else result.error_message or ""
            if not result.is_success and self._error_strategy is PipelineErrorStrategy.FAIL_FAST:
                return result
        return result


async def _run_step(tool: AgentTool, text: str, index: int) -> ToolResult:
    timeout_s = timeout_seconds(tool.timeout)
    timer = TimeLimit(timeout_s, current_tool_context().time_limits)
    try:
        async with timer:
            if isinstance(tool, AbstractAgentTool):
                with use_tool_context(current_tool_context().renamed(tool.name, step=index)):
                    return await tool.aexecute(text)
            with use_tool_context(None):  # a plain AgentTool has no context (S-TOOL-77)
                returned = await call_to_end(tool.execute, text)
            return as_result(returned, tool.name)
    except (ExitEarlyError, IllegalStateError, TryAgain):
        raise
    except TimeoutError as error:
        return ToolResult.failure(f"timed out after {timeout_s:g} s") if timer.is_over else _step_failure(tool, error)
    except Exception as error:  # noqa: BLE001  user code
        return _step_failure(tool, error)


def _step_failure(tool: AgentTool, error: Exception) -> ToolResult:
    message = format_with_class(error) if str(error) else ToolResult.failure(None).error_message
    context = current_tool_context()
    if context.run_id:  # in a run, the log line of the call contains the traceback
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
