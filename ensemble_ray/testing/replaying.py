"""Replays a recorded run with today's code and returns the first difference (S-DUR-55).

The usual runner executes each task on recorded inputs, answers and results: no model, tool or handler is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Union

from ensemble_ray.ensemble import Ensemble
from ensemble_ray.errors import AgentExecutionError, RecordError, ValidationError
from ensemble_ray.execute.callables import LocalCallables
from ensemble_ray.execute.orders import EvaluationFailed, HistoryPart, TaskBody, TaskFailure, TaskOrder, TaskResult
from ensemble_ray.execute.runner import TaskRunner
from ensemble_ray.execute.scope import RunnerPorts, exit_of
from ensemble_ray.facts.effects import ToolReturned
from ensemble_ray.facts.runs import ExitRecorded, FailureRecorded, OutputRecorded
from ensemble_ray.llm.limits.limiter import process_limiter
from ensemble_ray.ports import Services
from ensemble_ray.process.forks import SystemClock, run_blocking, threads
from ensemble_ray.record.head import locate_errors, origin_in, read_head
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.identity.definition import compare_fields
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.resume.reading import recorded_options
from ensemble_ray.record.source import FoldedSource, RecordedStimuli, path_of_question
from ensemble_ray.record.stores import RecordedRun, StoreAddress
from ensemble_ray.record.trace import outputs_of
from ensemble_ray.record.work import RecordedWork
from ensemble_ray.recovery.resuming import plan_again, planned_form
from ensemble_ray.runs.handle import Run
from ensemble_ray.runs.launching import run_context_of
from ensemble_ray.runs.outputs import HeldOutputs
from ensemble_ray.runs.planned_tasks import make_order
from ensemble_ray.runs.unit_evaluations import LocalPredicates, list_predicates
from ensemble_ray.schedule.instructions import EdgeMatches, Start, UntilHolds
from ensemble_ray.schedule.stimuli import Completed, Evaluated
from ensemble_ray.teamfile import load_source
from ensemble_ray.testing.replay_ports import (
    Difference,
    ReplayJournal,
    UnaskedMemory,
    UnaskedModel,
    cut_to_difference,
    place_of,
    request_difference,
)
from ensemble_ray.testing.scripted import RecordingSink
from ensemble_ray.tools.cpu import LokyCpuPool
from ensemble_ray.tools.waiting import NoOpToolMetrics
from ensemble_ray.values.error_data import error_from
from ensemble_ray.values.ids import delegating_call, instance_of, is_inside_unit, node_key
from ensemble_ray.values.outputs import EnsembleOutput, ExitReason
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.trace import CaptureMode, jsonable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ensemble_ray.definition.graph import Graph
    from ensemble_ray.definition.loop import Loop
    from ensemble_ray.definition.phase import Phase
    from ensemble_ray.execute.orders import TaskStatus
    from ensemble_ray.facts.effects import ModelAnswered
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.facts.runs import PlanRecorded
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.plan.planner import Planned
    from ensemble_ray.runs.planned_tasks import PrecedingOutputs
    from ensemble_ray.schedule.unit import HistoryEntry
    from ensemble_ray.teamfile import Runnable
    from ensemble_ray.values.messages import ChatMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedQuestion:
    """A recorded evaluation of a user's predicate or condition."""

    question: UntilHolds | EdgeMatches
    answered: Evaluated
    #: history that was passed to it
    history: Sequence[HistoryEntry]


Step = Union[Start, AskedQuestion]  # noqa: UP007  a name for the union, also at run time


def steps_of(plan: Plan, facts: Sequence[Fact], outputs: PrecedingOutputs[TaskOutput]) -> Iterator[Step]:
    """Yield the steps of a run in its order; for a plan without units, the tasks in the order of the plan.

    Args:
        plan: The plan of the run.
        facts: All facts of the run.
        outputs: The recorded outputs.
    """
    if not plan.units:
        yield from (Start(instance=instance_of(node.key)) for node in plan.nodes)
        return
    source = FoldedSource(plan)
    for group in RecordedStimuli(facts).numbered_groups:
        stimuli = [stimulus for _, stimulus in group]
        for stimulus in stimuli:
            if isinstance(stimulus, Evaluated) and stimulus.question in source.questions:
                question = stimulus.question
                if isinstance(question, UntilHolds | EdgeMatches):
                    yield AskedQuestion(question=question, answered=stimulus, history=source.history_of(question))
        known = [each for each in stimuli if not isinstance(each, Completed) or each.instance in outputs]
        yield from (each for each in source.handle(known) if isinstance(each, Start))


