"""Runners as effects: what is recorded of an asking, and what becomes of one that was begun before a crash."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from pydantic import BaseModel

from ensemble_ray import (
    Agent,
    AgentExecutionError,
    Effect,
    Task,
    TaskRequest,
    UnknownEffect,
    UnknownOutcomeError,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.ports import Persistence
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.work import RecordedWork
from ensemble_ray.values.ids import uuid_of
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench, WatchedJournal, named

NAME = "draft#0/0/runner"


class City(BaseModel):
    name: str


class Keeps:
    """A runner that keeps the keys it was asked under."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers) or ["done"]
        self.keys: list[str] = []

    async def run(self, request: TaskRequest) -> object:
        self.keys.append(request.idempotency_key)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def bench_of(
    runner: object, effect: Effect | None = None, *, known: Sequence[Fact] = (), **fields: object
) -> tuple[Bench, WatchedJournal]:
    """A task of an agent with that runner; `fields` of the task, and `on_unknown` and `ask` of the run."""
    journal = WatchedJournal(known)
    context = replace(RUN_CONTEXT, on_unknown=str(fields.pop("on_unknown", "tell_model")))
    ask = fields.pop("ask", None)
    agent = Agent(role="Writer", goal="Write", runner=runner, runner_effect=effect)  # type: ignore[arg-type]
    bench = Bench(agents={"draft": agent}, journal=journal, context=context, ask_unknown=ask)  # type: ignore[arg-type]
    bench.tasks["draft"] = Task(description="Draft", expected_output="Prose", **fields)  # type: ignore[arg-type]
    return bench, journal


async def begun(
    effect: Effect = "once", answers: Sequence[object] = (), facts: int = 1, **fields: object
) -> list[Fact]:
    """What a process recorded that died in the asking."""
    bench, journal = bench_of(Keeps(*answers), effect, **fields)
    await bench.run()
    return journal.facts()[:facts]


@pytest.mark.parametrize(
    ("effect", "degree"),
    [("none", Persistence.QUEUED), ("idempotent", Persistence.SYNCED), ("once", Persistence.SYNCED)],
)
async def test_intent_is_on_the_disk_when_a_runner_has_an_effect(effect: Effect, degree: Persistence) -> None:
    """S-INT-54: its answer is recorded as that of a model, its return behind it."""
    bench, journal = bench_of(Keeps(), effect)
    await bench.run()
    assert journal.degrees_of("tool_intent") == [("tool_intent", degree)]
    assert named(journal.facts()) == [
        ("tool_intent", NAME),
        ("model", "draft#0/0/model"),
        ("tool_result", NAME),
        ("output", "draft#0"),
    ]
    assert journal.facts()[0].data.to_data() == {"tool_name": "runner", "arguments": "", "effect": effect}
    assert journal.facts()[1].data.to_data()["text"] == "done"


async def test_runner_says_its_effect_itself() -> None:
    """S-INT-50: and what the agent declares outranks it."""
    runner = Keeps("a", "b")
    runner.effect = "none"  # type: ignore[attr-defined]
    said, journal = bench_of(runner)
    await said.run()
    assert journal.facts()[0].data.to_data()["effect"] == "none"
    declared, journal = bench_of(runner, "idempotent")
    await declared.run()
    assert journal.facts()[0].data.to_data()["effect"] == "idempotent"


async def test_runner_is_not_asked_when_its_answer_is_recorded() -> None:
    """S-INT-54: also where it was parsed at the second asking."""
    facts = await begun(answers=["no", '{"name": "Bern"}'], facts=6, output_type=City)
    again = Keeps("never")
    bench, _ = bench_of(again, known=facts, output_type=City)
    result = await bench.run(epoch=1)
    assert result.output is not None
    assert (result.output.parsed_output, again.keys) == (City(name="Bern"), [])


@pytest.mark.parametrize("effect", ["none", "idempotent"])
async def test_runner_is_asked_again_under_the_same_key_when_its_effect_allows_it(effect: Effect) -> None:
    """S-INT-54."""
    again = Keeps()
    bench, _ = bench_of(again, effect, known=await begun(effect))
    assert (await bench.run(epoch=1)).status == "completed"
    assert again.keys == [uuid_of(f"run/{NAME}")]


