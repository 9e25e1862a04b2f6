"""A manager's delegations played with at random: any rules, any order of asking, moving, succeeding and failing."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ray.plan.plan import HierarchyRules
from ensemble_ray.schedule.hierarchy import DelegationEnforcer, violations_of
from tests.ensemble_ray.schedule.invariants import check

WORKERS = ("Researcher", "Analyst", "Writer", "Editor")
#: Seeded and without a store of examples, so that a run gives the same everywhere.
SEEDED = settings(max_examples=60)


@dataclass
class Book:
    """What the specification says, kept the simple way: one list of charges, one set of successes."""

    rules: HierarchyRules
    charged: list[str] = field(default_factory=list)
    completed: set[str] = field(default_factory=set)

    def reason(self, role: str, *, is_move: bool = False) -> str | None:
        rules = self.rules
        before: list[tuple[str, ...]] = []
        for stage in rules.required_stages:
            if role in stage:
                break
            before.append(stage)
        else:
            before = []
        incomplete = [number for number, stage in enumerate(before, 1) if set(stage) - self.completed]
        count, cap = rules.global_max_delegations, rules.max_calls_per_worker.get(role, 10**6)
        if rules.allowed_workers and role not in rules.allowed_workers:
            return f"Agent '{role}' is not in the allowed_workers list"
        if count and len(self.charged) >= count and not is_move:
            return f"Global delegation cap of {count} has been reached"
        if self.charged.count(role) >= cap:
            return f"Agent '{role}' has reached its delegation cap of {cap}"
        return f"Cannot delegate to '{role}': stage {incomplete[0]} is not yet complete" if incomplete else None


ROLES = st.sampled_from(WORKERS)
#: one call of `delegate_task`: the role asked for, where a policy sends it, whether the worker succeeds
CALLS = st.tuples(ROLES, st.none() | ROLES, st.booleans())
TURNS = st.lists(st.lists(CALLS, max_size=8), max_size=6)


@st.composite
def rule_sets(draw: st.DrawFn) -> HierarchyRules:
    """Any rules over the four workers."""
    staged = draw(st.permutations(WORKERS))[: draw(st.integers(0, 4))]
    cut = draw(st.integers(0, len(staged)))
    return HierarchyRules(
        required_workers=tuple(draw(st.lists(ROLES, unique=True))),
        allowed_workers=tuple(draw(st.lists(ROLES, unique=True))),
        max_calls_per_worker=draw(st.dictionaries(ROLES, st.integers(1, 4))),
        global_max_delegations=draw(st.integers(0, 12)),
        required_stages=(tuple(staged[:cut]), tuple(staged[cut:])),
        stall_turns=draw(st.integers(0, 3)),
    )


@pytest.mark.heavy
@SEEDED
@given(rule_sets(), TURNS, st.randoms(use_true_random=False))
def test_rules_hold_exactly_when_turns_are_interleaved_at_random(
    rules: HierarchyRules, turns: list[list[tuple[str, str | None, bool]]], ends: random.Random
) -> None:
    """S-HIER-26, S-HIER-40 to S-HIER-46, S-SET-45: decided in request order, ended in any order, as the book says."""
    machine, book = DelegationEnforcer(rules, WORKERS), Book(rules)
    for turn in turns:
        running: list[tuple[str, bool]] = []
        for role, target, succeeds in turn:
            expected = book.reason(role)
            assert machine.approve(role) == expected
            if expected is not None:
                continue
            worker, moved = role, None
            if target is not None and target != role:
                moved = book.reason(target, is_move=True)
                assert machine.move(role, target) == moved
                worker = role if moved else target
            book.charged.append(worker)
            if moved is None:
                running.append((worker, succeeds))
            check(machine)
        ends.shuffle(running)
        for worker, succeeds in running:
            if succeeds:
                machine.record_success(worker, "work")
                book.completed.add(worker)
            check(machine)
        machine.turn_ended()
    assert machine.violations() == violations_of(rules, book.completed)
    charged = Counter(book.charged)
    assert all(charged[role] <= cap for role, cap in rules.max_calls_per_worker.items())
    assert not rules.global_max_delegations or charged.total() <= rules.global_max_delegations
    if machine.reminder() is not None:
        assert machine.violations()


@pytest.mark.heavy
@SEEDED
@given(rule_sets(), TURNS)
def test_same_decisions_follow_when_a_run_is_recalled(
    rules: HierarchyRules, turns: list[list[tuple[str, str | None, bool]]]
) -> None:
    """S-HIER-41, S-HIER-42: a second machine that is told what was approved and done decides the rest alike."""
    first, second = DelegationEnforcer(rules, WORKERS), DelegationEnforcer(rules, WORKERS)
    for turn in turns:
        approved = [(role, succeeds) for role, _, succeeds in turn if first.approve(role) is None]
        for role, _ in approved:
            second.reapply_recorded(role)
        for role, succeeds in approved:
            if succeeds:
                first.record_success(role, "work")
                second.record_success(role, "work")
        assert first.turn_ended() == second.turn_ended()
    assert [second.approve(role) for role in WORKERS] == [first.approve(role) for role in WORKERS]
    assert (second.hint(), second.violations()) == (first.hint(), first.violations())
    assert second.reminder() == first.reminder()
