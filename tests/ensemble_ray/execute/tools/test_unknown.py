"""Calls that were begun before a crash and have no result: what becomes of them, and who is asked."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from msgspec import structs

from ensemble_ray import (
    CalculatorTool,
    ExitEarlyError,
    IllegalStateError,
    ToolCallTrace,
    UnknownEffect,
    UnknownOutcomeError,
)
from ensemble_ray.execute.orders import RunContext, TaskResult
from ensemble_ray.execute.tools.unknown import ask_unknown
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.ports import Persistence
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.values.ids import uuid_of
from ensemble_ray.values.value import utc_of
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench, Search, WatchedJournal, call, searching, writer
from tests.ensemble_ray.record.facts_of_runs import altered

NAME = "draft#0/0/call-0"
EFFECT = UnknownEffect(
    run_id="run",
    task="draft",
    agent_role="Writer",
    tool_name="search",
    arguments='{"input": "Ray"}',
    effect=NAME,
    idempotency_key=uuid_of(f"run/{NAME}"),
    begun_at=utc_of(1000.0),
)


class Driver:
    """The process that started the run."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.asked: list[tuple[str, Mapping[str, object]]] = []

    async def ask(self, name: str, payload: Mapping[str, object]) -> object:
        self.asked.append((name, payload))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def notify(self, name: str, payload: Mapping[str, object]) -> None: ...


async def begun() -> list[Fact]:
    """What a process recorded that died while it searched."""
    bench, _ = searching(Search())
    await bench.run()
    return bench.journal.facts()[:2]


async def resumed(
    known: list[Fact],
    *,
    on_unknown: str,
    driver: Driver | None = None,
    ask: Callable[[UnknownEffect], object] | None = None,
    context: RunContext = RUN_CONTEXT,
) -> tuple[TaskResult, Bench, Search, ScriptedModel]:
    """The task in another process."""
    search, model = Search(), ScriptedModel("Three")
    bench = Bench(
        agents={"draft": writer(model, tools=[search])},
        known=known,
        context=structs.replace(context, on_unknown=on_unknown),
        driver=driver,
        ask_unknown=ask,
    )
    return await bench.run(epoch=1), bench, search, model


def shown_result(model: ScriptedModel) -> str:
    """What the model was told of its tool call."""
    (text,) = [message.content for message in model.calls[0].messages if message.role == "tool"]
    return text or ""


def call_trace(result: TaskResult) -> ToolCallTrace:
    """The only tool call of the task."""
    assert result.output is not None
    assert result.output.trace is not None
    (shown,) = result.output.trace.llm_interactions[0].tool_calls
    return shown


# Without asking.


async def test_model_is_told_when_the_outcome_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    """S-DUR-23, S-DUR-24, S-DUR-26: one WARN, no second call, outcome `unknown` in trace and record."""
    with caplog.at_level(logging.WARNING):
        result, bench, search, model = await resumed(await begun(), on_unknown="tell_model")
    assert search.asked == []
    assert "Outcome unknown" in shown_result(model)
    assert "before you call it again" in shown_result(model)
    shown = call_trace(result)
    assert (shown.outcome, shown.result, shown.started_at) == ("unknown", shown_result(model), utc_of(1000.0))
    recorded = (await bench.journal.lookup_recorded("draft#0"))[NAME, "tool_result"]
    assert (recorded.data.to_data()["outcome"], recorded.data.to_data()["text"]) == ("unknown", shown_result(model))
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "its outcome is unknown" in line


async def test_unknown_outcome_is_settled_for_good_when_another_house_takes_over() -> None:
    """S-DUR-22: what the model was told is recorded; the next process tells it the same, without a word."""
    _, bench, _, first = await resumed(await begun(), on_unknown="tell_model")
    known = [fact for fact in bench.journal.facts() if fact.kind in {"tool_intent", "tool_result"} or fact.seq == 1]
    _, _, search, second = await resumed(known, on_unknown="fail")
    assert (search.asked, shown_result(second)) == ([], shown_result(first))


async def test_text_of_an_unknown_outcome_is_whole_when_tool_output_is_cut() -> None:
    """S-DUR-24: half of it would tell the model nothing."""
    _, _, _, model = await resumed(
        await begun(), on_unknown="tell_model", context=structs.replace(RUN_CONTEXT, max_tool_output_length=9)
    )
    assert "truncated" not in shown_result(model)


async def test_task_fails_when_unknown_outcomes_shall_fail_it() -> None:
    """S-DUR-24: nothing else of the turn is begun."""
    result, bench, search, model = await resumed(await begun(), on_unknown="fail")
    assert isinstance(result.error, UnknownOutcomeError)
    assert (result.error.effect, result.error.tool_name) == (NAME, "search")
    assert uuid_of(f"run/{NAME}") in str(result.error)
    assert (search.asked, model.calls) == ([], ())
    assert bench.named[-1] == ("task_failed", "draft#0")


