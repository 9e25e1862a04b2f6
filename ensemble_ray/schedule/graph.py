"""A graph: after each step, the first edge that matches names the next state.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, assert_never

from ensemble_ray.plan.plan import EdgeEntry, ForkEntry, GraphEntry, GraphUnit, JoinEntry
from ensemble_ray.schedule.instructions import (
    Announce,
    AsksAfter,
    Cancel,
    ContextPart,
    EdgeMatches,
    End,
    Evaluate,
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
    Decided,
    Evaluated,
    Exited,
    Failed,
)
from ensemble_ray.schedule.unit import Execution, HistoryEntry, Parts, StopRequested, UnitStimulus, body_of, scope_of
from ensemble_ray.values.ids import instance_of, key_of, node_key
from ensemble_ray.values.outputs import ExitReason


class BranchState(StrEnum):
    """Where a branch stands.

    `begun`     made by the graph's start, a fork or a join; its first step has not started.
    `running`   a step runs.
    `routing`   its step is over; edges are tried, or wait to be.
    `forked`    its branches run.
    `joining`   arrived at a join, which waits.
    `joined`    went into the branch that the join made.
    `ended`     came to the end state.
    `capped`    the steps that a graph may make are used up.
    `failed`    its step failed, no edge matched, or a condition raised.
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
    """What happens to a branch."""

    STEP_STARTS = "its next step starts"
    STEP_COMPLETED = "its step completed"
    STEP_FAILED = "its step failed"
    STEP_STOPPED = "its step was cancelled, or ended the run early"
    REACHED_END = "the end state is next"
    REACHED_CAP = "the graph may make no more steps"
    DIVIDED = "a fork is next"
    ARRIVED = "a join is next"
    MERGED = "the join goes on"
    NO_EDGE = "no edge matches"
    CONDITION_RAISED = "a condition raised"
    DROPPED = "a join needs it no more, or the graph is ending"


_S, _E = BranchState, BranchEvent

#: (state, event) -> next state; the whole rule about branches, as data. What is not here is a defect.
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

#: Those that something may still become of without another branch.
_MOVING = frozenset({_S.RUNNING, _S.ROUTING})


class Rank(NamedTuple):
    """Where a branch lies among those of its fork: first the declared ones, then what joins made of them."""

    #: how many joins, one after the other, it came from
    generation: int
    #: its place in the fork, or the place of its join among the edges
    position: int
    #: of the first of those that were joined
    first: Rank | None = None


@dataclass(slots=True, eq=False)
class CompletedStep:
    """A step that completed."""

    state: str
    instance: str
    #: None: not routed
    next_state: str | None = None


@dataclass(slots=True, eq=False)
class GraphBranch:
    """One way through a graph."""

    fork: Fork
    rank: Rank
    #: the graph's state that it is at
    at: str = ""
    state: BranchState = BranchState.BEGUN
    #: the number of its step, 1-based
    step: int = 0
    started_at: float = 0.0
    #: position among the graph's edges of the join that it waits at, and the fork that its arrival counts for
    join: int = -1
    counts_for: Fork = field(init=False)
    #: its steps and forks, in order
    trail: list[CompletedStep | Fork] = field(default_factory=list["CompletedStep | Fork"])

    def __post_init__(self) -> None:
        self.counts_for = self.fork

    def move(self, event: BranchEvent) -> None:
        """Go to the state that the table says."""
        self.state = BRANCH_TRANSITIONS[self.state, event]

    def route(self, next_state: str) -> str:
        """Note where its last step leads; return what ran in that step."""
        step = self.trail[-1]
        if not isinstance(step, CompletedStep):
            raise TypeError(f"a branch is routed after a step, not after {step}")
        step.next_state = next_state
        return step.instance


@dataclass(slots=True, eq=False)
class Fork:
    """Branches that run side by side; the outermost one has the branch that the graph starts with."""

    #: None: the outermost
    divided: GraphBranch | None
    branches: list[GraphBranch] = field(default_factory=list[GraphBranch])


class _Arrivals(NamedTuple):
    """Branches that wait at a join, and the fork that they count for."""

    fork: Fork
    join: int
    branches: list[GraphBranch]


class Joined(NamedTuple):
    """A join that goes on."""

    #: the branch that goes on
    branch: GraphBranch
    #: the join's next state
    state: str
    #: those that it needs no more
    dropped: tuple[GraphBranch, ...]


