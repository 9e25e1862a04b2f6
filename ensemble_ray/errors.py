"""The error tree. Floor: lowest; imported by everybody, imports nothing of ours.

Exception
├─ EnsembleError                     everything that `run()` raises by contract
│  ├─ ValidationError (ValueError)   bad configuration, found before any model call
│  ├─ TaskExecutionError             a task failed; carries what was completed
│  │  └─ OutputParsingError          the answer never became the declared type
│  ├─ ParallelExecutionError         continue_on_error, and some tasks failed
│  ├─ ConstraintViolationError       a hierarchical constraint was not met
│  ├─ AgentExecutionError            model, handler or tool batch failed
│  ├─ MaxIterationsExceededError     the agent went on calling tools
│  ├─ ToolExecutionError             tool infrastructure; logged, never raised out of a run
│  ├─ PromptTemplateError            inputs are missing
│  ├─ GuardrailViolationError        a guardrail said no
│  ├─ RateLimitTimeoutError          no permit in time
│  ├─ RateLimitInterruptedError      waiting for a permit was interrupted
│  ├─ RunExistsError                 a run of that id is running
│  ├─ RecordError                    the run's record cannot be written or read
│  ├─ StaleEpochError                somebody newer does this work; the writer must stop
│  ├─ UnknownOutcomeError            an effect was begun before a crash; nobody knows whether it was done
│  └─ CircuitOpenError               an endpoint fails for everybody; it is not asked for now
├─ IllegalStateError (RuntimeError)  the object is not in a state for that call
│  └─ ToolConfigurationError         a tool is set up wrongly
└─ ExitEarlyError                    control flow: end the run, keep what is done

Every class crosses processes with its text, fields and chain of causes (S-ERR-33). A cause that cannot travel is
replaced by a stand-in of the same class name and text (S-ERR-31).
"""

from __future__ import annotations

import importlib
import pickle
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from ensemble_ray.limits.rate_limit import RateLimit
    from ensemble_ray.outputs import TaskOutput
    from ensemble_ray.trace import ExecutionTrace

__all__ = [
    "AgentExecutionError",
    "CircuitOpenError",
    "ConstraintViolationError",
    "EnsembleError",
    "ExitEarlyError",
    "GuardrailViolationError",
    "IllegalStateError",
    "MaxIterationsExceededError",
    "OutputParsingError",
    "ParallelExecutionError",
    "PromptTemplateError",
    "RateLimitInterruptedError",
    "RateLimitTimeoutError",
    "RecordError",
    "RunExistsError",
    "StaleEpochError",
    "TaskExecutionError",
    "ToolConfigurationError",
    "ToolExecutionError",
    "UnknownOutcomeError",
    "ValidationError",
    "message_of",
    "portable",
]


def message_of(error: BaseException) -> str:
    """The text of an error, or its class name where the text is empty (S-ENG-61)."""
    return str(error) or type(error).__name__


def _stand_in_class(name: str) -> type[Exception]:
    """An exception class of that name whose instances pickle; it stands for one that does not."""

    def reduce(self: Exception) -> tuple[object, ...]:
        return (_stand_in, (name, str(self)))

    return type(name, (Exception,), {"__reduce__": reduce, "__doc__": f"Stands for a {name} of another process."})


def _stand_in(name: str, text: str) -> Exception:
    return _stand_in_class(name)(text)


def portable(error: BaseException) -> BaseException:
    """The error itself if it travels unchanged, else a stand-in of the same class name and text.

    Source: S-ERR-31. The chain of causes is kept in both cases.
    """
    if _travels(error, pickle.dumps) is not None or _travels(error, _dumps_by_value) is not None:
        return error
    return _join(_links(error))


#: Longest chain of causes that travels; what lies deeper is dropped.
_MAX_CHAIN = 32


def _links(error: BaseException) -> list[tuple[object, ...]]:
    """The chain of causes as data, one link per error; pickling alone would lose the causes of foreign errors."""
    links: list[tuple[object, ...]] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen and len(links) < _MAX_CHAIN:
        seen.add(id(at))
        links.append((_rebuild, type(at), at.args, at.state()) if isinstance(at, _Portable) else _foreign_link(at))
        at = at.__cause__
    return links


def _foreign_link(error: BaseException) -> tuple[object, ...]:
    """An error that is not ours: as it is, else by value, else as a stand-in."""
    data = _travels(error, pickle.dumps) or _travels(error, _dumps_by_value)
    told = (type(error).__name__, message_of(error))
    return (_stand_in, *told) if data is None else (_loaded_or_stand_in, data, *told)


def _loaded_or_stand_in(data: bytes, name: str, text: str) -> BaseException:
    """The error, or its stand-in where its class cannot be had, such as that of a package only the sender has."""
    try:
        return cast("BaseException", pickle.loads(data))  # noqa: S301  bytes of our own cluster
    except Exception:  # noqa: BLE001  whatever loading raised, what went wrong must still be told
        return _stand_in(name, text)


