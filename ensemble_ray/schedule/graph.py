"""The machine of a graph."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, assert_never

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.plan.plan import EdgeEntry, ForkEntry, GraphEntry, GraphUnit, JoinEntry
from ensemble_ray.schedule.instructions import (
    Announce,
    Cancel,
    ContextPart,
    EdgeMatches,
    Evaluate,
    FollowUpQuestions,
    GraphResult,
    Instruction,
    Start,
    StepEnded,
    StepResult,
    TaskChanges,
    UnitFailure,
)
from ensemble_ray.schedule.machine import end_of
from ensemble_ray.schedule.stimuli import (
    Begun,
    Cancelled,
    CancelRequested,
    Completed,
    Evaluated,
    Exited,
    Failed,
    TaskEnd,
)
from ensemble_ray.schedule.unit import Execution, HistoryEntry, Parts, StopRequested, UnitStimulus, body_of, scope_of
from ensemble_ray.values.ids import instance_of, key_of, node_key
from ensemble_ray.values.outputs import ExitReason

END_STATE = "__END__"


class BranchState(StrEnum):
    """The state of a branch.

    `begun`     created by the graph's start, a fork or a join; its first step has not started.
    `running`   a step runs.
    `routing`   its step completed; its edges are tried, or wait for their turn.
    `forked`    its branches run.
    `joining`   waits at a join.
    `joined`    merged into the branch of a join.
    `ended`     reached the end state.
    `capped`    the graph has used all its steps.
    `failed`    its step failed, no edge matched, or a condition raised an error.
    `cut_short` cancelled by a join, or the graph was ending.
    """

    BEGUN = "begun"
    RUNNING = "running"
    ROUTING = "routing"
    FORKED = "forked"
    JOINING = "joining"
    JOINED = "joined"
    ENDED = "ended"
    CAPPED = "capped"
    FAILED = "failed"
    CUT_SHORT = "cut_short"


class BranchEvent(StrEnum):
    STEP_STARTS = "its next step starts"
    STEP_COMPLETED = "its step completed"
    STEP_FAILED = "its step failed"
    STEP_STOPPED = "its step was cancelled, or ended the run early"
    REACHED_END = "the end state is next"
    REACHED_CAP = "the graph may make no more steps"
    DIVIDED = "a fork is next"
    ARRIVED = "a join is next"
    MERGED = "the join continues"
    NO_EDGE = "no edge matches"
    CONDITION_RAISED = "a condition raised an error"
    DROPPED = "a join no longer needs it, or the graph is ending"


_S, _E = BranchState, BranchEvent

#: (state, event) -> next state. Every other pair is a defect.
BRANCH_TRANSITIONS: dict[tuple[BranchState, BranchEvent], BranchState] = {
    (_S.BEGUN, _E.STEP_STARTS): _S.RUNNING,
    (_S.BEGUN, _E.REACHED_END): _S.ENDED,
    (_S.BEGUN, _E.REACHED_CAP): _S.CAPPED,
    (_S.RUNNING, _E.STEP_COMPLETED): _S.ROUTING,
    (_S.RUNNING, _E.STEP_FAILED): _S.FAILED,
    (_S.RUNNING, _E.STEP_STOPPED): _S.CUT_SHORT,
    (_S.RUNNING, _E.DROPPED): _S.CUT_SHORT,
    (_S.ROUTING, _E.STEP_STARTS): _S.RUNNING,
    (_S.ROUTING, _E.REACHED_END): _S.ENDED,
    (_S.ROUTING, _E.REACHED_CAP): _S.CAPPED,
    (_S.ROUTING, _E.DIVIDED): _S.FORKED,
    (_S.ROUTING, _E.ARRIVED): _S.JOINING,
    (_S.ROUTING, _E.NO_EDGE): _S.FAILED,
    (_S.ROUTING, _E.CONDITION_RAISED): _S.FAILED,
    (_S.ROUTING, _E.DROPPED): _S.CUT_SHORT,
    (_S.JOINING, _E.MERGED): _S.JOINED,
    (_S.JOINING, _E.DROPPED): _S.CUT_SHORT,
    (_S.JOINED, _E.STEP_STARTS): _S.RUNNING,
    (_S.JOINED, _E.REACHED_END): _S.ENDED,
    (_S.JOINED, _E.REACHED_CAP): _S.CAPPED,
    (_S.FORKED, _E.STEP_STARTS): _S.RUNNING,
    (_S.FORKED, _E.REACHED_END): _S.ENDED,
    (_S.FORKED, _E.REACHED_CAP): _S.CAPPED,
}


class Rank(NamedTuple):
    """The order of branches in a fork: first the declared ones, then the branches of joins."""

    #: number of successive joins before it
    generation: int
    #: in the fork, or of its join among the edges
    position: int
    first: Rank | None = None


class CompletedStep(Struct, eq=False):
    state: str
    instance: str
    next_state: str | None = None


@dataclass(slots=True, eq=False)
class GraphBranch:
    fork: Fork
    rank: Rank
    at: str = ""
    state: BranchState = BranchState.BEGUN
    step: int = 0
    started_at: float = 0.0
    #: the join where it waits, by position among the edges, and the fork in which its arrival counts
    join: int = -1
    counts_for: Fork = field(init=False)
    trail: list[CompletedStep | Fork] = field(default_factory=list["CompletedStep | Fork"])

    def __post_init__(self) -> None:
        self.counts_for = self.fork

    def move(self, event: BranchEvent) -> None:
        self.state = BRANCH_TRANSITIONS[self.state, event]

    def route(self, next_state: str) -> str:
        """Store the next state of its last step; return the step's instance."""
        step = self.trail[-1]
        if not isinstance(step, CompletedStep):
            raise TypeError(f"a branch is routed after a step, not after {step}")
        step.next_state = next_state
        return step.instance


