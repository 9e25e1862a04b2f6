"""What the record of a task gives back: its output with its types, its error, when it began. Room: execute. Pure.

In: facts as a journal gives them. Out: the values that they were made of.
Never: an import of a class that a record names; types come from today's definition.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ensemble_ray.errors import RecordError, message_of
from ensemble_ray.errors.texts import brief
from ensemble_ray.execute.agent.structured import parse_output
from ensemble_ray.execute.agent.type_adapters import adapter_of
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.delegation import DelegationRequest
from ensemble_ray.values.error_data import error_from
from ensemble_ray.values.ids import delegated_instance
from ensemble_ray.values.messages import Fact
from ensemble_ray.values.outputs import TaskOutput
from ensemble_ray.values.trace import TaskTrace

if TYPE_CHECKING:
    from ensemble_ray.ports import Journal

__all__ = [
    "RecordedWorkers",
    "answers_before",
    "as_mapping",
    "began_at",
    "failure_of",
    "recorded_workers",
    "request_of",
    "resume_data",
    "trace_of",
    "typed_data",
    "typed_output",
]

_log = bounded_logger(__name__)
#: End of the names of model calls that made a task's agent.
_BEFORE = "/synthesis"


def as_mapping(value: object) -> Mapping[str, object]:
    """The value if it is a mapping, else an empty one: readers of broken records go on without it."""
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def answers_before(facts: Iterable[Fact]) -> dict[str, list[Fact]]:
    """Answers to calls that made agents before the run began (S-SET-46): by effect name, in the order of the calls."""
    found: dict[str, list[Fact]] = {}
    for fact in facts:
        if fact.kind == "model" and fact.name.endswith(_BEFORE):
            found.setdefault(fact.name, []).append(fact)
    return found


def resume_data(header: Mapping[str, object], *, is_restart: bool) -> dict[str, object]:
    """What a `resume` fact tells: whether a scheduler was replaced, else what the run goes on with.

    Args:
        header: Data of the first fact that the run would record now.
        is_restart: Whether only its owner's process was replaced.
    """
    chosen = {} if is_restart else {name: header[name] for name in ("options", "budget") if header.get(name)}
    return {"is_restart": is_restart, **chosen}


def began_at(fact: Fact) -> float:
    """When what a fact tells of began, Unix time, s."""
    begun = fact.data.get("started_at")
    return float(begun) if isinstance(begun, int | float) else fact.at


def failure_of(fact: Fact, output_type: type[Any] | None = None) -> BaseException:
    """The error that a `task_failed` fact tells of."""
    data = as_mapping(fact.data.get("error"))
    told = {"type": fact.data.get("error_type"), "text": fact.data.get("message")}
    return error_from(data or told, output_type=output_type)


def trace_of(fact: Fact) -> TaskTrace | None:
    """What a `task_failed` fact tells that the task did.

    Raises:
        RecordError: it is no trace.
    """
    data = as_mapping(fact.data.get("trace"))
    if not data:
        return None
    try:
        return TaskTrace(**cast("dict[str, Any]", data))
    except ValueError as error:
        raise RecordError(f"The record is damaged: trace of '{fact.name}': {error}") from error


def request_of(fact: Fact) -> DelegationRequest:
    """The request that a `delegation` fact decided of.

    Raises:
        RecordError: it is none.
    """
    try:
        return DelegationRequest(**cast("Mapping[str, Any]", as_mapping(fact.data.get("request"))))
    except ValueError as error:
        msg = f"The record is damaged: delegation '{fact.name}': {message_of(error)}"
        raise RecordError(msg) from error


@dataclass(frozen=True, slots=True)
class RecordedWorkers:
    """What is recorded of the workers of a task."""

    #: what they gave, by instance, in the order in which they were done
    delegated: tuple[tuple[str, TaskOutput], ...]
    #: what those did that failed
    lost_work: tuple[TaskTrace, ...]


async def recorded_workers(journal: Journal, known: Mapping[tuple[str, str], Fact]) -> RecordedWorkers:
    """What the workers of a task gave, and what those did that gave nothing.

    Args:
        journal: The run's.
        known: What is recorded of the task that asked them.
    """
    given: list[tuple[str, TaskOutput]] = []
    lost: list[TaskTrace] = []
    for name, kind in known:
        result = known.get((name, "tool_result"))
        if kind != "delegation" or result is None:
            continue
        instance = delegated_instance(name)
        of_worker = await journal.known(instance)
        output, failed = of_worker.get((instance, "output")), of_worker.get((instance, "task_failed"))
        if output is not None and result.data.get("outcome") == "success":
            given.append((instance, typed_output(as_mapping(output.data.get("output")))))
        elif output is None and failed is not None and (trace := trace_of(failed)) is not None:
            lost.append(trace)
    return RecordedWorkers(tuple(sorted(given, key=lambda pair: pair[1].completed_at)), tuple(lost))


def typed_data(data: object, output_type: type[Any]) -> object:
    """Recorded JSON data as the type that it was recorded of.

    Raises:
        ValueError: it does not fit that type (any more).
    """
    # By its JSON text: strict types accept there what they refuse as Python data, dates and enums for example.
    return adapter_of(cast("Hashable", output_type)).validate_json(adapter_of(object).dump_json(whole_data(data)))


def typed_output(data: Mapping[str, object], output_type: type[Any] | None = None) -> TaskOutput:
    """A recorded output; its parsed output of that type, or JSON data where there is none.

    What does not fit the type any more is parsed from the raw text; where that fails too, it stays JSON data and a WARN
    line says so (S-DUR-36: a definition may be changed on purpose).

    Raises:
        RecordError: it is no output.
    """
    given: dict[str, Any] = {**data, "output_type": output_type}
    if output_type is not None and given.get("parsed_output") is not None:
        given["parsed_output"] = parsed = _parsed(given, output_type)
        if isinstance(given.get("trace"), Mapping):
            given["trace"] = {**given["trace"], "parsed_output": parsed}
    try:
        return TaskOutput(**given)
    except ValueError as error:
        msg = f"The record is damaged: output of task '{_task_of(data)}': {error}"
        raise RecordError(msg) from error


def _parsed(given: Mapping[str, object], output_type: type[Any]) -> object:
    data = given["parsed_output"]
    try:
        return typed_data(data, output_type)
    except ValueError as error:
        read = parse_output(str(given.get("raw") or ""), output_type)
        if read.is_success:
            return read.value
        kind = getattr(output_type, "__qualname__", output_type)
        _log.warning("The recorded output of task '%s' is no %s any more: %s", _task_of(given), kind, brief(str(error)))
        return data


def _task_of(data: Mapping[str, object]) -> str:
    return str(data.get("task_description", ""))[:80]
