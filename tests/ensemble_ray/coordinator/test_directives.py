"""Directives of a run with its coordinator: who is told, for how long, and what is on record."""

from __future__ import annotations

from ensemble_ray.execute.orders import ResumePoint
from ensemble_ray.facts.runs import DirectiveRecorded, ModelSwitched
from ensemble_ray.values.reviews import Directive, ModelSwitch, model_for
from tests.ensemble_ray.coordinator.planned_runs import Conducting, Failure, conducting, done
from tests.ensemble_ray.schedule.plans import sequence


def told(run: Conducting) -> dict[str, tuple[str, ...]]:
    """What each task was told that was started."""
    return {order.key: order.directives for order in run.executor.started}


async def test_tasks_that_start_later_are_told_while_it_is_active() -> None:
    """S-CTL-4, S-CTL-5: in the order in which they were given, on record first; expired ones are not told any more."""
    run = await conducting(sequence("a", "b", "c"))
    assert await run.coordinator.inject(Directive(text="Soon", ttl_s=60, given_by="Ann"))
    assert await run.coordinator.inject(Directive(text="Always"))
    assert run.journal.committed[-2:] == ["directive run", "directive run"]
    await run.report(done("a"))
    run.clock.advance(60)
    await run.report(done("b"))
    assert told(run) == {"a": (), "b": ("Soon", "Always"), "c": ("Always",)}
    given = [fact.data for fact in run.journal.facts() if isinstance(fact.data, DirectiveRecorded)]
    assert given == [
        DirectiveRecorded(text="Soon", expires_at=160.0, given_by="Ann"),
        DirectiveRecorded(text="Always"),
    ]


async def test_one_that_is_given_again_is_told_once() -> None:
    """S-CTL-4: for as long as it was given last."""
    run = await conducting(sequence("a", "b"))
    await run.coordinator.inject(Directive(text="Again", ttl_s=1))
    await run.coordinator.inject(Directive(text="Again"))
    run.clock.advance(60)
    await run.report(done("a"))
    assert told(run)["b"] == ("Again",)


async def test_a_run_that_ended_takes_none() -> None:
    """S-CTL-7: nothing is recorded behind its end."""
    run = await conducting(sequence("a"))
    await run.report(done("a"))
    facts = run.fact_lines
    assert not await run.coordinator.inject(Directive(text="Late"))
    assert run.fact_lines == facts


async def test_a_run_that_goes_on_has_what_is_recorded() -> None:
    """S-CTL-6: what expired meanwhile is not told."""
    recorded = [DirectiveRecorded(text="Expired", expires_at=99.0), DirectiveRecorded(text="Always")]
    resumed: ResumePoint[str, Failure] = ResumePoint(started_at=50.0, stimuli=(), results={}, directives=recorded)
    run = await conducting(sequence("a"), resumed=resumed)
    assert told(run) == {"a": ("Always",)}


def asked(run: Conducting) -> dict[str, str | None]:
    """Which model the agent of each task asks that was started; None: its own."""
    return {order.key: model_for(order.switches, "Writer") for order in run.executor.started}


async def test_tasks_that_start_later_ask_the_model_that_was_chosen_last() -> None:
    """S-CTL-11: on record first; a choice for all takes the place of those for one agent, and null of both."""
    run = await conducting(sequence("a", "b", "c", "d", "e"))
    for number, chosen in enumerate(
        (
            ModelSwitch(model="small", given_by="Ann"),
            ModelSwitch(model="large", agent="Writer"),
            ModelSwitch(model="small", agent="Reader"),
            ModelSwitch(model=None),
        )
    ):
        assert await run.coordinator.inject(chosen)
        assert run.journal.committed[-1] == "model_switched run"
        await run.report(done("abcd"[number]))
    assert asked(run) == {"a": None, "b": "small", "c": "large", "d": "large", "e": None}
    made = [fact.data for fact in run.journal.facts() if isinstance(fact.data, ModelSwitched)]
    assert made[:2] == [ModelSwitched(model="small", given_by="Ann"), ModelSwitched(model="large", agent="Writer")]


async def test_a_run_that_goes_on_keeps_the_model_that_was_chosen() -> None:
    """S-CTL-12."""
    recorded = [ModelSwitched(model="large", agent="Writer"), ModelSwitched(model="small", agent="Reader")]
    resumed: ResumePoint[str, Failure] = ResumePoint(started_at=50.0, stimuli=(), results={}, directives=recorded)
    run = await conducting(sequence("a"), resumed=resumed)
    assert asked(run) == {"a": "large"}


async def test_a_run_that_ended_takes_no_model() -> None:
    """S-CTL-14: nothing is recorded behind its end."""
    run = await conducting(sequence("a"))
    await run.report(done("a"))
    facts = run.fact_lines
    assert not await run.coordinator.inject(ModelSwitch(model="small"))
    assert run.fact_lines == facts
