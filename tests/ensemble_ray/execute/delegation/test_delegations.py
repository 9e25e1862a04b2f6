"""Delegations of one task, carried out in this process: instances, durations, limits, what is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from ensemble_ray import (
    AgentExecutionError,
    ChatResponse,
    DelegationCompletedEvent,
    DelegationFailedEvent,
    DelegationPolicyContext,
    DelegationPolicyResult,
    DelegationRequest,
    ExitEarlyError,
    ManagerStalledError,
    TaskStartEvent,
    TokenUsage,
    tool,
)
from ensemble_ray.errors import StaleEpochError
from ensemble_ray.execute.orders import TaskResult
from ensemble_ray.facts.effects import ToolIntended
from ensemble_ray.facts.fact import Fact
from ensemble_ray.plan.plan import HierarchyRules
from ensemble_ray.ports import Persistence
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from ensemble_ray.tools.call import BATCH_LIMIT_S
from tests.ensemble_ray.execute.delegating import ask, done_by, member, together
from tests.ensemble_ray.execute.running import Bench, call, writer
from tests.ensemble_ray.virtual_time import run_in_virtual_time

HOUR_S = 3600.0


@tool
async def look_up() -> str:
    """Look something up."""
    return "found"


def shown_texts(bench: Bench, key: str = "writer") -> list[str]:
    """What an agent was sent as tool results."""
    model = bench.agents[key].llm
    assert isinstance(model, ScriptedModel)
    return [message.content or "" for message in model.calls[-1].messages if message.role == "tool"]


async def test_work_has_an_instance_inside_the_call() -> None:
    """S-DEL-3, S-DEL-4, S-DEL-62: deeper work deeper; all of it on record, no task events but the caller's (S-HIER-7)."""
    first = member("A", ask("B"), "a", allow_delegation=True)
    second = member("B", ask("C"), "b", allow_delegation=True)
    bench = together(first, second, member("C"))
    assert (await done_by(bench, "a")).status == "completed"
    assert bench.named == [
        ("model", "a#0/0/model"),
        ("delegation", "a#0/0/call-0"),
        ("model", "a#0/0/call-0/delegate#0/0/model"),
        ("delegation", "a#0/0/call-0/delegate#0/0/call-0"),
        ("model", "a#0/0/call-0/delegate#0/0/call-0/delegate#0/0/model"),
        ("output", "a#0/0/call-0/delegate#0/0/call-0/delegate#0"),
        ("tool_result", "a#0/0/call-0/delegate#0/0/call-0"),
        ("model", "a#0/0/call-0/delegate#0/1/model"),
        ("output", "a#0/0/call-0/delegate#0"),
        ("tool_result", "a#0/0/call-0"),
        ("model", "a#0/1/model"),
        ("output", "a#0"),
    ]
    assert [event.agent_role for event in bench.sink.of(TaskStartEvent)] == ["A"]


async def test_duration_begins_with_the_request() -> None:
    """S-DEL-54, S-TRC-40: what policies take is part of it; refusals have one as well."""

    def slow(request: DelegationRequest, _context: DelegationPolicyContext) -> DelegationPolicyResult:
        bench.clock.advance(2)
        return (
            DelegationPolicyResult.reject("no") if request.task_description == "no" else DelegationPolicyResult.allow()
        )

    def work(_asked: object) -> str:
        bench.clock.advance(3)
        return "worked"

    bench = together(
        member("Writer", ask("Digger"), ask("Digger", "no"), "done", allow_delegation=True),
        member("Digger", work),
        policies=[slow],
    )
    result = await done_by(bench, "writer")
    (done,), (failed,) = bench.sink.of(DelegationCompletedEvent), bench.sink.of(DelegationFailedEvent)
    assert (done.duration.total_seconds(), failed.duration.total_seconds()) == (5, 2)
    assert result.output is not None
    assert result.output.trace is not None
    spans = [(each.started_at.timestamp(), each.completed_at.timestamp()) for each in result.output.trace.delegations]
    assert spans == [(1000, 1005), (1005, 1007)]


