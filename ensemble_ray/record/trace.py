"""The trace and the output of a run: readers of its history. Pure. The trace of a torn record is incomplete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ensemble_ray.errors import ConstraintViolationError, EnsembleError, IllegalStateError, RecordError
from ensemble_ray.facts.fact import Fact, as_mapping, as_sequence, as_text
from ensemble_ray.facts.runs import LONGEST_MESSAGE, FailureRecorded, RecordedError
from ensemble_ray.plan.plan import MANAGER_ROLE
from ensemble_ray.record.head import RunHead, name_in
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.result import (
    FailureSeen,
    RunEnd,
    RunResultHead,
    RunResults,
    failure_of,
    failures_seen,
    make_trace,
    output_with,
    planned_results,
    violation_trace,
)
from ensemble_ray.record.source import recorded_plan
from ensemble_ray.record.units import EndedUnits, ended_units
from ensemble_ray.record.work import RecordedWork
from ensemble_ray.schedule.hierarchy import violations_of
from ensemble_ray.values.error_data import error_from
from ensemble_ray.values.ids import delegating_call, instance_of
from ensemble_ray.values.outputs import EnsembleOutput, RunState
from ensemble_ray.values.task_output import OutputType, TaskOutput
from ensemble_ray.values.trace import AgentSummary, ErrorTrace, ExecutionTrace, TaskTrace
from ensemble_ray.values.value import utc_of

#: The output may be partial.
_WITH_OUTPUT = frozenset({RunState.COMPLETED, RunState.CANCELLED, RunState.BUDGET_EXHAUSTED})


def fold_trace(facts: Iterable[Fact]) -> ExecutionTrace:
    return trace_of(RunHistory(facts, has_details=True))


def fold_output(
    facts: Iterable[Fact],
    *,
    output_types: Mapping[str, OutputType] | None = None,
    object_ids: Mapping[str, str] | None = None,
) -> EnsembleOutput:
    """Return the output of a finished run from its facts (S-SET-39).

    `output_types` has types of parsed outputs by task key; outputs of other tasks stay JSON data. With the hidden
    `object_ids`, `get_output(task)` finds a task's output.

    Raises:
        IllegalStateError: the run failed, or has not ended.
        RecordError: there are no facts, their data is damaged, or an output is not of its type.
    """
    return output_of(RunHistory(facts, has_details=True), output_types, object_ids)


# All of these read histories with details.


def trace_of(history: RunHistory) -> ExecutionTrace:
    works = works_of(history)
    return _assemble(history, works, _outputs(works, {}) if history.has_units else {})[0]


def output_of(
    history: RunHistory,
    output_types: Mapping[str, OutputType] | None = None,
    object_ids: Mapping[str, str] | None = None,
) -> EnsembleOutput:
    head = _head_of(history)
    if head.end is None or head.state not in _WITH_OUTPUT:
        why = "has not ended" if head.end is None else f"is {head.state.value}"
        raise IllegalStateError(f"Run '{head.run_id}' has no output: it {why}")
    works = works_of(history)
    workers: list[TaskOutput] = []
    if history.plan.hierarchy is not None:
        given = (worker.task_output() for work in works for worker, _ in work.workers_that_gave())
        workers = [output for output in given if output is not None]
    trace, results = _assemble(history, works, _outputs(works, output_types or {}), workers, object_ids)
    return output_with(trace, results, exit_reason=head.exit_reason, run_id=head.run_id)


def outputs_of(history: RunHistory, output_types: Mapping[str, OutputType]) -> dict[str, TaskOutput]:
    """Return the outputs of the plan's tasks by instance, in order of completion; see `fold_output`."""
    return _outputs(works_of(history), output_types)


def raised_by(history: RunHistory) -> BaseException | None:
    """Return the recorded error that the failed run raised; by name and text if its class is not ours."""
    works = works_of(history)
    last = {fact.instance: position for position, fact in enumerate(history.ends)}
    completed = {fact.instance: last[fact.instance] for fact in history.ends if fact.data.is_completion}.values()
    tasks = [
        FailureSeen(
            at=failed.at,
            error=error_from(failed.data.error_data),
            completed_before=sum(each < last.get(work.instance, len(history.ends)) for each in completed),
            node=history.nodes[work.key],
        )
        for work in works
        if (failed := work.failure) is not None and work.has_failed and work.key in history.nodes
    ]
    ended = _ended(history, _outputs(works, {}))
    failures = failures_seen(ended, tasks)
    if not failures and not _violations(history, works):
        return None
    error = failure_of(ended, failures, [output for work in works for _, output in work.workers_that_gave()])
    if isinstance(error, EnsembleError):
        error.trace = trace_of(history)
    return error


def works_of(history: RunHistory) -> list[RecordedWork]:
    """Return the work of the plan's tasks: completed ones as they completed, then failed ones, then unfinished ones.

    Unfinished tasks are in the order of their ends, the tasks of a planned map-reduce in the order of levels (S-MR-90).
    """
    known = (RecordedWork(history, each) for each in history.work if delegating_call(each) is None)
    works = [work for work in known if work.is_recorded]
    if history.plan.has_levels:
        by_instance = {work.instance: work for work in works}
        return [by_instance[each] for each in map(instance_of, history.nodes) if each in by_instance]
    completed = dict.fromkeys(fact.instance for fact in history.ends if fact.data.is_completion)
    first = {instance: position for position, instance in enumerate(completed)}
    last = {fact.instance: position for position, fact in enumerate(history.ends)}

    def rank(work: RecordedWork) -> tuple[int, int]:
        group = 2 if work.is_unfinished else 0 if work.output is not None else 1
        return group, (last if group else first).get(work.instance, len(history.ends))

    return sorted(works, key=rank)


