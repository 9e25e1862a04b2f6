"""The only interpreter of a run's facts, applied one after the other. Readers render it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, cast

from ensemble_ray.facts.effects import (
    DelegationDecided,
    MemoryRecalled,
    MemoryStored,
    ModelAnswered,
    SamplingAnswered,
    ToolIntended,
    ToolReturned,
    ValueRedacted,
    began_at,
    is_making_agent,
    read_request,
)
from ensemble_ray.facts.fact import Fact, FactData, as_mapping, as_text
from ensemble_ray.facts.runs import (
    BatchRecorded,
    ExitRecorded,
    FailureRecorded,
    GroupRecorded,
    ItemOutputRecorded,
    ItemsRecorded,
    OutputRecorded,
    PlanRecorded,
    ReviewDecided,
    ReviewRequested,
    RunEnded,
    RunResumed,
    StimulusRecorded,
    read_instant,
)
from ensemble_ray.plan.plan import MANAGER_KEY, Node, Unit
from ensemble_ray.record.batches import RecordedBatches
from ensemble_ray.record.head import RunHead
from ensemble_ray.record.history import changes
from ensemble_ray.record.history.changes import Change
from ensemble_ray.record.history.executions import ExecutionStatus, ExecutionTree, RecordedExecution
from ensemble_ray.record.identity.definition import map_key
from ensemble_ray.record.source import RecordedStimuli, ReplayedSource, read_stimulus, readable_plan, recorded_plan
from ensemble_ray.record.totals import UsageTally
from ensemble_ray.schedule.instructions import Announce, End, Instruction, Skip, Start, UntilHolds
from ensemble_ray.schedule.stimuli import Cancelled, Evaluated, Failed, Waiting
from ensemble_ray.values.delegation import spoken_role
from ensemble_ray.values.ids import RUN, delegated_instance, instance_of, node_key
from ensemble_ray.values.outputs import ExitReason, RunState

_REFLECTION = "reflect:"
#: Stimuli that the history interprets; the source interprets the others.
_READ = frozenset({"TaskFailed", "TaskCancelled", "TaskWaiting", "Evaluated"})


class RunHistory:
    """The state of one run. It stores texts of open calls, reviews and delegations only.

    Attributes:
        executions: By instance, units by their path, in the order of their first facts.
        plan: A plan without tasks if the run makes its tasks dynamically.
        started_at: Unix time, s; None if no fact is recorded.
        end: None if it has none, was resumed after it, or waits for reviews.
        totals: The usage of all executions (S-MET-38).
        work: By instance: all facts of the execution; empty without details.
        ends: Recorded stimuli about executions; empty without details.
        stimuli: All recorded stimuli of a plan with units; empty without details.
    """

    def __init__(self, facts: Iterable[Fact] = (), *, limit: int | None = None, has_details: bool = False) -> None:
        """Apply the facts, in order.

        `limit` is the number of executions to store; `left_out` counts the others. With `has_details` the history stores the
        facts of executions, reads what it can of a damaged plan, and does not follow the run's source.
        """
        self.head = RunHead()
        self.plan = readable_plan(self.head.header)
        self.started_at: float | None = None
        self.end: Fact[RunEnded] | None = None
        self.totals = UsageTally()
        self._tree = ExecutionTree(limit)
        self.executions: Mapping[str, RecordedExecution] = self._tree.found
        self._source: ReplayedSource | None = None
        self._roles: Mapping[str, str] = {}
        self._delegations: dict[str, changes.Delegation] = {}
        self._exhausted: list[RecordedExecution] = []  # the budget stopped them; they continue on resume
        self._found: list[Change] = []
        self._has_details = has_details
        self.work: dict[str, list[Fact]] = {}
        self.ends: list[Fact[StimulusRecorded]] = []
        self.stimuli = RecordedStimuli()
        self.batches = RecordedBatches()
        for fact in facts:
            self.apply(fact)

    @property
    def left_out(self) -> int:
        return len(self._tree.left_out)

    @property
    def has_units(self) -> bool:
        return bool((self.head.header.plan or {}).get("units"))

    @property
    def nodes(self) -> Mapping[str, Node]:
        return self._tree.nodes

    @property
    def units(self) -> Mapping[str, Unit]:
        return self._tree.units

    def apply(self, fact: Fact) -> Sequence[Change]:
        self._found = []
        self._tree.seq = fact.seq
        self.totals.apply(fact)
        if self._has_details:
            self._keep(fact)
        rule = self._RULES.get(type(fact.data))  # first, since most facts are of executions
        if rule is None or not self.head.run_id:
            self.head.apply(fact)
        elif self.head.last_at < fact.at:
            self.head.last_at = fact.at
        if rule is None:
            self._apply_rest(fact)
        else:
            self._apply_work(fact, rule)
        return self._found

    def _apply_rest(self, fact: Fact) -> None:
        match fact.data:
            case StimulusRecorded():
                self._apply_stimulus(cast("Fact[StimulusRecorded]", fact))
            case PlanRecorded():
                self._begin(cast("Fact[PlanRecorded]", fact))
            case RunResumed():
                self._resume(cast("Fact[RunResumed]", fact))
            case RunEnded():
                self._end(cast("Fact[RunEnded]", fact))
            case ItemsRecorded() as items:
                for index in items.places():
                    self._tree.get(instance_of(map_key(index)))
            case BatchRecorded():
                batch = cast("Fact[BatchRecorded]", fact)
                self._found.append(changes.BatchChanged(batch, self.batches.apply(batch)))
            case ValueRedacted():
                pass
            case GroupRecorded(level=level):
                self._start(self._tree.add_group(fact.instance, level), fact)
            case _:
                self._apply_work(fact, RunHistory._apply_other)

    def interrupt(self, at: float) -> None:
        """Mark open executions as interrupted: the run has no owner and no end."""
        if self.end is None:
            self._tree.close("interrupted", "pending", at)

    def role_of(self, decision: Fact[DelegationDecided]) -> str:
        found = self._roles.get(decision.data.worker or "")
        if found is not None:
            return found
        asked = read_request(decision).agent_role
        return next((role for role in self._roles.values() if spoken_role(role) == spoken_role(asked)), asked)

    def _keep(self, fact: Fact) -> None:
        instance, is_stimulus = fact.instance, isinstance(fact.data, StimulusRecorded)
        if (is_stimulus or isinstance(fact.data, RunResumed)) and self.has_units:
            self.stimuli.take((fact,))
        if instance == RUN:
            return
        kept = self.work.setdefault(instance, [])
        if not is_making_agent(fact):
            kept.append(fact)
        if is_stimulus:
            self.ends.append(cast("Fact[StimulusRecorded]", fact))

    # The run.

    def _begin(self, fact: Fact[PlanRecorded]) -> None:
        header = fact.data
        self.started_at = fact.at if header.started_at is None else header.started_at
        if self._has_details or header.is_dynamic or not header.plan:
            self.plan = readable_plan(header)
        else:
            self.plan = recorded_plan(header.plan)
            self._source = ReplayedSource(self.plan)
        is_managed = self.plan.hierarchy is not None
        agents = (agent for agent in self.plan.agents if agent.key != MANAGER_KEY or not is_managed)
        self._roles = {agent.key: agent.role for agent in agents}
        self._tree.begin(self.plan, is_dynamic=header.is_dynamic)
        if not self._has_details:
            self._tree.add_declared()
        self._found.append(changes.RunStarted(fact))

    def _resume(self, fact: Fact[RunResumed]) -> None:
        self.end = None
        for each in () if fact.data.is_restart else self._exhausted:
            if each.status == "exited":
                each.status, each.ended_at = "pending", None
                each.touch(fact.seq)
        for each in self.executions.values():
            before = each.status
            if not fact.data.is_restart:
                each.resume()
            elif before == "interrupted":  # other processes continue its work
                each.status, each.ended_at = "running", None
            if each.status != before:
                each.touch(fact.seq)
        self._found.append(changes.RunContinued(fact))
        if self._source is not None:
            self._follow(self._source.resume(fact), fact, fact.at)

    def _end(self, fact: Fact[RunEnded]) -> None:
        state = fact.data.state or RunState.INTERRUPTED
        self.end = None
        if state is not RunState.WAITING:
            self.end = fact
            begun: ExecutionStatus = "interrupted" if state is RunState.INTERRUPTED else "cancelled"
            self._tree.close(begun, "skipped", fact.at)
        self._found.append(changes.RunFinished(fact))

    # The source.

    def _apply_stimulus(self, fact: Fact[StimulusRecorded]) -> None:
        stimulus = read_stimulus(fact) if fact.data.type in _READ else None
        at = fact.data.fields.get("at")
        at = float(at) if isinstance(at, int | float) else fact.at  # the fact may be recorded later
        match stimulus:
            case Failed(instance=instance):
                execution = self._tree.get(instance)
                if not execution.has_result:
                    reason = stimulus.message or stimulus.error_type
                    self._start(execution, fact)
                    execution.end("failed", at, reason)
                    self._tree.mark(execution)
                    self._found.append(changes.ExecutionEnded(execution, "failed", fact, reason))
            case Cancelled(instance=instance):
                self._drop(instance, "cancelled", fact, at)
            case Waiting(instance=instance):
                execution = self._tree.get(instance)
                execution.status = "waiting"
                self._tree.mark(execution)
            case Evaluated(question=UntilHolds() as asked, answer=True):
                self._tree.complete(asked.unit, stimulus.at)
            case _:
                pass
        if self._source is not None:
            self._follow(self._source.apply(fact), fact, at)

    def _follow(self, wanted: Sequence[Instruction], fact: Fact, at: float) -> None:
        for each in wanted:
            match each:
                case Start(instance=instance):
                    execution = self._tree.get(instance)
                    self._start(execution, fact)
                    if not execution.has_result:
                        execution.mark_requested(at)
                        self._tree.mark(execution)
                case Skip(instance=instance, reason=reason):
                    self._drop(instance, "skipped", fact, at, reason)
                case Announce(what=what):
                    ended = self._tree.end_round(what, at)
                    if not ended.is_announced:  # a resumed source announces its rounds again
                        ended.is_announced = True
                        self._found.append(changes.RoundEnded(ended, fact, what))
                case End() if each.state is not RunState.WAITING:
                    self._tree.end_units(each, at)
                case _:
                    pass

    def _start(self, execution: RecordedExecution, fact: Fact) -> None:
        if not execution.is_announced:
            execution.is_announced = True
            self._found.append(changes.ExecutionStarted(execution, fact))

    def _drop(self, instance: str, status: ExecutionStatus, fact: Fact, at: float, reason: str | None = None) -> None:
        execution = self._tree.get(instance)
        if not execution.is_ended:
            execution.end(status, at, reason)
            self._tree.mark(execution)
            self._found.append(changes.ExecutionEnded(execution, status, fact, reason or ""))

    # Executions.

    def _apply_work(self, fact: Fact, rule: Callable[..., None]) -> None:
        instance = fact.instance
        if (
            instance == RUN
            or is_making_agent(fact)
            or (_REFLECTION in instance and node_key(instance).startswith(_REFLECTION))
        ):
            return
        execution = self._tree.get(instance)
        task = execution.task if execution.kind == "delegation" else execution
        if not task.is_announced and rule is not RunHistory._apply_item:  # such an item is no task itself
            self._start(task, fact)
        if fact.epoch != execution.epoch:
            execution.dispatch(fact.epoch)
        rule(self, execution, fact)
        self._tree.mark(execution)

    def _apply_answer(self, execution: RecordedExecution, fact: Fact[ModelAnswered]) -> None:
        answer = fact.data
        execution.begin(answer.started_at)
        execution.requested = answer.tool_calls
        self._found.append(changes.ModelReplied(execution, fact))

    def _apply_sampling(self, execution: RecordedExecution, fact: Fact[SamplingAnswered]) -> None:
        sent, received = int(fact.data.input_tokens), int(fact.data.output_tokens)
        self._found.append(changes.WorkRecorded(execution, fact, sent, received, model_calls=1))

    def _apply_memory(self, execution: RecordedExecution, fact: Fact[MemoryRecalled | MemoryStored]) -> None:
        execution.begin(fact.at)
        self._found.append(changes.WorkRecorded(execution, fact, fact.data.embedding_tokens))

    def _apply_other(self, execution: RecordedExecution, fact: Fact) -> None:
        execution.begin(fact.at)
        self._found.append(changes.WorkRecorded(execution, fact))

    def _apply_intent(self, execution: RecordedExecution, fact: Fact[ToolIntended]) -> None:
        execution.begin(fact.at)
        execution.open_call(fact.name, fact.data)
        self._found.append(changes.CallStarted(execution, fact))

    def _apply_result(self, execution: RecordedExecution, fact: Fact[ToolReturned]) -> None:
        execution.begin(fact.data.started_at)
        intent, requested = execution.close_call(fact.name), None
        if intent is None:
            number = fact.name.rpartition("/call-")[2]
            if number.isdecimal() and int(number) < len(execution.requested):
                requested = execution.requested[int(number)]
        delegation = self._delegations.pop(fact.name, None)
        self._found.append(changes.CallEnded(execution, fact, intent, requested, delegation))

    def _apply_delegation(self, execution: RecordedExecution, fact: Fact[DelegationDecided]) -> None:
        request, role, worker = read_request(fact), self.role_of(fact), None
        if fact.data.worker is not None:
            worker = self._tree.get(delegated_instance(fact.name))
            worker.label, worker.agent = request.task_description, role
            worker.mark_requested(fact.data.started_at)
            self._tree.mark(worker)
        execution.begin(began_at(fact))
        if fact.name not in self._delegations:  # a fork has copied the decision
            found = self._delegations[fact.name] = changes.Delegation(request, role, worker)
            self._found.append(changes.DelegationStarted(execution, fact, found))

    def _apply_request(self, execution: RecordedExecution, fact: Fact[ReviewRequested]) -> None:
        execution.begin(fact.at)
        execution.open_gate(fact)
        self._found.append(changes.GateOpened(execution, fact))

    def _apply_decision(self, execution: RecordedExecution, fact: Fact[ReviewDecided]) -> None:
        asked = execution.close_gate(fact.name)
        self._found.append(changes.GateClosed(execution, fact, asked))

    def _apply_output(self, execution: RecordedExecution, fact: Fact[OutputRecorded]) -> None:
        output = fact.data.read()
        execution.agent = execution.agent or output.agent_role
        if execution.started_at is None:
            execution.begin((output.completed_at or 0.0) - (output.duration_s or 0.0))
        execution.end("completed", output.completed_at or execution.started_at or 0.0)
        self._found.append(changes.ExecutionEnded(execution, "completed", fact, output=output))

    def _apply_item(self, execution: RecordedExecution, fact: Fact[ItemOutputRecorded]) -> None:
        execution.end("completed", fact.at)
        self._found.append(changes.ExecutionEnded(execution, "completed", fact))

    def _apply_failure(self, execution: RecordedExecution, fact: Fact[FailureRecorded]) -> None:
        if execution.status == "completed":
            return
        failure = fact.data
        trace = as_mapping(failure.trace)
        execution.agent = execution.agent or as_text(trace.get("agent_role"))
        if execution.started_at is None and (at := read_instant(trace.get("started_at"))) is not None:
            execution.begin(at)  # no model call of it is recorded
        error = f"{failure.error_type}: {failure.message}" if failure.message else failure.error_type
        execution.end("failed", fact.at, error)
        reason, metrics = failure.message or failure.error_type, as_mapping(trace.get("metrics"))
        self._found.append(changes.ExecutionEnded(execution, "failed", fact, reason, failed_metrics=metrics))

    def _apply_exit(self, execution: RecordedExecution, fact: Fact[ExitRecorded]) -> None:
        if execution.status != "completed":  # the gate behind a completed task may end the run
            if fact.data.reason is ExitReason.BUDGET_EXHAUSTED:
                self._exhausted.append(execution)
            execution.end("exited", fact.at)
            self._found.append(changes.ExecutionEnded(execution, "exited", fact))

    #: Facts of other kinds only show that the execution has begun.
    _RULES: ClassVar[Mapping[type[FactData], Callable[..., None]]] = {
        ModelAnswered: _apply_answer,
        SamplingAnswered: _apply_sampling,
        MemoryRecalled: _apply_memory,
        MemoryStored: _apply_memory,
        ToolIntended: _apply_intent,
        ToolReturned: _apply_result,
        DelegationDecided: _apply_delegation,
        ReviewRequested: _apply_request,
        ReviewDecided: _apply_decision,
        OutputRecorded: _apply_output,
        ItemOutputRecorded: _apply_item,
        FailureRecorded: _apply_failure,
        ExitRecorded: _apply_exit,
    }