class Fork(Struct, eq=False):
    """Parallel branches. The outermost fork contains the graph's first branch."""

    divided: GraphBranch | None
    #: number of forks around it
    depth: int = 0
    branches: list[GraphBranch] = msgspec.field(default_factory=list[GraphBranch])


class _Arrivals(NamedTuple):
    fork: Fork
    join: int
    branches: list[GraphBranch]


class Joined(NamedTuple):
    branch: GraphBranch
    state: str
    dropped: tuple[GraphBranch, ...]


class BranchTree:
    def __init__(self, edges: Sequence[GraphEntry]) -> None:
        self._edges = edges
        self._sources: dict[int, frozenset[str]] = {}
        self._all = Fork(None)
        self.first = GraphBranch(self._all, Rank(0, 0))
        self._all.branches.append(self.first)

    def divide(self, branch: GraphBranch, count: int) -> list[GraphBranch]:
        fork = Fork(branch, branch.fork.depth + 1)
        fork.branches = [GraphBranch(fork, Rank(0, position)) for position in range(count)]
        branch.trail.append(fork)
        branch.move(BranchEvent.DIVIDED)
        return list(fork.branches)

    def arrive(self, branch: GraphBranch, join: int) -> None:
        branch.join, branch.counts_for = join, branch.fork
        branch.move(BranchEvent.ARRIVED)

    def next_join(self) -> Joined | None:
        """Continue one join that is complete, if any."""
        while waiting := self._arrivals():
            is_still = all(branch.state is BranchState.JOINING for branch in self.leaves())
            if (found := self._complete_one(waiting, is_still=is_still)) is not None:
                return self._merge(*found)
            stuck = (
                each for each in waiting if each.fork.divided is not None and (is_still or not self._may_grow(each))
            )
            if (innermost := next(stuck, None)) is None or innermost.fork.divided is None:
                return None
            for branch in innermost.branches:
                branch.counts_for = innermost.fork.divided.fork
        return None

    def leaves(self, fork: Fork | None = None) -> list[GraphBranch]:
        """Return the branches of a fork, or all, that run, are routed or wait at a join, in order."""
        found: list[GraphBranch] = []
        open_branches = _in_order(fork or self._all)
        while open_branches:
            branch = open_branches.pop()
            if branch.state is BranchState.FORKED:
                last = branch.trail[-1]
                open_branches += _in_order(last) if isinstance(last, Fork) else []
            elif branch.state in {BranchState.RUNNING, BranchState.ROUTING, BranchState.JOINING}:
                found.append(branch)
        return found

    def steps(self) -> Iterator[StepResult]:
        """Yield the history (S-GRAPH-99)."""
        parts: list[CompletedStep | Fork | GraphBranch] = [self._all]
        while parts:
            match part := parts.pop():
                case CompletedStep():
                    yield StepResult(state=part.state, instance=part.instance, next_state=part.next_state)
                case Fork():
                    parts += _in_order(part)
                case GraphBranch():
                    parts += reversed(part.trail)

    def _arrivals(self) -> list[_Arrivals]:
        """Inner forks come first, then joins in declared order."""
        found: dict[tuple[int, int], _Arrivals] = {}
        for branch in self.leaves():
            if branch.state is BranchState.JOINING:
                fork = branch.counts_for
                found.setdefault((id(fork), branch.join), _Arrivals(fork, branch.join, [])).branches.append(branch)
        return sorted(found.values(), key=lambda each: (-each.fork.depth, each.join))

    def _complete_one(self, waiting: Sequence[_Arrivals], *, is_still: bool) -> _Arrivals | None:
        for each in waiting:
            entry = self._join(each.join)
            is_enough = len({branch.at for branch in each.branches}) >= (entry.count or len(set(entry.from_states)))
            if is_enough or (each.fork.divided is None and not self._may_grow(each)):
                return each
        # Joins may wait for each other while all other branches have ended (S-GRAPH-98).
        return waiting[0] if is_still and waiting[0].fork.divided is None else None

    def _merge(self, fork: Fork, join: int, group: list[GraphBranch]) -> Joined:
        entry = self._join(join)
        others = [branch for branch in self.leaves(fork) if branch not in group]
        dropped = [branch for branch in others if entry.count is not None and self._leads_to(branch, join)]
        for branch in group:
            branch.move(BranchEvent.MERGED)
        for branch in dropped:
            branch.move(BranchEvent.DROPPED)
        members = [_member(branch, fork) for branch in group]
        rank = Rank(1 + max(member.rank.generation for member in members), join, min(member.rank for member in members))
        is_alone = len(others) == len(dropped) and all(rank > branch.rank for branch in fork.branches)
        if is_alone and fork.divided is not None:
            return Joined(fork.divided, entry.to_state, tuple(dropped))
        if is_alone and len(set(map(id, members))) == 1:
            return Joined(members[0], entry.to_state, tuple(dropped))
        made = GraphBranch(fork, rank)
        fork.branches.append(made)
        return Joined(made, entry.to_state, tuple(dropped))

    def _may_grow(self, arrivals: _Arrivals) -> bool:
        others = (branch for branch in self.leaves(arrivals.fork) if branch not in arrivals.branches)
        return any(self._leads_to(branch, arrivals.join) for branch in others)

    def _leads_to(self, branch: GraphBranch, join: int) -> bool:
        if branch.state is BranchState.JOINING:
            return branch.join == join or self._join(branch.join).to_state in self._sources_of(join)
        return branch.at in self._sources_of(join)

    def _sources_of(self, join: int) -> frozenset[str]:
        if join not in self._sources:
            before: dict[str, list[str]] = {}
            for entry in self._edges:
                origins = entry.from_states if isinstance(entry, JoinEntry) else (entry.from_state,)
                for target in entry.to_states if isinstance(entry, ForkEntry) else (entry.to_state,):
                    before.setdefault(target, []).extend(origins)
            found = set(self._join(join).from_states)
            open_states = list(found)
            while open_states:
                for state in before.get(open_states.pop(), ()):
                    if state not in found:
                        found.add(state)
                        open_states.append(state)
            self._sources[join] = frozenset(found)
        return self._sources[join]

    def _join(self, position: int) -> JoinEntry:
        entry = self._edges[position]
        if not isinstance(entry, JoinEntry):
            raise TypeError(f"{entry} is no join")
        return entry


