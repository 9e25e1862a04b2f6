"""The kinds of tools, the context and the result of a call, and the `@tool` decorator."""

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
from itertools import takewhile
from typing import Any, Generic, Literal, Protocol, TypeVar, cast, final, get_args, overload
from weakref import WeakKeyDictionary

import pydantic
from msgspec import Struct
from pydantic import BaseModel
from pydantic_core import from_json, to_json

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, TryAgain, ValidationError
from ensemble_ray.errors.texts import format_with_class, user_exc_info, user_traceback
from ensemble_ray.events import Event
from ensemble_ray.ports import CustomToolMetrics
from ensemble_ray.process.concurrency import is_async_callable
from ensemble_ray.process.context import ScopedVariable, bounded_logger
from ensemble_ray.process.run_context import OUTSIDE_RUN, CurrentRun, DepsT_co
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.tools.approval import approval_request, ask, ask_from_thread
from ensemble_ray.tools.schema import explain_arguments, parameter_types
from ensemble_ray.tools.user_code import (
    AsksModel,
    NoOpToolMetrics,
    ResultError,
    TimeLimit,
    call_to_end,
    collect,
    collect_here,
    render_value,
)
from ensemble_ray.values.attachments import Attachment
from ensemble_ray.values.messages import Effect
from ensemble_ray.values.reviews import OnTimeoutAction, Review, ReviewDecision

DEFAULT_TIMEOUT_S = 300.0
_NAME = re.compile(r"[A-Za-z0-9_]+")
_EFFECTS: tuple[Effect, ...] = get_args(Effect)  # weakest first

_log = bounded_logger(__name__)
#: the plain logger, because tool authors use it
_default_tool_logger = _log.logger
_NO_METRICS = NoOpToolMetrics()


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of one execution of a tool. Build it with `success` or `failure`."""

    output: str = ""  # for the model
    error_message: str | None = None  # None: a success
    structured_output: Any = None  # for programs; the model does not see it
    attachments: tuple[Attachment, ...] = ()  # the model sees them after the results of its turn

    @classmethod
    def success(cls, output: object, structured_output: object = None) -> ToolResult:
        """Return a success. `output` is converted to text like the return value of a `@tool` function; None becomes "".

        Data (a model, mapping, list, tuple, set or dataclass) is also the structured output, unless one is passed. An
        attachment, or a list of texts and attachments, becomes a text that names them, and `attachments`.

        Raises:
            ResultError: `output` has no text.
        """
        if (split := split_attachments(output)) is not None:
            return cls(split[0], None, structured_output, split[1])
        try:
            text = render_value(output)
        except ResultError as error:
            raise ResultError(f"{error}. In ToolResult.success(text, value) the value needs no text") from error
        is_data = isinstance(output, BaseModel | Mapping | list | tuple | set | frozenset)
        is_payload = structured_output is None and (is_data or is_dataclass(type(output)))
        return cls(text, None, output if is_payload else structured_output)

    @classmethod
    def failure(cls, message: str | None) -> ToolResult:
        """Return a failure. The model reads the message."""
        return cls("", "Tool execution failed with no message" if message is None else message)

    @property
    def is_success(self) -> bool:
        """Whether the tool succeeded."""
        return self.error_message is None


def split_attachments(value: object) -> tuple[str, tuple[Attachment, ...]] | None:
    """Return the text and the attachments of a value that is one, or a list or tuple with one; None: it has none."""
    parts = cast("Sequence[object]", value) if isinstance(value, list | tuple) else (value,)
    attachments = tuple([each for each in parts if isinstance(each, Attachment)])
    if not attachments:
        return None
    texts = [mention(each) if isinstance(each, Attachment) else render_value(each) for each in parts]
    return "\n".join(texts), attachments


def mention(attachment: Attachment) -> str:
    """Return the text that stands for an attachment in the result of a tool."""
    return f"[{attachment.kind} {attachment.name or 'without a name'}]"  # a URL may contain a key


def as_result(value: object, tool_name: str = "") -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    if (split := split_attachments(value)) is not None:
        return ToolResult(split[0], None, None, split[1])
    return ToolResult.success(render_value(value, f"Tool '{tool_name}'" if tool_name else "A tool"))


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    text: str  # for the model, before truncation (S-ENG-71)
    #: `error`: it raised, timed out, or its arguments were invalid
    outcome: Literal["success", "failure", "error"] = "success"
    structured_output: Any = None
    traceback: str = field(default="", repr=False, compare=False)  # of the user's code
    asks_again: bool = False  # it raised `TryAgain`
    repairs: tuple[str, ...] = ()  # of the arguments before the call (S-LLM-43)
    log: tuple[str, ...] = ()  # lines that it logged and printed (S-TOOL-35)
    attachments: tuple[Attachment, ...] = ()


def outcome_of_result(result: ToolResult) -> ToolOutcome:
    """Return the outcome of an AgentTool's result (S-TOOL-22)."""
    if result.is_success:
        text = render_value(result.output)
        return ToolOutcome(text, "success", result.structured_output, attachments=tuple(result.attachments))
    return ToolOutcome(f"Error: {result.error_message}", "failure")


