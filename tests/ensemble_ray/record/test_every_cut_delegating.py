"""A run with delegations that died after any of its facts goes on to the same end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from ensemble_ray import (
    DelegationCompletedEvent,
    DelegationFailedEvent,
    DelegationStartedEvent,
    DelegationTrace,
    Ensemble,
    EnsembleOutput,
    InlineRuntime,
    RunState,
    TaskTrace,
    aresume,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.record.trace import fold_output, fold_trace, works_of

from .delegating_team import Counted

Kind = Literal["hierarchy", "peers"]


def _team(counted: Counted, kind: Kind) -> Ensemble:
    return counted.hierarchy() if kind == "hierarchy" else counted.peers()


async def _torn(store: SqliteStore, facts: Sequence[Fact], run_id: str) -> None:
    owned = await store.begin(run_id)
    first, *rest = facts
    header = read_fact(
        run=run_id, kind="plan", name="run", at=first.at, data={**first.data.to_data(), "ensemble_id": run_id}
    )
    copies = [
        read_fact(run=run_id, kind=fact.kind, name=fact.name, at=fact.at, data=fact.data.to_data()) for fact in rest
    ]
    await owned.journal.append([header, *copies])
    await owned.close(RunState.INTERRUPTED)


async def _incomplete_answers(store: SqliteStore, run_id: str) -> object:
    (end,) = [fact for fact in await store.facts(run_id) if fact.kind == "end"]
    return end.data.to_data().get("incomplete_answers", 0)


def _delegation(given: DelegationTrace) -> list[object]:
    """What does not depend on how long anything took, nor on the run's id."""
    inside = [] if given.worker_trace is None else _trace(given.worker_trace)
    request = {**given.request, "task_id": ""}
    response = {**given.response, "task_id": "", "duration": ""}
    found = [given.delegator_role, given.worker_role, given.depth, given.result, given.succeeded]
    return [*found, request, response, inside]


def _trace(trace: TaskTrace) -> list[object]:
    calls = [
        (call.tool_name, call.arguments, call.result, call.outcome)
        for interaction in trace.llm_interactions
        for call in interaction.tool_calls
    ]
    metrics = (trace.metrics.total_tokens, trace.metrics.tool_call_count, trace.metrics.delegation_count)
    told = [trace.agent_role, trace.task_description, trace.final_output, metrics, calls, trace.prompts]
    return [*told, [_delegation(each) for each in trace.delegations]]


def _essence(output: EnsembleOutput) -> list[object]:
    assert output.trace is not None
    totals = output.metrics
    found: list[object] = [output.raw, output.total_tool_calls, output.exit_reason, totals.total_tokens]
    found += [totals.total_llm_call_count, totals.total_delegations, output.trace.agents]
    *workers, last = [(each.agent_role, each.raw) for each in output.task_outputs]
    found += [workers[:1], sorted(workers), last]  # those that are asked in one turn end in any order
    return [*found, [_trace(each) for each in output.trace.task_traces]]


def _expected(facts: Sequence[Fact]) -> tuple[list[str], int, list[str]]:
    """What a run that has only these facts must still do: failing requests are known by what became of them."""
    models = [fact.name for fact in facts if fact.kind == "model"]
    models += [fact.name for fact in facts if fact.kind == "task_failed"]
    calls = sum(fact.kind == "tool_intent" for fact in facts)
    judged = [
        fact.name for fact in facts if fact.kind == "delegation" and fact.data.to_data().get("charged") is not None
    ]
    return models, calls, judged


@pytest.mark.parametrize("kind", [pytest.param("hierarchy", marks=pytest.mark.heavy), "peers"])
async def test_delegating_run_comes_to_the_same_end_wherever_it_was_cut(tmp_path: Path, kind: Kind) -> None:
    """S-DUR-70, S-DUR-71, S-DUR-72, S-DUR-73, S-DUR-37, S-DUR-38, S-HIER-26, S-HIER-41, S-MR-205: nothing is asked twice."""
    runtime, store, whole = InlineRuntime(home=tmp_path), SqliteStore(tmp_path), Counted()
    expected = await _team(whole, kind).arun(runtime=runtime, run_id="whole")
    facts = await store.facts("whole")

    async def go_on(cut: int) -> None:
        run_id, again = f"cut-{cut}", Counted()
        await _torn(store, facts[:cut], run_id)
        output = await aresume(run_id, _team(again, kind), runtime=runtime)
        where = f"cut after {facts[cut - 1].kind} {facts[cut - 1].name}"
        assert _essence(output) == _essence(expected), where
        assert await _incomplete_answers(store, run_id) == expected.metrics.total_incomplete_answers > 1, where
        rest, done = facts[cut:], facts[:cut]
        models, _, judged = _expected(rest)
        assert (len(again.asked), len(again.judged)) == (len(models), len(judged)), where
        # A call that only reads is made again where no result is recorded.
        lost = {f.name for f in done if f.kind == "tool_intent"} - {f.name for f in done if f.kind == "tool_result"}
        assert len(again.called) == sum(fact.kind == "tool_intent" for fact in rest) + len(lost), where

    await asyncio.gather(*(go_on(cut) for cut in range(1, len(facts))))


