"""The spans of a recorded run, the same that it sends while it goes on. Pure.

In: the facts of a run. Out: its spans: one for each beginning of the run, and those of its tasks, units, model and tool calls. What a run
did that never ended lasts until its last fact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from ensemble_ray.events.telemetry.spans import Content, UnitTimes, run_spans, task_spans
from ensemble_ray.events.tracing import RunTracedEvent, TaskTracedEvent
from ensemble_ray.facts.effects import DelegationDecided, ModelAnswered, is_making_agent, read_request
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import PlanRecorded, RunEnded, RunResumed, StimulusRecorded
from ensemble_ray.plan.plan import Node
from ensemble_ray.record.delegation_fold import worker_role
from ensemble_ray.record.fold import RunFold
from ensemble_ray.record.resume.run_head import RunHead, name_in
from ensemble_ray.values.ids import delegated_instance
from ensemble_ray.values.outputs import ExitReason, RunState
from ensemble_ray.values.trace import RunTracing, parse_traceparent

if TYPE_CHECKING:
    from ensemble_ray.events.telemetry.spans import SpanData
    from ensemble_ray.record.task_fold import TaskFold
    from ensemble_ray.values.trace import TraceParent


@dataclass(slots=True, kw_only=True)
class _Beginning:
    """One time that the run went on, until it ended or was interrupted."""

    tracing: RunTracing
    started_at: float
    last_at: float
    facts: list[Fact] = field(default_factory=list[Fact])
    end: RunEnded | None = None
    tasks: list[TaskTracedEvent] = field(default_factory=list[TaskTracedEvent])

    @property
    def has_told(self) -> bool:
        """Whether it has told of all that was done until then: a run that waits for people has not told of tasks that wait."""
        return self.end is not None and self.end.state is not RunState.WAITING


def recorded_spans(facts: Sequence[Fact], content: Content = Content.NO_CONTENT) -> list[SpanData]:
    """Return the spans of a run, of each beginning first those of its tasks.

    Raises:
        RecordError: its record is empty or damaged.
    """
    header = RunHead(facts).header
    beginnings = _read(facts, parse_traceparent(header.traceparent or ""))
    _tell_of_tasks(beginnings)
    spans: list[SpanData] = []
    for beginning in beginnings:
        for event in beginning.tasks:
            spans += task_spans(event, content)
        spans += run_spans(_run_ended(header, beginning), UnitTimes(beginning.tasks), content)
    # A tool call that was cut short and made again is told of where it ended.
    return list({span.span_id: span for span in spans}.values())


def _read(facts: Iterable[Fact], caller: TraceParent | None) -> list[_Beginning]:
    """Return the beginnings of a run, each with its facts; what made agents before is the first's."""
    beginnings: list[_Beginning] = []
    before: list[Fact] = []
    told_until = 0.0
    for fact in facts:
        match fact.data:
            case PlanRecorded(started_at=at):
                began = fact.at if at is None else at
                tracing = RunTracing(run_id=fact.run, caller=caller)
                beginnings.append(_Beginning(tracing=tracing, started_at=began, last_at=fact.at, facts=before))
            case RunResumed(is_restart=False) if beginnings:
                tracing = replace(beginnings[0].tracing, beginning=len(beginnings), told_until=told_until)
                beginnings.append(_Beginning(tracing=tracing, started_at=fact.at, last_at=fact.at))
            case RunEnded() as end if beginnings:
                beginnings[-1].end = end
                told_until = fact.at if beginnings[-1].has_told else told_until
            case _:
                pass
        if not beginnings:
            before.append(fact)
            continue
        beginnings[-1].facts.append(fact)
        beginnings[-1].last_at = max(beginnings[-1].last_at, fact.at)
    return beginnings


def _tell_of_tasks(beginnings: Sequence[_Beginning]) -> None:
    """Give each beginning the executions that it told of, or would have: those that did something in it.

    What was at work when a run was interrupted, or waited for people, is told of by the beginning in which it did its last.
    """
    fold, roles = RunFold(), dict[str, str]()
    taken: list[Fact] = []
    #: executions that nobody has told of -> in which beginning they did their last
    untold: dict[str, _Beginning] = {}
    for beginning in beginnings:
        for fact in beginning.facts:
            fold.apply(fact)
            if isinstance(fact.data, DelegationDecided):
                decided = cast("Fact[DelegationDecided]", fact)
                roles[delegated_instance(fact.name)] = worker_role(decided, {}) or read_request(decided).agent_role
            if fact.is_of_run or is_making_agent(fact):
                continue
            # That it is over is nothing that it does.
            if fact.instance in untold or not isinstance(fact.data, StimulusRecorded):
                untold[fact.instance] = beginning
        taken += beginning.facts
        if not beginning.has_told and beginning is not beginnings[-1]:
            continue
        call_ids = _call_ids(taken)
        for task in (*fold.tasks.values(), *fold.delegated.values()):
            if task.is_recorded and (last := untold.get(task.instance)) is not None:
                event = _make_traced(fold, task, last, roles)
                last.tasks.append(replace(event, call_ids=call_ids.get(task.instance, ())))
        untold.clear()


def _call_ids(facts: Iterable[Fact]) -> dict[str, list[tuple[str, ...]]]:
    """Return the models' own ids of their tool requests by instance, model call and request."""
    found: dict[str, dict[int, tuple[str, ...]]] = {}
    for fact in facts:
        if isinstance(fact.data, ModelAnswered) and not is_making_agent(fact):
            turn = fact.name.rsplit("/", 2)[1]
            ids = tuple(call.id for call in fact.data.tool_calls)
            found.setdefault(fact.instance, {})[int(turn)] = ids
    return {instance: [turns.get(turn, ()) for turn in range(max(turns) + 1)] for instance, turns in found.items()}


def _make_traced(fold: RunFold, task: TaskFold, beginning: _Beginning, roles: Mapping[str, str]) -> TaskTracedEvent:
    """Return the end of an execution, as it was told of or would have been."""
    state = RunState.INTERRUPTED if beginning.end is None else beginning.end.state or RunState.INTERRUPTED
    if task.instance in roles:
        role = roles[task.instance]
        node = Node(key="", index=0, description=task.key, expected_output="", agent_role=role, agent_key=role)
        trace = task.trace(node, fold.capture_mode, state=state.value)
    else:
        trace = fold.trace_of(task, state=state.value)
    failure = task.failure if task.has_failed else None
    status = "completed" if task.output is not None else str(trace.metadata.get("state", "exited"))
    return TaskTracedEvent(
        run_id=beginning.tracing.run_id,
        instance=task.instance,
        tracing=beginning.tracing,
        trace=trace,
        status="failed" if failure is not None else status,
        error_type="" if failure is None else failure.data.error_type,
        error_message="" if failure is None else failure.data.message,
        is_handler=task.is_handler,
    )


def _run_ended(header: PlanRecorded, beginning: _Beginning) -> RunTracedEvent:
    """Return the end of a beginning; one without an end was interrupted."""
    end = beginning.end
    reason, error_type, message = ExitReason.ERROR, "Interrupted", "The run was interrupted"
    if end is not None:
        reason = end.reason
        error_type, message = next(((each.error_type, each.message) for each in end.errors), ("", ""))
    return RunTracedEvent(
        run_id=beginning.tracing.run_id,
        tracing=beginning.tracing,
        workflow=header.workflow or "",
        name=name_in(header),
        started_at=beginning.started_at,
        ended_at=beginning.last_at,
        exit_reason=reason,
        error_type=error_type,
        error_message=message,
    )
