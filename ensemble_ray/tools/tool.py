"""Package tools: what a tool is. In: text that a model wrote. Out: a `ToolResult`.

`AgentTool` is the bare contract: a name, a description, text in, result out. `AbstractAgentTool` adds timing, metrics,
exception safety and a `ToolContext`; built-in tools extend it. Context is looked up per execution and never stored on
the tool, so that one tool object serves many tasks at once (S-TOOL-36).

What must never happen here: a tool's exception leaves `execute`, except the two kinds that are not for the model
(`ExitEarlyError`, `IllegalStateError`).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, is_dataclass, replace
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar, cast, final, get_args, overload
from weakref import WeakKeyDictionary

import pydantic
from pydantic import BaseModel
from pydantic_core import from_json, to_json

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, TryAgain, ValidationError
from ensemble_ray.errors.texts import format_with_class, user_exc_info, user_traceback
from ensemble_ray.events import Event
from ensemble_ray.ports import CustomToolMetrics
from ensemble_ray.process.context import ScopedVariable, bounded_logger
from ensemble_ray.process.forks import is_async_callable
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.tools.approval import approval_request, ask, ask_from_thread
from ensemble_ray.tools.schema import explain_arguments, parameter_types
from ensemble_ray.tools.waiting import (
    AsksModel,
    NoOpToolMetrics,
    ResultError,
    TimeLimit,
    call_to_end,
    collect,
    collect_here,
    render_value,
)
from ensemble_ray.values.messages import Effect
from ensemble_ray.values.reviews import OnTimeoutAction, Review, ReviewDecision

#: How long one call of a tool may take unless the tool says otherwise (S-SET-34).
DEFAULT_TIMEOUT_S = 300.0
_NAME = re.compile(r"[A-Za-z0-9_]+")
#: weakest first
_EFFECTS: tuple[Effect, ...] = get_args(Effect)

_log = bounded_logger(__name__)
#: What tools without a context log to; a logger as the library has it, since their authors use it.
_of_tools = _log.logger


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What one execution of a tool gave. Build it with `success` or `failure`."""

    #: text for the model; "" for a failure
    output: str = ""
    #: why it failed; None for a success
    error_message: str | None = None
    #: payload for programs: traces, events, the next step of a pipeline; the model does not see it
    structured_output: Any = None

    @classmethod
    def success(cls, output: object, structured_output: object = None) -> ToolResult:
        """Return a success. `output` None is ""; what is not text becomes text as a `@tool`'s return value does.

        Data is the structured output, too, where there is no other.

        Raises:
            ResultError: `output` has no text.
        """
        try:
            text = render_value(output)
        except ResultError as error:
            raise ResultError(f"{error}. In ToolResult.success(text, value) the value needs no text") from error
        is_data = isinstance(output, BaseModel | Mapping | list | tuple | set | frozenset)
        is_payload = structured_output is None and (is_data or is_dataclass(type(output)))
        return cls(text, None, output if is_payload else structured_output)

    @classmethod
    def failure(cls, message: str | None) -> ToolResult:
        """Return a failure; the message tells the model why."""
        return cls("", "Tool execution failed with no message" if message is None else message)

    @property
    def is_success(self) -> bool:
        """Whether it worked."""
        return self.error_message is None


def as_result(value: object, tool_name: str = "") -> ToolResult:
    """Return a `ToolResult` as it is, anything else that a tool's code returned as a success of its text.

    Raises:
        ResultError: it has no text (S-LLM-47).
    """
    if isinstance(value, ToolResult):
        return value
    return ToolResult.success(render_value(value, f"Tool '{tool_name}'" if tool_name else "A tool"))


_NO_METRICS = NoOpToolMetrics()