async def test_no_sibling_is_called_when_an_unknown_outcome_fails_the_task() -> None:
    """S-DUR-24: the second call of the turn was never begun, and is not begun for a task that fails."""
    both = Bench(
        agents={"draft": writer(ScriptedModel([call("search"), call("search", number=1)], "Done"), tools=[Search()])}
    )
    await both.run()
    result, _, search, _ = await resumed(both.journal.facts()[:2], on_unknown="fail")
    assert isinstance(result.error, UnknownOutcomeError)
    assert search.asked == []


@pytest.mark.parametrize(("recorded", "declared"), [("once", "none"), ("none", "once")])
async def test_stronger_effect_counts_when_a_tool_is_declared_anew(recorded: str, declared: str) -> None:
    """S-DUR-23: what was begun as `once` is no less so because the code changed, nor the other way round."""
    known = await begun()
    known[1] = altered(known[1], effect=recorded)
    search, model = Search(), ScriptedModel("Three")
    search.effect = declared  # type: ignore[assignment]  one of the three
    await Bench(agents={"draft": writer(model, tools=[search])}, known=known).run(epoch=1)
    assert (search.asked, shown_result(model)[:15]) == ([], "Outcome unknown")


async def test_outcome_is_unknown_when_the_tool_is_gone() -> None:
    """S-DUR-23: the call was begun all the same."""
    model = ScriptedModel("Three")
    bench = Bench(agents={"draft": writer(model, tools=[CalculatorTool()])}, known=await begun())
    await bench.run(epoch=1)
    assert "Outcome unknown" in shown_result(model)


# Asking.


async def test_call_is_made_again_under_the_same_key_when_it_is_decided_so() -> None:
    """S-DUR-24: the decision is recorded on the disk before anything is done."""
    seen: list[list[str]] = []

    class Watching(Search):
        async def do_execute(self, text: str, /):  # type: ignore[no-untyped-def]  # noqa: ANN202  as the class it extends
            seen.append([fact.kind for fact in bench.journal.facts()])
            return await super().do_execute(text)

    search, driver = Watching(), Driver("repeat")
    bench = Bench(
        agents={"draft": writer(ScriptedModel("Three"), tools=[search])},
        known=await begun(),
        context=structs.replace(RUN_CONTEXT, on_unknown="ask"),
        driver=driver,
    )
    result = await bench.run(epoch=1)
    assert (search.asked, search.keys) == (["Ray"], [EFFECT.idempotency_key])
    assert seen == [["model", "tool_intent", "decision", "tool_intent"]]
    assert call_trace(result).outcome == "success"
    ((service, payload),) = driver.asked
    assert (service, UnknownEffect.from_dict(payload)) == ("unknown_effect", EFFECT)


async def test_decision_is_used_when_it_is_recorded() -> None:
    """S-DUR-24: whoever takes over after it does not ask again."""
    decided = read_fact(run="run", kind="decision", name=NAME, at=1001.0, data={"answer": "repeat"})
    driver = Driver("fail")
    result, _, search, _ = await resumed([*await begun(), decided], on_unknown="ask", driver=driver)
    assert (result.status, search.asked, driver.asked) == ("completed", ["Ray"], [])


async def test_decision_is_asked_for_again_when_the_repeated_call_was_lost_too() -> None:
    """S-DUR-23, S-DUR-24: `repeat` was said of the first call; the second one may have been done as well."""
    model, intent = await begun()
    decided = read_fact(run="run", kind="decision", name=NAME, at=1001.0, data={"answer": "repeat"})
    driver = Driver("done")
    _, _, search, asked = await resumed([model, intent, decided, intent], on_unknown="ask", driver=driver)
    assert (search.asked, len(driver.asked)) == ([], 1)
    assert "was done" in shown_result(asked)


async def test_model_is_told_so_when_it_is_confirmed_that_it_was_done() -> None:
    """S-DUR-24, S-DUR-26."""
    result, bench, search, model = await resumed(await begun(), on_unknown="ask", driver=Driver("done"))
    assert search.asked == []
    assert "was done" in shown_result(model)
    assert call_trace(result).outcome == "unknown"
    assert (await bench.journal.lookup_recorded("draft#0"))[NAME, "decision"].data.to_data() == {"answer": "done"}


async def test_task_fails_when_it_is_decided_so() -> None:
    """S-DUR-24: the decision is on record."""
    result, bench, _, _ = await resumed(await begun(), on_unknown="ask", driver=Driver("fail"))
    assert isinstance(result.error, UnknownOutcomeError)
    assert ("decision", NAME) in bench.named