@pytest.mark.heavy
async def test_delegating_run_that_was_cut_twice_comes_to_the_same_end(tmp_path: Path) -> None:
    """S-DUR-70, S-DUR-30, S-DUR-38: what both lives recorded is used."""
    runtime, store, whole = InlineRuntime(home=tmp_path), SqliteStore(tmp_path), Counted()
    expected = await whole.hierarchy().arun(runtime=runtime, run_id="whole")
    facts = await store.facts("whole")
    middle = next(number for number, fact in enumerate(facts) if fact.kind == "output")
    await _torn(store, facts[:middle], "second")
    await aresume("second", Counted().hierarchy(), runtime=runtime)
    longer = await store.facts("second")

    async def go_on(cut: int) -> None:
        run_id, again = f"cut-{cut}", Counted()
        await _torn(store, longer[:cut], run_id)
        assert _essence(await aresume(run_id, again.hierarchy(), runtime=runtime)) == _essence(expected)
        models, _, judged = _expected(longer[cut:])
        assert (len(again.asked), len(again.judged)) == (len(models), len(judged))

    await asyncio.gather(*(go_on(cut) for cut in range(middle + 1, len(longer), 3)))


@pytest.mark.parametrize("kind", ["hierarchy", "peers"])
async def test_torn_record_shows_as_much_as_was_done(tmp_path: Path, kind: Kind) -> None:
    """S-DUR-74, S-TRC-43, S-MET-24: every cut folds; totals are those of the answers in it, each once."""
    whole = Counted()
    runtime, store = InlineRuntime(home=tmp_path), SqliteStore(tmp_path)
    output = await _team(whole, kind).arun(runtime=runtime, run_id="whole")
    facts = await store.facts("whole")
    key = "manager" if kind == "hierarchy" else "ask"
    for cut in range(1, len(facts) + 1):
        trace = fold_trace(facts[:cut])
        assert trace.metrics.total_llm_call_count == sum(fact.kind == "model" for fact in facts[:cut])
        assert {each.key for each in works_of(RunHistory(facts[:cut], has_details=True))} <= {key}
    end = next(number for number, fact in enumerate(facts) if fact.name == f"{key}#0" and fact.kind == "output")
    assert output.trace is not None
    for torn, live in zip(fold_trace(facts[:end]).task_traces, output.trace.task_traces, strict=True):
        told, live_told = (
            [_delegation(each.replace(worker_trace=None)) for each in trace.delegations] for trace in (torn, live)
        )
        assert told == live_told
        assert torn.metrics.delegation_count == live.metrics.delegation_count


async def test_events_of_delegations_come_in_pairs_when_a_run_goes_on(tmp_path: Path) -> None:
    """S-DUR-73, S-DEL-50: recorded ones are told again, under the same id; what their workers did is not."""
    runtime, store = InlineRuntime(home=tmp_path), SqliteStore(tmp_path)
    await Counted().hierarchy().arun(runtime=runtime, run_id="one")
    facts = await store.facts("one")
    cut = next(number for number, fact in enumerate(facts, start=1) if fact.name == "manager#0/1/model")
    await _torn(store, facts[:cut], "two")
    heard: list[tuple[str, str]] = []

    def hear(what: str, event: DelegationStartedEvent | DelegationCompletedEvent | DelegationFailedEvent) -> None:
        heard.append((what, event.worker_role))

    team = Counted().hierarchy(
        on_delegation_started=partial(hear, "start"),
        on_delegation_completed=partial(hear, "complete"),
        on_delegation_failed=partial(hear, "failed"),
    )
    await aresume("two", team, runtime=runtime)
    # Each callback is a listener of its own, with an order of its own.
    assert sorted(heard) == [
        ("complete", "Researcher"), ("complete", "Researcher"), ("complete", "Writer"),
        ("failed", "Breaker"), ("failed", "Checker"), ("failed", "Nobody"), ("failed", "Researcher"), ("failed", "Writer"),
        ("start", "Breaker"), ("start", "Researcher"), ("start", "Researcher"), ("start", "Writer"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["hierarchy", "peers"])
async def test_record_tells_what_the_run_gave(tmp_path: Path, kind: Kind) -> None:
    """S-DUR-74, S-HIER-6, S-DEL-6, S-TRC-41, S-TRC-43, S-MET-24, S-TRC-1: trace, output and totals, each once."""
    runtime, store = InlineRuntime(home=tmp_path), SqliteStore(tmp_path)
    live = await _team(Counted(), kind).arun(runtime=runtime, run_id="whole")
    facts = await store.facts("whole")
    folded = fold_output(facts)
    assert (folded.trace, folded.metrics, folded.raw) == (live.trace, live.metrics, live.raw)
    assert folded.total_tool_calls == live.total_tool_calls
    assert [each.model_dump() for each in folded.task_outputs] == [each.model_dump() for each in live.task_outputs]
    assert folded.metrics.total_tokens == 15 * sum(fact.kind == "model" for fact in facts)
    roles = ["Researcher", "Writer", "Researcher", "Manager"] if kind == "hierarchy" else ["Asker"]
    assert sorted(each.agent_role for each in folded.task_outputs) == sorted(roles)
    assert folded.trace is not None
    assert "Manager" not in {each.role for each in folded.trace.agents}