def _emit_nowhere(_event: Event) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """What a tool may know of the call it serves. One per call; `current_tool_context()` finds it."""

    tool_name: str = ""
    #: `unknown` outside an agent (S-TOOL-42)
    agent_role: str = "unknown"
    #: `ensemble_ray.tool.{name}` when a tool name is given, else this module's
    logger: logging.Logger = _of_tools
    #: counts calls, and what the tool's code counts itself; never raises
    metrics: CustomToolMetrics = _NO_METRICS
    #: name of the effect: the same when a call is repeated after a crash, so that the tool can do its work once
    idempotency_key: str = ""
    #: takes an event of the tool's own (a changed file); may be called from any thread
    emit: Callable[[Event], None] = field(default=_emit_nowhere, repr=False)
    run_id: str = ""
    instance: str = ""
    #: 1-based position of the task in the run; 0 outside one
    task_index: int = 0
    #: characters of input and output in log lines: -1 all, 0 none (S-ENG-72)
    log_truncate_length: int = 200
    #: decides what the tool asks a person: the run's, whose answers are recorded; None: there is nobody to ask
    review_handler: object = field(default=None, repr=False)
    #: the agent's model, for what a tool's server asks of it; None: there is none
    sampler: AsksModel | None = field(default=None, repr=False)
    #: those of the call, which stand still while a person is asked
    time_limits: list[TimeLimit] = field(default_factory=list[TimeLimit], repr=False, compare=False)
    #: where user code raised during the call; the log line of the call shows them
    tracebacks: list[str] = field(default_factory=list[str], repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.tool_name and self.logger is _of_tools:
            object.__setattr__(self, "logger", logging.getLogger(f"ensemble_ray.tool.{self.tool_name}"))

    def renamed(self, tool_name: str, *, step: int = 0) -> ToolContext:
        """Return this context for another tool that works for this call, such as the step of that index of a pipeline.

        Each step has a key of its own, also when one tool stands in a pipeline twice.
        """
        if self is _OUTSIDE:
            return self
        key = f"{self.idempotency_key}/{step}/{tool_name}" if self.idempotency_key else ""
        return replace(self, tool_name=tool_name, idempotency_key=key, logger=_of_tools)

    def emitting(self, emit: Callable[[Event], None]) -> ToolContext:
        """Return this context with another receiver of events."""
        return replace(self, emit=emit)


#: The context outside any call: nothing is counted, there are no listeners (S-TOOL-43).
_OUTSIDE = ToolContext()
_context: ContextVar[ToolContext | None] = ContextVar("ensemble_ray_tool_context", default=None)


def current_tool_context() -> ToolContext:
    """Return the context of the running tool call; outside one a context with no run, listener or metrics."""
    return _context.get() or _OUTSIDE


def use_tool_context(context: ToolContext | None) -> AbstractContextManager[None]:
    """Serve the block under that context; None hides an outer one."""
    return ScopedVariable(_context, context)


class AgentTool(ABC):
    """A tool with one text input. Subclasses set `name` and `description` and implement `execute`.

    Attributes:
        name: What the model calls it by: ASCII letters, digits and underscores.
        description: Tells the model when to use it and what to write as input.
        timeout: How long one call may take, in seconds or as a `timedelta`; None: as long as it likes.
        effect: What a call does to the world: `none`, `idempotent` or `once`. After a crash a call whose result was
            lost is made again if it is one of the first two; what becomes of the third, `Ensemble.on_unknown` says.
    """

    name: str
    description: str
    timeout: float | timedelta | None = DEFAULT_TIMEOUT_S
    effect: Effect = "once"

    @abstractmethod
    def execute(self, text: str, /) -> ToolResult | Awaitable[ToolResult]:
        """Do the work; may be `async`. The model reads what it raises as an error."""


def check_tool_name(name: object) -> str | None:
    """Return what is wrong with a tool's name; None when nothing is (S-DOM-7, S-DOM-8)."""
    if name is None or not str(name).strip():
        return "Tool name must not be blank"
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        return f"Tool name '{name}' must contain only alphanumeric characters and underscores"
    return None


def make_tool_name(text: str) -> str:
    """Return a name that a tool may have: each character that it may not have is an underscore (S-DOM-8)."""
    return re.sub(r"[^A-Za-z0-9_]", "_", text)


def check_effect(effect: object, subject: str) -> Effect:
    """Return an effect, if it is one (S-DUR-20).

    Raises:
        ValidationError: it is none.
    """
    for allowed in _EFFECTS:
        if effect == allowed:
            return allowed
    raise ValidationError(f"{subject} effect must be one of [{', '.join(_EFFECTS)}], got: {effect!r}")


def strongest_effect(*effects: Effect) -> Effect:
    """Return the one that asks for the most care; `none` of nothing (S-DUR-21)."""
    for effect in reversed(_EFFECTS):
        if effect in effects:
            return effect
    return "none"


def timeout_seconds(timeout: float | timedelta | None) -> float | None:
    """Return a tool's timeout in seconds, None where there is none.

    Raises:
        ValidationError: it is not a length of time above zero.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is None or seconds == math.inf:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ValidationError(f"Tool timeout must be > 0 seconds or None, got: {timeout!r}")
    return float(seconds)


class CustomSchemaAgentTool(AgentTool):
    """A tool that brings its own JSON schema and gets the model's whole argument text."""

    @property
    @abstractmethod
    def parameter_schema(self) -> Mapping[str, object]:
        """JSON schema of the arguments: an object with properties."""


class ContextAgentTool(CustomSchemaAgentTool):
    """A tool of the library's own with a schema of its own, which finds the context of its call.

    Attributes:
        origin: Who chose its name, if that is not the user: a server. Such a name gives way to others (S-LLM-63).
    """

    origin: str = ""


class DynamicToolProvider(ABC):
    """Stands in a tool list for tools that are only known when a task begins."""

    @abstractmethod
    def resolve(self) -> Sequence[object] | Awaitable[Sequence[object]]:
        """Return the tools, of either kind; asked once per task execution; may be `async`."""


class AbstractAgentTool(AgentTool):
    """A tool with timing, metrics and exception safety around `do_execute`.

    Attributes:
        require_approval: Whether it asks the run's review handler before it does anything, once in each call.
    """

    require_approval: bool = False

    @abstractmethod
    def do_execute(self, text: str, /) -> ToolResult | Awaitable[ToolResult | None] | None:
        """Do the work; may be `async`. None is a success without text; an exception becomes a failure."""

    @property
    def context(self) -> ToolContext:
        """The context of the call that runs here; a silent one outside an agent."""
        return current_tool_context()

    def request_approval(
        self,
        description: str,
        timeout: timedelta | float | None = Review.DEFAULT_TIMEOUT,
        on_timeout: OnTimeoutAction | str = OnTimeoutAction.EXIT_EARLY,
    ) -> ReviewDecision:
        """Ask the run's review handler, and wait in this thread; without one everything is approved.

        Args:
            description: What is about to be done.
            timeout: How long the answer may take, a `timedelta` or seconds; None or 0: as long as it takes.
            on_timeout: What follows when nobody answered: `"continue"`, `"exit_early"` or `"fail"`.
        """
        request = approval_request(description, timeout=timeout, on_timeout=on_timeout)
        return ask_from_thread(self.context.review_handler, request)

    async def arequest_approval(
        self,
        description: str,
        timeout: timedelta | float | None = Review.DEFAULT_TIMEOUT,  # noqa: ASYNC109  the person's time, not the caller's
        on_timeout: OnTimeoutAction | str = OnTimeoutAction.EXIT_EARLY,
    ) -> ReviewDecision:
        """`request_approval` for async tools, with the same contract."""
        request = approval_request(description, timeout=timeout, on_timeout=on_timeout)
        return await ask(self.context.review_handler, request)

    @final
    def execute(self, input: str) -> ToolResult:  # noqa: A002  the public name of the argument (S-TOOL-1)
        """Run the tool and wait for it, also where `do_execute` is async.

        Raises:
            ExitEarlyError: the tool ends the run.
            IllegalStateError: the tool is set up wrongly.
        """
        call = _MeasuredCall(self)
        try:
            return call.count_return(collect_here(self.do_execute(input)))
        except BaseException as error:  # noqa: BLE001  `raised` raises again what is not the tool's own failure
            return call.count_error(error)

    @final
    async def aexecute(self, input: str) -> ToolResult:  # noqa: A002  same name as `execute` has
        """Run the tool without blocking the event loop: sync code in a daemon thread, async code right here.

        Raises:
            ExitEarlyError: the tool ends the run.
            IllegalStateError: the tool is set up wrongly.
        """
        call = _MeasuredCall(self)
        try:
            is_async = self._is_async()
            outcome = await (collect(self.do_execute(input)) if is_async else call_to_end(self.do_execute, input))
            return call.count_return(outcome)
        except BaseException as error:  # noqa: BLE001  as in `execute`
            return call.count_error(error)

    def _is_async(self) -> bool:
        """Whether the work is written for the event loop; if not, it gets a thread."""
        return is_async_callable(self.do_execute)


class _MeasuredCall:
    """One execution of an `AbstractAgentTool`: counts exactly one of success, failure, error, and one duration."""

    __slots__ = ("_context", "_name", "_started_s")

    def __init__(self, tool: AbstractAgentTool) -> None:
        self._name = tool.name
        self._context = current_tool_context()
        self._started_s = time.perf_counter()

    def count_return(self, outcome: object) -> ToolResult:
        """Count what the tool's code returned."""
        result = as_result(outcome, self._name)
        metrics = self._context.metrics
        self._count(metrics.increment_success if result.is_success else metrics.increment_failure)
        return result

    def count_error(self, error: BaseException) -> ToolResult:
        """Count an error of the tool's code: a failure for the model, or the same error again (S-TOOL-41)."""
        metrics = self._context.metrics
        self._count(metrics.increment_failure if isinstance(error, TryAgain) else metrics.increment_error)
        if isinstance(error, ExitEarlyError | IllegalStateError | TryAgain) or not isinstance(error, Exception):
            raise error
        if self._context is _OUTSIDE:
            self._context.logger.warning("Tool '%s' raised", self._name, exc_info=user_exc_info(error))
        else:
            self._context.tracebacks.append(user_traceback(error))
        return ToolResult.failure(format_with_class(error))

    def _count(self, increment: Callable[[str, str], object]) -> None:
        role, metrics = self._context.agent_role, self._context.metrics
        if metrics is _NO_METRICS:
            return
        try:
            increment(self._name, role)
            metrics.record_duration(self._name, role, time.perf_counter() - self._started_s)
        except Exception:  # noqa: BLE001  counting must not change what the tool gave
            _log.warning("ToolMetrics failed for tool '%s'", self._name, exc_info=True)


InputT = TypeVar("InputT", bound=BaseModel)


class TypedAgentTool(AgentTool, Generic[InputT]):
    """A tool whose arguments are the fields of a pydantic model.

    Attributes:
        input_type: The model class; field descriptions are what the model reads of its parameters.
    """

    input_type: type[InputT]

    def __init_subclass__(cls, **options: object) -> None:
        """Refuse a class whose `input_type` cannot describe arguments.

        Raises:
            ValidationError: it is no model class.
        """
        super().__init_subclass__(**options)
        input_type: object = cls.__dict__.get("input_type")
        if input_type is not None and not isinstance(
            input_type, property
        ):  # a property is looked at when a tool is resolved
            _check_input_type(input_type, f"Tool class '{cls.__qualname__}'")

    @abstractmethod
    def execute_typed(self, arguments: InputT, /) -> object:
        """Do the work; may be `async`. Returns a `ToolResult` or anything that has a text."""

    def execute(self, text: str, /) -> ToolResult | Awaitable[ToolResult]:
        """Parse the JSON text and do the work."""
        parsed = parse_input(text, input_type_of(self))
        if isinstance(parsed, ToolResult):
            return parsed
        outcome = self.execute_typed(parsed)
        if isinstance(outcome, Awaitable | AsyncIterator):
            return _await_result(cast("object", outcome), self.name)
        return as_result(outcome, self.name)


class AbstractTypedAgentTool(AbstractAgentTool, TypedAgentTool[InputT]):
    """A typed tool with the timing, metrics and exception safety of `AbstractAgentTool`."""

    def do_execute(self, text: str, /) -> ToolResult | Awaitable[ToolResult]:
        """Parse the JSON text and do the work."""
        return TypedAgentTool[InputT].execute(self, text)

    def _is_async(self) -> bool:
        return is_async_callable(self.execute_typed)


async def _await_result(outcome: object, tool_name: str) -> ToolResult:
    return as_result(await collect(outcome), tool_name)


def input_type_of(tool: TypedAgentTool[InputT]) -> type[InputT]:
    """Return the tool's input model.

    Raises:
        ValidationError: there is no `input_type`, or it is no model class (S-TOOL-52).
    """
    input_type: object = getattr(tool, "input_type", None)
    _check_input_type(input_type, f"Tool '{tool.name}'")
    return cast("type[InputT]", input_type)


def _check_input_type(input_type: object, owner: str) -> None:
    if not isinstance(input_type, type) or not issubclass(input_type, BaseModel):
        raise ValidationError(f"{owner}: input_type must be a pydantic model class, got: {input_type!r}")


def parse_input(text: str, input_type: type[InputT]) -> InputT | ToolResult:
    """Return the arguments as an instance of the model, or the failure that the model reads (S-TOOL-51).

    A text that is no JSON object is the value of the one required field, where that is a string (S-TOOL-53).
    """
    name = input_type.__name__
    field = None if not text.strip() or text.lstrip().startswith("{") else _only_required_string(input_type)
    if field is not None:
        text = to_json({field: whole_text(text)}).decode()
    try:
        data: object = from_json(text)
    except ValueError as error:
        return ToolResult.failure(f"Invalid JSON input for '{name}': {error}")
    except TypeError:  # what pydantic says of a text that no UTF-8 can hold
        return ToolResult.failure(f"Invalid JSON input for '{name}': half of a surrogate pair is no character")
    if not isinstance(data, dict):
        return ToolResult.failure(f"Expected a JSON object for '{name}' but received: {_kind_of(data)}")
    values = cast("dict[str, object]", data)
    missing = [
        field.alias or key
        for key, field in input_type.model_fields.items()
        if field.is_required() and all(values.get(accepted) is None for accepted in _accepted_names(key, field.alias))
    ]
    if missing:
        return ToolResult.failure(f"Missing required parameter(s) for '{name}': {', '.join(missing)}")
    try:
        if input_type.model_config.get("extra") == "forbid":
            return input_type.model_validate_json(to_json(_drop_unknown(values, input_type)))
        return input_type.model_validate_json(text)
    except pydantic.ValidationError as error:
        return ToolResult.failure(f"Failed to deserialize input for '{name}': {explain_arguments(error)}")


def _only_required_string(input_type: type[BaseModel]) -> str | None:
    """Return the name under which a text can be given as the one argument that is needed; None where it cannot."""
    required = [(key, field) for key, field in input_type.model_fields.items() if field.is_required()]
    if len(required) != 1 or required[0][1].annotation is not str:
        return None
    key, field = required[0]
    return field.alias or key


def _accepted_names(key: str, alias: str | None) -> tuple[str, ...]:
    return (key,) if alias is None else (alias, key)


def _drop_unknown(values: Mapping[str, object], input_type: type[BaseModel]) -> dict[str, object]:
    known = {name for key, field in input_type.model_fields.items() for name in _accepted_names(key, field.alias)}
    return {name: value for name, value in values.items() if name in known}


def _kind_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array"


_MARK = "__ensemble_tool__"

#: A function, or what `@staticmethod` and `@classmethod` made of one.
F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool:
    """The mark that `@tool` leaves on a function."""

    name: str
    description: str
    #: seconds; None: as long as it likes (S-SET-34)
    timeout_s: float | None = DEFAULT_TIMEOUT_S
    #: heavy on the processor and stateless: it runs outside the agent's process (S-SET-35)
    cpu: bool = False
    #: what a call does to the world (S-DUR-20)
    effect: Effect = "once"
    #: a person is asked before each call (S-TOOL-96)
    approval: bool = False


class _Decorator(Protocol):
    def __call__(self, function: F, /) -> F: ...


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(
    description: str | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float | timedelta | None = DEFAULT_TIMEOUT_S,
    cpu: bool = False,
    effect: Effect = "once",
    approval: bool = False,
) -> _Decorator: ...
@overload
def tool(
    *,
    description: str,
    name: str | None = None,
    timeout: float | timedelta | None = DEFAULT_TIMEOUT_S,
    cpu: bool = False,
    effect: Effect = "once",
    approval: bool = False,
) -> _Decorator: ...
def tool(
    target: Callable[..., object] | str | None = None,
    /,
    *,
    description: str | None = None,
    name: str | None = None,
    timeout: float | timedelta | None = DEFAULT_TIMEOUT_S,
    cpu: bool = False,
    effect: Effect = "once",
    approval: bool = False,
) -> object:
    """Make a tool of a function or method: `@tool`, `@tool("description")`, `@tool(name=..., timeout=...)`.

    The signature becomes the tool's JSON schema: annotations, defaults, `Annotated[..., Field(description=...)]`, else
    the parameter's words in the docstring. The function may be `async`.

    Args:
        target: The function, or the description.
        description: What the model reads; default: the first paragraph of the docstring.
        name: What the model calls it by; default: the function's name.
        timeout: How long one call may take, in seconds or as a `timedelta`; None: as long as it likes.
        cpu: It is heavy on the processor and stateless; it then runs in another process, so that cores add up.
        effect: What a call does to the world: `none`: it only reads; `idempotent`: doing it again under the same
            `idempotency_key` changes nothing more; `once`: it must not be done twice, and is not repeated after a crash.
        approval: Whether the run's review handler is asked before each call, with the arguments; a refusal is an error for the model.

    Raises:
        ValidationError: the name, the timeout or the effect cannot be.
    """
    words = description if target is None or not isinstance(target, str) or description is not None else target
    options = _Options(
        name=name,
        description=words,
        timeout_s=timeout_seconds(timeout),
        cpu=cpu,
        effect=check_effect(effect, "@tool"),
        approval=approval,
    )
    if target is not None and not isinstance(target, str):
        return _mark(target, options)

    def decorate(function: F) -> F:
        return _mark(function, options)

    return decorate


def tool_mark(entry: object) -> FunctionTool | None:
    """Return the mark on a function or bound method; None when there is none."""
    if inspect.isclass(entry) or not callable(entry):
        return None
    mark = getattr(entry, _MARK, None)
    return mark if isinstance(mark, FunctionTool) else None


def marked_functions(kind: type[object]) -> tuple[str, ...]:
    """Names of a class's public `@tool` methods, inherited ones first, in the order of their definition."""
    cached = _methods.get(kind)
    if cached is not None:
        return cached
    found: dict[str, None] = {}
    for owner in reversed(kind.__mro__):
        found.update(dict.fromkeys(name for name in vars(owner) if not name.startswith("_")))
    names = tuple(name for name in found if tool_mark(_function_of(inspect.getattr_static(kind, name))) is not None)
    _methods[kind] = names
    return names


def _function_of(attribute: object) -> object:
    return attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute


#: Class -> names of its tool methods; classes are looked through once.
_methods: WeakKeyDictionary[type[object], tuple[str, ...]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What was said in the decorator."""

    name: str | None
    description: str | None
    timeout_s: float | None
    cpu: bool
    effect: Effect
    approval: bool


def _mark(function: F, options: _Options) -> F:
    target = cast("Callable[..., object]", _function_of(function))
    chosen = getattr(target, "__name__", "") if options.name is None else options.name
    problem = check_tool_name(chosen)
    if problem is not None:
        raise ValidationError(problem)
    said = options.description
    mark = FunctionTool(
        name=chosen,
        description=_summary(inspect.getdoc(target) or "") if said is None else said.strip(),
        timeout_s=options.timeout_s,
        cpu=options.cpu,
        effect=options.effect,
        approval=options.approval,
    )
    _resolve_fleeting_names(target)
    try:
        setattr(target, _MARK, mark)
    except AttributeError:
        raise ValidationError(f"@tool needs a function, got: {type(function).__name__}") from None
    return function


def _summary(doc: str) -> str:
    """Return the first paragraph of a docstring as one line."""
    lines: list[str] = []
    for line in doc.splitlines():
        text = line.strip()
        if (
            not text
            or text.startswith(":param")
            or text in {"Args:", "Arguments:", "Parameters:", "Returns:", "Raises:"}
        ):
            break
        lines.append(text)
    return " ".join(lines)


def _resolve_fleeting_names(function: Callable[..., object]) -> None:
    """Turn string annotations into types while the names they use are still in reach.

    A nested function's scope ends; a script's functions travel to other processes without what only annotations name.
    """
    annotations = cast("Mapping[str, object]", getattr(function, "__annotations__", {}))
    is_nested = "<locals>" in getattr(function, "__qualname__", "")
    is_of_a_script = getattr(function, "__module__", "") == "__main__"
    if not (is_nested or is_of_a_script) or not any(isinstance(value, str) for value in annotations.values()):
        return
    # the frame that applies the decorator; there is no public way
    frame = sys._getframe(3)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    around = frame.f_back.f_locals if frame.f_back is not None else {}  # the function around a class, for methods
    with contextlib.suppress(Exception):  # a name defined later: told at resolution, if it is still missing then
        function.__annotations__ = {**annotations, **parameter_types(function, {**around, **frame.f_locals})}
