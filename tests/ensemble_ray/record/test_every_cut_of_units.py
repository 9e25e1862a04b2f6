"""A run with loops, phases or a graph that died after any of its facts goes on to the same end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ensemble_ray import Ensemble, InlineRuntime, Loop, LoopIterationContext, aresume
from ensemble_ray.record.sqlite.store import SqliteStore

from .unit_teams import TEAM_PARAMS, TEAMS, World, count_recorded, essence_of, write_torn


@pytest.mark.heavy
@pytest.mark.parametrize("name", TEAM_PARAMS)
async def test_run_with_units_comes_to_the_same_end_wherever_it_was_cut(name: str, tmp_path: Path) -> None:
    """S-DUR-30, S-DUR-37, S-DUR-38, S-DUR-122, S-LOOP-54: no answer, effect or verdict that is recorded is asked for again."""
    runtime, store, whole, make = InlineRuntime(home=tmp_path), SqliteStore(tmp_path), World(), TEAMS[name]
    expected = await make(whole).arun(runtime=runtime, run_id="whole")
    facts = await store.facts("whole")
    counts = count_recorded(facts)
    assert whole.done == counts
    assert facts[-1].kind == "end"

    async def go_on(cut: int) -> None:
        run_id, again = f"cut-{cut}", World()
        await write_torn(store, facts[:cut], run_id)
        where = f"cut after {cut}: {facts[cut - 1].kind} {facts[cut - 1].name}"
        async with asyncio.timeout(60):
            output = await aresume(run_id, make(again), runtime=runtime)
        assert essence_of(output) == essence_of(expected), where
        kept = count_recorded(facts[:cut])
        # A tool that is `once` and was begun without a result is not called again: its outcome is unknown.
        begun = [fact.kind for fact in facts[:cut]].count("tool_intent") - kept[1]
        left = tuple(all_ - of_it for all_, of_it in zip(counts, kept, strict=True))
        assert again.done == (left[0], left[1] - begun, left[2]), where

    await asyncio.gather(*(go_on(cut) for cut in range(1, len(facts))))


async def test_run_that_died_of_what_a_predicate_raised_raises_it(tmp_path: Path) -> None:
    """S-DUR-137, S-DUR-39: its answer was recorded, and is not asked for again."""

    class BookError(Exception):
        """Of the user's."""

    def refuse(context: LoopIterationContext) -> bool:
        raise (BookError if context.iteration_number else ValueError)("no more")

    def make(world: World) -> Ensemble:
        return Ensemble(loops=[Loop(name="refine", body=[world.task("write")], until=refuse)])

    runtime, store = InlineRuntime(home=tmp_path), SqliteStore(tmp_path)
    with pytest.raises(BookError, match="no more"):
        await make(World()).arun(runtime=runtime, run_id="whole")
    facts = await store.facts("whole")
    await write_torn(store, facts[:-1], "torn")
    again = World()
    with pytest.raises(Exception, match=r"(?m)^no more$") as caught:
        await aresume("torn", make(again), runtime=runtime)
    assert type(caught.value).__name__ == "BookError"
    assert again.done == (0, 0, 0)
