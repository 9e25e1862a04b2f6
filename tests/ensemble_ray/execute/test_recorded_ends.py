"""A task whose end is recorded: whoever gets it again tells of that end and does nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    AgentExecutionError,
    ExitEarlyError,
    ExitReason,
    MaxIterationsExceededError,
    TaskCompleteEvent,
    TaskFailedEvent,
    tool,
)
from ensemble_ray.execute.orders import TaskResult
from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.record.unknown_outcomes import UnknownOutcomes
from ensemble_ray.record.work import RecordedWork
from ensemble_ray.testing import ScriptedModel
from tests.ensemble_ray.execute.running import Bench, Search, call, searching, writer


@tool
def leave() -> str:
    """End the run."""
    raise ExitEarlyError("enough", timed_out=True)


def again_of(bench: Bench) -> tuple[Bench, ScriptedModel]:
    """The same record in another process; its model has no answer, its clock is later."""
    model = ScriptedModel()
    again = Bench(agents={"draft": writer(model, tools=[Search(), leave])}, known=bench.journal.facts())
    again.clock.advance(60.0)
    return again, model


async def told_again(bench: Bench) -> tuple[TaskResult, Bench]:
    """What another process tells of a task that has ended; it did nothing and recorded nothing."""
    again, model = again_of(bench)
    known = again.named
    result = await again.run(epoch=1)
    assert model.calls == ()
    assert again.named == known
    return result, again


async def test_recorded_output_is_the_result_of_the_task() -> None:
    """S-DUR-31, S-DUR-38: the process died between the record of the output and the report; times are those of then."""
    bench, _ = searching(Search())
    first = await bench.run()
    result, again = await told_again(bench)
    assert first.output is not None
    assert result.output is not None
    assert (result.status, result.epoch) == ("completed", 1)
    assert result.output.model_dump(mode="json") == first.output.model_dump(mode="json")
    assert (result.at, result.duration_s) == (first.at, first.duration_s)
    assert (result.total_tokens, result.tool_call_count) == (first.total_tokens, first.tool_call_count)
    assert [event.task_output.raw for event in again.sink.of(TaskCompleteEvent)] == ["Three"]


async def test_recorded_output_has_the_type_that_the_task_declares() -> None:
    """S-DUR-38: it is made of data; whoever gets it as context finds an object."""

    class Count(BaseModel):
        hits: int

    def bench_of(model: ScriptedModel, facts: list[Fact]) -> Bench:
        bench = Bench(agents={"draft": writer(model)}, known=facts)
        bench.tasks["draft"] = bench.tasks["draft"].replace(output_type=Count)
        return bench

    first = bench_of(ScriptedModel('{"hits": 3}'), [])
    await first.run()
    result = await bench_of(ScriptedModel(), first.journal.facts()).run(epoch=1)
    assert result.output is not None
    assert result.output.parsed_output == Count(hits=3)


async def test_recorded_failure_is_the_result_of_the_task() -> None:
    """S-DUR-31, S-DUR-39: the documented class with its text and fields; one failed event."""
    bench, _ = searching(Search(), *(call("search") for _ in range(5)))
    bench = Bench(agents={"draft": writer(bench.agents["draft"].llm, tools=[Search()], max_iterations=1)})
    first = await bench.run()
    result, again = await told_again(bench)
    assert isinstance(first.error, MaxIterationsExceededError)
    assert isinstance(result.error, MaxIterationsExceededError)
    assert (result.at, result.duration_s, result.trace) == (first.at, first.duration_s, first.trace)
    assert (result.status, str(result.error)) == ("failed", str(first.error))
    assert (result.error.tool_calls_made, result.error.agent_role) == (4, "Writer")
    assert [event.cause for event in again.sink.of(TaskFailedEvent)] == [result.error]


async def test_recorded_failure_keeps_its_causes() -> None:
    """S-DUR-39: a foreign class comes back as a stand-in of its name."""
    bench, _ = searching(Search(), KeyError("no quota"))
    await bench.run()
    result, _ = await told_again(bench)
    assert isinstance(result.error, AgentExecutionError)
    assert "no quota" in str(result.error)
    assert type(result.error.__cause__).__name__ == "KeyError"


async def test_recorded_exit_is_the_result_of_the_task() -> None:
    """S-ENG-59, S-DUR-31: the tool that asked for it is not called again; no event of an end."""
    bench = Bench(agents={"draft": writer(ScriptedModel(call("leave")), tools=[leave])})
    await bench.run()
    result, again = await told_again(bench)
    assert (result.status, result.exit_reason, result.output) == ("exited", ExitReason.TIMEOUT, None)
    assert not again.sink.of(TaskFailedEvent)
    assert not again.sink.of(TaskCompleteEvent)


async def test_call_that_asked_for_the_end_of_the_run_has_a_known_outcome() -> None:
    """S-DUR-138, S-DUR-26: the end that it asked for names it; run and record tell alike of it, and none of it is unknown."""
    bench = Bench(agents={"draft": writer(ScriptedModel(call("leave")), tools=[leave])})
    result = await bench.run()
    history, unknown = RunHistory(has_details=True), UnknownOutcomes()
    for fact in bench.journal.facts():
        history.apply(fact)
        unknown.apply(fact)
    assert not unknown.counts(lambda _: True)
    assert result.trace is not None
    for trace in (result.trace, RecordedWork(history, "draft#0").trace("exited")):
        (shown,) = trace.llm_interactions[0].tool_calls
        assert (shown.outcome, shown.result) == ("success", "The tool asked for the end of the run: enough")


@pytest.mark.parametrize("epoch", [0, 1])
async def test_record_is_asked_only_for_tasks_that_were_handed_out_before(epoch: int) -> None:
    """S-DUR-31: a task's first process has nothing to look for, which saves a query for each."""
    asked: list[str] = []

    class Asked(MemoryJournal):
        async def lookup_recorded(self, instance: str) -> Mapping[tuple[str, str], Fact]:
            asked.append(instance)
            return await super().lookup_recorded(instance)

    bench = Bench(agents={"draft": writer(ScriptedModel("Three"))}, journal=Asked("run"))
    await bench.run(epoch=epoch)
    assert asked == ["draft#0"] * epoch


async def test_task_began_when_its_first_house_began_it() -> None:
    """S-DUR-38: its duration is that of the whole, also where its first process recorded only an answer."""
    first, _ = searching(Search(), call("search", '{"input": "Ray"}'), asyncio.CancelledError)
    await first.run(is_stopped=True)
    begun = first.journal.facts()[0].data.to_data()["started_at"]
    again = Bench(agents={"draft": writer(ScriptedModel("Three"), tools=[Search()])}, known=first.journal.facts())
    again.clock.advance(60.0)
    result = await again.run(epoch=1)
    assert result.output is not None
    assert result.output.duration == timedelta(seconds=60)
    assert result.output.trace is not None
    assert result.output.trace.started_at.timestamp() == begun == 1000.0
    assert [len(each.tool_calls) for each in result.output.trace.llm_interactions] == [1, 0]
