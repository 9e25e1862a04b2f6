"""Teams with loops, phases and graphs whose model answers by the request alone, and counts what it was asked."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from ensemble_ray import (
    Agent,
    ChatMessage,
    ChatResponse,
    Ensemble,
    EnsembleOutput,
    Graph,
    GraphEdge,
    GraphFork,
    GraphJoin,
    Loop,
    Phase,
    PhaseReview,
    RunState,
    Task,
    TokenUsage,
    ToolCall,
    ToolSpec,
    tool,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.facts.runs import StimulusRecorded
from ensemble_ray.record.sqlite.store import SqliteStore

__all__ = ["TEAMS", "TEAM_PARAMS", "World", "count_recorded", "essence_of", "write_torn"]

USAGE = TokenUsage(10, 5)
#: Tasks that a join makes superfluous: their model never answers.
ENDLESS = "endless"
#: What the outputs of the second phase have counted when it is accepted.
ENOUGH = 11


@dataclass
class World:
    """What was asked and done in one life of a run, and what answers."""

    asked: list[str] = field(default_factory=list[str])
    called: list[str] = field(default_factory=list[str])
    judged: list[str] = field(default_factory=list[str])
    is_hanging: asyncio.Event = field(default_factory=asyncio.Event)

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Answer by the request alone, so that an answer says how far its task has come."""
        prompt = messages[1].content or ""
        name = prompt.partition("## Task\n")[2].partition("\n")[0].removeprefix("do ")
        is_first = bool(tools) and messages[-1].role == "user"
        if name == ENDLESS and not is_first:
            self.is_hanging.set()
            await asyncio.Event().wait()
        if name == "fast":
            await self.is_hanging.wait()
        self.asked.append(name)
        if is_first:
            return ChatResponse(tool_calls=[ToolCall("1", "put_down", '{"text": "x"}')], usage=USAGE)
        if name.startswith("review"):
            return ChatResponse(text=_review(name, _sum(prompt)), usage=USAGE)
        return ChatResponse(text=f"{name} +{1 + _sum(prompt)}+", usage=USAGE)

    @property
    def done(self) -> tuple[int, int, int]:
        """How many requests, calls of tools and questions to predicates there were."""
        return len(self.asked), len(self.called), len(self.judged)

    def agent(self, *, has_tool: bool = False) -> Agent:
        """Return who does tasks."""

        @tool(effect="once")
        def put_down(text: str) -> str:
            """Put it down."""
            self.called.append(text)
            return "put"

        return Agent(role="Writer", goal="Write", llm=self, tools=[put_down] if has_tool else [])

    def task(self, name: str, *context: object, has_tool: bool = False) -> Task:
        """Return a task that the model does."""
        return Task(
            name=name,
            description=f"do {name}",
            expected_output="x",
            agent=self.agent(has_tool=has_tool),
            context=context,  # type: ignore[arg-type]  # tasks and outputs of units
        )

    def after(self, name: str, count: int) -> Callable[[object], bool]:
        """Return a predicate that holds when it was asked so often about one unit."""

        def judge(context: object) -> bool:
            number = getattr(context, "iteration_number", 0) or getattr(context, "step_number", 0)
            self.judged.append(f"{name} {number}")
            return number >= count

        return judge

    def loop(self, name: str = "refine", count: int = 3, **fields: object) -> Loop:
        """Return a loop over a writer with a tool and a critic."""
        writer = self.task(f"{name} writer", has_tool=True)
        body = [writer, self.task(f"{name} critic", writer)]
        return Loop(name=name, body=body, until=self.after(name, count), max_iterations=5, **fields)  # type: ignore[arg-type]


def _sum(prompt: str) -> int:
    """Return the sum of what earlier answers that a prompt shows have counted."""
    return sum(map(int, re.findall(r"\+(\d+)\+", prompt)))


def _review(name: str, seen: int) -> str:
    """Send back what has not counted far enough, as no first attempt has."""
    if name == "review back" and seen < ENOUGH:
        return "RETRY_PREDECESSOR plan: again"
    if name == "review once" and seen < 2:
        return "RETRY: again"
    return "APPROVE"


def _flat(world: World) -> Ensemble:
    """A task, a loop that needs it, a task that needs the loop."""
    first = world.task("first")
    loop = world.loop(context=[first])
    return Ensemble(tasks=[first, world.task("last", loop.output)], loops=[loop])


def _side_by_side(world: World) -> Ensemble:
    """Two loops at the same time, one of which shows all of its iterations."""
    loops = [world.loop("one", 2), world.loop("two", 3, output_mode="all_iterations")]
    last = world.task("last", *(each.output for each in loops))
    return Ensemble(tasks=[last], loops=loops, workflow="parallel")


