"""A task whose effects are recorded already, and a runner that was replaced by a newer one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ensemble_ray import (
    Effect,
    GuardrailOutput,
    GuardrailResult,
    StaleEpochError,
    TaskFailedEvent,
    ToolResult,
    TryAgain,
)
from ensemble_ray.execute.orders import TaskResult
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from ensemble_ray.values.ids import uuid_of
from tests.ensemble_ray.execute.running import WITH_A_TOOL, Bench, Search, call, searching, writer

# Recorded effects.


async def test_recorded_answer_is_used_and_the_model_is_not_asked() -> None:
    """A re-run pays for nothing twice: text, times and tokens are those of the record."""
    model = ScriptedModel()
    data = {
        "request_digest": "",
        "started_at": 500.0,
        "latency_s": 2.5,
        "text": "From the record",
        "tool_calls": [],
        "input_tokens": 4,
        "output_tokens": 3,
    }
    known = [read_fact(run="run", kind="model", name="draft#0/0/model", at=502.5, data=data)]
    bench = Bench(agents={"draft": writer(model)}, known=known)
    result = await bench.run(epoch=1)
    assert result.output is not None
    assert (result.output.raw, result.total_tokens, model.calls) == ("From the record", 7, ())
    interaction = result.output.trace.llm_interactions[0] if result.output.trace else None
    assert interaction is not None
    assert interaction.latency.total_seconds() == 2.5
    assert bench.named == [("model", "draft#0/0/model"), ("output", "draft#0")]


async def test_recorded_tool_result_is_used_and_the_tool_is_not_called() -> None:
    """S-DUR-22: the model is told what was recorded; no second intent is written."""
    live, _ = searching(Search())
    await live.run()
    search, model = Search(), ScriptedModel("Three again")
    known = live.journal.facts()[:3]
    bench = Bench(agents={"draft": writer(model, tools=[search])}, known=known)
    result = await bench.run(epoch=1)
    assert search.asked == []
    assert [message.content for message in model.calls[0].messages if message.role == "tool"] == ["3 hits"]
    assert bench.named == WITH_A_TOOL
    assert result.output is not None
    assert result.output.tool_call_count == 1


@pytest.mark.parametrize("effect", ["none", "idempotent"])
async def test_tool_is_called_again_when_only_its_intent_is_recorded(effect: Effect) -> None:
    """S-DUR-23: its effect allows that, and it gets the same idempotency key."""
    first = Search(effect)
    live, _ = searching(first)
    await live.run()
    again, model = Search(effect), ScriptedModel("Three")
    bench = Bench(agents={"draft": writer(model, tools=[again])}, known=live.journal.facts()[:2])
    await bench.run(epoch=1)
    assert again.asked == first.asked
    assert again.keys == first.keys == [uuid_of("run/draft#0/0/call-0")]


async def test_whole_task_is_the_same_when_all_its_effects_are_recorded() -> None:
    """Rule of the record: the same effects give the same output, trace and events."""
    live, _ = searching(Search())
    expected = await live.run()
    model, search = ScriptedModel(), Search()
    bench = Bench(agents={"draft": writer(model, tools=[search])}, known=live.journal.facts()[:-1])
    assert replace(await bench.run(epoch=1), epoch=0) == expected
    assert (model.calls, search.asked) == ((), [])
    assert [replace(fact, epoch=0) for fact in bench.journal.facts()] == live.journal.facts()
    assert [type(event) for event in bench.sink.events] == [type(event) for event in live.sink.events]


async def test_effects_of_another_instance_are_not_taken() -> None:
    """Each execution of a task has its own."""
    live, _ = searching(Search())
    await live.run()
    model = ScriptedModel("Anew")
    bench = Bench(agents={"draft": writer(model)}, known=live.journal.facts())
    result = await bench.run(instance="draft#1")
    assert len(model.calls) == 1
    assert result.instance == "draft#1"


# A runner that was replaced.


async def test_replaced_runner_stops_before_its_next_effect() -> None:
    """A newer dispatch of the instance wrote: the tool that was asked for is not called, and nothing is recorded."""
    search = Search()

    async def answer(_: ScriptedCall) -> object:
        newer = read_fact(run="run", kind="model", name="draft#0/0/model", at=1000.0, data={}, epoch=2)
        await bench.journal.append([newer], epoch=2)
        return call("search")

    bench, model = searching(search, answer, "never")
    result = await bench.run(epoch=1)
    assert result.status == "failed"
    assert isinstance(result.error, StaleEpochError)
    assert (search.asked, len(model.calls)) == ([], 1)
    assert not bench.sink.of(TaskFailedEvent)  # S-EVT-10: the newer one tells of the task's end
    assert [(fact.kind, fact.epoch) for fact in bench.journal.facts()] == [("model", 2)]


async def test_newer_runner_writes_with_its_epoch() -> None:
    """And is not disturbed by what older ones recorded."""
    known = [read_fact(run="run", kind="tool_intent", name="draft#0/0/call-0", at=1.0, data={}, epoch=1)]
    bench = Bench(agents={"draft": writer(ScriptedModel("Done"))}, known=known)
    assert (await bench.run(epoch=2)).status == "completed"
    assert [fact.epoch for fact in bench.journal.facts()] == [1, 2, 2]


async def test_tries_that_are_recorded_count_and_are_not_made_again() -> None:
    """S-TOOL-54, S-DUR-22: a task that goes on knows how often its tool has asked the model to try again."""

    class Fussy(Search):
        async def do_execute(self, text: str, /) -> ToolResult:  # type: ignore[override]  async is allowed
            self.asked.append(text)
            raise TryAgain("another one")

    asked = call("search", '{"input": "Ray"}')
    live, _ = searching(Fussy(), asked, asked, asked, "Given up")
    await live.run()
    search, model = Fussy(), ScriptedModel(asked, "Given up")
    bench = Bench(agents={"draft": writer(model, tools=[search])}, known=live.journal.facts()[:9])
    await bench.run(epoch=1)
    assert len(search.asked) == 1
    shown = [message.content or "" for message in model.calls[-1].messages if message.role == "tool"]
    assert shown[:3] == ["another one"] * 3
    assert shown[3].startswith("Tool error: TryAgain: another one")


async def test_answers_that_a_guardrail_refused_are_not_asked_for_again() -> None:
    """S-GRD-17, S-DUR-22: they are on record under the numbers of their calls."""

    def longer(output: GuardrailOutput) -> GuardrailResult:
        if output.raw_response != "Three":
            raise TryAgain("go on")
        return GuardrailResult.success()

    async def run(model: ScriptedModel, known: list[Fact], epoch: int) -> tuple[Bench, TaskResult]:
        bench = Bench(agents={"draft": writer(model)}, known=known)
        bench.tasks["draft"] = bench.tasks["draft"].replace(output_guardrails=[longer])
        return bench, await bench.run(epoch=epoch, output_guardrails=1)

    live, first = await run(ScriptedModel("One", "Two", "Three"), [], 0)
    assert [name for kind, name in live.named if kind == "model"] == [f"draft#0/{turn}/model" for turn in range(3)]
    model = ScriptedModel("Three")
    _, again = await run(model, live.journal.facts()[:2], 1)
    assert first.output is not None
    assert again.output is not None
    assert (again.output.raw, len(model.calls)) == (first.output.raw, 1)
    assert [message.content for message in model.calls[0].messages[2:]] == ["One", "go on", "Two", "go on"]