def outcome_of_return(value: object, tool_name: str = "") -> ToolOutcome:
    """Return the outcome of a `@tool` function's value (S-TOOL-14); text with the prefix `Error:` is a failure (S-TOOL-15)."""
    if isinstance(value, ToolResult):
        return outcome_of_result(value)
    if (split := split_attachments(value)) is not None:
        return ToolOutcome(split[0], attachments=split[1])
    failed = isinstance(value, str) and value.startswith("Error:")
    return ToolOutcome(render_value(value, f"Tool '{tool_name}'"), "failure" if failed else "success")


def outcome_of_error(error: BaseException, *, prefix: str = "Tool error") -> ToolOutcome:
    """Return the outcome of an error (S-ENG-51, S-ENG-52), or the text of a `TryAgain` (S-TOOL-54)."""
    if isinstance(error, TryAgain):
        return ToolOutcome(str(error), "failure", asks_again=True)
    message = f"the tool called sys.exit({error.code!r})" if isinstance(error, SystemExit) else format_with_class(error)
    return ToolOutcome(f"{prefix}: {message}", "error", traceback=user_traceback(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext(Generic[DepsT_co]):
    """Context of one tool call. `current_tool_context()` returns it.

    A `@tool` function may have it as its first parameter, `context: ToolContext[Shop]`, which the model does not see.
    """

    tool_name: str = ""
    agent_role: str = "unknown"  # outside an agent (S-TOOL-42)
    logger: logging.Logger = _default_tool_logger
    metrics: CustomToolMetrics = _NO_METRICS  # never raises
    idempotency_key: str = ""  # same when a call is repeated after a crash
    #: publishes an event of the tool; any thread may call it
    emit: Callable[[Event], None] = field(default=lambda _event: None, repr=False)
    run_id: str = ""
    instance: str = ""
    task_index: int = 0  # 1-based; 0 outside a run
    log_truncate_length: int = 200  # characters of texts in log lines: -1 all, 0 none (S-ENG-72)
    review_handler: object = field(default=None, repr=False)  # of the run
    sampler: AsksModel | None = field(default=None, repr=False)  # the agent's model
    #: they pause during a review
    time_limits: list[TimeLimit] = field(default_factory=list[TimeLimit], repr=False, compare=False)
    tracebacks: list[str] = field(default_factory=list[str], repr=False, compare=False)
    run: CurrentRun[DepsT_co] = field(default=cast("Any", OUTSIDE_RUN), repr=False, compare=False)

    @property
    def deps(self) -> DepsT_co:
        """The deps of the run.

        Raises:
            IllegalStateError: the run has no deps, or they stay in another process.
        """
        return self.run.deps

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
        if self.tool_name and self.logger is _default_tool_logger:
            object.__setattr__(self, "logger", logging.getLogger(f"ensemble_ray.tool.{self.tool_name}"))

    def renamed(self, tool_name: str, *, step: int = 0) -> ToolContext:
        """Return this context for a tool that works for the same call, such as a step of a pipeline."""
        if self is _OUTSIDE:
            return self
        key = f"{self.idempotency_key}/{step}/{tool_name}" if self.idempotency_key else ""
        return replace(self, tool_name=tool_name, idempotency_key=key, logger=_default_tool_logger)


_OUTSIDE = ToolContext()  # outside any call (S-TOOL-43)
_context: ContextVar[ToolContext | None] = ContextVar("ensemble_ray_tool_context", default=None)


def current_tool_context() -> ToolContext:
    """Return the context of the running tool call; outside a call, a context without run, listeners and metrics."""
    return _context.get() or _OUTSIDE


def use_tool_context(context: ToolContext | None) -> AbstractContextManager[None]:
    return ScopedVariable(_context, context)


class AgentTool(ABC):
    """A tool with one text input. Subclasses set `name` and `description` and implement `execute`.

    Attributes:
        name: Name for the model: ASCII letters, digits and underscores.
        description: Explains to the model when to use the tool and what input it expects.
        timeout: Time limit of one call, in seconds or as a `timedelta`; None: no limit.
        effect: Effect of a call on the outside world: `none`, `idempotent` or `once`. After a crash, a call without a
            recorded result is repeated if its effect is `none` or `idempotent`. For `once`, `Ensemble.on_unknown` decides.
    """

    name: str
    description: str
    timeout: float | timedelta | None = DEFAULT_TIMEOUT_S
    effect: Effect = "once"

    @abstractmethod
    def execute(self, text: str, /) -> ToolResult | Awaitable[ToolResult]:
        """Run the tool; may be `async`. The model reads an exception as an error."""


class CustomSchemaAgentTool(AgentTool):
    """A tool with its own JSON schema. `execute` receives the model's complete argument text."""

    @property
    @abstractmethod
    def parameter_schema(self) -> Mapping[str, object]:
        """JSON schema of the arguments: an object with properties."""


class ContextAgentTool(CustomSchemaAgentTool):
    """A tool of the library that can read the context of its call. `origin`: server that chose the name (S-LLM-63)."""

    origin: str = ""


class DynamicToolProvider(ABC):
    """An entry of a tool list whose tools are known only when a task starts."""

    @abstractmethod
    def resolve(self) -> Sequence[object] | Awaitable[Sequence[object]]:
        """Return tools of any kind; may be `async`. Called once per task execution."""


class AbstractAgentTool(AgentTool):
    """A tool with timing, metrics, exception safety and a `ToolContext`. Subclasses implement `do_execute`.

    Attributes:
        require_approval: Whether the tool asks the run's review handler before it does its work, once per call.
    """

    require_approval: bool = False

    @abstractmethod
    def do_execute(self, text: str, /) -> ToolResult | Awaitable[ToolResult | None] | None:
        """Run the tool; may be `async`. None is a success without text, an exception becomes a failure."""

    @property
    def context(self) -> ToolContext:
        """Context of the running call; outside an agent, a context without run, listeners and metrics."""
        return current_tool_context()  # never stored here: one object serves many tasks at a time (S-TOOL-36)

    def request_approval(
        self,
        description: str,
        timeout: timedelta | float | None = Review.DEFAULT_TIMEOUT,
        on_timeout: OnTimeoutAction | str = OnTimeoutAction.EXIT_EARLY,
    ) -> ReviewDecision:
        """Ask the run's review handler and block this thread until it answers. Without a handler, the answer is continue.

        Args:
            description: The action that needs approval.
            timeout: Time limit of the answer, a `timedelta` or seconds; None or 0: no limit.
            on_timeout: Decision after the time limit: `"continue"`, `"exit_early"` or `"fail"`.
        """
        request = approval_request(description, timeout=timeout, on_timeout=on_timeout)
        return ask_from_thread(self.context.review_handler, request)

    async def arequest_approval(
        self,
        description: str,
        timeout: timedelta | float | None = Review.DEFAULT_TIMEOUT,  # noqa: ASYNC109  the reviewer's time, not the caller's
        on_timeout: OnTimeoutAction | str = OnTimeoutAction.EXIT_EARLY,
    ) -> ReviewDecision:
        """`request_approval` for async tools."""
        request = approval_request(description, timeout=timeout, on_timeout=on_timeout)
        return await ask(self.context.review_handler, request)

    @final
    def execute(self, input: str) -> ToolResult:  # noqa: A002  the public name of the argument (S-TOOL-1)
        """Run the tool and wait for the result, even if `do_execute` is async.

        Raises:
            ExitEarlyError: the tool ends the run.
            IllegalStateError: the tool is set up wrongly.
        """
        call = _MeasuredCall(self)
        try:
            return call.count_return(collect_here(self.do_execute(input)))
        except BaseException as error:  # noqa: BLE001  `count_error` raises errors that are not for the model
            return call.count_error(error)

    @final
    async def aexecute(self, input: str) -> ToolResult:  # noqa: A002  as in `execute`
        """Run the tool without blocking the event loop: sync code in a daemon thread, async code on this loop.

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
        return is_async_callable(self.do_execute)


class _MeasuredCall:
    """Counts one execution: exactly one success, failure or error, and one duration."""

    __slots__ = ("_context", "_name", "_started_s")

    def __init__(self, tool: AbstractAgentTool) -> None:
        self._name = tool.name
        self._context = current_tool_context()
        self._started_s = time.perf_counter()

    def count_return(self, outcome: object) -> ToolResult:
        result = as_result(outcome, self._name)
        metrics = self._context.metrics
        self._count(metrics.increment_success if result.is_success else metrics.increment_failure)
        return result

    def count_error(self, error: BaseException) -> ToolResult:
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
        except Exception:  # noqa: BLE001  metrics must not change the result
            _log.warning("ToolMetrics failed for tool '%s'", self._name, exc_info=True)


InputT = TypeVar("InputT", bound=BaseModel)


class TypedAgentTool(AgentTool, Generic[InputT]):
    """A tool whose arguments are the fields of a pydantic model.

    Attributes:
        input_type: The model class. Its field descriptions become the descriptions of the parameters.
    """

    input_type: type[InputT]

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        input_type: object = cls.__dict__.get("input_type")
        if input_type is not None and not isinstance(input_type, property):  # a property is checked at resolution
            _check_input_type(input_type, f"Tool class '{cls.__qualname__}'")

    @abstractmethod
    def execute_typed(self, arguments: InputT, /) -> object:
        """Run the tool; may be `async`. Returns a `ToolResult`, or a value that becomes text."""

    def execute(self, text: str, /) -> ToolResult | Awaitable[ToolResult]:
        parsed = parse_input(text, input_type_of(self))
        if isinstance(parsed, ToolResult):
            return parsed
        outcome = self.execute_typed(parsed)
        if isinstance(outcome, Awaitable | AsyncIterator):

            async def collected() -> ToolResult:
                return as_result(await collect(cast("object", outcome)), self.name)

            return collected()
        return as_result(outcome, self.name)


class AbstractTypedAgentTool(AbstractAgentTool, TypedAgentTool[InputT]):
    """A typed tool with the timing, metrics and exception safety of `AbstractAgentTool`."""

    def do_execute(self, text: str, /) -> ToolResult | Awaitable[ToolResult]:
        return TypedAgentTool[InputT].execute(self, text)

    def _is_async(self) -> bool:
        return is_async_callable(self.execute_typed)


def input_type_of(tool: TypedAgentTool[InputT]) -> type[InputT]:
    input_type: object = getattr(tool, "input_type", None)
    _check_input_type(input_type, f"Tool '{tool.name}'")
    return cast("type[InputT]", input_type)


def _check_input_type(input_type: object, owner: str) -> None:
    if not isinstance(input_type, type) or not issubclass(input_type, BaseModel):
        raise ValidationError(f"{owner}: input_type must be a pydantic model class, got: {input_type!r}")


_JSON_TYPES: Mapping[type[object], str] = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
}


def parse_input(text: str, input_type: type[InputT]) -> InputT | ToolResult:
    """Return the arguments as an instance of the model, or a failure (S-TOOL-51)."""
    name = input_type.__name__
    required = [(key, field) for key, field in input_type.model_fields.items() if field.is_required()]
    is_plain = text.strip() and not text.lstrip().startswith("{")
    if is_plain and len(required) == 1 and required[0][1].annotation is str:  # plain text is its value (S-TOOL-53)
        key, field = required[0]
        text = to_json({field.alias or key: whole_text(text)}).decode()
    try:
        data: object = from_json(text)
    except ValueError as error:
        return ToolResult.failure(f"Invalid JSON input for '{name}': {error}")
    except TypeError:  # half of a surrogate pair
        return ToolResult.failure(f"Invalid JSON input for '{name}': half of a surrogate pair is no character")
    if not isinstance(data, dict):
        return ToolResult.failure(f"Expected a JSON object for '{name}' but received: {_JSON_TYPES[type(data)]}")
    values = cast("dict[str, object]", data)
    accepted = {key: {key, field.alias or key} for key, field in input_type.model_fields.items()}
    missing = [field.alias or key for key, field in required if all(values.get(each) is None for each in accepted[key])]
    if missing:
        return ToolResult.failure(f"Missing required parameter(s) for '{name}': {', '.join(missing)}")
    try:
        if input_type.model_config.get("extra") == "forbid":
            known = set[str]().union(*accepted.values())
            return input_type.model_validate_json(to_json({key: values[key] for key in values if key in known}))
        return input_type.model_validate_json(text)
    except pydantic.ValidationError as error:
        return ToolResult.failure(f"Failed to deserialize input for '{name}': {explain_arguments(error)}")


def check_tool_name(name: object) -> str | None:
    if name is None or not str(name).strip():
        return "Tool name must not be blank"
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        return f"Tool name '{name}' must contain only alphanumeric characters and underscores"
    return None


def make_tool_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", text)


def check_effect(effect: object, subject: str) -> Effect:
    for allowed in _EFFECTS:
        if effect == allowed:
            return allowed
    raise ValidationError(f"{subject} effect must be one of [{', '.join(_EFFECTS)}], got: {effect!r}")


def strongest_effect(*effects: Effect) -> Effect:
    return max((_EFFECTS[0], *effects), key=_EFFECTS.index)


def timeout_seconds(timeout: float | timedelta | None) -> float | None:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is None or seconds == math.inf:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ValidationError(f"Tool timeout must be > 0 seconds or None, got: {timeout!r}")
    return float(seconds)


_MARK = "__ensemble_tool__"
_DOC_SECTIONS = {"Args:", "Arguments:", "Parameters:", "Returns:", "Raises:"}

F = TypeVar("F", bound=Callable[..., object])


class FunctionTool(Struct, frozen=True, kw_only=True):
    name: str
    description: str
    timeout_s: float | None = DEFAULT_TIMEOUT_S  # None: no limit (S-SET-34)
    cpu: bool = False  # runs outside the agent's process (S-SET-35)
    effect: Effect = "once"
    approval: bool = False  # each call needs approval (S-TOOL-96)


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

    The tool's JSON schema is built from the signature and the docstring's descriptions of the parameters.

    Args:
        target: The function, or the description.
        description: Description for the model; default: the first paragraph of the docstring.
        name: Name for the model; default: the function's name.
        timeout: Time limit of a call, s or `timedelta`; None: no limit.
        cpu: The function is CPU-bound and stateless, and runs in another process.
        effect: `none`: the call only reads; `idempotent`: repeating it under the same `idempotency_key` changes nothing;
            `once`: it is not repeated after a crash.
        approval: Ask the run's review handler before each call.
    """
    text = target if isinstance(target, str) and description is None else description
    timeout_s, checked_effect = timeout_seconds(timeout), check_effect(effect, "@tool")

    def decorate(function: F) -> F:
        inner = cast("Callable[..., object]", _function_of(function))
        chosen = getattr(inner, "__name__", "") if name is None else name
        problem = check_tool_name(chosen)
        if problem is not None:
            raise ValidationError(problem)
        lines = map(str.strip, (inspect.getdoc(inner) or "").splitlines())
        first_paragraph = takewhile(
            lambda line: line and line not in _DOC_SECTIONS and not line.startswith(":param"), lines
        )
        mark = FunctionTool(
            name=chosen,
            description=" ".join(first_paragraph) if text is None else text.strip(),
            timeout_s=timeout_s,
            cpu=cpu,
            effect=checked_effect,
            approval=approval,
        )
        _resolve_local_annotations(inner)
        try:
            setattr(inner, _MARK, mark)
        except AttributeError:
            raise ValidationError(f"@tool needs a function, got: {type(function).__name__}") from None
        return function

    return decorate if target is None or isinstance(target, str) else decorate(target)


def tool_mark(entry: object) -> FunctionTool | None:
    if inspect.isclass(entry) or not callable(entry):
        return None
    mark = getattr(entry, _MARK, None)
    return mark if isinstance(mark, FunctionTool) else None


_methods: WeakKeyDictionary[type[object], tuple[str, ...]] = WeakKeyDictionary()  # names of `@tool` methods


def marked_functions(kind: type[object]) -> tuple[str, ...]:
    """Return the names of a class's public `@tool` methods, inherited ones first."""
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


def _resolve_local_annotations(function: Callable[..., object]) -> None:
    annotations = cast("Mapping[str, object]", getattr(function, "__annotations__", {}))
    is_nested = "<locals>" in getattr(function, "__qualname__", "")
    is_of_a_script = getattr(function, "__module__", "") == "__main__"
    if not (is_nested or is_of_a_script) or not any(isinstance(value, str) for value in annotations.values()):
        return
    frame = sys._getframe()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  there is no public way
    while frame.f_globals is globals() and frame.f_back is not None:
        frame = frame.f_back  # up to the frame that applies the decorator
    around = frame.f_back.f_locals if frame.f_back is not None else {}  # for methods: the function around the class
    with contextlib.suppress(Exception):  # a name that is defined later
        function.__annotations__ = {**annotations, **parameter_types(function, {**around, **frame.f_locals})}