class RepeatedPredicates:
    """Evaluates today's predicates and conditions on the recorded questions."""

    def __init__(self, units: Mapping[str, Loop | Phase | Graph], output_of: Callable[[str], TaskOutput]) -> None:
        """Collect the predicates.

        Args:
            units: The declared units, by key.
            output_of: Returns a recorded output by instance.
        """
        self._predicates = LocalPredicates(list_predicates(units))
        self._output_of = output_of
        #: number of sent parts of the history, by unit path
        self._sent: dict[str, int] = {}

    async def difference(self, asked: AskedQuestion) -> Difference | None:
        """Return how today's answer differs from the recorded one."""
        question, sent = asked.question, self._sent.get(asked.question.unit, 0)
        parts = [
            HistoryPart(
                names=entry.names,
                outputs=tuple(map(self._output_of, entry.instances)),
                is_joined=entry.is_joined,
            )
            for entry in asked.history[sent:]
        ]
        self._sent[question.unit] = sent + len(parts)
        answer = await self._predicates.holds(question, sent_count=sent, new=parts)
        recorded, current = _describe_recorded(asked.answered), _describe(answer)
        if recorded == current:
            return None
        path = path_of_question(question)
        is_loop = isinstance(question, UntilHolds)
        return Difference(
            where=f"'{path}'" if isinstance(question, UntilHolds) else f"'{path}', edge {question.edge}",
            what=f"the answer of the {'predicate' if is_loop else 'condition'}",
            recorded=recorded,
            current=current,
        )


def _describe_recorded(answered: Evaluated) -> str:
    if answered.answer is None:
        return f"raised {answered.error_type}: {answered.message}"
    return str(answered.answer).lower()


def _describe(answer: bool | EvaluationFailed | None) -> str:  # noqa: FBT001  a verdict
    if isinstance(answer, EvaluationFailed):
        return f"raised {answer.error_type}: {answer.message}"
    return str(answer).lower()


_STATUS = {OutputRecorded.KIND: "completed", FailureRecorded.KIND: "failed"}


class ReplayedWorkers:
    """Implements `Peers` for a replay."""

    def __init__(self, journal: ReplayJournal, runner: TaskRunner) -> None:
        self._journal = journal
        self._runner = runner

    async def perform(self, order: TaskOrder) -> TaskResult:
        """Replay a worker's task on its record.

        Raises:
            AgentExecutionError: a step differs or is not recorded; the difference is noted for the delegating task.
        """
        with self._journal.at(order.instance):
            result = await self._runner.run(order, is_stopped=lambda: False)
        call = delegating_call(order.instance) or order.instance
        end = self._journal.end_of(order.instance)
        found = self._journal.find_difference(order.instance)
        if found is not None:
            if self._journal.is_at_end(order.instance) and not self._journal.has_output(order.instance):
                return self._recorded_end(order, call, result, end, found)
            self._report(order, call, found)
        self._compare(order, call, result, end)
        told = self._journal.find_recorded(call, ToolReturned)
        if told is not None and not told.is_success and self._journal.has_output(order.instance):
            return _make_stopped(result, told)  # it had finished when it was stopped or its process was lost
        return result

    def stop(self, instances: Sequence[str]) -> None:
        """Ignore: a replay has no timeouts, because recorded effects are available immediately."""

    def _recorded_end(
        self, order: TaskOrder, call: str, result: TaskResult, end: Fact | None, found: Difference
    ) -> TaskResult:
        """Return the recorded end of a worker that has no output and reached the end of its record."""
        if end is not None and isinstance(end.data, ExitRecorded):
            return _make_end(result, "exited", exit_of(end.data.reason))
        if end is not None and isinstance(end.data, FailureRecorded):
            return _make_end(result, "failed", error_from(end.data.error_data))
        recorded_result = self._journal.find_recorded(call, ToolReturned)
        if recorded_result is None:  # the run died while the worker was running
            self._report(order, call, found, is_at_end=True)
        return _make_stopped(result, recorded_result)  # or its process was lost

    def _compare(self, order: TaskOrder, call: str, result: TaskResult, end: Fact | None) -> None:
        """Report a difference between the worker's result and the record."""
        if end is None:
            return
        recorded = end.data.read().raw if isinstance(end.data, OutputRecorded) else None
        current = None if result.output is None else result.output.raw
        what = "the output"
        if current is None or recorded is None:
            what, recorded = "the end", _STATUS.get(end.kind, "exited")
            current = result.status
        if recorded != current:
            old, new = cut_to_difference(recorded, current)
            self._report(order, call, Difference(where="its end", what=what, recorded=old, current=new))

    def _report(self, order: TaskOrder, call: str, found: Difference, *, is_at_end: bool = False) -> NoReturn:
        where = f"{place_of(call)} ({order.agent_role}), {found.where}"
        asking = call.rsplit("/", 2)[0]
        self._journal.report(replace(found, where=where), instance=asking, is_at_end=is_at_end)


