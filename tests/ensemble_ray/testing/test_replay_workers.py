"""Recorded runs that handed work on, against today's code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from ensemble_ray import (
    Agent,
    DelegationPolicyContext,
    DelegationPolicyResult,
    DelegationRequest,
    Ensemble,
    InlineRuntime,
    RunState,
    build_system_prompt,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.testing import Replay, replay
from tests.ensemble_ray.record.delegating_team import Counted

Kind = Literal["hierarchy", "peers"]
Team = Callable[[], Ensemble]


def _team(kind: Kind, counted: Counted | None = None) -> Ensemble:
    team = counted or Counted()
    return team.hierarchy() if kind == "hierarchy" else team.peers()


@pytest.fixture(params=["hierarchy", "peers"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    """Both kinds of delegation; a run of each is recorded under its name."""
    found: Kind = request.param
    _team(found).run(runtime=InlineRuntime(home=tmp_path), run_id=found)
    return found


def test_delegating_run_is_the_same_when_nothing_was_changed(kind: Kind, tmp_path: Path) -> None:
    """S-DUR-77, S-DUR-55: workers do their work again on their records; no model is asked, policies are."""
    counted = Counted()
    found = replay(kind, _team(kind, counted), home=tmp_path)
    assert found.is_same, str(found)
    assert (counted.asked, counted.called) == ([], [])
    assert len(counted.judged) == (7 if kind == "hierarchy" else 4)
    facts = run_blocking(SqliteStore(tmp_path).facts(kind))
    assert (found.tasks, found.effects) == (1, sum(fact.kind in {"model", "tool_result"} for fact in facts))


@pytest.mark.heavy
def test_unfinished_delegating_run_is_the_same_as_far_as_it_goes(kind: Kind, tmp_path: Path) -> None:
    """S-DUR-77: wherever its record ends, in a worker's or in its asker's."""
    store = SqliteStore(tmp_path)

    async def torn(facts: list[Fact], run_id: str) -> None:
        owned = await store.begin(run_id)
        copies = [read_fact(run=run_id, kind=f.kind, name=f.name, at=f.at, data=f.data.to_data()) for f in facts]
        await owned.journal.append(copies)
        await owned.close(RunState.INTERRUPTED)

    facts = run_blocking(store.facts(kind))
    for cut in range(2, len(facts), 2):
        run_blocking(torn(facts[:cut], f"cut-{cut}"))
        found = replay(f"cut-{cut}", _team(kind), home=tmp_path)
        assert found.is_same, f"cut after {facts[cut - 1].kind} {facts[cut - 1].name}: {found}"


def test_a_worker_that_was_stopped_when_it_was_done_is_a_failure_again(kind: Kind, tmp_path: Path) -> None:
    """S-DUR-77: its output is on record, and its asker was told that it had been stopped."""
    facts = run_blocking(SqliteStore(tmp_path).facts(kind))
    task = "manager" if kind == "hierarchy" else "ask"
    told = next(n for n, f in enumerate(facts) if (f.kind, f.name) == ("tool_result", f"{task}#0/0/call-0"))
    stopped = {**facts[told].data.to_data(), "outcome": "error", "text": "Error: Agent 'Researcher' was stopped"}

    async def record() -> None:
        owned = await SqliteStore(tmp_path).begin("stopped")
        changed = [(f, stopped if n == told else f.data.to_data()) for n, f in enumerate(facts[: told + 1])]
        copies = [read_fact(run="stopped", kind=f.kind, name=f.name, at=f.at, data=data) for f, data in changed]
        await owned.journal.append(copies)
        await owned.close(RunState.INTERRUPTED)

    run_blocking(record())
    found = replay("stopped", _team(kind), home=tmp_path)
    assert found.is_same, str(found)


def _difference(found: Replay) -> tuple[str, str]:
    assert found.difference is not None
    return found.difference.where, found.difference.what


def test_request_of_a_worker_that_differs_is_told_with_its_way(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-DUR-77: whoever asked for it, however deep."""

    def brief(agent: Agent) -> str:
        return build_system_prompt(agent) + ("\nBe brief." if agent.role == "Checker" else "")

    monkeypatch.setattr("ensemble_ray.execute.agent.loop.build_system_prompt", brief)
    where, what = _difference(replay(kind, _team(kind), home=tmp_path))
    task = "manager" if kind == "hierarchy" else "ask"
    assert where == f"task '{task}', turn 0, call 0 (Researcher), turn 0, call 0 (Checker), turn 0, model call"
    assert what == "message 1 (system) of the request"


def test_delegation_that_would_be_decided_otherwise_is_told(kind: Kind, tmp_path: Path) -> None:
    """S-DUR-77: a policy that says no today; the worker is not asked."""

    def refuse(request: DelegationRequest, context: DelegationPolicyContext) -> DelegationPolicyResult:
        del context
        is_it = request.task_description == "check the site"
        return DelegationPolicyResult.reject("no more") if is_it else DelegationPolicyResult.allow()

    team = _team(kind)
    found = replay(kind, team.replace(delegation_policies=[*team.delegation_policies, refuse]), home=tmp_path)
    where, what = _difference(found)
    assert what == "the delegation"
    assert where.endswith("call 0 (Researcher), turn 0, call 0")
    assert found.difference is not None
    assert "no more" in found.difference.current
    assert "checker" in found.difference.recorded


def test_result_of_a_worker_that_differs_is_told(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-DUR-77: what its asker was told is compared too."""

    def louder(_: object, text: str | None) -> str:
        return f"{text}!"

    monkeypatch.setattr("ensemble_ray.execute.agent.loop.AgentLoop._check", louder)
    where, what = _difference(replay(kind, _team(kind), home=tmp_path))
    assert what == "the output"
    assert where.endswith("(Writer), its end")
