"""The units and levels of a run: their results, the outputs that they show, and their histories and traces. Pure.

A live run has the results from its machines, a record from the stimuli of its source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.plan.plan import GraphUnit, LoopUnit, Node, PhaseUnit, Plan, Unit, in_waiting_order
from ensemble_ray.record.source import RecordedStimuli, ReplayedSource, path_of_question
from ensemble_ray.schedule.instructions import (
    EdgeMatches,
    GraphResult,
    LoopResult,
    PhaseResult,
    UnitFailure,
    UnitResult,
    UntilHolds,
)
from ensemble_ray.schedule.stimuli import Evaluated, Stimulus
from ensemble_ray.schedule.unit import list_shown
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.metrics import TaskMetrics, add_tokens
from ensemble_ray.values.task_output import (
    GraphHistory,
    GraphStep,
    LoopHistory,
    TaskOutput,
    UnitOutputs,
    join_iterations,
)
from ensemble_ray.values.trace import (
    ExecutionTrace,
    GraphTrace,
    GraphTraceStep,
    LoopTrace,
    MapReduceLevelSummary,
    PhaseStatus,
    PhaseTrace,
    TaskTrace,
    ToolCallTrace,
)
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import RunOutcome, TaskFailure
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.values.task_output import TaskOutput


_T = TypeVar("_T")


def place_trace(trace: TaskTrace, node_type: str | None, level: int | None) -> TaskTrace:
    return trace.model_copy(update={"node_type": node_type, "map_reduce_level": level})


def placed_outcome(plan: Plan, outcome: RunOutcome) -> RunOutcome:
    if not plan.has_levels:
        return outcome
    places = {node.key: (node.node_type, node.level) for node in plan.nodes}

    def output_of(instance: str, output: TaskOutput) -> TaskOutput:
        trace = None if output.trace is None else place_trace(output.trace, *places[node_key(instance)])
        return output.model_copy(update={"trace": trace})

    def failure_of(instance: str, failure: TaskFailure) -> TaskFailure:
        return (
            failure
            if failure.trace is None
            else replace(failure, trace=place_trace(failure.trace, *places[node_key(instance)]))
        )

    return replace(
        outcome,
        completed=[(instance, output_of(instance, output)) for instance, output in outcome.completed],
        failures=[replace(each, failure=failure_of(each.instance, each.failure)) for each in outcome.failures],
        unfinished=[(instance, failure_of(instance, each)) for instance, each in outcome.unfinished],
    )


def in_level_order(plan: Plan, keyed: Sequence[tuple[str, _T]]) -> Sequence[tuple[str, _T]]:
    if not plan.has_levels:
        return keyed
    positions = {node.key: position for position, node in enumerate(plan.nodes)}
    return sorted(keyed, key=lambda entry: positions[node_key(entry[0])])


def level_summaries(traces: Iterable[TaskTrace]) -> tuple[MapReduceLevelSummary, ...]:
    """Return one summary per level (S-MR-93). Traces without a level are ignored."""
    by_level: dict[int, list[TaskTrace]] = {}
    for trace in traces:
        if trace.map_reduce_level is not None:
            by_level.setdefault(trace.map_reduce_level, []).append(trace)
    return tuple(
        MapReduceLevelSummary(
            level=level,
            task_count=len(found),
            duration=max(trace.completed_at for trace in found) - min(trace.started_at for trace in found),
        )
        for level, found in sorted(by_level.items())
    )


# Totals.


class LevelTally(Struct, kw_only=True):
    level: int
    node_type: str  # `map`, `reduce`, `final-reduce` or `direct`
    total: int = 0
    done: int = 0
    failed: int = 0
    model_calls: int = 0
    tool_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    unknown: int = 0
    incomplete: int = 0
    reused_calls: int = 0
    reused_tokens: int = 0
    uncounted: int = 0  # tasks whose tokens the provider did not count
    started_at: datetime | None = None
    ended_at: datetime | None = None

    def add(self, metrics: TaskMetrics, started_at: datetime, ended_at: datetime) -> None:
        self.model_calls += metrics.llm_call_count
        self.tool_calls += metrics.tool_call_count
        self.input_tokens += max(metrics.input_tokens, 0)
        self.output_tokens += max(metrics.output_tokens, 0)
        self.incomplete += metrics.incomplete_answers
        self.reused_calls += metrics.reused_calls
        self.reused_tokens = add_tokens((self.reused_tokens, metrics.reused_tokens))
        self.uncounted += metrics.llm_call_count > 0 and min(metrics.input_tokens, metrics.output_tokens) < 0
        self.started_at = started_at if self.started_at is None else min(started_at, self.started_at)
        self.ended_at = ended_at if self.ended_at is None else max(ended_at, self.ended_at)

    @property
    def duration(self) -> timedelta:
        if self.started_at is None or self.ended_at is None:
            return timedelta()
        return self.ended_at - self.started_at


def level_tallies(trace: ExecutionTrace, failed: Collection[tuple[str, str]]) -> list[LevelTally]:
    """Return the levels of a trace; `failed` are the roles and descriptions of its failed tasks."""
    found: dict[int, LevelTally] = {}
    for task in trace.task_traces:
        level = task.map_reduce_level
        if level is None:
            continue
        tally = found.setdefault(level, LevelTally(level=level, node_type=task.node_type or ""))
        tally.total += 1
        has_failed = (task.agent_role, task.task_description) in failed
        tally.failed += has_failed
        tally.done += not has_failed and "state" not in task.metadata
        tally.unknown += len(unknown_calls(task)) or task.metadata.get("outcome") == "unknown"
        tally.add(task.metrics, task.started_at, task.completed_at)
    return [found[level] for level in sorted(found)]


def unknown_calls(task: TaskTrace) -> list[ToolCallTrace]:
    return [call for model in task.llm_interactions for call in model.tool_calls if call.outcome == "unknown"]


def tally_data(tallies: Iterable[LevelTally]) -> list[dict[str, object]]:
    return [
        {
            "level": tally.level,
            "node_type": tally.node_type,
            "tasks": tally.total,
            "done": tally.done,
            "failed": tally.failed,
            "model_calls": tally.model_calls,
            "tool_calls": tally.tool_calls,
            "unknown_outcomes": tally.unknown,
            **({"incomplete_answers": tally.incomplete} if tally.incomplete else {}),
            **(
                {"reused_calls": tally.reused_calls, "reused_tokens": tally.reused_tokens} if tally.reused_calls else {}
            ),
            "input_tokens": tally.input_tokens,
            "output_tokens": tally.output_tokens,
            "uncounted_tasks": tally.uncounted,
            "duration_s": tally.duration.total_seconds(),
        }
        for tally in tallies
    ]


_R = TypeVar("_R")
_U = TypeVar("_U")


class KeyedOutput(NamedTuple):
    key: str
    output: TaskOutput


def key_of_path(path: str) -> str:
    """Return the key of the unit at the end of a path.

    Examples:
        >>> key_of_path("graph:triage#3/loop:refine")
        'loop:refine'
    """
    return path.rpartition("/")[2]


@dataclass(kw_only=True)
class EndedUnits:
    plan: Plan
    results: Sequence[UnitResult] = ()  # in the order in which they ended
    failures: Sequence[UnitFailure] = ()  # units that failed although none of their tasks did, in order
    outputs: Mapping[str, TaskOutput] = field(default_factory=dict[str, "TaskOutput"])

    @cached_property
    def units(self) -> Mapping[str, Unit]:
        return {unit.key: unit for unit in self.plan.units}

    @cached_property
    def nodes(self) -> Mapping[str, Node]:
        return {node.key: node for node in self.plan.nodes}

    def _of(self, results: type[_R], units: type[_U]) -> Iterator[tuple[_U, _R]]:
        for result in self.results:
            unit = self.units.get(key_of_path(result.unit))
            if isinstance(result, results) and isinstance(unit, units):
                yield unit, result

    def loops(self) -> Iterator[tuple[LoopUnit, LoopResult]]:
        return self._of(LoopResult, LoopUnit)

    def phases(self) -> Iterator[tuple[PhaseUnit, PhaseResult]]:
        return self._of(PhaseResult, PhaseUnit)

    def graph(self) -> tuple[GraphUnit, GraphResult] | None:
        return next(self._of(GraphResult, GraphUnit), None)

    # Outputs that the caller of a run sees.

    def list_visible(self) -> list[KeyedOutput]:
        """Return the outputs in the caller's order.

        Tasks as they completed or in the order of levels, with loops in their positions (S-LOOP-75); phases as they completed
        (S-PHASE-41); the steps of a graph (S-GRAPH-70). If the run ended early: the outputs so far (S-LOOP-112, S-PHASE-56,
        S-GRAPH-53).
        """
        if not self.plan.units:
            ordered = in_level_order(self.plan, [*self.outputs.items()])
            return [KeyedOutput(node_key(instance), output) for instance, output in ordered]
        if (graph := self.graph()) is not None:
            return [each for step in graph[1].steps for each in self.shown_of(step.instance)]
        if any(isinstance(unit, PhaseUnit) for unit in self.plan.units):
            return [each for _, result in self.phases() for each in self.shown_of_phase(result)]
        return self._tasks_and_loops(result for _, result in self.loops())

    def shown_of_completed(self) -> list[KeyedOutput]:
        failed = {failure.unit for failure in self.failures}  # a cap may fail a loop that has a reason (S-LOOP-61)
        return self._tasks_and_loops(
            result for _, result in self.loops() if result.termination_reason is not None and result.unit not in failed
        )

    def _tasks_and_loops(self, loops: Iterable[LoopResult]) -> list[KeyedOutput]:
        return self._in_place([*(name for name in self.outputs if "/" not in name), *(each.unit for each in loops)])

    def _in_place(self, paths: Iterable[str]) -> list[KeyedOutput]:
        """Return the visible outputs of tasks, in this order, and of loops.

        A loop is placed before the first task or loop that waits for it, else after all tasks, as declared (S-LOOP-75).
        """
        by_key = {key_of_path(path).partition("#")[0]: path for path in paths}
        tasks = [key for key in by_key if key not in self.units]
        loops = [unit for unit in self.plan.units if unit.key in by_key and isinstance(unit, LoopUnit)]
        places: dict[str, int] = {}
        for place, key in reversed([*enumerate(tasks)]):
            context = self.nodes[key].context if key in self.nodes else ()
            places.update(dict.fromkeys(context, place))
        last = {loop.key: place for place, loop in enumerate(loops, start=len(tasks))}
        waits_for = {loop.key: loop.context for loop in loops}
        ordered = in_waiting_order([*waits_for], waits_for)
        for key in reversed(ordered):
            place = places.setdefault(key, last[key])
            places.update((each, min(place, places.get(each, place))) for each in waits_for[key])
        placed = sorted([*((places[key], key) for key in ordered), *enumerate(tasks)], key=itemgetter(0))
        return [each for _, key in placed for each in self.shown_of(by_key[key])]

    def shown_of(self, path: str) -> list[KeyedOutput]:
        if "#" in path.rpartition("/")[2]:
            output = self.outputs.get(path)
            return [] if output is None else [KeyedOutput(node_key(path), output)]
        result = self._loop_results.get(path)
        if result is None:
            return []
        unit = self.units[key_of_path(result.unit)]
        if not isinstance(unit, LoopUnit):
            return []
        shown: list[KeyedOutput] = []
        for instances in list_shown(unit, result.iterations):
            outputs = [self.outputs[name] for name in instances if name in self.outputs]
            if outputs and unit.output_mode == "all_iterations":
                outputs = [join_iterations(outputs)]
            shown += [KeyedOutput(node_key(instances[0]), output) for output in outputs]
        return shown

    def shown_of_phase(self, result: PhaseResult) -> list[KeyedOutput]:
        """Return the outputs of a phase's accepted attempt, or else of its last attempt."""
        return self._in_place(result.outputs)

    @cached_property
    def _loop_results(self) -> Mapping[str, LoopResult]:
        return {result.unit: result for _, result in self.loops()}