def _make_stopped(result: TaskResult, told: ToolReturned) -> TaskResult:
    return replace(_make_end(result, "failed", AgentExecutionError(told.text.removeprefix("Error: "))), output=None)


def _make_end(result: TaskResult, status: TaskStatus, error: BaseException) -> TaskResult:
    return replace(result, status=status, failure=TaskFailure(error=error, trace=result.trace))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The result of a replay; `str()` returns a readable report."""

    run_id: str
    #: the first difference in the order of the plan, or None
    difference: Difference | None
    #: number of replayed tasks
    tasks: int = 0
    #: number of used model answers and tool results of the record
    effects: int = 0

    @property
    def is_same(self) -> bool:
        """Whether today's code behaves as recorded."""
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is not None:
            return f"Run '{self.run_id}' differs from today's code\n{self.difference}"
        return f"Run '{self.run_id}' is what today's code does: {self.tasks} tasks, {self.effects} recorded answers and results"


def replay(
    run: str | Run | EnsembleOutput,
    ensemble: Runnable | None = None,
    *,
    home: str | Path | None = None,
    store: str | None = None,
) -> Replay:
    """Replay a run on its record and compare it with today's code.

    Unrecorded steps, such as the rest of an interrupted task, are not compared. The replay calls guardrails, delegation
    policies, predicates of loops and conditions of graphs, because it checks them, too. Workers are replayed on their
    own records.

    Args:
        run: The run: its id, a prefix of the id, `latest`, its handle or its output.
        ensemble: Today's definition; None: loaded from the location in the run's record.
        home: Directory of the records; default: `ENSEMBLE_RAY_HOME` or the user's state directory.
        store: URL of a database that stores them instead; default: `ENSEMBLE_RAY_STORE`.

    Raises:
        ValidationError: the run does not exist, or its definition is unknown here.
        RecordError: its record is damaged or empty.
    """
    run_id = run if isinstance(run, str) else run.id if isinstance(run, Run) else run.run_id
    if not run_id:
        raise ValidationError("This output was made by hand and has no record to replay")
    return run_blocking(_replay(run_id, ensemble, StoreAddress.of(home, store)))


async def _replay(name: str, ensemble: Runnable | None, address: StoreAddress) -> Replay:
    store = store_at(address)
    found = await store.find(name)
    if (await read_head(store, found.run_id)).is_dynamic:
        raise ValidationError(
            f"Run '{found.run_id}' was a map-reduce whose tasks are made while it runs: there is no plan to replay. A resume "
            "with today's definition says whether it differs"
        )
    facts = await store.facts(found.run_id)
    with locate_errors(found.location):
        recorded = RunHistory(facts, has_details=True)
    header = recorded.head.header
    if header.is_empty:
        raise RecordError(
            f"Run '{found.run_id}' recorded no plan in {found.location}: there is nothing to replay", found.location
        )
    loaded = await threads.run(_definition, found, header) if ensemble is None else ensemble
    definition = planned_form(loaded)
    options = recorded_options(header)
    planned = await plan_again(definition.with_options(options), header.inputs or {}, facts, is_replay=True)
    changed = _plan_difference(header, planned)
    if changed is not None:
        return Replay(run_id=found.run_id, difference=changed)
    repetition = _Repetition(recorded, planned, facts, definition.with_options(options))
    difference = await repetition.difference()
    return Replay(run_id=found.run_id, difference=difference, tasks=repetition.tasks, effects=repetition.journal.used)


def _definition(found: RecordedRun, header: PlanRecorded) -> Runnable:
    source = origin_in(header)
    if not source.place:
        raise ValidationError(
            f"Run '{found.run_id}' was begun by a program, so its definition is not known here: "
            f"call replay('{found.run_id}', ensemble)"
        )
    return load_source(source, needs_keys=False)


def _plan_difference(header: PlanRecorded, planned: Planned) -> Difference | None:
    found = compare_fields(header.plan or {}, planned.plan.to_dict())
    if not found:
        return None
    first = found[0]
    return Difference(where="the plan", what=first.path, recorded=first.recorded, current=first.current)


