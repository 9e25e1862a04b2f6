"""Decisions: made in request order, on record before anybody works, recalled after a crash."""

from __future__ import annotations

import uuid

import pytest

from ensemble_ray import (
    DelegationFailedEvent,
    DelegationPolicyContext,
    DelegationPolicyResult,
    DelegationRequest,
    DelegationStartedEvent,
    RecordError,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.plan.plan import HierarchyRules
from tests.ensemble_ray.execute.delegating import ask, done_by, member, together
from tests.ensemble_ray.execute.running import Bench, call, named


class Policy:
    """Rejects what is called bad, sends what is called other to the painter; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def evaluate(self, request: DelegationRequest, _context: DelegationPolicyContext) -> DelegationPolicyResult:
        self.asked.append(request.task_description)
        match request.task_description:
            case "bad":
                return DelegationPolicyResult.reject("too bad")
            case "other":
                return DelegationPolicyResult.modify(request.replace(agent_role="Painter"))
            case "broken":
                raise LookupError("no register")
            case _:
                return DelegationPolicyResult.allow()


TURN = [
    ask("Digger", "good"),
    ask("digger", "bad", number=1),
    ask("Digger", "other", number=2),
    ask("Nobody", "good", number=3),
    call("delegate", "{}", number=4),
    ask("Digger", "broken", number=5),
]


def team(policy: Policy, *, known: tuple[Fact, ...] = ()) -> Bench:
    """A writer that asks for all of that in one turn."""
    return together(
        member("Writer", TURN, "done", allow_delegation=True),
        member("Digger"),
        member("Painter"),
        policies=[policy],
        known=known,
    )


async def test_decisions_of_a_turn_are_on_record_before_the_first_worker_starts() -> None:
    """S-DEL-62, S-SET-45, S-DEL-21: in request order; a malformed call has none."""
    bench = team(policy := Policy())
    assert (await done_by(bench, "writer")).status == "completed"
    assert policy.asked == ["good", "bad", "other", "broken"]
    decided = [name for kind, name in bench.named if kind == "delegation"]
    assert decided == [f"writer#0/0/call-{n}" for n in (0, 1, 2, 3, 5)]
    kinds = [kind for kind, _ in bench.named]
    work = next(place for place, (_, name) in enumerate(bench.named) if "delegate#0" in name)
    assert max(place for place, kind in enumerate(kinds) if kind == "delegation") < work


async def test_recorded_decisions_are_recalled_and_no_policy_is_asked_again() -> None:
    """S-DEL-62, S-DEL-61, S-DEL-50: whatever was recorded before the crash; same texts, same ids, same attempts."""
    whole = team(Policy())
    expected = await done_by(whole, "writer")
    assert expected.output is not None
    facts = whole.journal.facts()
    undecided = [fact.kind for fact in facts].index("delegation")
    for cut in range(undecided, len(facts)):
        bench = team(policy := Policy(), known=tuple(facts[:cut]))
        result = await done_by(bench, "writer", epoch=1)
        assert result.output is not None
        assert sorted(named(bench.journal.facts())) == sorted(named(facts))
        recorded = {fact.name for fact in facts[:cut] if fact.kind == "delegation"}
        assert len(policy.asked) == sum(f"writer#0/0/call-{n}" not in recorded for n in (0, 1, 2, 5))
        for old, new in zip(expected.output.trace.delegations, result.output.trace.delegations, strict=True):  # type: ignore[union-attr]
            assert (new.result, new.worker_role, new.succeeded, new.request) == (
                old.result,
                old.worker_role,
                old.succeeded,
                old.request,
            )
            assert {**new.response, "duration": None} == {**old.response, "duration": None}


async def test_recalled_refusal_took_as_long_as_it_did() -> None:
    """S-DEL-54, S-DEL-61: the hours between a crash and a resume are none of it."""
    whole = together(asking := member("Writer", ask("Nobody"), "done", allow_delegation=True))
    await done_by(whole, "writer")
    facts = [fact for fact in whole.journal.facts() if fact.kind != "output"]
    bench = together(asking, known=facts)
    bench.clock.advance(3600)
    result = await done_by(bench, "writer", epoch=1)
    assert result.output is not None
    assert result.output.trace is not None
    (refused,) = result.output.trace.delegations
    assert refused.duration.total_seconds() == 0


async def test_recalled_attempts_use_up_the_caps() -> None:
    """S-HIER-41, S-HIER-46, S-DEL-62: of the worker that they were charged to; also those without a worker."""
    rules = HierarchyRules(max_calls_per_worker={"Digger": 1, "Painter": 1}, stall_turns=0)
    turns = [[ask(role, text, number=n, tool="delegate_task") for n, (role, text) in enumerate(calls)] for calls in (
        [("Digger", "other"), ("Digger", "bad")],
        [("Digger", "again"), ("Painter", "again")],
    )]  # fmt: skip

    def managed(*known: Fact) -> Bench:
        manager = member("Manager", *turns, "done")
        return together(manager, member("Digger"), member("Painter"), policies=[Policy()], rules=rules, known=known)

    whole = managed()
    await done_by(whole, "manager")
    facts = whole.journal.facts()
    texts = [fact.data.to_data()["text"] for fact in facts if fact.kind == "tool_result"]
    assert sorted(str(text).partition("\n")[0] for text in texts) == [
        "Delegation rejected by policy: Agent 'Digger' has reached its delegation cap of 1",
        "Delegation rejected by policy: Agent 'Painter' has reached its delegation cap of 1",
        "Delegation rejected by policy: too bad",
        "by Painter",
    ]
    for cut in range(1, len(facts)):
        bench = managed(*facts[:cut])
        result = await done_by(bench, "manager", epoch=1)
        assert sorted(named(bench.journal.facts())) == sorted(named(facts))
        assert [output.agent_role for _, output in result.delegated] == ["Painter"]


async def test_ids_of_delegations_are_the_same_whoever_decides() -> None:
    """S-DEL-50, S-DEL-31: a process that died before its decision was written changes none."""
    benches = [team(Policy()) for _ in range(2)]
    for bench in benches:
        await done_by(bench, "writer")
    first, second = ([event.delegation_id for event in bench.sink.of(DelegationStartedEvent)] for bench in benches)
    assert first == second
    assert all(uuid.UUID(each) for each in first)
    assert (
        len(
            {
                event.delegation_id
                for event in (*benches[0].sink.of(DelegationStartedEvent), *benches[0].sink.of(DelegationFailedEvent))
            }
        )
        == 5
    )


async def test_damaged_decision_is_told() -> None:
    """S-DUR-36: it is not decided anew in silence."""
    whole = team(Policy())
    await done_by(whole, "writer")
    facts = [
        fact for fact in whole.journal.facts() if fact.kind in {"model", "delegation"} and "delegate#0" not in fact.name
    ][:2]
    data = {**facts[1].data.to_data(), "request": {"agent_role": ""}}
    broken = read_fact(run=facts[1].run, kind="delegation", name=facts[1].name, at=facts[1].at, data=data)
    result = await done_by(team(Policy(), known=(facts[0], broken)), "writer", epoch=1)
    assert isinstance(result.error, RecordError)
    assert str(result.error).startswith("The record is damaged: delegation 'writer#0/0/call-0': ")


@pytest.mark.parametrize("text", ["good", "broken"])
async def test_peer_that_fails_to_ask_still_has_its_own_answer(text: str) -> None:
    """S-DEL-43, S-DEL-5: whatever the policy does, the task goes on."""
    bench = together(
        member("Writer", ask("Digger", text), "done", allow_delegation=True), member("Digger"), policies=[Policy()]
    )
    result = await done_by(bench, "writer")
    assert result.output is not None
    assert result.output.raw == "done"
