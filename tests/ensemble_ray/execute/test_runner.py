"""One task from its order to its result: facts, recorded effects, endings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import pytest

from ensemble_ray import (
    AgentExecutionError,
    ChatResponse,
    ExitEarlyError,
    ExitReason,
    MaxIterationsExceededError,
    RecordError,
    TaskExecutionError,
    TaskFailedEvent,
    TokenUsage,
    tool,
)
from ensemble_ray.execute.orders import RunContext
from ensemble_ray.execute.runner import cut
from ensemble_ray.facts.fact import Fact
from ensemble_ray.ports import Persistence
from ensemble_ray.process.context import current_log_context
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.testing import RecordingSink, ScriptedCall, ScriptedModel
from tests.ensemble_ray.execute.running import RUN_CONTEXT, WITH_A_TOOL, Bench, Search, call, searching, writer

# Facts.


async def test_facts_are_named_by_instance_turn_and_call() -> None:
    """The record format: no name is random, so that a run that goes on finds its effects again."""
    bench, _ = searching(Search())
    await bench.run()
    assert bench.named == WITH_A_TOOL


async def test_facts_have_the_data_of_the_record_format() -> None:
    """S-MET-13: unknown tokens are -1; times are those of the clock."""
    asked = ChatResponse(text="Look", tool_calls=(call("search", '{"input": "Ray"}'),), usage=TokenUsage(10, 2))
    bench, _ = searching(Search(), asked, "Three")
    await bench.run()
    first, intent, result, second, output = bench.journal.facts()
    digests = [first.data.to_data()["request_digest"], second.data.to_data()["request_digest"]]
    assert all(isinstance(digest, str) and len(digest) == 64 for digest in digests)
    assert digests[0] != digests[1]
    assert first.data.to_data() == {
        "request_digest": digests[0],
        "started_at": 1000.0,
        "latency_s": 0.0,
        "text": "Look",
        "tool_calls": [{"id": "id-0", "name": "search", "arguments": '{"input": "Ray"}'}],
        "input_tokens": 10,
        "output_tokens": 2,
    }
    assert intent.data.to_data() == {"tool_name": "search", "arguments": '{"input": "Ray"}', "effect": "once"}
    assert result.data.to_data() == {
        "outcome": "success",
        "text": "3 hits",
        "structured_output": {"hits": 3},
        "started_at": 1000.0,
        "duration_s": 0.0,
    }
    assert (second.data.to_data()["input_tokens"], second.data.to_data()["output_tokens"]) == (-1, -1)
    recorded = output.data.to_data()["output"]
    assert isinstance(recorded, Mapping)
    assert recorded["raw"] == "Three"


async def test_facts_are_in_the_journal_before_the_next_step() -> None:
    """What depends on an effect finds it recorded; a tool's intent is there before it runs, its result is not."""
    seen: list[list[tuple[str, str]]] = []

    @tool
    async def search(query: str) -> str:
        """Search."""
        seen.append(bench.named)
        return query

    async def answer(_: ScriptedCall) -> str:
        await asyncio.sleep(0)
        seen.append(bench.named)
        return "Three"

    model = ScriptedModel(call("search", '{"query": "Ray"}'), answer)
    bench = Bench(agents={"draft": writer(model, tools=[search])})
    await bench.run()
    assert seen == [WITH_A_TOOL[:2], WITH_A_TOOL[:3]]


async def test_requests_of_one_turn_are_numbered_in_their_order() -> None:
    """The record format: `call-N`, N from 0 in the order of the model's requests."""
    bench, _ = searching(Search(), [call("search", '{"input": "a"}'), call("search", '{"input": "b"}')], "Done")
    await bench.run()
    intents = {
        fact.name: fact.data.to_data()["arguments"] for fact in bench.journal.facts() if fact.kind == "tool_intent"
    }
    assert intents == {"draft#0/0/call-0": '{"input": "a"}', "draft#0/0/call-1": '{"input": "b"}'}


async def test_handler_task_leaves_its_effect_and_its_output() -> None:
    """S-DET-9, S-DUR-25: no model, so no tokens at all rather than unknown ones."""
    bench = Bench(handlers={"draft": lambda _: "counted"})
    result = await bench.run()
    assert bench.named == [
        ("tool_intent", "draft#0/0/handler"),
        ("tool_result", "draft#0/0/handler"),
        ("output", "draft#0"),
    ]
    assert (result.status, result.total_tokens) == ("completed", 0)
    assert result.output is not None
    assert result.output.raw == "counted"


# Endings.


