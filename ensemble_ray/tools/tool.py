"""Package tools: what a tool is. In: text that a model wrote. Out: a `ToolResult`.

`AgentTool` is the bare contract: a name, a description, text in, result out. `AbstractAgentTool` adds timing, metrics,
exception safety and a `ToolContext`; built-in tools extend it. Context is looked up per execution and never stored on
the tool, so that one tool object serves many tasks at once (S-TOOL-36).

What must never happen here: a tool's exception leaves `execute`, except the two kinds that are not for the model
(`ExitEarlyError`, `IllegalStateError`).
"""

from __future__ import annotations

import logging
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, is_dataclass, replace
from datetime import timedelta
from typing import Any, final, get_args

from pydantic import BaseModel

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, TryAgain, ValidationError
from ensemble_ray.errors.texts import format_with_class, user_exc_info, user_traceback
from ensemble_ray.events import Event
from ensemble_ray.ports import CustomToolMetrics, ToolMetrics
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.context import ScopedVariable
from ensemble_ray.process.threads import is_async_callable
from ensemble_ray.tools.approval import approval_request, ask, ask_from_thread
from ensemble_ray.tools.metrics import NoOpToolMetrics
from ensemble_ray.tools.rendering import ResultError, render_value
from ensemble_ray.tools.sampling import AsksModel
from ensemble_ray.tools.time_limit import TimeLimit
from ensemble_ray.tools.waiting import call_to_end, collect, collect_here
from ensemble_ray.values.messages import Effect
from ensemble_ray.values.reviews import OnTimeoutAction, Review, ReviewDecision

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "AbstractAgentTool",
    "AgentTool",
    "ContextAgentTool",
    "CustomSchemaAgentTool",
    "DynamicToolProvider",
    "NoOpToolMetrics",
    "ToolContext",
    "ToolMetrics",
    "ToolResult",
    "as_result",
    "check_effect",
    "check_tool_name",
    "current_tool_context",
    "make_tool_name",
    "strongest_effect",
    "timeout_seconds",
    "use_tool_context",
]

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