def _head_of(history: RunHistory) -> RunHead:
    if not history.head.run_id:
        raise RecordError("There are no facts to fold: the record is empty")
    return history.head


def _outputs(works: Iterable[RecordedWork], output_types: Mapping[str, OutputType]) -> dict[str, TaskOutput]:
    found = ((work.instance, work.task_output(output_types.get(work.key))) for work in works)
    return {instance: output for instance, output in found if output is not None}


def _assemble(
    history: RunHistory,
    works: Sequence[RecordedWork],
    outputs: Mapping[str, TaskOutput],
    delegated: Sequence[TaskOutput] = (),
    object_ids: Mapping[str, str] | None = None,
) -> tuple[ExecutionTrace, RunResults]:
    head = _head_of(history)
    state = head.state.value
    traces = [(work.instance, work.trace(state)) for work in works]
    ended = _ended(history, outputs)
    results = planned_results(
        ended,
        traces,
        [_agent_summary(each) for each in head.header.agents or ()],
        delegated=delegated,
        worker_traces=[each for work in works for each in work.worker_traces(state)],
        object_ids=object_ids or {},
    )
    run = RunResultHead(
        run_id=head.header.ensemble_id or head.run_id,
        name=name_in(head.header),
        workflow=head.header.workflow or history.plan.workflow,
        inputs={name: str(value) for name, value in (head.header.inputs or {}).items()},
        capture_mode=head.capture_mode,
        trace_id=(head.end and head.end.trace_id) or None,
    )
    end = RunEnd(
        state=head.state,
        exit_reason=head.exit_reason,
        started_at=utc_of(head.started_at),
        completed_at=utc_of(max(head.last_at, head.started_at)),
        errors=_errors(history, works, ended),
        metadata={"lost": list(head.lost)} if head.lost else {},
    )
    return make_trace(run, results, end), results


def _ended(history: RunHistory, outputs: Mapping[str, TaskOutput]) -> EndedUnits:
    if not history.has_units:
        return EndedUnits(plan=history.plan, outputs=outputs)
    # A plan that is damaged elsewhere has no units when it is read leniently.
    plan = history.plan if history.plan.units else recorded_plan(history.head.header.plan or {})
    return ended_units(plan, history.stimuli, outputs)


def _errors(history: RunHistory, works: Sequence[RecordedWork], ended: EndedUnits) -> tuple[ErrorTrace, ...]:
    reasons = history.head.errors
    places = {_identify(each): each.place for each in reasons if each.place}
    failed = [error for work in works if (error := _error_of(history, work)) is not None]
    of_units = [each.as_trace() for each in failures_seen(ended, ())]
    placed = (
        each.replace(place=place) if (place := places.get(_identify(each))) else each for each in (*failed, *of_units)
    )
    known = {_identify(work.failure.data) for work in works if work.failure is not None}
    known.update(map(_identify, of_units))
    return (*placed, *_run_errors(history, works, [each for each in reasons if _identify(each) not in known]))


def _run_errors(
    history: RunHistory, works: Sequence[RecordedWork], reasons: Sequence[RecordedError]
) -> Iterable[ErrorTrace]:
    """Return errors of the run itself: `reasons` of no task and no unit, and missing workers of a manager."""
    violation, last_at = ConstraintViolationError.__name__, history.head.last_at
    for error in reasons:
        node = history.nodes.get(error.key)
        role = MANAGER_ROLE if error.error_type == violation else "" if node is None else node.agent_role
        yield ErrorTrace(
            agent_role=error.agent_role or role,
            task_description=error.task_description or (error.key if node is None else node.description),
            error_type=error.error_type or "Exception",
            message=error.message,
            stack_trace=error.stack_trace,
            place=error.place,
            occurred_at=utc_of(last_at),
        )
    is_recorded = any(each.error_type == violation for each in history.head.errors)
    if not is_recorded and (violations := _violations(history, works)):
        yield violation_trace(violations, last_at)


def _violations(history: RunHistory, works: Sequence[RecordedWork]) -> tuple[str, ...]:
    """Return why a manager's run failed although no task did (S-HIER-50)."""
    rules = history.plan.hierarchy
    if rules is None or history.head.state is not RunState.FAILED or any(work.has_failed for work in works):
        return ()
    return violations_of(rules, {output.agent_role for work in works for _, output in work.workers_that_gave()})


def _identify(error: FailureRecorded | ErrorTrace | RecordedError) -> tuple[str, str]:
    return error.error_type, error.message[:LONGEST_MESSAGE]


def _error_of(history: RunHistory, work: RecordedWork) -> ErrorTrace | None:
    failure, node = work.failure, history.nodes.get(work.key)
    if failure is None:
        return None
    trace = failure.data.trace
    if isinstance(trace, TaskTrace):
        role, description = trace.agent_role, trace.task_description
    else:
        seen = as_mapping(trace)
        role = as_text(seen.get("agent_role"), "" if node is None else node.agent_role)
        description = as_text(seen.get("task_description"), work.key if node is None else node.description)
    return ErrorTrace(
        agent_role=role,
        task_description=description,
        error_type=failure.data.error_type,
        message=failure.data.message,
        stack_trace=failure.data.stack_trace or "",
        occurred_at=utc_of(failure.at),
    )


def _agent_summary(data: Mapping[str, object]) -> AgentSummary:
    background = data.get("background")
    return AgentSummary(
        role=as_text(data.get("role")),
        goal=as_text(data.get("goal")),
        background=background if isinstance(background, str) else None,
        tool_names=tuple(str(name) for name in as_sequence(data.get("tool_names"))),
        allow_delegation=data.get("allow_delegation") is True,
    )