async def test_events_of_a_task_are_in_order() -> None:
    """S-PAR-41: start, input, then turns with their tools, then the end."""
    bench, _ = searching(Search())
    await bench.run()
    assert [event.method for event in bench.sink.events] == [
        "on_task_start",
        "on_task_input",
        "on_llm_iteration_started",
        "on_llm_iteration_completed",
        "on_tool_call",
        "on_llm_iteration_started",
        "on_llm_iteration_completed",
        "on_task_complete",
    ]
    assert {(event.run_id, event.instance) for event in bench.sink.events} == {("run", "draft#0")}


async def test_output_is_recorded_before_its_event() -> None:
    """Who hears of a completed task finds it in the record."""
    known: list[tuple[str, str]] = []

    class Asking(RecordingSink):
        def emit(self, event: object) -> None:
            if getattr(event, "method", "") == "on_task_complete":
                known.extend(bench.named)

    bench = Bench(agents={"draft": writer(ScriptedModel("Done"))}, sink=Asking())
    await bench.run()
    assert known[-1] == ("output", "draft#0")


async def test_failed_task_is_a_result_a_fact_and_an_event() -> None:
    """S-ENG-50, S-EVT-13: the error unwrapped, with what was done until then."""
    broken = ValueError("no quota")
    bench, _ = searching(Search(), call("search", '{"input": "Ray"}'), broken)
    result = await bench.run()
    assert (result.status, str(result.error)) == ("failed", "Agent 'Writer': no quota (ValueError)")
    assert isinstance(result.error, AgentExecutionError)
    assert result.error.__cause__ is broken
    assert result.trace is not None
    assert [len(each.tool_calls) for each in result.trace.llm_interactions] == [1]
    fact = bench.journal.facts()[-1]
    assert (fact.kind, fact.name) == ("task_failed", "draft#0")
    assert (fact.data.to_data()["error_type"], fact.data.to_data()["message"]) == (
        "AgentExecutionError",
        str(result.error),
    )
    assert "no quota" in str(fact.data.to_data()["stack_trace"])
    assert isinstance(fact.data.to_data()["trace"], Mapping)
    assert [event.cause for event in bench.sink.of(TaskFailedEvent)] == [result.error]


async def test_iteration_limit_is_a_failure_with_its_counts() -> None:
    """S-ENG-43, S-ENG-46: the trace has the skipped requests."""
    bench, model = searching(Search(), *(call("search") for _ in range(5)))
    agents = {"draft": writer(model, tools=[Search()], max_iterations=1)}
    result = await Bench(agents=agents, journal=bench.journal).run()
    assert isinstance(result.error, MaxIterationsExceededError)
    assert (result.error.tool_calls_made, result.tool_call_count, len(model.calls)) == (4, 4, 4)


async def test_missing_context_fails_the_task_after_its_start() -> None:
    """S-ENG-11, S-EVT-11: no model call; started and failed are told."""
    model = ScriptedModel("never")
    bench = Bench(agents={"draft": writer(model)})
    result = await bench.run(missing_context="Find facts")
    assert isinstance(result.error, TaskExecutionError)
    assert str(result.error) == "Context task not yet completed: Find facts"
    assert (result.error.task_description, result.error.agent_role) == ("Find facts", "Writer")
    assert [event.method for event in bench.sink.events] == ["on_task_start", "on_task_failed"]
    assert model.calls == ()


class FullDisk(MemoryJournal):
    """A journal that has no room for failures."""

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:
        if any(fact.kind == "task_failed" for fact in facts):
            raise RecordError("The disk is full")
        await super().append(facts, epoch=epoch, until=until)


async def test_first_failure_is_told_when_it_cannot_be_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """S-ENG-50: what failed first is what the caller hears; the log tells the rest."""
    bench = Bench(agents={"draft": writer(ScriptedModel(ValueError("no quota")))}, journal=FullDisk("run"))
    with caplog.at_level(logging.WARNING, logger="ensemble_ray"):
        result = await bench.run()
    assert str(result.error) == "Agent 'Writer': no quota (ValueError)"
    assert "The failure of task 'draft' is not in the record: The disk is full" in caplog.messages


async def test_task_has_not_failed_when_its_record_cannot_be_read() -> None:
    """S-DUR-8: a store that cannot be reached for a moment does not make a failed task, which would never be done again."""

    class OutOfReach(MemoryJournal):
        async def lookup_recorded(self, instance: str) -> Mapping[tuple[str, str], Fact]:
            raise RecordError(f"Cannot read {instance}")

    bench = Bench(agents={"draft": writer(ScriptedModel())}, journal=OutOfReach("run"))
    result = await bench.run(epoch=1)
    assert (type(result.error), str(result.error)) == (RecordError, "Cannot read draft#0")
    assert bench.named == []


