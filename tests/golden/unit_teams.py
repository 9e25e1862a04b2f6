"""The golden teams with loops, phases and a graph; what `teams` says of a change holds here too."""

from __future__ import annotations

from typing import Any

from ensemble_ray import (
    Agent,
    Ensemble,
    Graph,
    GraphEdge,
    GraphFork,
    GraphJoin,
    Loop,
    Phase,
    PhaseReview,
    Task,
)
from tests.golden.model import model as _model
from tests.golden.teams import conclude, is_enough, is_refined, pay


def _agent(role: str, llm: object, **fields: Any) -> Agent:
    return Agent(role=role, goal=f"be a good {role}", llm=llm, **fields)


def _task(description: str, by: Agent | None = None, **fields: Any) -> Task:
    return Task(**{"description": description, "expected_output": "a text", "agent": by, **fields})


def looped() -> Ensemble:
    """Return a team: a loop between two tasks."""
    llm = _model()
    facts = _task("Find facts", _agent("Researcher", llm), name="facts")
    draft = _task("Draft it", _agent("Writer", llm), name="draft")
    critique = _task("Criticise it", _agent("Critic", llm), name="critique", context=[draft])
    refine = Loop(name="refine", body=[draft, critique], until=is_refined, max_iterations=4, context=[facts])
    title = _task("Find a title", _agent("Writer", llm), name="title", context=[refine.output])
    return Ensemble(tasks=[facts, title], loops=[refine])


def phased() -> Ensemble:
    """Return a team: three phases, the second one with a loop and a review that sends it back once."""
    llm = _model()
    sources = _task("Find sources", _agent("Researcher", llm), name="sources")
    polish = Loop(name="polish", body=[_task("Polish it", _agent("Writer", llm), name="polished")], max_iterations=2)
    collect = _task("Collect it", _agent("Editor", llm), name="collect", context=[sources, polish.output])
    judge_it = _task("Judge it", _agent("Judge", llm), name="judge", context=[collect])
    research = Phase(name="research", tasks=[sources])
    writing = Phase(
        name="writing",
        tasks=[collect],
        loops=[polish],
        after=[research],
        review=PhaseReview(task=judge_it, max_retries=1),
    )
    summary = _task("Sum it up", _agent("Writer", llm), name="summary", context=[collect])
    return Ensemble(phases=[research, writing, Phase(name="closing", tasks=[summary], after=[writing])])


def branched() -> Ensemble:
    """Return a team: a graph that visits a state twice, then branches that meet."""
    llm = _model()
    states = {
        "plan": _task("Plan it", _agent("Planner", llm), name="plan"),
        "left": _task("Go left", _agent("Payer", llm, tools=[pay]), name="left"),
        "right": _task("Go right", _agent("Writer", llm), name="right"),
        "split": _task("Split it", name="split", handler=conclude, effect="none"),
        "meet": _task("Meet there", _agent("Editor", llm), name="meet"),
    }
    edges = [
        GraphEdge(from_state="plan", to_state="split", condition=is_enough),
        GraphEdge(from_state="plan", to_state="plan"),
        GraphFork(from_state="split", to_states=["left", "right"]),
        GraphJoin(from_states=["left", "right"], to_state="meet"),
        GraphEdge(from_state="meet", to_state=Graph.END),
    ]
    return Ensemble(graph=Graph(name="desk", states=states, start="plan", edges=edges), max_parallel_tasks=1)
