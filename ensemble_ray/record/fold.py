"""Folds over a run's facts: its trace and its output. Pure.

In: the facts of one run in order, as a journal gives them or as they are appended. Out: the `ExecutionTrace` of a
finished, failed, cancelled or torn run; the `EnsembleOutput` of a finished one.
Never: events, clocks, files; a torn record is no error, it is a run of which less is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ensemble_ray.errors import ConstraintViolationError, EnsembleError, IllegalStateError, RecordError
from ensemble_ray.facts.ends import FailureRecorded
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.lenient import as_mapping, as_sequence, as_text
from ensemble_ray.facts.runs import (
    LONGEST_MESSAGE,
    LossAccepted,
    PlanRecorded,
    RecordedError,
    RunEnded,
    RunInterrupted,
    RunResumed,
    StimulusRecorded,
)
from ensemble_ray.plan.plan import MANAGER_KEY, MANAGER_ROLE, Node, Plan
from ensemble_ray.record.levels import place_trace
from ensemble_ray.record.result import (
    RunEnd,
    RunResultHead,
    RunResults,
    make_trace,
    output_with,
    planned_results,
    violation_trace,
)
from ensemble_ray.record.resume.run_head import name_in
from ensemble_ray.record.source import readable_plan, recorded_plan
from ensemble_ray.record.task_fold import TaskFold
from ensemble_ray.record.units.ended import EndedUnits
from ensemble_ray.record.units.failures import FailureSeen, failure_of, failures_seen
from ensemble_ray.record.units.recorded import PredicateAnswer, RecordedUnits
from ensemble_ray.schedule.hierarchy import violations_of
from ensemble_ray.values.error_data import error_from
from ensemble_ray.values.ids import delegating_call, instance_of
from ensemble_ray.values.outputs import EnsembleOutput, ExitReason, RunState
from ensemble_ray.values.task_output import OutputType, TaskOutput
from ensemble_ray.values.trace import AgentSummary, CaptureMode, ErrorTrace, ExecutionTrace, TaskTrace
from ensemble_ray.values.value import utc_of

#: Ends with an output; it may be of a part.
_WITH_OUTPUT = frozenset({RunState.COMPLETED, RunState.CANCELLED, RunState.BUDGET_EXHAUSTED})


def fold_trace(facts: Iterable[Fact]) -> ExecutionTrace:
    """Return the trace of a run from its facts.

    Raises:
        RecordError: there are no facts, or their data is damaged.
    """
    return RunFold(facts).trace()


def fold_output(
    facts: Iterable[Fact],
    *,
    output_types: Mapping[str, OutputType] | None = None,
    object_ids: Mapping[str, str] | None = None,
) -> EnsembleOutput:
    """Return the output of a finished run from its facts (S-SET-39).

    Args:
        facts: All facts of the run.
        output_types: By task key: what parsed outputs become; those of other tasks stay JSON data.
        object_ids: By task key: hidden ids of the tasks, so that `get_output(task)` finds their outputs.

    Raises:
        IllegalStateError: the run failed, or has not ended.
        RecordError: there are no facts, their data is damaged, or an output is not of its type.
    """
    return RunFold(facts).output(output_types or {}, object_ids or {})


class RunFold:
    """What the facts of one run tell, as far as they were taken.

    Attributes:
        plan: The recorded plan, as far as it can be read.
    """

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self._run_id: str | None = None
        self._read_plan(PlanRecorded())
        self._end: RunEnded | None = None
        self._interruption: RunInterrupted | None = None
        self._started_at: float | None = None
        self._last_at = 0.0
        self._tasks: dict[str, TaskFold] = {}
        #: work that tasks handed on, by instance; each belongs to the one that asked for it
        self._delegated: dict[str, TaskFold] = {}
        #: instances in the order in which the scheduler was told of their completion, and of any end
        self._completed: list[str] = []
        self._ended: dict[str, None] = {}
        #: of a plan that has any
        self._units: RecordedUnits | None = None
        #: what the record has lost
        self._lost: list[str] = []
        for fact in facts:
            self.apply(fact)

    def apply(self, fact: Fact) -> None:
        """Take the next fact."""
        if self._run_id is None:
            self._run_id = fact.run
            self._started_at = fact.at
        self._last_at = max(self._last_at, fact.at)
        if self._units is not None and isinstance(fact.data, StimulusRecorded | RunResumed):
            self._units.apply((fact,))
        match fact.data:
            case PlanRecorded(plan=plan, started_at=started_at) as header:
                self._read_plan(header)
                self._units = RecordedUnits() if plan and plan.get("units") else None
                self._started_at = fact.at if started_at is None else started_at
            case RunEnded() as end:
                self._end, self._interruption = end, None
                self._last_at = max(fact.at, self._started_at or 0.0)
            case RunResumed(is_restart=is_restart):
                self._resume(is_restart=is_restart)
            case RunInterrupted() as interruption:
                self._interruption = interruption
            case LossAccepted(reason=reason):
                self._lost.append(reason)
            case told if not fact.is_of_run:
                if isinstance(told, StimulusRecorded):
                    self._note_end(fact.instance, told)
                self._fold_of(fact.instance).apply(fact)
            case _:
                pass

    def _resume(self, *, is_restart: bool) -> None:
        self._end = self._interruption = None  # it goes on: a cancelled run ended, and has not ended any more
        for fold in () if is_restart else (*self._tasks.values(), *self._delegated.values()):
            fold.resume()

    def _note_end(self, instance: str, told: StimulusRecorded) -> None:
        """Note the places of a task among those that ended, and among those that completed."""
        self._ended.pop(instance, None)
        self._ended[instance] = None
        if told.is_completion:
            self._completed.append(instance)

    @property
    def _whole_plan(self) -> Plan:
        """The plan of a run with units. Raises `RecordError` if it is damaged."""
        return self.plan if self.plan.units else recorded_plan(self._header.plan or {})

    def _read_plan(self, header: PlanRecorded) -> None:
        self._header, self.plan = header, readable_plan(header)
        self._nodes = {node.key: node for node in self.plan.nodes}
        roles = {agent.key: agent.role for agent in self.plan.agents}
        self._roles = {key: role for key, role in roles.items() if key != MANAGER_KEY or not self.is_hierarchical}

    def _fold_of(self, instance: str) -> TaskFold:
        """Return the fold of an instance; work that was handed on belongs to who asked for it."""
        call = delegating_call(instance)
        folds = self._tasks if call is None else self._delegated
        fold = folds.get(instance)
        if fold is None:
            fold = folds[instance] = TaskFold(instance=instance)
            if call is not None:
                self._fold_of(call.rsplit("/", 2)[0]).adopt(fold)
        return fold

    @property
    def _reasons(self) -> Sequence[RecordedError]:
        """Why the run failed or stopped."""
        if self._interruption is not None:
            return (self._interruption.reason,)
        return () if self._end is None else self._end.errors

    @property
    def state(self) -> RunState:
        """How the run ended; without an end it was interrupted."""
        return RunState.INTERRUPTED if self._end is None else self._end.state or RunState.INTERRUPTED

    @property
    def exit_reason(self) -> ExitReason:
        """Why the run ended."""
        return ExitReason.COMPLETED if self._end is None else self._end.reason

    @property
    def tasks(self) -> Mapping[str, TaskFold]:
        """What is known of each task of the plan, by instance."""
        return self._tasks

    @property
    def delegated(self) -> Mapping[str, TaskFold]:
        """What is known of work that tasks handed on, by instance."""
        return self._delegated

    @property
    def is_hierarchical(self) -> bool:
        """Whether its only task is a manager's (S-HIER-1)."""
        return self.plan.hierarchy is not None

    @property
    def capture_mode(self) -> CaptureMode:
        """What the run captured."""
        mode = self._header.capture_mode
        return CaptureMode(mode) if mode in set(CaptureMode) else CaptureMode.OFF

    @property
    def header(self) -> PlanRecorded:
        """The run's first fact; an empty one when it is not recorded."""
        return self._header

    def trace(self) -> ExecutionTrace:
        """Return the run's trace so far.

        Raises:
            RecordError: no facts were taken, or their data is damaged.
        """
        return self._assemble({} if self._units is None else self.outputs({}))[0]

    def _assemble(
        self,
        outputs: Mapping[str, TaskOutput],
        delegated: Sequence[TaskOutput] = (),
        object_ids: Mapping[str, str] | None = None,
    ) -> tuple[ExecutionTrace, RunResults]:
        """Return the trace of the run, and what its tasks gave as far as `outputs`, by instance, and `delegated` tell."""
        state, tasks = self.state.value, self._in_order()
        traces = [(fold.instance, self.trace_of(fold, state=state)) for fold in tasks]
        ended = self._collect_ends(outputs)
        results = planned_results(
            ended,
            traces,
            [_agent_summary(each) for each in self._header.agents or ()],
            delegated=delegated,
            worker_traces=[each for fold in tasks for each in self._worker_traces(fold, state)],
            object_ids=object_ids or {},
        )
        return make_trace(self._description(), results, self._run_end(tasks, ended)), results

    def _collect_ends(self, outputs: Mapping[str, TaskOutput]) -> EndedUnits:
        if self._units is None:
            return EndedUnits(plan=self.plan, outputs=outputs)
        return self._units.collect_ends(self._whole_plan, outputs)

    def _description(self) -> RunResultHead:
        run_id, _ = self._get_beginning()
        header = self._header
        return RunResultHead(
            run_id=header.ensemble_id or run_id,
            name=name_in(header),
            workflow=header.workflow or self.plan.workflow,
            inputs={name: str(value) for name, value in (header.inputs or {}).items()},
            capture_mode=self.capture_mode,
            trace_id=(self._end and self._end.trace_id) or None,
        )

    def _run_end(self, tasks: Sequence[TaskFold], ended: EndedUnits) -> RunEnd:
        _, started = self._get_beginning()
        failed = [error for fold in tasks if (error := _error_of(fold, self._nodes.get(fold.key))) is not None]
        of_units = [each.as_trace() for each in failures_seen(ended, ())]
        places = {_identify(each): each.place for each in self._reasons if each.place}
        return RunEnd(
            state=self.state,
            exit_reason=self.exit_reason,
            started_at=utc_of(started),
            completed_at=utc_of(max(self._last_at, started)),
            errors=(
                *(
                    each.replace(place=place) if (place := places.get(_identify(each))) else each
                    for each in (*failed, *of_units)
                ),
                *self._run_errors(of_units),
            ),
            metadata={"lost": list(self._lost)} if self._lost else {},
        )

    def trace_of(self, fold: TaskFold, *, state: str) -> TaskTrace:
        """Return the trace of one task, without those of a manager's workers; `state` marks an unfinished one."""
        node = self._nodes.get(fold.key)
        trace = fold.trace(node, self.capture_mode, state=state, roles=self._roles, is_manager=self.is_hierarchical)
        return _place(trace, node)

    def failed_delegations(self, instance: str) -> tuple[TaskTrace, ...]:
        """Return what workers of a manager did that failed (S-TRC-43); of other tasks it stands in their own traces."""
        fold = self._tasks.get(instance)
        return () if fold is None else tuple(self._worker_traces(fold, RunState.FAILED.value, has_failed=True))

    def _worker_traces(self, fold: TaskFold, state: str, *, has_failed: bool = False) -> list[TaskTrace]:
        """Return the traces of a manager's workers, which stand beside its own (26, ExecutionTrace)."""
        if not self.is_hierarchical:
            return []
        return fold.worker_traces(self.capture_mode, state=state, roles=self._roles, has_failed=has_failed)

    def _violations(self) -> tuple[str, ...]:
        """Return what a manager's run failed for that failed in no task (S-HIER-50)."""
        rules = self.plan.hierarchy
        if rules is None or self.state is not RunState.FAILED:
            return ()
        if any(fold.failure is not None and fold.output is None for fold in self._tasks.values()):
            return ()
        asked = {output.agent_role for fold in self._in_order() for output in _outputs_of(fold.workers_that_gave())}
        return violations_of(rules, asked)

    def output(self, output_types: Mapping[str, OutputType], object_ids: Mapping[str, str]) -> EnsembleOutput:
        """Return the output of the run; see `fold_output`."""
        run_id, _ = self._get_beginning()
        if self._end is None or self.state not in _WITH_OUTPUT:
            msg = (
                f"Run '{run_id}' has no output: it {'has not ended' if self._end is None else f'is {self.state.value}'}"
            )
            raise IllegalStateError(msg)
        workers: list[TaskOutput] = []
        if self.is_hierarchical:
            for fold in self._in_order():
                workers += _outputs_of(fold.workers_that_gave(), has_traces=True)
        trace, results = self._assemble(self.outputs(output_types), workers, object_ids)
        return output_with(trace, results, exit_reason=self.exit_reason, run_id=run_id)

    def failure(self) -> BaseException | None:
        """Return what the failed run raised; None where the record does not say.

        What is no error of this package is a stand-in with its class name and text.

        Raises:
            RecordError: no facts were taken, or their data is damaged.
        """
        places = {instance: position for position, instance in enumerate(self._ended)}
        completed = [places[instance] for instance in dict.fromkeys(self._completed)]
        tasks = [
            FailureSeen(
                at=failed.at,
                error=error_from(failed.data.error_data),
                completed_before=sum(each < places.get(fold.instance, len(places)) for each in completed),
                node=self._nodes[fold.key],
            )
            for fold in self._in_order()
            if (failed := fold.failure) is not None and fold.output is None and fold.key in self._nodes
        ]
        ended = self._collect_ends(self.outputs({}))
        failures = failures_seen(ended, tasks)
        if not failures and not self._violations():
            return None
        delegated = [output for fold in self._in_order() for output in _outputs_of(fold.workers_that_gave())]
        error = failure_of(ended, failures, delegated)
        if isinstance(error, EnsembleError):
            error.trace = self.trace()
        return error

    def outputs(self, output_types: Mapping[str, OutputType]) -> dict[str, TaskOutput]:
        """Return the outputs of the plan's tasks by instance, in order of completion; see `fold_output`."""
        found: dict[str, TaskOutput] = {}
        for fold in self._in_order():
            output = fold.task_output(output_types.get(fold.key))
            if output is not None:
                if output.trace is not None:
                    trace = _place(output.trace, self._nodes.get(fold.key))
                    output = output.model_copy(update={"trace": trace})
                found[fold.instance] = output
        return found

    def verdicts(self) -> Sequence[PredicateAnswer]:
        """Return what the user's predicates and conditions answered, in order."""
        return () if self._units is None else self._units.verdicts()

    def _get_beginning(self) -> tuple[str, float]:
        if self._run_id is None or self._started_at is None:
            msg = "There are no facts to fold: the record is empty"
            raise RecordError(msg)
        return self._run_id, self._started_at

    def _in_order(self) -> list[TaskFold]:
        """Known tasks: completed ones in the order of completion, then failed ones, then those never finished, as they ended.

        Those of a planned map-reduce: in the order of levels (S-MR-90).
        """
        if self.plan.has_levels:
            return [fold for key in self._nodes if (fold := self._tasks.get(instance_of(key))) and fold.is_recorded]
        completed, ended = (
            {instance: position for position, instance in enumerate(dict.fromkeys(each))}
            for each in (self._completed, self._ended)
        )

        def rank(fold: TaskFold) -> tuple[int, int]:
            group = 2 if fold.is_unfinished else 0 if fold.output is not None else 1
            positions = ended if group else completed
            return group, positions.get(fold.instance, len(positions))

        return sorted((fold for fold in self._tasks.values() if fold.is_recorded), key=rank)

    def _run_errors(self, of_units: Sequence[ErrorTrace]) -> Iterable[ErrorTrace]:
        """Return what the end tells of and no task: errors of the run itself, and what interrupted it."""
        of_tasks = {_identify(f.data) for t in self._tasks.values() if (f := t.failure)}
        of_tasks.update(map(_identify, of_units))
        violation = ConstraintViolationError.__name__
        for error in self._reasons:
            if _identify(error) not in of_tasks:
                node = self._nodes.get(error.key)
                role = MANAGER_ROLE if error.error_type == violation else "" if node is None else node.agent_role
                yield ErrorTrace(
                    agent_role=error.agent_role or role,
                    task_description=error.task_description or (error.key if node is None else node.description),
                    error_type=error.error_type or "Exception",
                    message=error.message,
                    stack_trace=error.stack_trace,
                    place=error.place,
                    occurred_at=utc_of(self._last_at),
                )
        is_recorded = any(each.error_type == violation for each in self._reasons)
        if not is_recorded and (violations := self._violations()):
            yield violation_trace(violations, self._last_at)


