"""What the record of a task gives back: its output with its types, its error, when it began. Package: execute. Pure.

In: facts as a journal gives them. Out: the values that they were made of.
Never: an import of a class that a record names; types come from today's definition.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ensemble_ray.errors import RecordError
from ensemble_ray.errors.texts import brief
from ensemble_ray.execute.agent.structured import parse_output
from ensemble_ray.execute.agent.type_adapters import adapter_of
from ensemble_ray.facts.effects import DelegationDecided, ModelAnswered, ToolReturned, is_making_agent
from ensemble_ray.facts.ends import FailureRecorded, OutputRecorded, RecordedOutput, read_output, read_trace
from ensemble_ray.facts.fact import Fact, find_fact
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.ids import delegated_instance
from ensemble_ray.values.task_output import OutputType, TaskOutput, type_name
from ensemble_ray.values.trace import TaskTrace

if TYPE_CHECKING:
    from ensemble_ray.ports import Journal

__all__ = [
    "RecordedWorkers",
    "answers_before",
    "recorded_output",
    "recorded_trace",
    "recorded_workers",
    "typed_data",
    "typed_output",
]

_log = bounded_logger(__name__)


def answers_before(facts: Iterable[Fact]) -> dict[str, list[Fact[ModelAnswered]]]:
    """Return the answers to calls that made agents before the run began (S-SET-46): by effect name, in order."""
    found: dict[str, list[Fact[ModelAnswered]]] = {}
    for fact in facts:
        if isinstance(fact.data, ModelAnswered) and is_making_agent(fact):
            found.setdefault(fact.name, []).append(cast("Fact[ModelAnswered]", fact))
    return found


@dataclass(frozen=True, slots=True)
class RecordedWorkers:
    """What is recorded of the workers of a task."""

    #: what they gave, by role, in the order in which they were done
    delegated: tuple[tuple[str, TaskOutput], ...]
    #: what those did that failed
    failed_delegations: tuple[TaskTrace, ...]


async def recorded_workers(journal: Journal, recorded: Mapping[tuple[str, str], Fact]) -> RecordedWorkers:
    """Return what the workers of a task gave, and what those did that gave nothing.

    Args:
        journal: The run's.
        recorded: What is recorded of the task that asked them.
    """
    outputs: list[tuple[str, TaskOutput]] = []
    lost: list[TaskTrace] = []
    for name, fact_kind in recorded:
        result = find_fact(recorded, name, ToolReturned)
        if fact_kind != DelegationDecided.KIND or result is None:
            continue
        instance = delegated_instance(name)
        of_worker = await journal.lookup_recorded(instance)
        output = recorded_output(of_worker, instance)
        if output is not None and result.data.is_success:
            outputs.append((output.agent_role, output))
        elif output is None and (trace := recorded_trace(of_worker, instance)) is not None:
            lost.append(trace)
    return RecordedWorkers(tuple(sorted(outputs, key=lambda pair: pair[1].completed_at)), tuple(lost))


def recorded_output(
    recorded: Mapping[tuple[str, str], Fact], instance: str, output_type: OutputType | None = None
) -> TaskOutput | None:
    """Return the recorded output of an instance; see `typed_output`. None where it has none.

    Raises:
        RecordError: it is no output.
    """
    fact = find_fact(recorded, instance, OutputRecorded)
    return None if fact is None else typed_output(fact.data.output_data(), output_type)


def recorded_trace(recorded: Mapping[tuple[str, str], Fact], instance: str) -> TaskTrace | None:
    """Return what an instance did that failed; None where that is not recorded.

    Raises:
        RecordError: it is no trace.
    """
    fact = find_fact(recorded, instance, FailureRecorded)
    return None if fact is None else read_trace(fact)


def typed_data(data: object, output_type: OutputType) -> object:
    """Return recorded JSON data as the type that it was recorded of.

    Raises:
        ValueError: it does not fit that type (any more).
    """
    # By its JSON text: strict types accept there what they refuse as Python data, dates and enums for example.
    return adapter_of(cast("Hashable", output_type)).validate_json(adapter_of(object).dump_json(whole_data(data)))


def typed_output(data: Mapping[str, object], output_type: OutputType | None = None) -> TaskOutput:
    """Return a recorded output; its parsed output of that type, or JSON data where there is none.

    What does not fit the type any more is parsed from the raw text; where that fails too, it stays JSON data and a WARN
    line says so (S-DUR-36: a definition may be changed on purpose).

    Raises:
        RecordError: it is no output.
    """
    fields: dict[str, Any] = {**data, "output_type": output_type}
    if output_type is not None and fields.get("parsed_output") is not None:
        fields["parsed_output"] = parsed = _parse(fields, output_type)
        if isinstance(fields.get("trace"), Mapping):
            fields["trace"] = {**fields["trace"], "parsed_output": parsed}
    try:
        return TaskOutput(**fields)
    except ValueError as error:
        msg = f"The record is damaged: output of task '{_task_of(read_output(data))}': {error}"
        raise RecordError(msg) from error


def _parse(fields: Mapping[str, object], output_type: OutputType) -> object:
    read = read_output(fields)
    data = read.parsed_output
    try:
        return typed_data(data, output_type)
    except ValueError as error:
        parsed = parse_output(read.raw, output_type)
        if parsed.is_success:
            return parsed.value
        _log.warning(
            "The recorded output of task '%s' is no %s any more: %s",
            _task_of(read),
            type_name(output_type),
            brief(str(error)),
        )
        return data


def _task_of(read: RecordedOutput) -> str:
    return read.task_description[:80]