def _in_order(fork: Fork) -> list[GraphBranch]:
    """Return the branches of a fork as a stack: the first one is last."""
    return sorted(fork.branches, key=lambda branch: branch.rank, reverse=True)


def _member(branch: GraphBranch, fork: Fork) -> GraphBranch:
    while branch.fork is not fork:
        if branch.fork.divided is None:
            raise ValueError("the branch is outside of the fork")
        branch = branch.fork.divided
    return branch


class UnroutedStep(NamedTuple):
    branch: GraphBranch
    duration_s: float
    output: ContextPart

    @property
    def entry(self) -> HistoryEntry:
        return HistoryEntry((self.branch.at,), self.output.instances, self.output.is_joined)


def shown_of(part: ContextPart) -> ContextPart:
    """Return the output that a step shows: all if joined, else the last."""
    return part if part.is_joined else ContextPart(part.instances[-1:])


class GraphMachine:
    """The scheduling state of one execution of a graph.

    After a step, the edges, forks and joins that leave the state are tried in declared order (S-GRAPH-42, S-GRAPH-90). The
    cost of a step does not grow with the history.
    """

    def __init__(self, unit: GraphUnit, execution: Execution) -> None:
        self._unit = unit
        self._execution = execution
        self._scope = scope_of(execution.instance)
        self._path = key_of(execution.instance)
        self._members = {state.name: state.member for state in unit.states}
        #: positions of the entries that leave each state
        self._leaving: dict[str, list[int]] = {state.name: [] for state in unit.states}
        for position, entry in enumerate(unit.edges):
            for state in dict.fromkeys(entry.from_states if isinstance(entry, JoinEntry) else (entry.from_state,)):
                self._leaving[state].append(position)
        self._tree = BranchTree(unit.edges)
        self._has_forks = any(isinstance(entry, ForkEntry) for entry in unit.edges)
        self._running: dict[str, GraphBranch] = {}
        #: in order of completion; the edges of the first one are tried
        self._to_route: deque[UnroutedStep] = deque()
        self._question: EdgeMatches | None = None
        #: number of branches at joins
        self._joining = 0
        self._steps = 0
        self._visits: Counter[str] = Counter()
        self._last: dict[str, tuple[str, ContextPart]] = {}
        self._history: list[HistoryEntry] = []
        self._is_capped = False
        self._has_failed = False
        self._failure: UnitFailure | None = None
        self._exit: ExitReason | None = None
        self._reason: Literal["terminal", "max_steps"] | None = None
        self._is_cancelled = False
        self._is_ended = False

    @property
    def is_stopping(self) -> bool:
        return self._has_failed or self._is_cancelled or self._exit is not None

    @property
    def history(self) -> Sequence[HistoryEntry]:
        return self._history

    def results(self) -> tuple[GraphResult, ...]:
        return (GraphResult(unit=self._path, steps=tuple(self._tree.steps()), termination_reason=self._reason),)

    def projection(self) -> Parts:
        last = self._history[-1]
        return (ContextPart(last.instances, last.is_joined),)

    def handle(self, *stimuli: UnitStimulus) -> list[Instruction]:
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
                if self._question is not None and stimulus.question == self._question:
                    self._on_answer(self._question, stimulus, done)
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
            case _:
                assert_never(stimulus)

    # Steps.

    def _go_to(self, branch: GraphBranch, state: str, at: float, done: list[Instruction]) -> None:
        """Start the next step of a branch, or end the branch. Steps are counted over all branches (S-GRAPH-47)."""
        branch.at = state
        if state == END_STATE:
            branch.move(BranchEvent.REACHED_END)
        elif self._steps >= self._unit.max_steps:
            branch.move(BranchEvent.REACHED_CAP)
            self._is_capped = True
        else:
            branch.move(BranchEvent.STEP_STARTS)
            step = instance_of(self._unit.key, occurrence=self._steps, parent=self._scope)
            instance = instance_of(self._members[state], parent=step)
            self._steps += 1
            branch.step, branch.started_at = self._steps, at
            self._running[instance] = branch
            changes = self._changes_of(state)
            done.append(Start(instance=instance, changes=changes, asks_after=self._questions_after(branch, instance)))

    def _changes_of(self, state: str) -> TaskChanges | None:
        """Count the visit, and return the additions to its task (S-GRAPH-60)."""
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

    def _questions_after(self, branch: GraphBranch, instance: str) -> FollowUpQuestions | None:
        if self._has_forks:
            return None
        questions: list[EdgeMatches] = []
        for position in self._leaving[branch.at]:
            entry = self._unit.edges[position]
            if not (isinstance(entry, EdgeEntry) and entry.has_condition):
                break
            questions.append(EdgeMatches(unit=self._path, step=branch.step, edge=position))
        if not questions:
            return None
        return FollowUpQuestions(questions=tuple(questions), names=(branch.at,), instances=(instance,))

    def _step_ended(self, branch: GraphBranch, end: TaskEnd, done: list[Instruction]) -> None:
        if isinstance(end, Exited):
            self._exit = self._exit or end.reason
            self._drop_unrouted()
        if branch.state is not BranchState.RUNNING:  # a join no longer needs it, or another branch failed
            self._execution.scopes.drop(scope_of(end.instance))  # it may have completed in the meantime
            return
        match end:
            case Completed():
                branch.move(BranchEvent.STEP_COMPLETED)
                self._store_output(branch, end)
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
                    self._store_output(branch, end)
            case _:
                assert_never(end)

    def _store_output(self, branch: GraphBranch, end: Completed | Exited) -> None:
        scopes, key = self._execution.scopes, node_key(end.instance)
        own = scopes.own(scope_of(end.instance))
        parts = own.get(key) or (ContextPart((end.instance,)),)
        scopes.put(self._path, key, parts)
        for inner, outputs in own.items():
            if inner.startswith(body_of(key, "")):
                scopes.put(self._path, inner, outputs)
        if branch.at in self._last:  # later tasks see only the last visit
            scopes.drop(scope_of(self._last[branch.at][0]))
        self._last[branch.at] = (end.instance, shown_of(parts[-1]))
        is_unit = key in self._execution.units
        branch.trail.append(CompletedStep(branch.at, key_of(end.instance) if is_unit else end.instance))

    # Routing, in the order of completion: a condition sees its own step as the newest of the history (S-GRAPH-92).

    def _route_next(self, at: float, done: list[Instruction]) -> None:
        """Route steps, oldest first, until an edge asks a question."""
        while self._to_route and self._question is None and not self.is_stopping:
            step = self._to_route[0]
            self._history.append(step.entry)
            self._try_edges(step.branch, at, 0, done)

    def _try_edges(self, branch: GraphBranch, at: float, first: int, done: list[Instruction]) -> None:
        for position in self._leaving[branch.at]:
            entry = self._unit.edges[position]
            if position < first:
                continue
            if isinstance(entry, EdgeEntry) and entry.has_condition:
                self._question = EdgeMatches(unit=self._path, step=branch.step, edge=position)
                done.append(Evaluate(question=self._question))
                return
            self._follow(branch, position, at, done)
            return
        branch.move(BranchEvent.NO_EDGE)
        self._fail(done, UnitFailure(unit=self._path, at=at, reason="no_edge", completed_before=0, step=branch.step))

    def _on_answer(self, question: EdgeMatches, answered: Evaluated, done: list[Instruction]) -> None:
        self._question = None
        branch = self._to_route[0].branch
        if answered.answer is None:
            branch.move(BranchEvent.CONDITION_RAISED)
            # The nested source sets `completed_before`.
            failure = UnitFailure(
                unit=self._path,
                at=answered.at,
                reason="evaluation",
                completed_before=0,
                step=branch.step,
                message=answered.message,
                error_type=answered.error_type,
            )
            self._fail(done, failure)
        elif answered.answer:
            self._follow(branch, question.edge, answered.at, done)
        else:
            self._try_edges(branch, answered.at, question.edge + 1, done)
        self._route_next(answered.at, done)

    def _follow(self, branch: GraphBranch, position: int, at: float, done: list[Instruction]) -> None:
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
        self._continue_joins(at, done)

    def _continue_joins(self, at: float, done: list[Instruction]) -> None:
        while self._joining and (joined := self._tree.next_join()) is not None:
            dropped = {id(branch) for branch in joined.dropped}
            done.extend(Cancel(instance=name) for name, branch in self._running.items() if id(branch) in dropped)
            # Steps that are dropped before their routing are part of the history too (S-GRAPH-97).
            self._history += [step.entry for step in self._to_route if id(step.branch) in dropped]
            self._to_route = deque(step for step in self._to_route if id(step.branch) not in dropped)
            self._joining = sum(branch.state is BranchState.JOINING for branch in self._tree.leaves())
            self._go_to(joined.branch, joined.state, at, done)

    # Failing and ending.

    def _fail(self, done: list[Instruction], failure: UnitFailure | None = None) -> None:
        """Cancel the steps of all other branches (S-GRAPH-100). The first failure counts."""
        is_ending, self._has_failed = self.is_stopping, True
        if is_ending:  # the running steps are cancelled already, or may end (S-GRAPH-101)
            return
        self._failure = failure
        self._drop_unrouted()
        for instance, branch in self._running.items():
            if branch.state is BranchState.RUNNING:
                branch.move(BranchEvent.DROPPED)
                done.append(Cancel(instance=instance))

    def _drop_unrouted(self) -> None:
        self._to_route.clear()
        self._question = None
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
        done.append(replace(usual, units=self.results(), unit_failures=failures))