async def test_task_fails_when_the_driver_is_gone() -> None:
    """S-DUR-24: as `fail`; nothing was decided, so nothing is recorded as decided."""
    gone = Driver(IllegalStateError("the driver is gone"))
    result, bench, search, _ = await resumed(await begun(), on_unknown="ask", driver=gone)
    assert isinstance(result.error, UnknownOutcomeError)
    assert "the driver is gone" in str(result.error)
    assert search.asked == []
    assert ("decision", NAME) not in bench.named


async def test_callable_is_asked_here_when_this_process_is_the_driver() -> None:
    """S-DUR-24: with what is known of the call."""
    asked: list[UnknownEffect] = []

    def ask(effect: UnknownEffect) -> str:
        asked.append(effect)
        return "done"

    result, _, search, _ = await resumed(await begun(), on_unknown="ask", ask=ask)
    assert (result.status, search.asked, asked) == ("completed", [], [EFFECT])


async def test_decision_is_synced_before_it_is_acted_on() -> None:
    """S-DUR-24, S-DUR-3: so that it survives a loss of power."""
    journal = WatchedJournal(await begun())
    bench = Bench(
        agents={"draft": writer(ScriptedModel("Three"), tools=[Search()])},
        journal=journal,
        context=structs.replace(RUN_CONTEXT, on_unknown="ask"),
        driver=Driver("repeat"),
    )
    await bench.run(epoch=1)
    assert journal.degrees_of("decision", "tool_intent", "tool_result") == [
        ("decision", Persistence.SYNCED),
        ("tool_intent", Persistence.SYNCED),
        ("tool_result", Persistence.COMMITTED),
    ]


# In the asking process.


async def test_async_callable_is_asked() -> None:
    """S-DUR-24: callables may be async (S-CONV-16)."""

    async def ask(_: UnknownEffect) -> str:
        await asyncio.sleep(0)
        return "repeat"

    assert await ask_unknown(EFFECT, ask) == "repeat"


@pytest.mark.parametrize(("answer", "problem"), [("maybe", "got: 'maybe'"), (None, "got: None")])
async def test_wrong_answer_fails_the_task(answer: object, problem: str) -> None:
    """S-DUR-24: the error says what may be answered."""
    with pytest.raises(UnknownOutcomeError, match=problem) as failure:
        await ask_unknown(EFFECT, lambda _: answer)
    assert "'done', 'repeat' or 'fail'" in str(failure.value)


async def test_callable_that_raises_fails_the_task() -> None:
    """S-DUR-24: its error is the cause."""

    def ask(_: UnknownEffect) -> str:
        raise ValueError("no idea")

    with pytest.raises(UnknownOutcomeError, match="no idea") as failure:
        await ask_unknown(EFFECT, ask)
    assert isinstance(failure.value.__cause__, ValueError)


async def test_callable_may_end_the_run() -> None:
    """S-DUR-24: `ExitEarlyError` is not a failure."""

    def ask(_: UnknownEffect) -> str:
        raise ExitEarlyError("enough")

    with pytest.raises(ExitEarlyError):
        await ask_unknown(EFFECT, ask)


class Terminal(io.StringIO):
    """A stream with a person at it."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "answer"), [("d\n", "done"), ("REPEAT\n", "repeat"), ("what?\n\nf\n", "fail")])
async def test_person_is_asked_at_the_terminal(monkeypatch: pytest.MonkeyPatch, typed: str, answer: str) -> None:
    """S-DUR-24: until there is an answer."""
    shown = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    monkeypatch.setattr("sys.stderr", shown)
    assert await ask_unknown(EFFECT) == answer
    assert "tool 'search'" in shown.getvalue()
    assert EFFECT.idempotency_key in shown.getvalue()


async def test_terminal_is_not_steered_by_what_a_model_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-DUR-24: arguments are shown with their control characters escaped."""
    shown = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal("d\n"))
    monkeypatch.setattr("sys.stderr", shown)
    await ask_unknown(replace(EFFECT, arguments="\x1b[2Jall is well"))
    assert "\x1b" not in shown.getvalue()


@pytest.mark.parametrize(
    ("stdin", "stderr", "problem"),
    [
        (io.StringIO("d\n"), Terminal(), "no terminal"),
        (Terminal("d\n"), io.StringIO(), "no terminal"),
        (None, Terminal(), "no terminal"),
        (Terminal(""), Terminal(), "The terminal returned no answer"),
    ],
)
async def test_task_fails_when_nobody_is_at_the_terminal(
    monkeypatch: pytest.MonkeyPatch, stdin: object, stderr: object, problem: str
) -> None:
    """S-DUR-24: as `fail`; the error says why nobody was asked."""
    monkeypatch.setattr("sys.stdin", stdin)
    monkeypatch.setattr("sys.stderr", stderr)
    with pytest.raises(UnknownOutcomeError, match=problem):
        await ask_unknown(EFFECT)
