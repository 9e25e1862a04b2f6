"""The spans of a recorded run, the same that it sends while it goes on. Package: record. Pure.

In: the facts of a run. Out: its spans: one for each beginning of the run, and those of its tasks, units, model and tool calls. What a run
did that never ended lasts until its last fact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from ensemble_ray.events.tracing import RunTracedEvent, TaskTracedEvent
from ensemble_ray.facts.effects import DelegationDecided, ModelAnswered, is_making_agent, read_request
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import PlanRecorded, RunEnded, RunResumed
from ensemble_ray.record.delegation_fold import worker_role
from ensemble_ray.record.fold import RunFold
from ensemble_ray.telemetry.content import Content
from ensemble_ray.telemetry.run_spans import UnitTimes, run_spans
from ensemble_ray.telemetry.task_spans import task_spans
from ensemble_ray.values.ids import delegated_instance
from ensemble_ray.values.outputs import ExitReason, RunState
from ensemble_ray.values.tracing import RunTracing, parse_traceparent

if TYPE_CHECKING:
    from ensemble_ray.record.task_fold import TaskFold
    from ensemble_ray.telemetry.span import SpanData

__all__ = ["recorded_spans"]


@dataclass(slots=True, kw_only=True)
class _Beginning:
    """One time that the run went on, until it ended or was interrupted."""

    number: int
    started_at: float
    last_at: float
    end: RunEnded | None = None
    tasks: list[TaskTracedEvent] = field(default_factory=list[TaskTracedEvent])


def recorded_spans(facts: Sequence[Fact], content: Content = Content.NO_CONTENT) -> list[SpanData]:
    """Return the spans of a run, of each beginning first those of its tasks.

    Raises:
        RecordError: its record is empty or damaged.
    """
    fold = RunFold(facts)
    beginnings, last_of, roles = _read(facts)
    call_ids = _call_ids(facts)
    if not beginnings:
        return []
    run_id, header = facts[0].run, fold.header
    caller = parse_traceparent(header.traceparent or "")

    def tracing(number: int) -> RunTracing:
        return RunTracing(run_id=run_id, caller=caller, beginning=number)

    for task in (*fold.tasks.values(), *fold.delegated.values()):
        if task.is_recorded:
            beginning = beginnings[last_of.get(task.instance, 0)]
            event = _traced(fold, task, tracing(beginning.number), beginning, roles)
            beginning.tasks.append(replace(event, call_ids=call_ids.get(task.instance, ())))
    spans: list[SpanData] = []
    for beginning in beginnings:
        for event in beginning.tasks:
            spans += task_spans(event, content)
        ended = _run_ended(fold, beginning, tracing(beginning.number))
        spans += run_spans(ended, UnitTimes(beginning.tasks), content)
    return spans


def _read(facts: Iterable[Fact]) -> tuple[list[_Beginning], dict[str, int], dict[str, str]]:
    """Return the beginnings of a run, in which of them each instance did its last, and the roles that work was handed to."""
    beginnings: list[_Beginning] = []
    last_of: dict[str, int] = {}
    asked: dict[str, str] = {}
    for fact in facts:
        match fact.data:
            case PlanRecorded(started_at=at):
                beginnings.append(_Beginning(number=0, started_at=fact.at if at is None else at, last_at=fact.at))
            case RunResumed(is_restart=False) if beginnings:
                beginnings.append(_Beginning(number=len(beginnings), started_at=fact.at, last_at=fact.at))
            case RunEnded() as end if beginnings:
                beginnings[-1].end = end
            case DelegationDecided():
                decided = cast("Fact[DelegationDecided]", fact)
                role = worker_role(decided, {}) or read_request(decided).agent_role
                asked[delegated_instance(fact.name)] = role
            case _:
                pass
        if not beginnings:
            continue  # what made agents, before the run was on record
        beginnings[-1].last_at = max(beginnings[-1].last_at, fact.at)
        if not fact.is_of_run and not is_making_agent(fact):
            last_of[fact.instance] = len(beginnings) - 1
    return beginnings, last_of, asked


def _call_ids(facts: Iterable[Fact]) -> dict[str, list[tuple[str, ...]]]:
    """Return the models' own ids of their tool requests by instance, model call and request."""
    found: dict[str, dict[int, tuple[str, ...]]] = {}
    for fact in facts:
        if isinstance(fact.data, ModelAnswered) and not is_making_agent(fact):
            turn = fact.name.rsplit("/", 2)[1]
            ids = tuple(call.id for call in fact.data.tool_calls)
            found.setdefault(fact.instance, {})[int(turn)] = ids
    return {instance: [turns.get(turn, ()) for turn in range(max(turns) + 1)] for instance, turns in found.items()}


def _traced(
    fold: RunFold, task: TaskFold, tracing: RunTracing, beginning: _Beginning, roles: dict[str, str]
) -> TaskTracedEvent:
    """Return the end of an execution, as it was told of or would have been."""
    state = RunState.INTERRUPTED if beginning.end is None else beginning.end.state or RunState.INTERRUPTED
    if task.instance in roles:
        trace = task.trace({"agent_role": roles[task.instance]}, fold.capture_mode, state=state.value)
    else:
        trace = fold.trace_of(task, state=state.value)
    failure = task.failure if task.has_failed else None
    status = "completed" if task.output is not None else str(trace.metadata.get("state", "exited"))
    return TaskTracedEvent(
        run_id=tracing.run_id,
        instance=task.instance,
        tracing=tracing,
        trace=trace,
        status="failed" if failure is not None else status,
        error_type="" if failure is None else failure.data.error_type,
        error_message="" if failure is None else failure.data.message,
        is_handler=task.is_handler,
    )


def _run_ended(fold: RunFold, beginning: _Beginning, tracing: RunTracing) -> RunTracedEvent:
    """Return the end of a beginning; one without an end was interrupted."""
    end = beginning.end
    reason, error_type, message = ExitReason.ERROR, "Interrupted", "The run was interrupted"
    if end is not None:
        reason = end.exit_reason or ExitReason.COMPLETED
        error_type, message = next(((each.error_type, each.message) for each in end.errors), ("", ""))
    return RunTracedEvent(
        run_id=tracing.run_id,
        tracing=tracing,
        workflow=fold.header.workflow or "",
        origin=fold.header.origin or "",
        started_at=beginning.started_at,
        ended_at=beginning.last_at,
        exit_reason=reason,
        error_type=error_type,
        error_message=message,
    )