# From a record.


class PredicateAnswer(Struct, frozen=True, kw_only=True):
    path: str  # `loop:refine#1`, `graph:triage#4`
    edge: int | None  # position in its graph; None for the predicate of a loop
    answer: bool | None  # None if it raised
    at: float
    error: str = ""


def ended_units(plan: Plan, stimuli: RecordedStimuli, outputs: Mapping[str, TaskOutput]) -> EndedUnits:
    """Return the results of a recorded plan's units, even if they had not ended when the record did."""
    from ensemble_ray.schedule.nested import NestedSource  # with the machines of all units

    replayed = ReplayedSource(plan)
    for group in stimuli.groups:
        replayed.handle(group)
    source = replayed.source
    if not isinstance(source, NestedSource):
        return EndedUnits(plan=plan, outputs=outputs)
    return EndedUnits(plan=plan, results=source.results(), failures=source.failures(), outputs=outputs)


def verdicts_of(groups: Sequence[Sequence[Stimulus]]) -> Iterator[PredicateAnswer]:
    for stimulus in (each for group in groups for each in group):
        if not isinstance(stimulus, Evaluated):
            continue
        question, answer = stimulus.question, stimulus.answer
        error = ": ".join(each for each in (stimulus.error_type, stimulus.message) if each)
        verdict = answer if isinstance(answer, bool) else None
        if not isinstance(question, UntilHolds | EdgeMatches):
            continue
        edge = question.edge if isinstance(question, EdgeMatches) else None
        yield PredicateAnswer(path=path_of_question(question), edge=edge, answer=verdict, at=stimulus.at, error=error)