@pytest.mark.parametrize("how", ["tell_model", "fail"])
async def test_unknown_outcome_of_a_runner_fails_the_task(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """S-INT-54: one WARN line; the runner is not asked."""
    again = Keeps()
    bench, _ = bench_of(again, known=await begun(), on_unknown=how)
    error = (await bench.run(epoch=1)).error
    assert isinstance(error, UnknownOutcomeError)
    assert str(error).startswith("Task 'draft': its runner was called at ")
    assert "runner_effect='idempotent'" in str(error)
    assert error.effect == NAME
    assert again.keys == []
    assert [record.levelname for record in caplog.records if "its outcome is unknown" in record.message] == ["WARNING"]


async def test_second_asking_that_was_begun_is_unknown_too() -> None:
    """S-INT-54: the first answer is taken from the record."""
    facts = await begun(answers=["no", '{"name": "Bern"}'], facts=4, output_type=City)
    assert named(facts)[-1] == ("tool_intent", "draft#0/1/runner")
    again = Keeps()
    bench, _ = bench_of(again, known=facts, output_type=City)
    assert isinstance((await bench.run(epoch=1)).error, UnknownOutcomeError)
    assert again.keys == []


@pytest.mark.parametrize("output_type", [None, City])
async def test_answer_that_is_lost_is_told_when_somebody_says_that_it_was_done(output_type: type[City] | None) -> None:
    """S-INT-54: it is not parsed and not asked for again, now and whenever the record is read, wherever that was cut."""
    asked: list[UnknownEffect] = []

    def decide(unknown: UnknownEffect) -> str:
        asked.append(unknown)
        return "done"

    again = Keeps()
    bench, journal = bench_of(again, known=await begun(), on_unknown="ask", ask=decide, output_type=output_type)
    result = await bench.run(epoch=1)
    assert result.output is not None
    assert result.output.trace is not None
    assert "was done: that was confirmed" in result.output.raw
    assert (result.output.parsed_output, result.output.trace.metadata["outcome"]) == (None, "unknown")
    assert [(each.tool_name, each.task, each.idempotency_key) for each in asked] == [
        ("runner", "draft", uuid_of(f"run/{NAME}"))
    ]
    kinds = ["tool_intent", "decision", "model", "tool_result", "output"]
    assert [fact.kind for fact in journal.facts()] == kinds
    for count in (2, 3, 4):
        cut, _ = bench_of(again, known=journal.facts()[:count], on_unknown="ask", ask=decide, output_type=output_type)
        once_more = await cut.run(epoch=2)
        assert once_more.output is not None, kinds[:count]
        assert once_more.output.trace is not None
        assert (once_more.output.raw, once_more.output.parsed_output) == (result.output.raw, None)
        assert once_more.output.trace.metadata["outcome"] == "unknown", kinds[:count]
    assert (again.keys, len(asked)) == ([], 1)


async def test_answer_after_a_repetition_is_no_lost_one() -> None:
    """S-INT-54: an answer that a process did not live to note the return of is parsed as any other."""
    again = Keeps('{"name": "Bern"}')
    known = await begun(output_type=City)
    bench, journal = bench_of(again, known=known, on_unknown="ask", ask=lambda _: "repeat", output_type=City)
    await bench.run(epoch=1)
    kinds = ["tool_intent", "decision", "tool_intent", "model"]
    assert [fact.kind for fact in journal.facts()][:4] == kinds
    cut, _ = bench_of(again, known=journal.facts()[:4], output_type=City)
    result = await cut.run(epoch=2)
    assert result.output is not None
    assert (result.output.parsed_output, len(again.keys)) == (City(name="Bern"), 1)


async def test_runner_is_asked_again_when_somebody_says_so() -> None:
    """S-INT-54."""
    again = Keeps("better")
    bench, _ = bench_of(again, known=await begun(), on_unknown="ask", ask=lambda _: "repeat")
    result = await bench.run(epoch=1)
    assert result.output is not None
    assert (result.output.raw, again.keys) == ("better", [uuid_of(f"run/{NAME}")])


async def test_failure_of_a_runner_is_recorded_and_told_again() -> None:
    """S-INT-54: it is not asked again for that."""
    facts = await begun(answers=[ValueError("no such page")], facts=2)
    assert [(fact.kind, fact.data.to_data().get("outcome")) for fact in facts] == [
        ("tool_intent", None),
        ("tool_result", "error"),
    ]
    again = Keeps()
    bench, _ = bench_of(again, known=facts)
    error = (await bench.run(epoch=1)).error
    assert isinstance(error, AgentExecutionError)
    assert (str(error), again.keys) == ("Agent 'Writer': no such page (ValueError)", [])


@pytest.mark.parametrize(("facts", "is_unknown"), [(1, True), (3, False), (4, True), (6, False)])
async def test_trace_of_the_record_tells_of_an_asking_that_never_came_back(facts: int, is_unknown: bool) -> None:  # noqa: FBT001
    """S-INT-56: the first of two, or the second."""
    recorded = await begun(answers=["no", '{"name": "Bern"}'], facts=facts, output_type=City)
    trace = RecordedWork(RunHistory(recorded, has_details=True), "draft#0").trace("interrupted")
    assert (trace.metadata.get("outcome") == "unknown") is is_unknown
