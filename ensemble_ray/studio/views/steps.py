"""The steps of a run, folded from its facts one by one. Package: studio. Pure.

In: facts in order. Out: a row for each execution of anything; those that changed behind a position. Rules:

1. A task of the plan is there before it runs, and runs from when the run's source wanted it; a source that is told again what it was
   told wants the same again.
2. What runs inside a loop, a phase or a graph has the execution as its parent, and that has the unit.
3. Work that was handed on has who asked as its parent.
4. What had begun when a run was interrupted is `interrupted`, until the run goes on.
5. Of very many steps the first ones are told; `left_out` says how many are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from ensemble_ray.facts.effects import DelegationDecided, is_making_agent, read_request
from ensemble_ray.facts.ends import ExitRecorded, FailureRecorded, OutputRecorded
from ensemble_ray.facts.items import AgentsJoined, GroupRecorded, ItemOutputRecorded, ItemsRecorded
from ensemble_ray.facts.runs import LossAccepted, PlanRecorded, RunEnded, RunResumed, StimulusRecorded
from ensemble_ray.record.delegation_fold import worker_role
from ensemble_ray.record.identity.map_reduce import map_key
from ensemble_ray.record.source import ReplayedSource
from ensemble_ray.schedule.instructions import Announce, End, IterationEnded, Skip, Start, StepEnded
from ensemble_ray.schedule.stimuli import Cancelled, Evaluated, Failed, Waiting, decode_stimulus
from ensemble_ray.studio.views.step_effects import apply_effect
from ensemble_ray.studio.views.step_ends import apply_failure, apply_output
from ensemble_ray.studio.views.step_names import StepNames
from ensemble_ray.studio.views.step_state import StepState, title_of
from ensemble_ray.studio.views.unit_steps import UnitSteps
from ensemble_ray.values.ids import delegated_instance, delegating_call, instance_of, node_key
from ensemble_ray.values.outputs import RunState

if TYPE_CHECKING:
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.schedule.instructions import Instruction
    from ensemble_ray.studio.schemas.steps import StepSchema, StepStatus

__all__ = ["MOST_STEPS", "StepsView"]

#: Steps that are told of one run.
MOST_STEPS = 50_000
_REFLECTION = "reflect:"


class StepsView:
    """The steps of one run.

    Attributes:
        names: What they are called.
        states: What is known of each, in the order in which they became known.
    """

    def __init__(self) -> None:
        self.names = StepNames({}, is_dynamic=False)
        self.states: dict[str, StepState] = {}
        #: hashes of the names of those that are not told
        self._left_out: set[int] = set()
        self._source: ReplayedSource | None = None
        self._units = UnitSteps(self)
        self._seq = 0
        self._is_over = False

    # What is asked of it.

    def rows(self, *, after: int = 0) -> list[StepSchema]:
        """Return the rows of all steps that changed behind a position."""
        return [state.row() for state in self.states.values() if state.changed > after]

    @property
    def left_out(self) -> int:
        """How many steps are not told."""
        return len(self._left_out)

    def counts(self) -> dict[str, int]:
        """Return how many steps there are of each status, units and their executions not counted."""
        return dict(Counter(state.status for state in self.states.values() if not self.is_unit(state)))

    def is_unit(self, state: StepState) -> bool:
        """Whether it is a loop, a phase, a graph or an execution of one, and does nothing itself."""
        return state.kind in {"loop", "iteration", "phase", "attempt", "graph", "state"}

    def first_failed(self) -> StepState | None:
        """Return the step that failed first; None: none did."""
        failed = (each for each in self.states.values() if each.status == "failed" and not self.is_unit(each))
        return min(failed, key=lambda each: each.ended_at or 0.0, default=None)

    # Facts.

    def apply(self, fact: Fact) -> None:
        """Take the next fact.

        Raises:
            RecordError: it is damaged.
        """
        self._seq = fact.seq
        match fact.data:
            case PlanRecorded() as header:
                self._begin(header, fact.at)
            case RunResumed():
                self._resume(cast("Fact[RunResumed]", fact))
            case RunEnded(state=state):
                self._end(state or RunState.INTERRUPTED, fact.at)
            case StimulusRecorded():
                self._tell(cast("Fact[StimulusRecorded]", fact))
            case ItemsRecorded() as items:
                for index in items.places():
                    self.state_of(instance_of(map_key(index)))
            case GroupRecorded(level=level):
                self.names.levels[node_key(fact.instance)] = level
                self.state_of(fact.instance)
            case AgentsJoined() | LossAccepted():
                pass
            case _ if fact.is_of_run or is_making_agent(fact) or node_key(fact.instance).startswith(_REFLECTION):
                pass
            case _:
                self._of_step(fact)

    def interrupt(self, at: float) -> None:
        """Take notice that nobody works on the run any more, though it has no end."""
        if not self._is_over:
            self._close("interrupted", at, pending="pending")

    def _begin(self, header: PlanRecorded, at: float) -> None:
        plan = header.plan or {}
        self.names = StepNames(plan, is_dynamic=header.is_dynamic)
        if not header.is_dynamic and plan:
            self._source = ReplayedSource(plan)
        for state in self.names.list_declared():
            self._add(state)
        del at

    def _resume(self, fact: Fact[RunResumed]) -> None:
        self._is_over = False
        for state in self.states.values():
            before = state.status
            if not fact.data.is_restart:
                state.go_on()
            elif before == "interrupted":  # its work goes on where it was, in other processes
                state.status, state.ended_at = "running", None
            if state.status != before:
                state.touch(self._seq)
        if self._source is not None:
            self._want(self._source.resume(fact), fact.at)

    def _tell(self, fact: Fact[StimulusRecorded]) -> None:
        told = decode_stimulus(fact) if fact.data.type in _TOLD else None
        said = fact.data.fields.get("at")
        at = float(said) if isinstance(said, int | float) else fact.at  # it may be written down later
        match told:
            case Failed(instance=instance) if not (state := self.state_of(instance)).is_ended:
                state.end("failed", at, told.message or told.error_type)
                self.mark_changed(state)
            case Cancelled(instance=instance) if not (state := self.state_of(instance)).is_ended:
                state.end("cancelled", at)
                self.mark_changed(state)
            case Waiting(instance=instance):
                state = self.state_of(instance)
                state.status = "waiting"
                self.mark_changed(state)
            case Evaluated() as evaluated:
                self._units.evaluate(evaluated)
            case _:
                pass
        if self._source is not None:
            self._want(self._source.apply(fact), at)

    def _want(self, wanted: Sequence[Instruction], at: float) -> None:
        """Take what the run's source wanted."""
        for each in wanted:
            match each:
                case Start(instance=instance):
                    state = self.state_of(instance)
                    if state.status not in {"completed", "failed", "exited"}:
                        state.want(at)
                        self.mark_changed(state)
                case Skip(instance=instance):
                    state = self.state_of(instance)
                    if not state.is_ended:
                        state.end("skipped", at, each.reason)
                        self.mark_changed(state)
                case Announce(what=IterationEnded() | StepEnded() as what):
                    self._units.announce(what, at)
                case End() if each.state is not RunState.WAITING:
                    self._units.end(each, at)
                case _:
                    pass

    def _of_step(self, fact: Fact) -> None:
        state = self.state_of(fact.instance)
        state.note_epoch(fact.epoch)
        match fact.data:
            case OutputRecorded() as output:
                apply_output(state, output)
            case ItemOutputRecorded():
                state.end("completed", fact.at)
            case FailureRecorded() as failure:
                apply_failure(state, failure, fact.at)
            case ExitRecorded():
                if state.status != "completed":  # the gate behind a completed task may end the run
                    state.end("exited", fact.at)
            case DelegationDecided():
                self._delegate(cast("Fact[DelegationDecided]", fact))
                state.begin(fact.data.started_at)
            case _:
                apply_effect(state, fact)
        self.mark_changed(state)

    def _delegate(self, fact: Fact[DelegationDecided]) -> None:
        if fact.data.worker is None:
            return
        state = self.state_of(delegated_instance(fact.name))
        state.kind = "delegation"
        state.title = title_of(read_request(fact).task_description) or state.title
        state.agent = worker_role(fact, self.names.roles)
        state.want(fact.data.started_at)
        self.mark_changed(state)

    def _end(self, state: RunState, at: float) -> None:
        if state is RunState.WAITING:
            return
        self._is_over = True
        self._close("interrupted" if state is RunState.INTERRUPTED else "cancelled", at, pending="skipped")

    def _close(self, begun: StepStatus, at: float, *, pending: StepStatus) -> None:
        for state in self.states.values():
            if state.is_ended or self.is_unit(state):
                continue
            is_begun = state.status in {"running", "waiting"}
            if is_begun:
                state.end(begun, max(at, state.started_at or at))
            elif state.status != pending:
                state.end(pending, at)
            else:
                continue
            state.touch(self._seq)
        self._units.close(at, begun)

    # Steps.

    def state_of(self, step: str) -> StepState:
        """Return the step of a name; it is made where it is new, and all that it is part of."""
        found = self.states.get(step)
        if found is not None:
            return found
        parent = self.names.parent_of(step)
        if parent is not None:
            self.state_of(parent)
        made = self.names.of(step)
        if delegating_call(step) is not None:
            made.kind = "delegation"
        self._add(made)
        if parent is not None and (name := self.names.state_name(step)):
            self.states.get(parent, made).title = name
        return made

    def mark_changed(self, state: StepState) -> None:
        """Take notice that a step changed, and all that it is part of."""
        state.touch(self._seq)
        self._units.child_changed(state)

    def _add(self, state: StepState) -> None:
        if len(self.states) >= MOST_STEPS:
            self._left_out.add(hash(state.id))
            return
        self.states[state.id] = state
        state.touch(max(1, self._seq))


_TOLD: Mapping[str, None] = dict.fromkeys(("TaskFailed", "TaskCancelled", "TaskWaiting", "Evaluated"))