def _identify(error: FailureRecorded | ErrorTrace | RecordedError) -> tuple[str, str]:
    """Return what tells errors of a run apart: class and message, as far as the end of a run tells it."""
    return error.error_type, error.message[:LONGEST_MESSAGE]


def _place(trace: TaskTrace, node: Node | None) -> TaskTrace:
    """Return the trace of a planned map-reduce's task with its place in the tree (S-MR-38); any other as it is."""
    return trace if node is None or node.level is None else place_trace(trace, node.node_type, node.level)


def _outputs_of(folds: Iterable[TaskFold], *, has_traces: bool = False) -> list[TaskOutput]:
    outputs = (fold.task_output() if has_traces else fold.summary() for fold in folds)
    return [output for output in outputs if output is not None]


def _error_of(fold: TaskFold, node: Node | None) -> ErrorTrace | None:
    """Return what a trace says of a failed task, by its place in the plan."""
    failure = fold.failure
    if failure is None:
        return None
    trace = failure.data.trace
    if isinstance(trace, TaskTrace):
        role, description = trace.agent_role, trace.task_description
    else:
        seen = as_mapping(trace)
        role = as_text(seen.get("agent_role"), "" if node is None else node.agent_role)
        description = as_text(seen.get("task_description"), fold.key if node is None else node.description)
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