class BranchTree:
    """All branches of one execution of a graph."""

    def __init__(self, edges: Sequence[GraphEntry]) -> None:
        self._edges = edges
        #: for each join the states from which it can be reached; made when one is reached
        self._sources: dict[int, frozenset[str]] = {}
        self._all = Fork(None)
        self.first = GraphBranch(self._all, Rank(0, 0))
        self._all.branches.append(self.first)

    # Dividing and joining.

    def divide(self, branch: GraphBranch, count: int) -> list[GraphBranch]:
        """Return the branches of a fork, in order."""
        fork = Fork(branch)
        fork.branches = [GraphBranch(fork, Rank(0, position)) for position in range(count)]
        branch.trail.append(fork)
        branch.move(BranchEvent.DIVIDED)
        return list(fork.branches)

    def arrive(self, branch: GraphBranch, join: int) -> None:
        """Let a branch wait at a join."""
        branch.join, branch.counts_for = join, branch.fork
        branch.move(BranchEvent.ARRIVED)

    def next_join(self) -> Joined | None:
        """Let one join go on that can; None where none can."""
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

    def _arrivals(self) -> list[_Arrivals]:
        """Return who waits where: those of inner forks first, then in declared order."""
        found: dict[tuple[int, int], _Arrivals] = {}
        for branch in self.leaves():
            if branch.state is BranchState.JOINING:
                fork = branch.counts_for
                found.setdefault((id(fork), branch.join), _Arrivals(fork, branch.join, [])).branches.append(branch)
        return sorted(found.values(), key=lambda each: (-_depth(each.fork), each.join))

    def _complete_one(self, waiting: Sequence[_Arrivals], *, is_still: bool) -> _Arrivals | None:
        """Return the first that go on."""
        for each in waiting:
            entry = self._join(each.join)
            is_enough = len({branch.at for branch in each.branches}) >= (entry.count or len(set(entry.from_states)))
            if is_enough or (each.fork.divided is None and not self._may_grow(each)):
                return each
        # Joins may wait for each other, where nothing else moves (S-GRAPH-98).
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

    # What can be reached.

    def _may_grow(self, arrivals: _Arrivals) -> bool:
        """Whether another branch of their fork may still arrive."""
        others = (branch for branch in self.leaves(arrivals.fork) if branch not in arrivals.branches)
        return any(self._leads_to(branch, arrivals.join) for branch in others)

    def _leads_to(self, branch: GraphBranch, join: int) -> bool:
        """Whether a branch may come to that join, or waits there."""
        if branch.state is BranchState.JOINING:
            return branch.join == join or self._join(branch.join).to_state in self._sources_of(join)
        return branch.at in self._sources_of(join)

    def _sources_of(self, join: int) -> frozenset[str]:
        if join not in self._sources:
            before: dict[str, list[str]] = {}
            for entry in self._edges:
                for origin, target in _pairs(entry):
                    before.setdefault(target, []).append(origin)
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

    # Reading.

    def leaves(self, fork: Fork | None = None) -> list[GraphBranch]:
        """Return the branches of a fork, or all, that something may still become of, in order; forked ones by theirs."""
        found: list[GraphBranch] = []
        open_branches = _in_order(fork or self._all)
        while open_branches:
            branch = open_branches.pop()
            if branch.state is BranchState.FORKED:
                last = branch.trail[-1]
                open_branches += _in_order(last) if isinstance(last, Fork) else []
            elif branch.state in _MOVING or branch.state is BranchState.JOINING:
                found.append(branch)
        return found

    def steps(self) -> Iterator[StepResult]:
        """Return the history (S-GRAPH-99)."""
        parts: list[CompletedStep | Fork | GraphBranch] = [self._all]
        while parts:
            match part := parts.pop():
                case CompletedStep():
                    yield StepResult(state=part.state, instance=part.instance, next_state=part.next_state)
                case Fork():
                    parts += _in_order(part)
                case GraphBranch():
                    parts += reversed(part.trail)


def _in_order(fork: Fork) -> list[GraphBranch]:
    """Return the branches of a fork, the first one last, as a stack wants them."""
    return sorted(fork.branches, key=lambda branch: branch.rank, reverse=True)


def _member(branch: GraphBranch, fork: Fork) -> GraphBranch:
    """Return the branch of that fork that another one is, or is inside of."""
    while branch.fork is not fork:
        if branch.fork.divided is None:
            raise ValueError("it is in no branch of that fork")
        branch = branch.fork.divided
    return branch


def _depth(fork: Fork) -> int:
    depth = 0
    while fork.divided is not None:
        fork = fork.divided.fork
        depth += 1
    return depth


def _pairs(entry: GraphEntry) -> list[tuple[str, str]]:
    """Return the moves from state to state that an entry allows."""
    match entry:
        case EdgeEntry():
            return [(entry.from_state, entry.to_state)]
        case ForkEntry():
            return [(entry.from_state, state) for state in entry.to_states]
        case JoinEntry():
            return [(state, entry.to_state) for state in entry.from_states]


class UnroutedStep(NamedTuple):
    """A step that completed and is not routed."""

    branch: GraphBranch
    duration_s: float
    output: ContextPart

    @property
    def entry(self) -> HistoryEntry:
        """Return what the history has of it."""
        return HistoryEntry((self.branch.at,), self.output.instances, self.output.is_joined)


def shown_of(part: ContextPart) -> ContextPart:
    """Return what a step shows of the last part of its state's outputs: all of it where that is one, else its last."""
    return part if part.is_joined else ContextPart(part.instances[-1:])


def list_questions(
    unit: GraphUnit, leaving: Sequence[int], *, path: str, step: int, state: str, instance: str
) -> AsksAfter | None:
    """Return what is asked when a step completed, if nothing runs beside it; None: nothing.

    Args:
        unit: The graph.
        leaving: Positions of what leaves the state, in declared order.
        path: Of the graph, without an occurrence.
        step: Its number, 1-based.
        state: Whose step it is.
        instance: Of its task.
    """
    questions: list[EdgeMatches] = []
    for position in leaving:
        entry = unit.edges[position]
        if not (isinstance(entry, EdgeEntry) and entry.has_condition):
            break
        questions.append(EdgeMatches(unit=path, step=step, edge=position))
    return AsksAfter(questions=tuple(questions), names=(state,), instances=(instance,)) if questions else None


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
