"""A graph: after each step, the first edge that matches names the next state. Package: schedule.

Rules:
1. `BRANCH_TRANSITIONS` is the machine of one branch; a graph without forks has one branch (`branches`).
2. One step runs the member of one state. What leaves a state is tried in declared order; an edge with a condition is asked,
   an edge without one, a fork and a join match always (S-GRAPH-42, S-GRAPH-90).
3. Steps are routed one after the other, in the order in which they completed, so that what a condition is asked about is
   the newest of the history (S-GRAPH-92). A step that is routed is announced before anything follows from it.
4. Steps are numbered in the order of their starts, over all branches. No step starts beyond `max_steps`; those that run end,
   and are routed (S-GRAPH-47, S-GRAPH-93).
5. The end state ends its branch; the graph ends when no branch runs or waits (S-GRAPH-94).
6. A failure in one branch cancels the others. An early exit lets running steps end (S-GRAPH-100, S-GRAPH-101).
7. Nothing of earlier steps is copied; a step costs the same however many there were.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal, assert_never

from ensemble_ray.plan.units import EdgeEntry, ForkEntry, GraphUnit, JoinEntry
from ensemble_ray.schedule.branches import BranchEvent, BranchState, BranchTree, CompletedStep, GraphBranch
from ensemble_ray.schedule.graph_steps import UnroutedStep, list_questions, shown_of
from ensemble_ray.schedule.instructions import (
    Announce,
    Cancel,
    ContextPart,
    EdgeMatches,
    End,
    Evaluate,
    Instruction,
    Start,
    StepEnded,
    TaskChanges,
)
from ensemble_ray.schedule.machine import end_of
from ensemble_ray.schedule.results import GraphResult, UnitFailure
from ensemble_ray.schedule.scopes import Parts, body_of, scope_of
from ensemble_ray.schedule.stimuli import (
    Begun,
    Cancelled,
    CancelRequested,
    Completed,
    Decided,
    Evaluated,
    Exited,
    Failed,
)
from ensemble_ray.schedule.unit import Execution, HistoryEntry, StopRequested, UnitStimulus
from ensemble_ray.values.ids import instance_of, key_of, node_key
from ensemble_ray.values.outputs import ExitReason

__all__ = ["END_STATE", "GraphMachine"]

#: The state that ends a branch.
END_STATE = "__END__"


class GraphMachine:
    """The scheduling state of one execution of a graph."""

    def __init__(self, unit: GraphUnit, execution: Execution) -> None:
        """Make one that has not begun."""
        self._unit = unit
        self._execution = execution
        self._scope = scope_of(execution.instance)
        #: without an occurrence
        self._path = key_of(execution.instance)
        self._members = {state.name: state.member for state in unit.states}
        #: what leaves each state, by position among the edges, in declared order
        self._leaving: dict[str, list[int]] = {state.name: [] for state in unit.states}
        for position, entry in enumerate(unit.edges):
            for state in dict.fromkeys(entry.from_states if isinstance(entry, JoinEntry) else (entry.from_state,)):
                self._leaving[state].append(position)
        self._tree = BranchTree(unit.edges)
        self._has_forks = any(isinstance(entry, ForkEntry) for entry in unit.edges)
        self._running: dict[str, GraphBranch] = {}
        #: whose steps completed and are not routed, in order; the first one's edges are tried
        self._to_route: deque[UnroutedStep] = deque()
        #: the edge of the first one that is asked
        self._asked: EdgeMatches | None = None
        #: how many branches wait at joins
        self._joining = 0
        self._steps = 0
        self._visits: Counter[str] = Counter()
        #: the last visit of each state that completed: what ran, and its output
        self._last: dict[str, tuple[str, ContextPart]] = {}
        self._history: list[HistoryEntry] = []
        self._is_capped = False
        self._has_failed = False
        self._failure: UnitFailure | None = None
        self._exit: ExitReason | None = None
        self._reason: Literal["terminal", "max_steps"] | None = None
        self._is_cancelled = False
        self._is_ended = False

    # What may be asked.

    @property
    def is_stopping(self) -> bool:
        """Whether it starts nothing more, though it has not ended."""
        return self._has_failed or self._is_cancelled or self._exit is not None

    @property
    def history(self) -> Sequence[HistoryEntry]:
        """Return the steps whose routing began, oldest first."""
        return self._history

    def results(self) -> tuple[GraphResult, ...]:
        """Return its steps that have completed."""
        return (GraphResult(unit=self._path, steps=tuple(self._tree.steps()), termination_reason=self._reason),)

    def projection(self) -> Parts:
        """Return the output of its last step."""
        last = self._history[-1]
        return (ContextPart(last.instances, last.is_joined),)

    # The door.

    def handle(self, *stimuli: UnitStimulus) -> list[Instruction]:
        """Take facts, give what is to be done now, in order."""
        done: list[Instruction] = []
        for stimulus in stimuli:
            if not self._is_ended:
                self._handle_one(stimulus, done)
                self._end_if_over(stimulus.at, done)
        return done

    def _handle_one(self, stimulus: UnitStimulus, done: list[Instruction]) -> None:
        match stimulus:
            case Begun():
                self._go_to(self._tree.first, self._unit.start, stimulus.at, done)
            case Completed() | Failed() | Exited() | Cancelled():
                if (branch := self._running.pop(stimulus.instance, None)) is not None:
                    self._step_ended(branch, stimulus, done)
            case Evaluated():
                if self._asked is not None and stimulus.question == self._asked:
                    self._on_answer(self._asked, stimulus, done)
            case CancelRequested():
                if not self._is_cancelled:
                    self._is_cancelled = True
                    self._drop_unrouted()
                    running = (name for name, each in self._running.items() if each.state is BranchState.RUNNING)
                    done.extend(Cancel(instance=instance) for instance in running)
            case StopRequested():
                self._exit = self._exit or stimulus.exit_reason
                self._is_cancelled = self._is_cancelled or stimulus.exit_reason is None
                self._drop_unrouted()
            case Decided():
                raise TypeError(f"nothing waits for {stimulus}")
            case _:
                assert_never(stimulus)

    # Steps.

    def _go_to(self, branch: GraphBranch, state: str, at: float, done: list[Instruction]) -> None:
        """Let a branch start its next step, or end."""
        branch.at = state
        if state == END_STATE:
            branch.move(BranchEvent.REACHED_END)
        elif self._steps >= self._unit.max_steps:
            branch.move(BranchEvent.REACHED_CAP)
            self._is_capped = True
        else:
            branch.move(BranchEvent.STEP_STARTS)
            changes = self._changes_of(state)
            instance = instance_of(self._members[state], parent=self._step_path(self._steps))
            self._steps += 1
            branch.step, branch.started_at = self._steps, at
            self._running[instance] = branch
            asks_after = None
            if not self._has_forks:
                leaving = self._leaving[state]
                asks_after = list_questions(
                    self._unit, leaving, path=self._path, step=self._steps, state=state, instance=instance
                )
            done.append(Start(instance=instance, changes=changes, asks_after=asks_after))

    def _changes_of(self, state: str) -> TaskChanges | None:
        """Return what a visit has beside the task; count the visit (S-GRAPH-60)."""
        self._visits[state] += 1
        visit = self._visits[state]
        unit = self._unit
        if state not in self._last or not unit.inject_feedback_on_revisit or state in unit.no_feedback_states:
            return None
        feedback = (
            f"Graph state '{state}' visit #{visit}. "
            "Prior visit's output is provided above; refine your response based on it."
        )
        return TaskChanges(attempt=visit - 1, feedback=feedback, prior=self._last[state][0])

    def _step_path(self, number: int) -> str:
        return instance_of(self._unit.key, occurrence=number, parent=self._scope)

    def _step_ended(
        self, branch: GraphBranch, end: Completed | Failed | Exited | Cancelled, done: list[Instruction]
    ) -> None:
        if isinstance(end, Exited):
            self._exit = self._exit or end.reason
            self._drop_unrouted()
        if branch.state is not BranchState.RUNNING:  # a join needs it no more, or another branch failed
            self._execution.scopes.drop(scope_of(end.instance))  # it may have completed all the same
            return
        match end:
            case Completed():
                branch.move(BranchEvent.STEP_COMPLETED)
                self._keep_output(branch, end)
                self._to_route.append(UnroutedStep(branch, end.at - branch.started_at, self._last[branch.at][1]))
                if self.is_stopping:
                    self._drop_unrouted()
                else:
                    self._route_next(end.at, done)
            case Failed():
                branch.move(BranchEvent.STEP_FAILED)
                self._fail(done)
            case Exited() | Cancelled():
                branch.move(BranchEvent.STEP_STOPPED)
                if isinstance(end, Exited) and end.has_output:
                    self._keep_output(branch, end)
            case _:
                assert_never(end)

    def _keep_output(self, branch: GraphBranch, end: Completed | Exited) -> None:
        """Let the output of a step be the one of its state, and the step a part of the history."""
        scopes, key = self._execution.scopes, node_key(end.instance)
        parts = scopes.own(scope_of(end.instance)).get(key) or (ContextPart((end.instance,)),)
        scopes.put(self._path, key, parts)
        for inner, given in scopes.own(scope_of(end.instance)).items():
            if inner.startswith(body_of(key, "")):
                scopes.put(self._path, inner, given)
        if branch.at in self._last:  # nothing looks into a visit before the last one
            scopes.drop(scope_of(self._last[branch.at][0]))
        self._last[branch.at] = (end.instance, shown_of(parts[-1]))
        is_unit = key in self._execution.units
        branch.trail.append(CompletedStep(branch.at, key_of(end.instance) if is_unit else end.instance))

    # Routing.

    def _route_next(self, at: float, done: list[Instruction]) -> None:
        """Route steps, oldest first, until an edge has to be asked or none is left."""
        while self._to_route and self._asked is None and not self.is_stopping:
            step = self._to_route[0]
            self._history.append(step.entry)
            self._try_edges(step.branch, at, 0, done)

    def _try_edges(self, branch: GraphBranch, at: float, first: int, done: list[Instruction]) -> None:
        """Try what leaves a branch's state from that position on; ask, or let the branch go on."""
        for position in self._leaving[branch.at]:
            entry = self._unit.edges[position]
            if position < first:
                continue
            if isinstance(entry, EdgeEntry) and entry.has_condition:
                self._asked = EdgeMatches(unit=self._path, step=branch.step, edge=position)
                done.append(Evaluate(question=self._asked))
                return
            self._follow(branch, position, at, done)
            return
        branch.move(BranchEvent.NO_EDGE)
        self._fail(done, self._failure_of(branch, at, "no_edge"))

    def _on_answer(self, asked: EdgeMatches, answered: Evaluated, done: list[Instruction]) -> None:
        self._asked = None
        branch = self._to_route[0].branch
        if answered.answer is None:
            branch.move(BranchEvent.CONDITION_RAISED)
            failure = self._failure_of(branch, answered.at, "evaluation", answered.error_type, answered.message)
            self._fail(done, failure)
        elif answered.answer:
            self._follow(branch, asked.edge, answered.at, done)
        else:
            self._try_edges(branch, answered.at, asked.edge + 1, done)
        self._route_next(answered.at, done)

    def _follow(self, branch: GraphBranch, position: int, at: float, done: list[Instruction]) -> None:
        """Let a routed branch go where an edge, a fork or a join leads."""
        routed = self._to_route.popleft()
        entry = self._unit.edges[position]
        next_state = ", ".join(entry.to_states) if isinstance(entry, ForkEntry) else entry.to_state
        instance = branch.route(next_state)
        ended = StepEnded(
            unit=self._path,
            step=branch.step,
            state=branch.at,
            instance=instance,
            output=routed.output,
            next_state=next_state,
            duration_s=routed.duration_s,
        )
        done.append(Announce(what=ended))
        match entry:
            case EdgeEntry():
                self._go_to(branch, entry.to_state, at, done)
            case ForkEntry():
                for each, state in zip(self._tree.divide(branch, len(entry.to_states)), entry.to_states, strict=True):
                    self._go_to(each, state, at, done)
            case JoinEntry():
                self._tree.arrive(branch, position)
                self._joining += 1
            case _:
                assert_never(entry)
        self._go_on_with_joins(at, done)

    def _go_on_with_joins(self, at: float, done: list[Instruction]) -> None:
        """Let joins go on that are complete now."""
        while self._joining and (joined := self._tree.next_join()) is not None:
            dropped = {id(branch) for branch in joined.dropped}
            done.extend(Cancel(instance=name) for name, branch in self._running.items() if id(branch) in dropped)
            # What is dropped before it was routed is a part of the history all the same (S-GRAPH-97).
            self._history += [step.entry for step in self._to_route if id(step.branch) in dropped]
            self._to_route = deque(step for step in self._to_route if id(step.branch) not in dropped)
            self._joining = sum(branch.state is BranchState.JOINING for branch in self._tree.leaves())
            self._go_to(joined.branch, joined.state, at, done)

    # Failing and ending.

    def _failure_of(
        self,
        branch: GraphBranch,
        at: float,
        reason: Literal["no_edge", "evaluation"],
        error_type: str = "",
        message: str = "",
    ) -> UnitFailure:
        return UnitFailure(
            unit=self._path,
            at=at,
            reason=reason,
            completed_before=0,  # the source of the run counts
            step=branch.step,
            message=message,
            error_type=error_type,
        )

    def _fail(self, done: list[Instruction], failure: UnitFailure | None = None) -> None:
        """Cancel what other branches run; the first failure counts. Of a graph that ends anyway, all is cancelled or ends."""
        is_ending, self._has_failed = self.is_stopping, True
        if is_ending:
            return
        self._failure = failure
        self._drop_unrouted()
        for instance, branch in self._running.items():
            if branch.state is BranchState.RUNNING:
                branch.move(BranchEvent.DROPPED)
                done.append(Cancel(instance=instance))

    def _drop_unrouted(self) -> None:
        """Let branches go no further that run no step."""
        self._to_route.clear()
        self._asked = None
        self._joining = 0
        for branch in self._tree.leaves():
            if branch.state is not BranchState.RUNNING:
                branch.move(BranchEvent.DROPPED)

    def _end_if_over(self, at: float, done: list[Instruction]) -> None:
        if self._running or self._to_route or self._joining:
            return
        self._is_ended = True
        if not self.is_stopping:
            self._reason = "max_steps" if self._is_capped else "terminal"
        if self._reason == "max_steps" and self._unit.on_max_steps == "throw":
            self._has_failed = True
            self._failure = UnitFailure(unit=self._path, at=at, reason="cap", completed_before=0)
        usual = end_of(is_cancelled=self._is_cancelled, exit_reason=self._exit, has_failed=self._has_failed)
        failures = () if self._failure is None else (self._failure,)
        done.append(End(state=usual.state, exit_reason=usual.exit_reason, units=self.results(), unit_failures=failures))

    # Invariants, for tests and for hunting defects.

    def validate(self) -> None:
        """Check the invariants that hold between any two stimuli.

        Raises:
            AssertionError: one does not hold.
        """
        leaves = self._tree.leaves()
        in_state = {state: {id(each) for each in leaves if each.state is state} for state in BranchState}
        running = {id(each) for each in self._running.values() if each.state is BranchState.RUNNING}
        assert running == in_state[BranchState.RUNNING], "a step of each running branch"  # noqa: S101  invariants
        routing = {id(step.branch) for step in self._to_route}
        assert routing == in_state[BranchState.ROUTING], "routed in turn"  # noqa: S101
        assert len(in_state[BranchState.JOINING]) == self._joining, "count of arrivals"  # noqa: S101
        assert bool(self._to_route) == (self._asked is not None), "the oldest is asked"  # noqa: S101
        assert self._steps <= self._unit.max_steps, "cap"  # noqa: S101
        is_over = not (self._running or self._to_route or self._joining)
        assert self._is_ended == (is_over and bool(self._steps)), "ended when nothing runs or waits"  # noqa: S101