def test_what_a_stopped_worker_had_done_counts() -> None:
    """S-HIER-85, S-TRC-43: its trace, with the tokens that were spent before its time was up."""

    async def hang(_asked: object) -> str:
        await asyncio.Event().wait()
        return "never"

    first = ChatResponse(tool_calls=[call("look_up")], usage=TokenUsage(10, 5))
    bench = together(
        member("Manager", ask("Slow", tool="delegate_task"), "done"),
        member("Slow", first, hang, tools=[look_up]),
        rules=HierarchyRules(),
        timeout_s=90.0,
    )
    result, _ = run_in_virtual_time(done_by(bench, "manager"))
    (lost,) = result.failed_delegations
    assert (lost.agent_role, lost.metrics.input_tokens, lost.metrics.output_tokens) == ("Slow", 10, 5)
    assert result.delegated == ()


def test_peer_that_takes_too_long_is_stopped() -> None:
    """S-HIER-85: the colleague is cancelled, and its asker told; a quick one beside it is not touched."""
    ended: list[str] = []

    async def hang(_asked: object) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("hang")
        return "never"

    calls = [ask("Slow"), ask("Quick", number=1)]
    bench = together(
        member("Writer", calls, "done", allow_delegation=True), member("Slow", hang), member("Quick"), timeout_s=90.0
    )
    result, seconds = run_in_virtual_time(done_by(bench, "writer"))
    assert shown_texts(bench) == ["Error: Agent 'Slow' was stopped, since it did not finish within 90 s", "by Quick"]
    assert (result.status, ended, seconds) == ("completed", ["hang"], 90.0)
    (failed,) = bench.sink.of(DelegationFailedEvent)
    assert isinstance(failed.cause, AgentExecutionError)


def test_turn_with_delegations_may_take_longer_than_a_batch_of_tools() -> None:
    """S-HIER-85, S-TOOL-83."""

    async def work(_asked: object) -> str:
        await asyncio.sleep(HOUR_S)
        return "worked"

    calls = [ask("Digger"), ask("Digger", "more", number=1)]
    worker = writer(ScriptedModel(otherwise=work), role="Digger")
    bench = together(member("Writer", calls, "done", allow_delegation=True), worker)
    _, seconds = run_in_virtual_time(done_by(bench, "writer"))
    assert shown_texts(bench) == ["worked", "worked"]
    assert seconds == HOUR_S > BATCH_LIMIT_S