def _travels(error: BaseException, dumps: Callable[[object], bytes]) -> bytes | None:
    """The pickled error if it comes out with its class name and text, else None."""
    try:
        data = dumps(error)
        copy = pickle.loads(data)  # noqa: S301  our own bytes, made one line up
    except Exception:  # noqa: BLE001  any failure here means one thing: it does not travel this way
        return None
    return data if type(copy).__name__ == type(error).__name__ and str(copy) == str(error) else None


def _dumps_by_value(error: object) -> bytes:
    """For classes that only this process can import, such as those of a script."""
    cloudpickle = importlib.import_module("cloudpickle")  # untyped, and only needed where plain pickling failed
    return cast("bytes", cloudpickle.dumps(error))


def _join(links: Sequence[tuple[object, ...]]) -> BaseException:
    """The chain of causes again; gives its first error."""
    cause: BaseException | None = None
    for make, *args in reversed(links):
        error = cast("Callable[..., BaseException]", make)(*args)
        error.__cause__ = cause
        cause = error
    return cast("BaseException", cause)


def _rebuild(cls: type[BaseException], args: tuple[object, ...], state: Mapping[str, object]) -> BaseException:
    """One of our errors as it was; its constructor does not run again."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class _Chain:
    """An error on its way through a pickle; it comes out as the error, with its causes."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return (_join, (_links(self._error),))


class _Portable(Exception):  # noqa: N818  a mixin of behaviour, never raised as such
    """Pickles with text, fields and causes; no constructor runs again on the other side."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_join, (_links(self),))

    def state(self) -> dict[str, object]:
        """The fields, in a form that pickles."""
        return dict(self.__dict__)


class EnsembleError(_Portable):
    """Root of everything that `run()` raises by contract.

    Attributes:
        trace: The run's trace up to the failure; None where the run had not begun (S-SET-26).
        run_id: The run's id; None where the run had not begun.
    """

    trace: ExecutionTrace | None = None
    run_id: str | None = None


class ValidationError(EnsembleError, ValueError):
    """Configuration that cannot work, found at construction or at the start of a run. Unrelated to pydantic's."""


class PromptTemplateError(EnsembleError):
    """Template variables without a value: all of them, and the template uncut (S-TPL-6)."""

    def __init__(self, message: str, missing_variables: Sequence[str] = (), template: str = "") -> None:
        super().__init__(message)
        self.missing_variables = tuple(missing_variables)
        self.template = template


class TaskExecutionError(EnsembleError):
    """A task failed; `__cause__` is why, `completed_task_outputs` is what was done before (S-ENG-13)."""

    def __init__(
        self,
        message: str,
        task_description: str = "",
        agent_role: str = "",
        completed_task_outputs: Sequence[TaskOutput] = (),
    ) -> None:
        super().__init__(message)
        self.task_description = task_description
        self.agent_role = agent_role
        self.completed_task_outputs = tuple(completed_task_outputs)


class OutputParsingError(TaskExecutionError):
    """No attempt gave an answer of the declared type (S-OUT-33)."""

    def __init__(  # noqa: PLR0917  S-SET-3 fixes the order
        self,
        message: str,
        raw_output: str = "",
        output_type: type[object] | None = None,
        parse_errors: Sequence[str] = (),
        attempt_count: int = 0,
        task_description: str = "",
        agent_role: str = "",
        completed_task_outputs: Sequence[TaskOutput] = (),
    ) -> None:
        super().__init__(message, task_description, agent_role, completed_task_outputs)
        self.raw_output = raw_output
        self.output_type = output_type
        self.parse_errors = tuple(parse_errors)
        self.attempt_count = attempt_count


class ParallelExecutionError(EnsembleError):
    """Some tasks of a parallel run failed under continue_on_error (S-PAR-25)."""

    def __init__(
        self,
        message: str,
        completed_task_outputs: Sequence[TaskOutput] = (),
        failed_task_causes: Mapping[str, BaseException] | None = None,
        failed_count: int | None = None,
        completed_count: int | None = None,
    ) -> None:
        super().__init__(message)
        self.completed_task_outputs = tuple(completed_task_outputs)
        self.failed_task_causes = dict(failed_task_causes or {})
        self.failed_count = len(self.failed_task_causes) if failed_count is None else failed_count
        self.completed_count = len(self.completed_task_outputs) if completed_count is None else completed_count

    def state(self) -> dict[str, object]:
        """The fields; the failed tasks' causes keep their own causes."""
        return {**super().state(), "failed_task_causes": {key: _Chain(e) for key, e in self.failed_task_causes.items()}}


