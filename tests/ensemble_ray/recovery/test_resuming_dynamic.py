"""Going on with dynamic runs, and what is said of them where they have no plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import pytest

from ensemble_ray import (
    Agent,
    ChatMessage,
    ChatResponse,
    Ensemble,
    MapReduceEnsemble,
    RunState,
    Task,
    TaskExecutionError,
    ToolSpec,
    ValidationError,
    fork,
    resume,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.ports import Persistence
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.testing import replay
from tests.ensemble_ray.record.facts_of_dynamic_runs import begun, failed, pulled
from tests.ensemble_ray.record.facts_of_runs import RUN, fact


class Counting:
    """A model that counts what it is asked, and fails for some of it while it is broken."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.broken = ""

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """The last line of the task."""
        del tools
        text = (messages[-1].content or "").rpartition("## Task\n")[2].partition("\n")[0]
        self.asked.append(text)
        if self.broken and self.broken in text:
            raise ValueError("no answer")
        return ChatResponse(text=text)


def _ensemble(
    model: Counting,
    items: Sequence[str] = ("a", "b", "c"),
    *,
    chunk_size: int | None = None,
    mode: Literal["levels", "pipelined"] = "pipelined",
) -> MapReduceEnsemble:
    agent = Agent(role="Reader", goal="Read", llm=model)

    def map_task(item: str) -> Task:
        return Task(description=f"map {item}", expected_output="x", agent=agent)

    def reduce_task(group: list[Task]) -> Task:
        return Task(description="reduce", expected_output="x", agent=agent, context=group)

    return MapReduceEnsemble(
        items=items,
        map_task=map_task,
        reduce_task=reduce_task,
        chunk_size=chunk_size,
        mode=mode,
        max_parallel_tasks=1,
    )


def _fork(team: MapReduceEnsemble) -> object:
    return fork(RUN, "map-0", team, runtime="inline")


def _replay(team: MapReduceEnsemble) -> object:
    return replay(RUN, team)


def _record(*facts: Fact, state: RunState = RunState.FAILED) -> None:
    """A run that recorded these facts."""

    async def write() -> None:
        owned = await store_at(StoreAddress.of()).begin(RUN)
        await owned.journal.append(facts, until=Persistence.COMMITTED)
        await owned.close(state)

    run_blocking(write())


def test_failed_map_is_tried_again_when_its_run_is_resumed() -> None:
    """S-MR-163: what was done is not asked again (S-MR-161)."""
    model = Counting()
    model.broken = "map b"
    ensemble = _ensemble(model)
    with pytest.raises(TaskExecutionError):
        ensemble.run(runtime="inline", run_id=RUN)
    assert model.asked == ["map a", "map b"]
    model.broken = ""
    output = resume(RUN, ensemble, runtime="inline")
    assert model.asked == ["map a", "map b", "map b", "map c", "reduce"]
    assert output.raw == "reduce"
    facts = run_blocking(store_at(StoreAddress.of()).facts(RUN))
    assert {each.name for each in facts if each.kind == "output"} >= {"map-0#0", "map-1#1", "map-2#0"}


def test_definition_that_differs_is_refused() -> None:
    """S-MR-161, S-DUR-36: the path of what differs is named; so are other items (S-MR-162)."""
    model = Counting()
    model.broken = "map c"
    with pytest.raises(TaskExecutionError):
        _ensemble(model).run(runtime="inline", run_id=RUN)
    with pytest.raises(ValidationError, match=r"plan\.chunk_size"):
        resume(RUN, _ensemble(model, chunk_size=2), runtime="inline")
    with pytest.raises(ValidationError, match="items changed: item 1 is not what it was"):
        resume(RUN, _ensemble(model, items=("a", "other", "c")), runtime="inline")
    assert model.asked == ["map a", "map b", "map c"]


def test_run_all_of_whose_maps_were_left_out_is_not_resumed() -> None:
    """S-MR-163, S-MR-102: the text says what can be done."""
    _record(
        begun("collect"), pulled(1), failed("map-0#0"), fact("end", "run", 106.0, state="failed", failure="all_maps")
    )
    with pytest.raises(ValidationError, match=r"all its maps failed.*DeadLetters"):
        resume(RUN, _ensemble(Counting()), runtime="inline")


@pytest.mark.parametrize("ask", [_fork, _replay])
def test_run_without_a_plan_is_neither_forked_nor_replayed(ask: Callable[[MapReduceEnsemble], object]) -> None:
    """S-MR-163, S-MR-165: the text says what there is instead."""
    _record(begun("fail"), pulled(1), failed("map-0#0"), fact("end", "run", 106.0, state="failed", failure="first"))
    with pytest.raises(ValidationError, match=r"tasks are made while it runs.*resume"):
        ask(_ensemble(Counting()))


def test_definition_of_another_kind_is_refused() -> None:
    """S-MR-161: a run with a plan goes on with one, a run without goes on without."""
    team = Ensemble(tasks=[Task(name="a", description="A", expected_output="a", handler=lambda _: "a")])
    _record(begun("fail"), pulled(1), state=RunState.INTERRUPTED)
    with pytest.raises(
        ValidationError, match="made its tasks while it ran, and the tasks of this Ensemble have a plan"
    ):
        resume(RUN, team, runtime="inline")
    team.run(runtime="inline", run_id="planned")
    with pytest.raises(
        ValidationError, match="had a plan, and the tasks of this MapReduceEnsemble are made while it runs"
    ):
        resume("planned", _ensemble(Counting()), runtime="inline")


def test_planned_map_reduce_is_resumed_forked_and_replayed_like_any_other() -> None:
    """S-MR-165: by its definition as it was written."""
    model = Counting()
    model.broken = "reduce"
    ensemble = _ensemble(model, mode="levels")
    with pytest.raises(TaskExecutionError):
        ensemble.run(runtime="inline", run_id="first")
    model.broken = ""
    assert fork("first", "task-4", ensemble, runtime="inline", new_run_id="second").raw == "reduce"
    assert sorted(model.asked) == ["map a", "map b", "map c", "reduce", "reduce"]
    assert replay("second", ensemble).is_same
    assert resume("second", ensemble, runtime="inline").raw == "reduce"
    assert len(model.asked) == 5