@pytest.mark.parametrize("reason", [ExitReason.USER_EXIT_EARLY, ExitReason.TIMEOUT])
async def test_early_exit_is_neither_failure_nor_output(reason: ExitReason) -> None:
    """S-ENG-59, S-DUR-30: no event; that it left is a fact, so that it is not asked to leave again."""

    @tool
    async def leave() -> str:
        """Leave."""
        raise ExitEarlyError("enough", timed_out=reason is ExitReason.TIMEOUT)

    bench = Bench(agents={"draft": writer(ScriptedModel(call("leave")), tools=[leave])})
    result = await bench.run()
    assert (result.status, result.exit_reason, result.output) == ("exited", reason, None)
    assert bench.named == [
        ("model", "draft#0/0/model"),
        ("tool_intent", "draft#0/0/call-0"),
        ("task_exited", "draft#0"),
    ]
    said = {"reason": reason.value, "call": "draft#0/0/call-0", "text": "enough"}
    assert bench.journal.facts()[-1].data.to_data() == said
    assert not bench.sink.of(TaskFailedEvent)


async def test_stopped_task_is_cancelled_with_what_it_did() -> None:
    """S-SET-27: neither a failure nor an event."""
    bench, _ = searching(Search(), call("search", '{"input": "Ray"}'), asyncio.CancelledError)
    result = await bench.run(is_stopped=True)
    assert (result.status, result.error, result.tool_call_count) == ("cancelled", None, 1)
    assert result.trace is not None
    assert len(result.trace.llm_interactions) == 1
    assert not bench.sink.of(TaskFailedEvent)
    assert bench.named == WITH_A_TOOL[:3]


async def test_cancellation_that_nobody_wanted_is_a_failure() -> None:
    """S-ENG-50: user code raised it."""
    bench = Bench(agents={"draft": writer(ScriptedModel(asyncio.CancelledError()))})
    result = await bench.run()
    assert (result.status, str(result.error)) == ("failed", "Agent 'Writer': CancelledError")
    assert isinstance(result.error.__cause__ if result.error else None, asyncio.CancelledError)


# Surroundings.


@pytest.mark.parametrize(
    ("workflow", "own"),
    [("sequential", {"task.index": "1/2", "task.description": "Do draft"}), ("parallel", {})],
)
async def test_log_fields_hold_while_the_task_runs(workflow: str, own: dict[str, str]) -> None:
    """S-PAR-16, S-ENG-20: the caller's and its own, gone afterwards."""
    seen: list[Mapping[str, str]] = []

    async def answer(_: ScriptedCall) -> str:
        await asyncio.sleep(0)
        seen.append(current_log_context())
        return "Done"

    context = RunContext(run_id="run", workflow=workflow, total_tasks=2, log_fields={"request": "7"})
    await Bench(agents={"draft": writer(ScriptedModel(answer))}, context=context).run()
    assert seen == [{"request": "7", "ensemble.id": "run", "agent.role": "Writer", **own}]
    assert current_log_context() == {}


async def test_nothing_is_built_that_nobody_wants() -> None:
    """S-EVT-1: a sink without interest is given nothing."""
    bench = Bench(agents={"draft": writer(ScriptedModel("Done"))}, sink=RecordingSink(()))
    assert (await bench.run()).status == "completed"
    assert bench.sink.events == ()


async def test_tasks_of_one_runner_do_not_mix() -> None:
    """S-PAR-18: any number at the same time; facts and outputs are each task's own."""
    both = asyncio.Barrier(2)

    async def answer(request: ScriptedCall) -> str:
        await both.wait()
        return "one" if "Do one" in request.text else "two"

    agents = {key: writer(ScriptedModel(answer)) for key in ("one", "two")}
    bench = Bench(agents=agents)
    results = await asyncio.gather(bench.run("one"), bench.run("two"))
    assert [result.output.raw for result in results if result.output] == ["one", "two"]
    assert {name for _, name in bench.named} == {"one#0/0/model", "one#0", "two#0/0/model", "two#0"}


@pytest.mark.parametrize(("text", "shown"), [("abc", "abc"), ("abcd", "abc..."), ("", "")])
def test_long_text_is_cut(text: str, shown: str) -> None:
    """S-ENG-16: only what is cut off has dots behind it."""
    assert cut(text, 3) == shown


async def test_log_tells_of_a_task_from_start_to_end(caplog: pytest.LogCaptureFixture) -> None:
    """S-ENG-16: indices are 1-based; outputs at DEBUG unless the run is verbose."""
    with caplog.at_level(logging.DEBUG, logger="ensemble_ray.execute.runner"):
        await Bench(agents={"draft": writer(ScriptedModel("Done"))}, context=RUN_CONTEXT).run()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "Task 1/2 'draft' starting: Do draft [Writer]"),
        ("DEBUG", "Task 1/2 'draft' has 0 context outputs"),
        ("INFO", "Task 1/2 'draft' completed in 0.000 s, 0 tool calls"),
        ("DEBUG", "Output: Done"),
    ]