class ConstraintViolationError(EnsembleError):
    """A hierarchical run ended with its constraints unmet (S-ERR-32)."""

    def __init__(self, violations: Sequence[str], completed_task_outputs: Sequence[TaskOutput] = ()) -> None:
        if not violations:
            raise ValueError("violations must not be None or empty")
        found = tuple(violations)
        what = "constraint violated" if len(found) == 1 else f"constraints violated ({len(found)})"
        super().__init__(f"Hierarchical {what}: {'; '.join(found)}")
        self.violations = found
        self.completed_task_outputs = tuple(completed_task_outputs)


class AgentExecutionError(EnsembleError):
    """The model, the handler, the tool batch or the agent's process failed (S-ERR-15)."""

    def __init__(self, message: str, agent_role: str = "", task_description: str = "") -> None:
        super().__init__(message)
        self.agent_role = agent_role
        self.task_description = task_description


class MaxIterationsExceededError(EnsembleError):
    """The agent went on calling tools after three stop messages (S-ENG-43, S-ENG-47)."""

    def __init__(self, agent_role: str, task_description: str, max_iterations: int, tool_calls_made: int) -> None:
        super().__init__(
            f"Agent '{agent_role}' exceeded maximum iterations ({max_iterations}). "
            f"Tool calls made: {tool_calls_made}. Task: '{task_description}'. "
            "Consider increasing max_iterations or simplifying the task."
        )
        self.agent_role = agent_role
        self.task_description = task_description
        self.max_iterations = max_iterations
        self.tool_calls_made = tool_calls_made


class ToolExecutionError(EnsembleError):
    """A tool's infrastructure failed; it is logged and told to the model, and never stops a run (S-ERR-19)."""

    def __init__(self, message: str, tool_name: str = "", tool_input: str = "") -> None:
        super().__init__(message)
        self.tool_name = tool_name
        self.tool_input = tool_input


class GuardrailViolationError(EnsembleError):
    """A guardrail said no (S-GRD-7). `guardrail_type` is `input` or `output`."""

    def __init__(self, guardrail_type: str, violation_message: str, task_description: str, agent_role: str) -> None:
        kind = str(getattr(guardrail_type, "value", guardrail_type))
        super().__init__(
            f"{kind.upper()} guardrail violation on agent '{agent_role}' task '{task_description}': {violation_message}"
        )
        self.guardrail_type = guardrail_type
        self.violation_message = violation_message
        self.task_description = task_description
        self.agent_role = agent_role


class RateLimitTimeoutError(EnsembleError):
    """No permit came within the wait timeout; the model was not called (S-RATE-12)."""

    def __init__(self, rate_limit: RateLimit, wait_timeout: timedelta) -> None:
        waited_ms = round(wait_timeout.total_seconds() * 1000)
        super().__init__(
            f"Rate limit exceeded: waited {waited_ms}ms but no token became available. "
            f"Limit: {rate_limit.requests} requests per {rate_limit.period}. "
            "Increase wait_timeout or reduce concurrency."
        )
        self.rate_limit = rate_limit
        self.wait_timeout = wait_timeout


class RateLimitInterruptedError(EnsembleError):
    """Synchronous waiting for a permit was interrupted (S-RATE-14)."""


class RunExistsError(EnsembleError):
    """A run of that id is running already (S-SET-39)."""


class RecordError(EnsembleError):
    """The record of a run cannot be written or read: a full disk, a directory without rights, a damaged file."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class StaleEpochError(EnsembleError):
    """A newer writer does this work already; the refused one must stop before its next effect."""

    def __init__(self, run: str, name: str, epoch: int, newest: int) -> None:
        super().__init__(f"Run '{run}' was taken over: '{name}' is written by epoch {newest}, epoch {epoch} must stop")
        self.run = run
        self.name = name
        self.epoch = epoch
        self.newest = newest


class UnknownOutcomeError(EnsembleError):
    """An effect was begun before a crash, and nothing tells whether it was done (S-DUR-24, S-DUR-25)."""

    def __init__(self, message: str, effect: str = "", tool_name: str = "") -> None:
        super().__init__(message)
        self.effect = effect
        self.tool_name = tool_name


class CircuitOpenError(EnsembleError):
    """An endpoint fails for everybody and is not asked for now (S-DUR-64); the last failure is the cause."""

    def __init__(self, message: str, endpoint: str = "") -> None:
        super().__init__(message)
        self.endpoint = endpoint


class IllegalStateError(_Portable, RuntimeError):
    """The object is not in a state for that call; never fed to a model (S-TOOL-23)."""


class ToolConfigurationError(IllegalStateError):
    """A tool is set up in a way that cannot work (S-ERR-21)."""


class ExitEarlyError(_Portable):
    """Ends the run with what is done so far; it becomes `exit_reason`, never an error of `run()` (S-ERR-22)."""

    def __init__(self, message: str = "", timed_out: bool = False) -> None:  # noqa: FBT001, FBT002  S-SET-3 fixes the order
        super().__init__(message)
        self.timed_out = timed_out