class _Repetition:
    """Replays all tasks of a run sequentially, each on its record."""

    def __init__(self, recorded: RunHistory, planned: Planned, facts: Sequence[Fact], definition: Ensemble) -> None:
        self._recorded = recorded
        self._facts = facts
        self._planned = planned
        self._outputs: HeldOutputs[TaskOutput] = HeldOutputs()
        types = {key: each for key, task in planned.tasks.items() if (each := task.output_type) is not None}
        for instance, output in outputs_of(recorded, types).items():
            self._outputs.put(instance, output)
        self._nodes = {node.key: node for node in planned.plan.nodes}
        self.journal = ReplayJournal(facts)
        self.tasks = 0
        self._policies = definition.delegation_policies
        context = run_context_of(
            definition,
            planned,
            run_id=facts[0].run,
            interest=frozenset(),
            capture_mode=CaptureMode.OFF,
            log_fields={},
        )
        unlimited = replace(context.delegation, timeout_s=None)
        self._context = replace(context, on_unknown="fail", retry=None, is_verbose=False, delegation=unlimited)

    async def difference(self) -> Difference | None:
        """Return the first difference in the order of the plan; with units, in the order of the run."""
        cpu = LokyCpuPool()
        ports = RunnerPorts(
            clock=SystemClock(),
            journal=self.journal,
            events=RecordingSink(),
            callables=LocalCallables(self._planned.tasks, self._policies),
            services=Services(limiter=process_limiter(), cpu=cpu),
            tool_metrics=NoOpToolMetrics(),
            compare=self._compare,
            memory=UnaskedMemory(self.journal),
        )
        agents = {key: agent.rewritten(llm=UnaskedModel(self.journal)) for key, agent in self._planned.agents.items()}
        runner = TaskRunner(self._context, ports, agents)
        runner.peers = ReplayedWorkers(self.journal, runner)
        predicates = RepeatedPredicates(self._planned.units, self._outputs.get)
        try:
            for step in steps_of(self._planned.plan, self._facts, self._outputs):
                if isinstance(step, AskedQuestion):
                    found = await predicates.difference(step)
                elif step.instance in self._recorded.work:
                    self.tasks += 1
                    found = await self._of_task(runner, step)
                else:
                    continue
                if found is not None:
                    return found
        finally:
            cpu.close()
        return None

    async def _of_task(self, runner: TaskRunner, start: Start) -> Difference | None:
        order = self._order(start)
        with self.journal.at(order.instance):
            result = await runner.run(order, is_stopped=lambda: False)
        where = f"task '{order.instance if is_inside_unit(order.instance) else order.key}'"
        # The task requested more than its record contains, or it waits at its gate as before.
        has_stopped = self.journal.is_at_end(order.instance) or result.status == "waiting"
        if has_stopped and not self.journal.has_output(order.instance):
            return None
        found = self.journal.find_difference(order.instance)
        return self._ending(where, result) if found is None else replace(found, where=f"{where}, {found.where}")

    def _ending(self, where: str, result: TaskResult) -> Difference | None:
        """Return the difference between the task's result and the record."""
        instance = result.instance
        if instance not in self._outputs:
            end = self.journal.end_of(instance)
            if end is None or (isinstance(end.data, ExitRecorded) and end.data.reason is ExitReason.BUDGET_EXHAUSTED):
                return None  # it was interrupted
            if not isinstance(end.data, FailureRecorded):
                return _first(where, ("the end", "exited", result.status))
            errors = ("the error", _describe_error(error_from(end.data.error_data)), _describe_error(result.error))
            return _first(where, ("the end", "failed", result.status), errors)
        recorded, current_output = self._outputs.get(instance), result.output
        if current_output is None:
            ending = f"{result.status}, {_describe_error(result.error)}"
            return Difference(where=where, what="the end", recorded="completed", current=ending)
        return _first(
            where,
            ("the output", recorded.raw, current_output.raw),
            ("the parsed output", jsonable(recorded.parsed_output), jsonable(current_output.parsed_output)),
        )

    def _order(self, start: Start) -> TaskOrder:
        task = self._planned.tasks[node_key(start.instance)]
        order = make_order(
            start,
            self._nodes,
            TaskBody(task, len(task.input_guardrails), len(task.output_guardrails)),
            self._outputs,
            run_id=self._context.run_id,
            epoch=1,  # so that the runner reads the record
            is_sequential=self._planned.plan.workflow == "sequential",
        )
        return replace(order, is_streaming=False)

    def _compare(self, name: str, fact: Fact[ModelAnswered], digest: str, messages: Sequence[ChatMessage]) -> None:
        """Check that the request of a reused answer is the recorded one."""
        if fact.data.request_digest != digest:
            instance = name.rsplit("/", 2)[0]
            trace = RecordedWork(self._recorded, instance).recorded_trace()
            self.journal.report(request_difference(self.journal, name, messages, trace), instance=instance)


def _describe_error(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _first(where: str, *pairs: tuple[str, object, object]) -> Difference | None:
    """Return the first pair with different values."""
    for what, old, new in pairs:
        if old != new:
            recorded, current = cut_to_difference(old, new)
            return Difference(where=where, what=what, recorded=recorded, current=current)
    return None