async def test_stopped_task_stops_what_it_asked_for() -> None:
    """S-SET-27: the colleague is cancelled too; the trace tells what the task was waiting for."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def hang(_asked: object) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "never"

    bench = together(member("Writer", ask("Digger"), "never", allow_delegation=True), member("Digger", hang))
    executor = bench.runner.peers
    asked = asyncio.create_task(done_by(bench, "writer"))
    await begun.wait()
    executor.stop(["writer#0"])  # type: ignore[union-attr]  a local executor
    result = await asked
    await ended.wait()
    assert result.status == "cancelled"
    assert result.trace is not None
    (attempt,) = result.trace.delegations
    assert (attempt.worker_role, attempt.succeeded) == ("Digger", False)


@pytest.mark.parametrize("most", [None, 1])
async def test_all_attempts_of_a_turn_are_told_when_their_task_is_stopped(most: int | None) -> None:
    """S-DEL-61, S-HIER-89: also several, and those that still waited for a place; who gave a result gave it."""
    begun = asyncio.Event()

    async def work(asked: ScriptedCall) -> str:
        if "quick" in (asked.messages[-1].content or ""):
            return "worked"
        begun.set()
        await asyncio.Event().wait()
        return "never"

    texts = ["quick", "hang", "hang too"]
    calls = [ask("Digger", text, number=n, tool="delegate_task") for n, text in enumerate(texts)]
    bench = together(
        member("Manager", calls, "never"), member("Digger", work), rules=HierarchyRules(), most_at_once=most
    )
    asked = asyncio.create_task(done_by(bench, "manager"))
    await begun.wait()
    while not bench.sink.of(DelegationCompletedEvent):  # noqa: ASYNC110  a sink tells nobody
        await asyncio.sleep(0)
    bench.runner.peers.stop(["manager#0"])  # type: ignore[union-attr]  a local executor
    result = await asked
    assert result.trace is not None
    attempts = [(each.task_description, each.succeeded) for each in result.trace.delegations]
    assert attempts == [("quick", True), ("hang", False), ("hang too", False)]
    assert result.trace.metrics.delegation_count == (3 if most is None else 2)
    assert [output.raw for _, output in result.delegated] == ["worked"]


async def test_worker_that_waits_for_a_place_does_not_begin_when_the_run_was_ended() -> None:
    """S-HIER-89, S-PAR-30, S-DEL-61: its attempt stands in the trace all the same."""
    asked: list[str] = []

    def leave(scripted: ScriptedCall) -> str:
        asked.append(scripted.messages[-1].content or "")
        raise ExitEarlyError

    calls = [ask("Digger", f"dig {n}", number=n, tool="delegate_task") for n in range(3)]
    bench = together(member("Manager", calls, "never"), member("Digger", leave), rules=HierarchyRules(), most_at_once=1)
    result = await done_by(bench, "manager")
    assert (result.status, len(asked)) == ("exited", 1)
    assert result.trace is not None
    assert [each.task_description for each in result.trace.delegations] == ["dig 0", "dig 1", "dig 2"]
    assert result.trace.metrics.delegation_count == 1


async def test_trace_has_the_last_turn_when_the_manager_stalled() -> None:
    """S-HIER-84, S-TRC-10: what it was told last is what it failed for."""
    turns = [ask("Nobody", text, tool="delegate_task") for text in ("a", "b")]
    bench = together(member("Manager", *turns), member("Digger"), rules=HierarchyRules(stall_turns=2))
    result = await done_by(bench, "manager")
    assert isinstance(result.error, ManagerStalledError)
    assert result.trace is not None
    assert [len(each.tool_calls) for each in result.trace.llm_interactions] == [1, 1]


async def test_work_that_is_asked_for_twice_is_done_once() -> None:
    """S-HIER-86: whoever asks for what is at work already gets its result."""
    free = asyncio.Event()

    async def work(_asked: object) -> str:
        await free.wait()
        return "worked"

    bench = together(member("Digger", work))
    both: list[asyncio.Task[TaskResult]] = [asyncio.create_task(done_by(bench, "digger")) for _ in range(2)]
    await asyncio.sleep(0)
    free.set()
    first, second = await asyncio.gather(*both)
    assert first is second
    assert first.output is not None
    assert first.output.raw == "worked"


async def test_places_are_shared_by_those_who_wait() -> None:
    """S-DEL-12, S-HIER-87: a circle of agents with one place each, asked for twice at the same time."""

    def member_of(role: str, other: str) -> object:
        def entry(asked: object) -> object:
            messages = asked.messages  # type: ignore[attr-defined]
            return "enough" if messages[-1].role == "tool" else ask(other)

        return writer(ScriptedModel(otherwise=entry), role=role, allow_delegation=True, max_concurrency=1)

    bench = together(member_of("A", "B"), member_of("B", "A"), max_depth=3)  # type: ignore[arg-type]
    results = await asyncio.wait_for(asyncio.gather(done_by(bench, "a"), done_by(bench, "b")), 60)
    assert [result.status for result in results] == ["completed", "completed"]


async def test_task_ends_when_the_intent_of_a_call_is_refused_while_another_call_waits() -> None:
    """S-DUR-3, S-DEL-12: the refused call holds no place that the delegated work needs to end."""

    class Refusing(MemoryJournal):
        async def append(
            self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED
        ) -> None:
            if any(isinstance(fact.data, ToolIntended) for fact in facts):
                raise StaleEpochError("run", facts[0].instance, 0, 10)
            await super().append(facts, epoch=epoch, until=until)

    asking = member(
        "A", [ask("B"), call("look_up", number=1)], tools=[look_up], allow_delegation=True, max_concurrency=1
    )
    other = member("B", ask("A"), "enough", allow_delegation=True, max_concurrency=1)
    bench = together(asking, other, journal=Refusing("run"), max_depth=2)
    result = await asyncio.wait_for(done_by(bench, "a"), 60)
    assert isinstance(result.error, StaleEpochError)