# Their outputs and traces.


def unit_outputs(ended: EndedUnits) -> UnitOutputs:
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
    names = dict(zip(unit.body, unit.body_names, strict=True))
    return LoopHistory(
        iterations=[
            {names[node_key(each)]: ended.outputs[each] for each in instances if each in ended.outputs}
            for instances in result.iterations
        ],
        termination_reason=result.termination_reason,
        is_flagged=result.termination_reason == "max_iterations" and unit.on_max_iterations == "return_with_flag",
    )


def _graph_history(ended: EndedUnits) -> GraphHistory | None:
    found = ended.graph()
    if found is None:
        return None
    unit, result = found
    steps: list[GraphStep] = []
    for step in result.steps:
        shown = ended.shown_of(step.instance)
        if shown:  # a failed or cancelled step has no output
            output = shown[-1].output
            steps.append(
                GraphStep(state_name=step.state, step_number=step.number, output=output, next_state=step.next_state)
            )
    reason = result.termination_reason
    is_flagged = reason == "max_steps" and unit.on_max_steps == "return_with_flag"
    return GraphHistory(steps=steps, termination_reason=reason, is_flagged=is_flagged)


def loop_traces(ended: EndedUnits) -> tuple[LoopTrace, ...]:
    """Return one trace per run of a loop (S-LOOP-130, S-LOOP-180)."""
    found: list[LoopTrace] = []
    for unit, result in ended.loops():
        names = dict(zip(unit.body, unit.body_names, strict=True))
        trace = LoopTrace(
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
        found.append(trace)
    return tuple(found)


def graph_trace(ended: EndedUnits) -> GraphTrace | None:
    """Return the trace of the graph (S-GRAPH-74)."""
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
    """Return the traces of phases and of their reviews (S-PHASE-44, S-PHASE-64)."""
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
