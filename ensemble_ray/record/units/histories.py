"""What the iterations, phases and steps of a run gave, and what its trace says of them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from ensemble_ray.plan.plan import LoopUnit
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.task_output import GraphHistory, GraphStep, LoopHistory, UnitOutputs
from ensemble_ray.values.trace import GraphTrace, GraphTraceStep, LoopTrace, PhaseStatus, PhaseTrace, TaskTrace
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ensemble_ray.plan.plan import PhaseUnit
    from ensemble_ray.record.units.ended import EndedUnits
    from ensemble_ray.schedule.instructions import LoopResult, PhaseResult


class UnitParts(TypedDict, total=False):
    """What of `RunResults` units make."""

    units: UnitOutputs
    loop_traces: tuple[LoopTrace, ...]
    phases: tuple[PhaseTrace, ...]
    graph_trace: GraphTrace | None


def unit_results(ended: EndedUnits, traces: Sequence[tuple[str, TaskTrace]]) -> UnitParts:
    """Return what units add to the results of a run.

    Args:
        ended: The units of the run.
        traces: Of all executions, by instance, in the order in which they ended.
    """
    return UnitParts(
        units=unit_outputs(ended),
        loop_traces=loop_traces(ended),
        phases=phase_traces(ended, traces),
        graph_trace=graph_trace(ended),
    )


def unit_outputs(ended: EndedUnits) -> UnitOutputs:
    """Return what the accessors of a run's output speak of."""
    return UnitOutputs(
        loops={unit.name: _history(ended, unit, result) for unit, result in ended.loops()},
        phases={
            unit.name: [each.output for each in ended.shown_of_phase(result)]
            for unit, result in ended.phases()
            if result.status == "completed"
        },
        graph=_graph_history(ended),
    )


def _history(ended: EndedUnits, unit: LoopUnit, result: LoopResult) -> LoopHistory:
    names = _body_names(unit)
    return LoopHistory(
        iterations=[
            {names[node_key(each)]: ended.outputs[each] for each in instances if each in ended.outputs}
            for instances in result.iterations
        ],
        termination_reason=result.termination_reason,
        is_flagged=result.termination_reason == "max_iterations" and unit.on_max_iterations == "return_with_flag",
    )


def _body_names(unit: LoopUnit) -> Mapping[str, str]:
    return dict(zip(unit.body, unit.body_names, strict=True))


def _graph_history(ended: EndedUnits) -> GraphHistory | None:
    found = ended.graph()
    if found is None:
        return None
    unit, result = found
    steps: list[GraphStep] = []
    for step in result.steps:
        shown = ended.shown_of(step.instance)
        if shown:  # a step that failed, or was cancelled, gave nothing
            output = shown[-1].output
            steps.append(
                GraphStep(state_name=step.state, step_number=step.number, output=output, next_state=step.next_state)
            )
    reason = result.termination_reason
    return GraphHistory(
        steps=steps,
        termination_reason=reason,
        is_flagged=reason == "max_steps" and unit.on_max_steps == "return_with_flag",
    )


def loop_traces(ended: EndedUnits) -> tuple[LoopTrace, ...]:
    """Return what a trace says of each run of a loop (S-LOOP-130, S-LOOP-180)."""
    return tuple(_loop_trace(unit, result) for unit, result in ended.loops())


def _loop_trace(unit: LoopUnit, result: LoopResult) -> LoopTrace:
    names = _body_names(unit)
    return LoopTrace(
        loop_name=unit.name,
        path=result.unit,
        iterations_run=len(result.iterations),
        max_iterations=unit.max_iterations,
        termination_reason=result.termination_reason,
        on_max_iterations=unit.on_max_iterations,
        output_mode=unit.output_mode,
        memory_mode=unit.memory_mode,
        iterations=tuple(tuple(names[node_key(each)] for each in instances) for instances in result.iterations),
    )


def graph_trace(ended: EndedUnits) -> GraphTrace | None:
    """Return what a trace says of the graph (S-GRAPH-74)."""
    found = ended.graph()
    if found is None:
        return None
    unit, result = found
    steps = tuple(
        GraphTraceStep(
            path=step.instance.rpartition("/")[0],
            state_name=step.state,
            step_number=step.number,
            next_state=step.next_state,
        )
        for step in result.steps
    )
    return GraphTrace(
        graph_name=unit.name,
        path=result.unit,
        start_state=unit.start,
        termination_reason=result.termination_reason,
        steps_run=len(steps),
        max_steps=unit.max_steps,
        steps=steps,
    )


def phase_traces(ended: EndedUnits, traces: Sequence[tuple[str, TaskTrace]]) -> tuple[PhaseTrace, ...]:
    """Return what a trace says of phases and of their reviews (S-PHASE-44, S-PHASE-64).

    Args:
        ended: The units of the run.
        traces: Of all executions, by instance, in the order in which they ended.
    """
    phases = tuple(ended.phases())
    if not phases:
        return ()
    by_phase: dict[str, list[tuple[str, TaskTrace]]] = {}
    for instance, trace in traces:
        by_phase.setdefault(instance.partition("/")[0].rpartition("#")[0], []).append((instance, trace))
    return tuple(each for unit, result in phases for each in _of_phase(unit, result, by_phase.get(unit.key, ())))


def _of_phase(unit: PhaseUnit, result: PhaseResult, traces: Sequence[tuple[str, TaskTrace]]) -> Iterator[PhaseTrace]:
    started, completed = utc_of(result.started_at), utc_of(max(result.started_at, result.completed_at))
    yield PhaseTrace(
        name=unit.name,
        path=result.unit,
        status=PhaseStatus(result.status),
        task_traces=tuple(trace for instance, trace in traces if node_key(instance) != unit.review),
        started_at=started,
        completed_at=completed,
        duration=completed - started,
        attempts=result.attempts,
    )
    reviews = tuple(trace for instance, trace in traces if node_key(instance) == unit.review)
    if reviews:
        yield PhaseTrace(
            name=f"__review__{unit.name}",
            path=result.unit,
            status=PhaseStatus(result.status),
            task_traces=reviews,
            started_at=reviews[0].started_at,
            completed_at=max(each.completed_at for each in reviews),
            duration=max(each.completed_at for each in reviews) - reviews[0].started_at,
            attempts=len(reviews),
        )