def _phases(world: World) -> Ensemble:
    """A phase that is sent back, one with a loop that sends the one before back."""
    draft = world.task("plan", has_tool=True)
    plan = Phase(name="plan", tasks=[draft], review=PhaseReview.of(world.task("review once", draft)))
    loop = world.loop("inner", 2)
    collect = world.task("collect", plan.output, loop.output)
    work = Phase(
        name="work",
        tasks=[collect],
        loops=[loop],
        after=[plan],
        review=PhaseReview.of(world.task("review back", collect)),
    )
    return Ensemble(phases=[plan, work])


def _graph(world: World) -> Ensemble:
    """A state that is visited again, a state that is a loop, then an edge that is asked."""
    return Ensemble(
        graph=Graph(
            name="triage",
            states={
                "write": world.task("write", has_tool=True),
                "refine": world.loop(count=2),
                "end": world.task("end"),
            },
            start="write",
            edges=[
                GraphEdge(
                    from_state="write", to_state="write", condition=lambda context: not world.after("again", 2)(context)
                ),
                GraphEdge(from_state="write", to_state="refine"),
                GraphEdge(from_state="refine", to_state="end", condition=world.after("enough", 1)),
                GraphEdge(from_state="refine", to_state="write"),
                GraphEdge(from_state="end", to_state=Graph.END),
            ],
        )
    )


def _fork(world: World) -> Ensemble:
    """Branches, one of them a loop, that meet."""
    return Ensemble(
        graph=Graph(
            name="branches",
            states={
                "split": world.task("split"),
                "left": world.task("left", has_tool=True),
                "further": world.task("further"),
                "right": world.loop("right", 2),
                "meet": world.task("meet"),
            },
            start="split",
            edges=[
                GraphFork(from_state="split", to_states=["left", "right"]),
                GraphEdge(from_state="left", to_state="further", condition=world.after("left", 1)),
                GraphJoin(from_states=["further", "right"], to_state="meet"),
                GraphEdge(from_state="meet", to_state=Graph.END),
            ],
        )
    )


def _first_counts(world: World, *, loser_has_tool: bool = False) -> Ensemble:
    """Branches of which the first to arrive is enough; the other one would never end."""
    return Ensemble(
        graph=Graph(
            name="race",
            states={
                "split": world.task("split"),
                "fast": world.task("fast"),
                "slow": world.task(ENDLESS, has_tool=loser_has_tool),
                "meet": world.task("meet"),
                "more": world.task("more", has_tool=True),
            },
            start="split",
            edges=[
                GraphFork(from_state="split", to_states=["fast", "slow"]),
                GraphJoin(from_states=["fast", "slow"], to_state="meet", count=1),
                GraphEdge(from_state="meet", to_state="more", condition=world.after("meet", 1)),
                GraphEdge(from_state="more", to_state=Graph.END),
            ],
        )
    )


def _loser_worked(world: World) -> Ensemble:
    """The same, where the other one had called a model and a tool."""
    return _first_counts(world, loser_has_tool=True)


TEAMS: Mapping[str, Callable[[World], Ensemble]] = {
    "flat": _flat,
    "side by side": _side_by_side,
    "phases": _phases,
    "graph": _graph,
    "fork": _fork,
    "first counts": _first_counts,
    "loser worked": _loser_worked,
}
#: Names of teams, as parameters of what runs each team dozens of times: "loser worked" has all of "first counts".
TEAM_PARAMS = [
    pytest.param(name, marks=() if name == "loser worked" else pytest.mark.heavy)
    for name in TEAMS
    if name != "first counts"
]


def count_recorded(facts: Sequence[Fact]) -> tuple[int, int, int]:
    """Recorded answers, results and verdicts."""
    kinds = [fact.kind for fact in facts]
    verdicts = [fact for fact in facts if isinstance(fact.data, StimulusRecorded) and fact.data.type == "Evaluated"]
    return kinds.count("model"), kinds.count("tool_result"), len(verdicts)


def essence_of(output: EnsembleOutput) -> list[object]:
    """What does not depend on how long anything took."""
    assert output.trace is not None
    found: list[object] = [output.raw, output.total_tool_calls, output.exit_reason]
    found += [output.metrics.total_tokens, output.metrics.total_llm_call_count]
    found += [[each.raw for each in output.task_outputs]]
    found += [sorted(output.trace.loop_traces, key=lambda each: each.path), output.trace.graph_trace]
    return found


async def write_torn(store: SqliteStore, facts: Sequence[Fact], run_id: str) -> None:
    """Write the record of a run that was interrupted behind these facts of another one."""
    owned = await store.begin(run_id)
    first, *rest = facts
    header = read_fact(
        run=run_id, kind="plan", name="run", at=first.at, data={**first.data.to_data(), "ensemble_id": run_id}
    )
    copies = [
        read_fact(run=run_id, kind=fact.kind, name=fact.name, at=fact.at, data=fact.data.to_data()) for fact in rest
    ]
    await owned.journal.append([header, *copies])
    await owned.close(RunState.INTERRUPTED)
