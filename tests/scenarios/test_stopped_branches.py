"""A run that goes on knows what its stopped branches did, and its readers do not hear of the end that it went on after."""

from __future__ import annotations

from pathlib import Path

from ensemble_ray import (
    Agent,
    Ensemble,
    EnsembleOutput,
    Graph,
    GraphEdge,
    GraphFork,
    GraphJoin,
    InlineRuntime,
    aresume,
    tool,
)
from ensemble_ray.events.messages import Cursor, WireEvent
from ensemble_ray.record.following import RunFollower
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, answer, call, task
from tests.scenarios.teams import Forever, wait_for


@tool(effect="none")
def look() -> str:
    """Look."""
    return "seen"


def raced(slow: Forever, last: object) -> Ensemble:
    """Of two branches the first one counts; the other one has asked its model once, and is stopped when it asks again."""

    def hurry(_context: object) -> str:
        wait_for(slow.asked)
        return "first"

    looking: Agent = agent(ScriptedModel(answer("", 7, 5, calls=[call("look")]), slow), "Slow", tools=[look])
    states = {
        "begin": task("begin", name="begin", handler=lambda _: "begun"),
        "slow": task("slow", looking, name="slow"),
        "quick": task("quick", name="quick", handler=hurry, effect="none"),
        "end": task("end", agent(ScriptedModel(last), "Editor"), name="end"),  # type: ignore[arg-type]
    }
    edges: list[GraphEdge | GraphFork | GraphJoin] = [
        GraphFork(from_state="begin", to_states=["slow", "quick"]),
        GraphJoin(from_states=["slow", "quick"], to_state="end", count=1),
        GraphEdge(from_state="end", to_state=Graph.END),
    ]
    return Ensemble(graph=Graph(name="race", states=states, start="begin", edges=edges))


def told(output: EnsembleOutput) -> tuple[int, list[tuple[str, int]]]:
    """The tokens of a run, and its agents' tasks with their model calls."""
    assert output.trace is not None
    calls = [(each.agent_role, len(each.llm_interactions)) for each in output.trace.task_traces]
    return output.metrics.total_tokens, sorted(calls)


async def test_a_run_that_goes_on_has_what_a_stopped_branch_did(tmp_path: Path) -> None:
    """S-DUR-135: its trace and its metrics are those of a run that was not interrupted."""
    whole = await raced(Forever(), answer("done", 3, 2)).arun(runtime=InlineRuntime(home=tmp_path), run_id="whole")
    waiting = Forever()
    home = InlineRuntime(home=tmp_path)
    begun = raced(Forever(), waiting).start(runtime=home, run_id="parted")
    wait_for(waiting.asked)
    await begun.acancel()
    await begun.aresult()
    parted = await aresume("parted", raced(Forever(), answer("done", 3, 2)), runtime=home)
    assert told(parted) == told(whole)
    assert ("Slow", 1) in told(whole)[1]


async def follow(home: Path, run_id: str, after: Cursor | None = None) -> list[WireEvent]:
    """All messages about a run, to the end."""
    follower = RunFollower(SqliteStore(home), run_id, after=after)
    found: list[WireEvent] = []
    while not follower.is_over:
        found += await follower.read(5)
    return found


async def test_an_end_that_a_run_went_on_after_is_not_told_later(tmp_path: Path) -> None:
    """S-SRV-38: a reader who comes later has one end, the last; one who had the earlier end has what followed."""
    waiting, home = Forever(), InlineRuntime(home=tmp_path)
    begun = raced(Forever(), waiting).start(runtime=home, run_id="parted")
    wait_for(waiting.asked)
    await begun.acancel()
    await begun.aresult()
    before = await follow(tmp_path, "parted")
    await aresume("parted", raced(Forever(), "done"), runtime=home)
    after = await follow(tmp_path, "parted")
    assert (before[-1].type, before[-1].data["exit_reason"]) == ("ensemble_completed", "cancelled")
    ends = [each.data["exit_reason"] for each in after if each.type == "ensemble_completed"]
    assert ends == ["completed"]
    assert after[: len(before) - 1] == before[:-1]
    assert await follow(tmp_path, "parted", before[-2].cursor) == after[len(before) - 1 :]
