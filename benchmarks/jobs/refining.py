"""One task again and again, each with the answer before: a loop with a predicate, and a graph of one state."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from benchmarks.setting import MODEL, Ask, Round, Setting, answer, bare_rounds, team_rounds

if TYPE_CHECKING:
    from ensemble_ray import Ensemble, GraphRoutingContext, LoopIterationContext, Task

__all__ = ["floor", "graph", "loop"]


def floor(setting: Setting) -> AbstractContextManager[Round]:
    """Run a loop written by hand."""

    async def job(ask: Ask) -> str:
        text = ""
        for number in range(setting.size):
            asked = f"Revise, round {number}: {text}\n\nWrite one sentence."
            text = await answer(ask, asked)
        return text

    return bare_rounds(setting, job)


def loop(setting: Setting) -> AbstractContextManager[Round]:
    """Run a loop whose predicate is asked after each iteration and never holds."""

    def never(context: LoopIterationContext) -> bool:
        return context.iteration_number < 0

    def make() -> Ensemble:
        from ensemble_ray import Ensemble, Loop

        body = [_task(setting)]
        return Ensemble(loops=[Loop(name="refine", body=body, until=never, max_iterations=setting.size)])

    return team_rounds(setting, make)


def graph(setting: Setting) -> AbstractContextManager[Round]:
    """Run a graph whose only state is followed by itself; the condition of leaving it is asked at each step."""

    def never(context: GraphRoutingContext) -> bool:
        return context.step_number < 0

    def make() -> Ensemble:
        from ensemble_ray import Ensemble, Graph, GraphEdge

        edges = [
            GraphEdge(from_state="write", to_state=Graph.END, condition=never),
            GraphEdge(from_state="write", to_state="write"),
        ]
        states = {"write": _task(setting)}
        return Ensemble(graph=Graph(name="walk", states=states, edges=edges, start="write", max_steps=setting.size))

    return team_rounds(setting, make)


def _task(setting: Setting) -> Task:
    from ensemble_ray import Agent, OpenAIChatModel, Task

    writer = Agent(role="Writer", goal="Write", llm=OpenAIChatModel(MODEL, base_url=setting.url, api_key="benchmark"))
    return Task(name="write", description="Write one sentence", expected_output="One sentence", agent=writer)
