"""A recorded run with loops, phases or a graph against today's code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from ensemble_ray import (
    Ensemble,
    GuardrailInput,
    GuardrailOutput,
    GuardrailResult,
    InlineRuntime,
    Loop,
    LoopIterationContext,
)
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.testing import ScriptedModel, replay
from tests.builders import agent, task
from tests.ensemble_ray.record.unit_teams import TEAMS, World, count_recorded, write_torn


@pytest.mark.parametrize("name", TEAMS)
def test_run_is_what_the_code_does_that_ran_it(name: str, tmp_path: Path) -> None:
    """S-DUR-121, S-DUR-55: every execution is done again with what it was given, and nobody is asked but predicates."""
    whole, again = World(), World()
    TEAMS[name](whole).run(runtime=InlineRuntime(home=tmp_path), run_id="whole")
    counts = count_recorded(run_blocking(SqliteStore(tmp_path).facts("whole")))
    found = replay("whole", TEAMS[name](again), home=tmp_path)
    assert found.is_same, str(found)
    assert found.effects == sum(counts[:2])
    assert again.done == (0, 0, counts[2])
    assert again.judged == whole.judged


@pytest.mark.heavy
@pytest.mark.parametrize("name", TEAMS)
def test_torn_run_is_compared_as_far_as_it_goes(name: str, tmp_path: Path) -> None:
    """S-DUR-121."""
    TEAMS[name](World()).run(runtime=InlineRuntime(home=tmp_path), run_id="whole")
    store = SqliteStore(tmp_path)
    facts = run_blocking(store.facts("whole"))
    for cut in range(2, len(facts), 7):
        run_blocking(write_torn(store, facts[:cut], f"cut-{cut}"))
        found = replay(f"cut-{cut}", TEAMS[name](World()), home=tmp_path)
        assert found.is_same, f"{cut}: {found}"


def _looping(*texts: str, until: Callable[[LoopIterationContext], bool], description: str = "Write") -> Ensemble:
    body = [task(description, agent(ScriptedModel(*texts)), name="writer")]
    return Ensemble(loops=[Loop(name="refine", body=body, until=until, max_iterations=3)])


def _is_done(context: LoopIterationContext) -> bool:
    return context.last_body_output.raw == "b"


def test_other_answer_of_a_predicate_is_a_difference(tmp_path: Path) -> None:
    """S-DUR-121: with the iteration that it is about, before the tasks that followed."""
    _looping("a", "b", until=_is_done).run(runtime=InlineRuntime(home=tmp_path), run_id="one")
    found = replay("one", _looping(until=lambda context: context.iteration_number == 1), home=tmp_path)
    assert found.difference is not None
    assert (found.difference.where, found.difference.what) == ("'loop:refine#0'", "the answer of the predicate")
    assert (found.difference.recorded, found.difference.current) == ("false", "true")


def test_predicate_that_raises_today_is_a_difference(tmp_path: Path) -> None:
    """S-DUR-121: one that raised then and raises the same today is none."""

    def failing(context: LoopIterationContext) -> bool:
        raise ValueError(f"no: {context.iteration_number}")

    _looping("a", "b", until=_is_done).run(runtime=InlineRuntime(home=tmp_path), run_id="one")
    found = replay("one", _looping(until=failing), home=tmp_path)
    assert found.difference is not None
    assert found.difference.current == "raised ValueError: no: 1"
    with pytest.raises(ValueError, match="no: 1"):
        _looping("a", until=failing).run(runtime=InlineRuntime(home=tmp_path), run_id="two")
    assert replay("two", _looping(until=failing), home=tmp_path).is_same


def test_task_is_named_by_its_execution(tmp_path: Path) -> None:
    """S-DUR-121: here the second iteration, of which a guardrail thinks otherwise today."""

    def judge(given: GuardrailInput | GuardrailOutput) -> GuardrailResult:
        is_fine = not isinstance(given, GuardrailOutput) or given.raw_response != "b"
        return GuardrailResult.success() if is_fine else GuardrailResult.failure("not b")

    def make(*texts: str) -> Ensemble:
        body = [task("Write", agent(ScriptedModel(*texts)), name="writer", output_guardrails=[judge])]
        return Ensemble(loops=[Loop(name="refine", body=body, max_iterations=2)])

    make("a", "c").run(runtime=InlineRuntime(home=tmp_path), run_id="one")
    assert replay("one", make(), home=tmp_path).is_same
    run_blocking(_say_b(SqliteStore(tmp_path)))
    found = replay("two", make(), home=tmp_path)
    assert found.difference is not None
    assert found.difference.where == "task 'loop:refine#1/writer#0'"


async def _say_b(store: SqliteStore) -> None:
    """Write the record of the run again, with another last answer."""
    facts = [
        replace(fact, data=replace(fact.data, text="b"))
        if isinstance(fact.data, ModelAnswered) and fact.data.text == "c"
        else fact
        for fact in await store.facts("one")
    ]
    await write_torn(store, facts[:-1], "two")
