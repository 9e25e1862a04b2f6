"""Teams of loops, phases, graphs and maps drawn from a list of numbers: the same numbers make the same team.

Tasks are handlers; with trouble some of them fail, or leave the run, in one of their executions. A team that is ordered does
one thing after the other, so that what fails first, and what it leaves undone, is the same wherever it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ensemble_ray import (
    Ensemble,
    ExitEarlyError,
    Graph,
    GraphEdge,
    GraphFork,
    GraphJoin,
    GraphRoutingContext,
    Loop,
    LoopIterationContext,
    MapEnsemble,
    Phase,
    PhaseReview,
    Task,
    UnitOutput,
)
from tests.scenarios.answering import answering

__all__ = ["KINDS", "Kind", "team_of"]

Kind = Literal["phases", "graph", "loops", "map"]
KINDS: Sequence[Kind] = ("phases", "graph", "loops", "map")


@dataclass(frozen=True)
class _From:
    """A predicate that holds from an iteration on."""

    number: int

    def __call__(self, context: LoopIterationContext) -> bool:
        """Answer."""
        return context.iteration_number >= self.number


@dataclass(frozen=True)
class _Below:
    """A condition that holds until a state was visited that often, in each round."""

    state: str
    visits: int
    #: whose visits count the rounds; "": there is one
    rounds_by: str = ""

    def __call__(self, routing: GraphRoutingContext) -> bool:
        """Answer."""
        rounds = len(routing.state_history[self.rounds_by]) if self.rounds_by else 1
        return len(routing.state_history[self.state]) < self.visits * rounds


@dataclass
class Draws:
    """Choices by their place in a list, so that the same team can be made anew for every run."""

    choices: Sequence[int]
    #: one task in how many fails or leaves; 0: none
    trouble: int = 0
    #: whether nothing runs beside anything else
    is_ordered: bool = False
    #: whether it may hang on timing which branches a join or a cap stops
    is_racing: bool = True
    taken: int = 0
    made: int = 0

    def below(self, end: int) -> int:
        """Choose a number from 0 on."""
        self.taken += 1
        return self.choices[self.taken % len(self.choices)] % end

    def task(self, context: Sequence[object] = ()) -> Task:
        """Make a task that may fail, or leave the run, in one of its executions."""
        self.made += 1
        name = f"t{self.made}"
        answers: list[object] = []
        if self.trouble and self.below(self.trouble) == 0:
            answers = ["fine"] * self.below(2) + [(ValueError("broke"), ExitEarlyError("enough"))[self.below(2)]]
        return answering(name, *answers, context=[each for each in context if self.below(2)])

    def loop(self) -> Loop:
        """Make a loop of one or two tasks."""
        first = self.task()
        body = [first, self.task([first])][: 1 + self.below(2)]
        self.made += 1
        ends = 1 + self.below(4)
        return Loop(
            name=f"l{self.made}",
            body=body,
            until=None if self.below(2) else _From(ends),
            max_iterations=1 + self.below(3),
            output_mode=("last_iteration", "final_task_only", "all_iterations")[self.below(3)],
            on_max_iterations="throw" if self.trouble and self.below(6) == 0 else "return_last",
        )

    def phases(self) -> Ensemble:
        """Make phases of tasks and loops, some of them reviewed."""
        made: list[Phase] = []
        for number in range(1 + self.below(4)):
            after = made[-1:] if self.is_ordered else [each for each in made if self.below(2)]
            before = [each.output for each in after]
            loops = [self.loop() for _ in range(self.below(2))]
            tasks = [self.task([*before, *(each.output for each in loops)]) for _ in range(1 + self.below(2))]
            said = ["APPROVE", "RETRY: more", f"RETRY_PREDECESSOR p{number - 1}: more"]
            decisions = [said[self.below(3)], said[self.below(2)], "APPROVE"]
            if self.trouble and self.below(8) == 0:
                decisions = ["REJECT: no"]
            review = PhaseReview(task=answering(f"check{number}", *decisions)) if self.below(2) else None
            workflow = "parallel" if self.below(2) and not self.is_ordered else None
            made.append(
                Phase(name=f"p{number}", tasks=tasks, loops=loops, after=after, review=review, workflow=workflow)
            )
        return Ensemble(phases=made, max_parallel_tasks=1)

    def state(self) -> Task | Loop:
        """Make what a state does: a task, or at times a whole loop."""
        return self.loop() if self.below(3) == 0 else self.task()

    def graph(self) -> Ensemble:
        """Make a graph: a start, branches that may visit their state again and may fork themselves, an end that may lead back."""
        branches = [f"b{number}" for number in range(2 + self.below(2))]
        states: dict[str, Task | Loop] = {"start": self.task()}
        states |= {name: self.state() for name in branches}
        edges: list[GraphEdge | GraphFork | GraphJoin] = []
        if self.is_ordered:
            ways = ["start", *branches, "end"]
            edges += [each for name in branches for each in self._again(name)]
            edges += [GraphEdge(from_state=one, to_state=next_) for one, next_ in itertools.pairwise(ways)]
        else:
            edges += self._branches(branches, states)
        states["end"] = self.task([each for name in branches if isinstance(each := states[name], Task)])
        edges.append(GraphEdge(from_state="end", to_state="start", condition=_Below("end", 1 + self.below(2))))
        edges.append(GraphEdge(from_state="end", to_state=Graph.END))
        steps = 4 + self.below(20) if self.is_racing or self.is_ordered else 100
        action = "throw" if self.trouble and self.below(3) == 0 else "return_with_flag"
        return Ensemble(
            graph=Graph(name="g", states=states, edges=edges, start="start", max_steps=steps, on_max_steps=action),
            max_parallel_tasks=1,
        )

    def _again(self, name: str) -> list[GraphEdge]:
        """Make an edge back to the state itself, which is taken so often in each round."""
        return [GraphEdge(from_state=name, to_state=name, condition=_Below(name, 1 + self.below(3), "start"))]

    def _branches(
        self, branches: Sequence[str], states: dict[str, Task | Loop]
    ) -> list[GraphEdge | GraphFork | GraphJoin]:
        """Make a fork, its branches, of which the first may fork again, and the join."""
        edges: list[GraphEdge | GraphFork | GraphJoin] = [GraphFork(from_state="start", to_states=branches)]
        edges += [each for name in branches for each in self._again(name)]
        ends = list(branches)
        if self.below(3) == 0:
            inner = [f"{branches[0]}{letter}" for letter in "xy"]
            ends[0] = f"{branches[0]}z"
            states.update({name: self.state() for name in [*inner, ends[0]]})
            edges.append(GraphFork(from_state=branches[0], to_states=inner))
            edges += self._again(inner[0])
            edges.append(self._join(inner, ends[0]))
        return [*edges, self._join(ends, "end")]

    def _join(self, names: Sequence[str], to_state: str) -> GraphJoin:
        count = 1 + self.below(len(names)) if self.is_racing and self.below(2) else None
        return GraphJoin(from_states=names, to_state=to_state, count=count)

    def loops(self) -> Ensemble:
        """Make tasks and loops that wait for each other."""
        loops = [self.loop() for _ in range(1 + self.below(3))]
        tasks = [self.task([each.output for each in loops]) for _ in range(self.below(3))]
        workflow = "sequential" if self.is_ordered else ("sequential", "parallel")[self.below(2)]
        return Ensemble(tasks=tasks, loops=loops, workflow=workflow, max_parallel_tasks=1)

    def map(self) -> MapEnsemble:
        """Make a map of which each item is a task, a loop, or what one task of a loop gave."""
        count = 2 + self.below(4)

        def of_item(number: int) -> Task | Loop | UnitOutput:
            own = Draws([*self.choices[number:], *self.choices[:number]], self.trouble)
            loop, kind = own.loop(), own.below(3)
            return (own.task(), loop, loop.output_of(loop.body[0]))[kind]

        return MapEnsemble(
            items=range(count),
            map_task=of_item,
            on_item_error=("fail", "collect", "skip")[self.below(3)],
            max_parallel_tasks=1,
        )


def team_of(
    kind: Kind, choices: Sequence[int], trouble: int = 0, *, is_ordered: bool = False, is_racing: bool = True
) -> Ensemble | MapEnsemble:
    """Make the team of these choices; the same choices make the same team.

    Args:
        kind: What it is made of, at the top.
        choices: Numbers below 60.
        trouble: One task in how many fails or leaves; 0: none.
        is_ordered: Whether it does one thing after the other.
        is_racing: Whether it may hang on timing which branches a join or a cap stops.
    """
    draws = Draws(choices, trouble, is_ordered=is_ordered, is_racing=is_racing)
    makers = {"phases": draws.phases, "graph": draws.graph, "loops": draws.loops, "map": draws.map}
    return makers[kind]()
