"""Messages about errors: what failed, where, what to do.

In the chain of causes the outermost error names the place, the innermost the reason. Classes of other libraries are
matched by name, because a cause from another process may be a replacement of its class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ensemble_ray.cli.view.terminal import FAILED, USAGE, screen_line
from ensemble_ray.errors import (
    EnsembleError,
    ParallelExecutionError,
    PromptTemplateError,
    RecordError,
    RunExistsError,
    TaskExecutionError,
    ValidationError,
    message_of,
)
from ensemble_ray.errors.texts import brief, user_line
from ensemble_ray.record.failure import remedy_for

_SHOWN = 120
_LONGEST = 2000  # some messages repeat whole documents
# Another directory is no remedy for these.
_DAMAGED_RECORD = ("The record ", "The run's record ")


def exit_code_of(error: BaseException) -> int:
    """Return 2 if the user's command or definition is wrong, else 1."""
    if isinstance(error, ValidationError | PromptTemplateError | RunExistsError):
        return USAGE
    return FAILED


def describe_error(error: BaseException) -> str:
    lines = [f"Error: {line}" if not number else line for number, line in enumerate(_lines(error))]
    if advice := advice_of(error):
        lines.append(f"  What to do: {advice}")
    if not isinstance(error, EnsembleError):
        lines.append("  For a traceback: the same command with --debug")
    return "\n".join(lines)


def advice_of(error: BaseException) -> str:
    """Empty if the message itself says it."""
    names: list[str] = []
    for cause in _chain(error):
        if isinstance(cause, RecordError) and message_of(cause).startswith(_DAMAGED_RECORD):
            return ""
        names += [each.__name__ for each in reversed(type(cause).__mro__)]
    return remedy_for(names)


def _lines(error: BaseException) -> Iterator[str]:
    if isinstance(error, ParallelExecutionError):
        yield message_of(error).partition(": ")[0]
        for description, cause in error.failed_task_causes.items():
            yield f"  '{screen_line(description, _SHOWN)}': {_why(list(_chain(cause)))}"
            yield from _user_code_of(list(_chain(cause)))
    elif isinstance(error, TaskExecutionError):
        who = f" (agent '{error.agent_role}')" if error.agent_role else ""
        chain = list(_chain(error))
        why = _why(chain[1:] if error.__cause__ is not None else chain)
        yield f"task '{screen_line(error.task_name or error.task_description, _SHOWN)}'{who} failed:"
        yield f"  {why}"
        yield from _user_code_of(chain)
    elif isinstance(error, EnsembleError):
        yield message_of(error)
    else:
        yield f"{type(error).__name__}: {_cut(message_of(error))}"
        yield from _user_code_of([error])
    done = len(getattr(error, "completed_task_outputs", ()))
    if done:
        yield f"  {done} {'task was' if done == 1 else 'tasks were'} completed before; the record has their outputs"


def _why(chain: Sequence[BaseException]) -> str:
    """Join messages up to the first that the text already contains."""
    shown = ""
    for cause in chain:
        text = _cut(message_of(cause))
        if brief(text).removesuffix("...").removesuffix(".") in shown:
            break
        shown = f"{shown.removesuffix('.')}: {text}" if shown else text
    return shown


def _user_code_of(chain: Sequence[BaseException]) -> Iterator[str]:
    if line := user_line(reversed(chain)):
        yield f"  {line}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    at: BaseException | None = error
    seen: set[int] = set()
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
