"""Calls that may have been made in a part of the record that is lost: they are never repeated silently (S-DUR-86)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from ensemble_ray import Effect, UnknownEffect, UnknownOutcomeError
from ensemble_ray.execute.orders import TaskResult
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.testing import ScriptedModel
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench, Search, call, writer

ASK = '{"input": "Ray"}'
OTHER = '{"input": "Plasma"}'


def loss(*, has_effect: object = True) -> Fact:
    """What is recorded of an accepted loss."""
    return read_fact(run="run", kind="loss", name="run", at=900.0, data={"has_effect": has_effect})


async def ran(
    *entries: object,
    known: Fact | None,
    effect: Effect = "once",
    on_unknown: str = "tell_model",
    ask: Callable[[UnknownEffect], object] | None = None,
) -> tuple[TaskResult, Search, Bench, ScriptedModel]:
    """A task of a run that goes on after a loss; nothing is on record of it."""
    search, model = Search(effect), ScriptedModel(*entries)  # type: ignore[arg-type]  entries of a script
    bench = Bench(
        agents={"draft": writer(model, tools=[search])},
        known=[known] if known else [],
        context=replace(RUN_CONTEXT, on_unknown=on_unknown),
        ask_unknown=ask,
    )
    return await bench.run(epoch=1), search, bench, model


async def test_call_is_not_made_and_the_model_is_told() -> None:
    """S-DUR-86: once; what it asks for again, knowing that, is called. Other calls are told of by themselves."""
    twice = (call("search", ASK, number=1), call("search", ASK, number=2))
    result, search, bench, model = await ran(
        call("search", ASK), twice, call("search", OTHER, number=3), call("search", OTHER, number=4), "Done",
        known=loss(),
    )  # fmt: skip
    assert result.error is None
    assert search.asked == ["Ray", "Ray", "Plasma"]
    texts = [message.content or "" for message in model.calls[-1].messages if message.role == "tool"]
    assert [text.startswith("Outcome unknown: a part of this run's record is lost") for text in texts] == [
        True, False, False, True, False,
    ]  # fmt: skip
    known = await bench.journal.lookup_recorded("draft#0")
    assert known["draft#0/0/call-0", "tool_result"].data.to_data()["outcome"] == "unknown"
    assert ("draft#0/0/call-0", "tool_intent") not in known
    assert result.output is not None
    assert result.output.trace is not None
    assert result.output.trace.llm_interactions[0].tool_calls[0].outcome == "unknown"
    # It began when its first fact did, not when the loss was accepted.
    assert result.output.trace.started_at.timestamp() == 1000.0


async def test_what_one_turn_asks_for_twice_is_asked_before_the_model_is_told() -> None:
    """S-DUR-86: neither call is made."""
    both = (call("search", ASK, number=1), call("search", ASK, number=2))
    _, search, _, _ = await ran(both, "Done", known=loss())
    assert search.asked == []


@pytest.mark.parametrize(
    ("known", "effect"),
    [(None, "once"), (loss(has_effect=False), "once"), (loss(), "none"), (loss(), "idempotent")],
)
async def test_call_is_made_where_it_cannot_have_been_or_may_be_repeated(known: Fact | None, effect: Effect) -> None:
    """S-DUR-23, S-DUR-86: nothing that changes anything was begun in what is lost, or the tool may be called twice."""
    _, search, _, _ = await ran(call("search", ASK), "Done", known=known, effect=effect)
    assert search.asked == ["Ray"]


async def test_task_that_goes_on_once_more_is_told_the_same() -> None:
    """S-DUR-22, S-DUR-86: what the model was told is on record; what it was told of is called when it is asked for again."""
    _, _, bench, _ = await ran(call("search", ASK), "Done", known=loss())
    facts = [fact for fact in bench.journal.facts() if fact.kind in {"loss", "model", "tool_result"}][:3]
    search = Search()
    agents = {"draft": writer(ScriptedModel(call("search", ASK), "Done"), tools=[search])}
    again = Bench(agents=agents, known=facts)
    assert (await again.run(epoch=2)).error is None
    assert search.asked == ["Ray"]


async def test_task_fails_where_unknown_outcomes_shall_fail_it() -> None:
    """S-DUR-24, S-DUR-86: the error says that it may have been called."""
    result, search, _, _ = await ran(call("search", ASK), known=loss(), on_unknown="fail")
    assert isinstance(result.error, UnknownOutcomeError)
    assert "may have been called in the part of the run's record that is lost" in str(result.error)
    assert search.asked == []


@pytest.mark.parametrize(("answer", "asked"), [("done", []), ("repeat", ["Ray"])])
async def test_who_decides_is_asked(answer: str, asked: list[str]) -> None:
    """S-DUR-24, S-DUR-86: told that the call is one of a lost part."""
    seen: list[UnknownEffect] = []

    def decide(effect: UnknownEffect) -> str:
        seen.append(effect)
        return answer

    result, search, _, model = await ran(call("search", ASK), "Done", known=loss(), on_unknown="ask", ask=decide)
    assert result.error is None
    (effect,) = seen
    assert (effect.is_lost, effect.tool_name, effect.arguments) == (True, "search", ASK)
    assert search.asked == asked
    (text,) = [message.content or "" for message in model.calls[-1].messages if message.role == "tool"]
    assert ("was done before a part of the run's record was lost" in text) is (answer == "done")


async def test_handler_is_not_called() -> None:
    """S-DUR-25, S-DUR-86: it is an effect too; without anybody to ask, its task fails."""
    called: list[object] = []
    bench = Bench(handlers={"draft": called.append}, known=[loss()])
    result = await bench.run(epoch=1)
    assert isinstance(result.error, UnknownOutcomeError)
    assert called == []
