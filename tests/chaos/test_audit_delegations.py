"""The judge of delegations: it must find what is broken, and nothing where all is well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from ensemble_ray.facts.fact import Fact
from ensemble_ray.testing import ServedRequest
from tests.chaos.audit_delegations import DelegationAudit, decisions_in, judge_delegations
from tests.chaos.kills import Kill
from tests.chaos.test_audit import RUN, fact, numbered, request
from tests.chaos.world import key_of

DUG, WROTE, REFUSED = (f"manager#0/{turn}/call-{index}" for turn, index in ((0, 0), (1, 0), (0, 1)))
RULES = {
    "max_calls_per_worker": {"Digger": 1},
    "global_max_delegations": 2,
    "required_stages": [["Digger"], ["Writer"]],
}
PLAN = fact("plan", "run", 0.0, plan={"hierarchy": RULES})
KILL = Kill(victim="process", at=10.0, repeats_calls=True, when="")


def decision(name: str, at: float, role: str | None, *, charged: str | None = None) -> Fact:
    """What was decided of a call; no role: it was refused."""
    worker = None if role is None else role.lower()
    asked = {"agent_role": role or "Digger", "task_description": "t"}
    return fact("delegation", name, at, request=asked, worker=worker, charged=charged or role, refusal=None)


def work(name: str, at: float, end: str = "output") -> list[Fact]:
    """A worker's run, and what its asker was told."""
    instance = f"{name}/delegate#0"
    return [
        fact("model", f"{instance}/0/model", at),
        fact(end, instance, at + 0.1),
        fact("tool_result", name, at + 0.2, outcome="success"),
    ]


def refused(name: str, at: float) -> list[Fact]:
    """A call that was refused before any policy."""
    return [decision(name, at, None), fact("tool_result", name, at, outcome="success")]


WELL = (
    PLAN,
    decision(DUG, 9.0, "Digger"),
    *refused(REFUSED, 9.1),
    *work(DUG, 12.0),
    decision(WROTE, 13.0, "Writer"),
    *work(WROTE, 14.0),
)
ASKED = ((DUG, 8.0), (WROTE, 12.9))


def judged(
    facts: Sequence[Fact],
    *,
    asked: Sequence[tuple[str, float]] = (),
    requests: Sequence[ServedRequest] = (),
    kills: Sequence[Kill] = (KILL,),
) -> DelegationAudit:
    """What the judge says."""
    lines: list[Mapping[str, object]] = [{"policy": "Desk", "key": key_of(RUN, name), "at": at} for name, at in asked]
    return judge_delegations(RUN, numbered(*facts), requests, lines, kills)


def test_nothing_is_found_when_all_promises_were_kept() -> None:
    """S-HIER-41, S-HIER-43: within caps, stage after stage; a question that a kill cut off is asked again."""
    found = judged(WELL, asked=[*ASKED, (DUG, 8.9)], kills=[Kill(victim="p", at=8.5, repeats_calls=True, when="")])
    assert (found.violations, found.policies_asked_again, found.rules_broken) == ([], 1, 0)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        pytest.param(
            [*WELL, decision("manager#0/2/call-0", 15, "Digger"), *work("manager#0/2/call-0", 16)],
            ["'Digger' was charged 2 times, and its cap is 1", "3 delegations were approved, and the global cap is 2"],
            id="caps",
        ),
        pytest.param(
            [PLAN, decision(DUG, 9, "Digger"), decision(WROTE, 9, "Writer"), *work(WROTE, 10), *work(DUG, 12)],
            [f"'{WROTE}' was carried out by 'Writer' before 'Digger' had succeeded"],
            id="stage",
        ),
        pytest.param(
            [PLAN, decision(DUG, 9, "Digger"), *work(DUG, 10, "task_failed"), decision(WROTE, 13, "Writer"), *work(WROTE, 14)],
            [f"'{WROTE}' was carried out by 'Writer' before 'Digger' had succeeded"],
            id="a stage whose worker failed",
        ),
    ],
)  # fmt: skip
def test_a_rule_that_was_overstepped_is_found(facts: Sequence[Fact], expected: Sequence[str]) -> None:
    """S-HIER-41, S-HIER-42, S-HIER-43: counted from the record, by rules that are read from the plan."""
    found = judged(facts)
    assert (found.violations, found.rules_broken) == (expected, len(expected))


def test_a_worker_that_asks_too_early_is_found() -> None:
    """S-HIER-43: the server saw it, whatever the record says."""
    found = judged(WELL, requests=[request(f"{WROTE}/delegate#0/0/model", 11.0)])
    assert (found.rules_broken, "asked its model 1.1" in found.violations[0]) == (1, True)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        pytest.param([*WELL, fact("model", f"{REFUSED}/delegate#0/0/model", 15)], "without a decision", id="refused"),
        pytest.param([*WELL, *refused("manager#0/2/call-0", 15)[:1]], "is not on record", id="no result"),
        pytest.param([*WELL[:5], *WELL[6:]], "its worker's run no end", id="no end"),
        pytest.param([*WELL, fact("model", f"{DUG}/delegate#0/1/model", 15)], "was worked on after", id="again"),
        pytest.param(
            [*WELL, fact("tool_result", "manager#0/3/call-0", 15, outcome="success")],
            "neither a decision nor an intent",
            id="undecided",
        ),
    ],
)
def test_work_that_was_not_decided_or_is_done_again_is_found(facts: Sequence[Fact], expected: str) -> None:
    """S-SET-45: a worker works because of a decision on record, and until its result is on record."""
    found = judged(facts)
    assert any(expected in each for each in found.violations), found.violations


def test_a_worker_that_is_asked_after_its_result_is_found() -> None:
    """S-DUR-37: for the server, too."""
    found = judged(WELL, requests=[request(f"{DUG}/delegate#0/0/model", 12.5)])
    assert "0.3000 s after its delegation's result was recorded" in found.violations[-1]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        pytest.param([*ASKED, (DUG, 8.5)], "twice, and no kill between explains it", id="twice"),
        pytest.param([*ASKED, (DUG, 10.5)], "after that was decided", id="decided"),
        pytest.param([*ASKED, ("manager#0/7/call-0", 9)], "of which no decision is recorded", id="unrecorded"),
        pytest.param([*ASKED, (REFUSED, 9)], "or one was that it did not come to", id="refused before"),
        pytest.param(ASKED[:1], "no policy was asked", id="not asked"),
    ],
)
def test_a_policy_that_is_asked_wrongly_is_found(asked: Sequence[tuple[str, float]], expected: str) -> None:
    """S-DEL-10, S-DEL-41: once about each call that passed what stands before it."""
    found = judged(WELL, asked=asked)
    assert any(expected in each for each in found.violations), found.violations


def test_decisions_are_the_same_when_only_times_and_ids_differ() -> None:
    """S-HIER-26: what is compared with the undisturbed run."""
    first, later = (decisions_in(numbered(decision(DUG, at, "Digger"))) for at in (1.0, 2.0))
    assert first == later
    assert first != decisions_in(numbered(decision(DUG, 1.0, "Digger", charged="Writer")))
