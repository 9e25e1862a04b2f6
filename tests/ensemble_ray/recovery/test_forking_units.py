"""A new run that uses what one with loops, phases or a graph recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from ensemble_ray import Ensemble, InlineRuntime, Loop, LoopIterationContext, ValidationError, afork
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.resume.fork import ForkPlan
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.recovery.forking import offer_fork
from ensemble_ray.values.ids import task_instance
from tests.ensemble_ray.record.unit_teams import TEAM_PARAMS, TEAMS, World, count_recorded, essence_of, write_torn


@pytest.fixture
def home(tmp_path: Path) -> InlineRuntime:
    """Where all runs of a test are."""
    return InlineRuntime(home=tmp_path)


def _names(facts: list[Fact]) -> list[str]:
    """Return the names of all executions, of tasks and of what they are in."""
    instances = dict.fromkeys(task_instance(fact.instance) for fact in facts if "#" in fact.instance)
    parts = [each.split("/") for each in instances]
    paths = ("/".join(each[:length]) for each in parts for length in range(1, len(each) + 1))
    return [*dict.fromkeys(path for path in paths if "#" in path.rpartition("/")[2])]


@pytest.mark.heavy
@pytest.mark.parametrize("name", TEAM_PARAMS)
async def test_fork_comes_to_the_same_end_from_every_execution(name: str, tmp_path: Path, home: InlineRuntime) -> None:
    """S-DUR-120, S-DUR-130: nothing that is used is done again, everything else is, the named execution first."""
    store, make, whole = SqliteStore(tmp_path), TEAMS[name], World()
    expected = await make(whole).arun(runtime=home, run_id="whole")
    facts = await store.facts("whole")
    # A branch that a join had stopped is stopped again where the join's other branch is used: it does nothing then.
    counts, names = count_recorded(facts), [each for each in _names(facts) if not each.startswith("graph:race#2")]

    async def check(number: int, from_there: str) -> None:
        again, run_id = World(), f"fork-{number}"
        offer = await offer_fork("whole", from_there, make(World()), runtime=home)
        kept = [fact for fact in facts if task_instance(fact.instance) in offer.plan.instances]
        kept += [fact for fact in facts if fact.instance == "run" and fact.seq in (offer.plan.stimuli or {})]
        async with asyncio.timeout(60):
            output = await afork("whole", from_there, make(again), runtime=home, new_run_id=run_id)
        assert essence_of(output) == essence_of(expected), from_there
        assert not [each for each in offer.plan.instances if each.startswith(f"{from_there}/") or each == from_there]
        left = tuple(all_ - used for all_, used in zip(counts, count_recorded(kept), strict=True))
        assert again.done == left, from_there
        assert count_recorded(await store.facts(run_id)) == counts, from_there

    await asyncio.gather(*(check(number, each) for number, each in enumerate(names)))


async def _offered(home: InlineRuntime, make: Callable[[World], Ensemble], name: str) -> ForkPlan:
    await make(World()).arun(runtime=home, run_id="whole")
    return (await offer_fork("whole", name, make(World()), runtime=home)).plan


async def test_iterations_before_the_named_one_are_used(home: InlineRuntime) -> None:
    """S-DUR-130, S-DUR-133: and what the loop waits for; of what is told, executions stand for all that is in them."""
    plan = await _offered(home, TEAMS["flat"], "loop:refine#2")
    assert (plan.reused, plan.again) == (("first", "loop:refine#0", "loop:refine#1"), ("loop:refine#2", "last"))


async def test_execution_of_a_task_inside_an_iteration_is_named(home: InlineRuntime) -> None:
    """S-DUR-130: what came before it in its iteration is used."""
    plan = await _offered(home, TEAMS["flat"], "loop:refine#1/refine critic#0")
    assert plan.reused == ("first", "loop:refine#0", "loop:refine#1/refine writer#0")
    assert plan.again == ("loop:refine#1/refine critic#0", "loop:refine#2", "last")


async def test_name_of_a_task_means_its_first_execution(home: InlineRuntime) -> None:
    """S-DUR-130: as the name of a unit does."""
    of_task = await _offered(home, TEAMS["flat"], "refine critic")
    of_unit = (await offer_fork("whole", "loop:refine", TEAMS["flat"](World()), runtime=home)).plan
    assert of_task.reused == ("first", "loop:refine#0/refine writer#0")
    assert (of_unit.reused, of_unit.again) == (("first",), ("loop:refine#0", "loop:refine#1", "loop:refine#2", "last"))


async def test_independent_work_of_a_parallel_run_is_used(home: InlineRuntime) -> None:
    """S-DUR-131: whenever it was done, also where few tasks may run at once."""

    def make(world: World) -> Ensemble:
        return TEAMS["side by side"](world).replace(max_parallel_tasks=1)

    plan = await _offered(home, make, "loop:one#1")
    assert set(plan.reused) == {"loop:one#0", "loop:two#0", "loop:two#1", "loop:two#2"}
    assert plan.again == ("loop:one#1", "last")


async def test_branch_that_does_not_depend_on_the_step_is_used(home: InlineRuntime) -> None:
    """S-DUR-131: steps of another branch of a fork."""
    plan = await _offered(home, TEAMS["fork"], "graph:branches#1")
    steps = {each.partition("/")[0] for each in plan.reused}
    assert "graph:branches#2" in steps
    assert not steps & {"graph:branches#1"}


async def test_attempt_is_named_as_trace_shows_it(home: InlineRuntime) -> None:
    """S-DUR-130: the decision that sent the phase back stays."""
    plan = await _offered(home, TEAMS["phases"], "phase:plan#1")
    assert plan.reused == ("phase:plan#0",)


async def test_unit_that_goes_on_is_told(tmp_path: Path, home: InlineRuntime) -> None:
    """S-DUR-133: of a run that was interrupted behind an iteration, whose predicate had not answered."""
    make, store = TEAMS["flat"], SqliteStore(tmp_path)
    await make(World()).arun(runtime=home, run_id="whole")
    facts = await store.facts("whole")
    answered = next(number for number, fact in enumerate(facts) if fact.data.to_data().get("type") == "Evaluated")
    await write_torn(store, facts[:answered], "torn")
    plan = (await offer_fork("torn", "last", make(World()), runtime=home)).plan
    assert (plan.reused, plan.again) == (("first", "loop:refine#0"), ("loop:refine", "last"))


async def test_error_lists_what_there_is_when_a_name_is_unknown(home: InlineRuntime) -> None:
    """S-DUR-132."""
    await TEAMS["flat"](World()).arun(runtime=home, run_id="whole")
    with pytest.raises(ValidationError) as caught:
        await offer_fork("whole", "loop:refine#7", TEAMS["flat"](World()), runtime=home)
    text = str(caught.value)
    assert text.startswith("Run 'whole' has no task, unit or execution 'loop:refine#7'. Nearest: [loop:refine#")
    listed = ["first", "loop:refine", "last"]
    for number in range(3):
        listed += [f"loop:refine#{number}", *(f"loop:refine#{number}/refine {each}#0" for each in ("writer", "critic"))]
    assert text.endswith(f" There are: [{', '.join(listed)}]")


async def test_caps_may_be_moved(home: InlineRuntime) -> None:
    """S-DUR-134: a loop that came to its cap goes on in a fork with a larger one, and pays for nothing twice."""
    first = World()

    def make(world: World, cap: int) -> Ensemble:
        return Ensemble(loops=[Loop(name="refine", body=[world.task("write")], max_iterations=cap)])

    await make(first, 2).arun(runtime=home, run_id="whole")
    again = World()
    output = await afork("whole", "loop:refine#1", make(again, 4), runtime=home)
    assert len(again.asked) == 3
    assert len(output.get_loop_history("refine")) == 4


async def test_changed_predicate_is_refused_when_its_answers_would_be_used(home: InlineRuntime) -> None:
    """S-DUR-134: unless changes are allowed; where none is used, it may be any."""

    def make(world: World, until: Callable[[LoopIterationContext], bool]) -> Ensemble:
        return Ensemble(loops=[Loop(name="refine", body=[world.task("write")], until=until)])

    def is_third(context: LoopIterationContext) -> bool:
        return context.iteration_number == 3

    def is_second(context: LoopIterationContext) -> bool:
        return context.iteration_number == 2

    await make(World(), is_third).arun(runtime=home, run_id="whole")
    with pytest.raises(ValidationError, match=r"predicates.loop:refine.until"):
        await afork("whole", "loop:refine#1", make(World(), is_second), runtime=home)
    allowed = await afork("whole", "loop:refine#1", make(World(), is_second), runtime=home, allow_changes=True)
    anew = await afork("whole", "loop:refine#0", make(World(), is_second), runtime=home)
    assert [len(each.get_loop_history("refine")) for each in (allowed, anew)] == [2, 2]


async def test_failed_run_is_forked_where_it_failed(home: InlineRuntime) -> None:
    """S-DUR-130: what the predicate raised, and what followed from it, is not used."""
    calls: list[int] = []

    def until(context: LoopIterationContext) -> bool:
        calls.append(context.iteration_number)
        if calls == [1, 2]:
            raise ValueError("not now")
        return context.iteration_number == 3

    def make(world: World) -> Ensemble:
        return Ensemble(loops=[Loop(name="refine", body=[world.task("write")], until=until)])

    with pytest.raises(ValueError, match="not now"):
        await make(World()).arun(runtime=home, run_id="whole")
    output = await afork("whole", "loop:refine#1", make(World()), runtime=home)
    assert (calls, len(output.get_loop_history("refine"))) == ([1, 2, 2, 3], 3)


async def test_fork_of_a_fork_of_a_resumed_run(tmp_path: Path, home: InlineRuntime) -> None:
    """S-DUR-120: it is a run like others; answers that another run paid for stay marked as that (S-BUD-9)."""
    make = TEAMS["graph"]
    expected = await make(World()).arun(runtime=home, run_id="whole")
    await afork("whole", "graph:triage#2", make(World()), runtime=home, new_run_id="two")
    output = await afork("two", "graph:triage#1", make(World()), runtime=home, new_run_id="three")
    assert essence_of(output) == essence_of(expected)
    paid = [
        fact.data.is_copied
        for fact in await SqliteStore(tmp_path).facts("three")
        if isinstance(fact.data, ModelAnswered)
    ]
    assert paid == sorted(paid, reverse=True)
    assert True in paid
