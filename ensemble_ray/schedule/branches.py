"""The branches of a graph: how forks divide them, how joins bring them together, and their history. Package: schedule.

Rules:
1. `BRANCH_TRANSITIONS` is what may become of a branch; nothing here decides where one goes, which edges do (`graph`).
2. Branches of one fork lie in its declared order, whatever order they end in; what joins of a fork make follows them, in the
   order of the joins. The history is read along this tree (S-GRAPH-99).
3. Arrivals at a join are counted for the fork whose branches they are (S-GRAPH-95). It goes on when enough of its states
   have arrived; it does not wait for what cannot arrive any more (S-GRAPH-96). Those that are too few in their own fork
   count for the fork around it, and outside of every fork go on.
4. A join that goes on with a count cancels those of the fork that could still arrive, and no others (S-GRAPH-97).

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

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ensemble_ray.plan.units import EdgeEntry, ForkEntry, GraphEntry, JoinEntry
from ensemble_ray.schedule.results import StepResult

__all__ = ["BRANCH_TRANSITIONS", "BranchEvent", "BranchState", "BranchTree", "Fork", "GraphBranch", "Joined"]


class BranchState(StrEnum):
    """Where a branch stands."""

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
