"""Teams with loops, phases and graphs that are killed; their predicates leave a line for each time that they are asked.

See `teams` for what they are made of. A line says which question was asked, as `audit_verdicts` calls it: a predicate is shown
how far its unit is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ensemble_ray import (
    Ensemble,
    Graph,
    GraphEdge,
    GraphFork,
    GraphJoin,
    GraphRoutingContext,
    Loop,
    LoopIterationContext,
    Phase,
    PhaseReview,
)
from tests.chaos.audit_verdicts import question_of_edge, question_of_loop
from tests.chaos.teams import QUESTIONS, leave, make_agent, make_task

__all__ = ["graph", "loop", "phases"]


def _path() -> str:
    return os.environ.get(QUESTIONS, str(Path.cwd() / "questions"))


@dataclass(frozen=True)
class After:
    """A predicate that holds after so many iterations."""

    path: str
    unit: str
    count: int

    def __call__(self, context: LoopIterationContext) -> bool:
        """Leave a line, and answer."""
        number = context.iteration_number
        leave(self.path, verdict=question_of_loop(self.unit, number), key=context.last_body_output.raw)
        return number >= self.count


@dataclass(frozen=True)
class Visited:
    """A condition that holds from the n-th visit of the state on."""

    path: str
    count: int

    def __call__(self, context: GraphRoutingContext) -> bool:
        """Leave a line, and answer."""
        visits = len(context.state_history[context.current_state])
        leave(self.path, verdict=question_of_edge(visits), key=context.last_output.raw)
        return visits >= self.count


def _loop(name: str, count: int, **fields: object) -> Loop:
    agent = make_agent(f"Writer of {name}", isolation="process")
    writer = make_task(f"{name}w", agent, [])
    critic = make_task(f"{name}c", make_agent("Critic", has_tools=False), [writer])
    return Loop(name=name, body=[writer, critic], until=After(_path(), name, count), **fields)  # type: ignore[arg-type]


def loop() -> Ensemble:
    """A task, a loop of four iterations that needs it, and what needs the loop."""
    agent = make_agent("Walker")
    first = make_task("l0", agent, [])
    refine = _loop("refine", 4, context=[first])
    return Ensemble(tasks=[first, make_task("l1", agent, [refine.output])], loops=[refine])


def phases() -> Ensemble:
    """Two phases side by side, one sent back once; then one with a loop."""
    agent = make_agent("Walker")
    draft = make_task("pd", agent, [])
    review = make_task("reviewpd", make_agent("Editor", has_tools=False), [draft])
    plan = Phase(name="plan", tasks=[draft], review=PhaseReview.of(review, 1))
    other = Phase(name="other", tasks=[make_task("po", make_agent("Other", isolation="process"), [])])
    polish = _loop("polish", 2)
    last = make_task("pl", agent, [plan.output, other.output, polish.output])
    return Ensemble(phases=[plan, other, Phase(name="work", tasks=[last], loops=[polish], after=[plan, other])])


def graph() -> Ensemble:
    """A state that is visited twice, a fork into a task and a loop, and a join."""
    path, agent = _path(), make_agent("Walker")
    states = {
        "write": make_task("gw", agent, []),
        "left": make_task("gl", make_agent("Left", isolation="process"), []),
        "right": _loop("right", 2),
        "meet": make_task("gm", agent, []),
    }
    split = make_task("gs", make_agent("Splitter", has_tools=False), [])
    return Ensemble(
        graph=Graph(
            name="triage",
            states={**states, "split": split},
            start="write",
            edges=[
                GraphEdge(from_state="write", to_state="split", condition=Visited(path, 2)),
                GraphEdge(from_state="write", to_state="write"),
                GraphFork(from_state="split", to_states=["left", "right"]),
                GraphJoin(from_states=["left", "right"], to_state="meet"),
                GraphEdge(from_state="meet", to_state=Graph.END),
            ],
        )
    )
