"""The machine that decides a manager's delegations."""

from __future__ import annotations

import pytest

from ensemble_ray.plan.plan import HierarchyRules
from ensemble_ray.schedule.hierarchy import DelegationEnforcer, rules_text, violations_of
from tests.ensemble_ray.schedule.invariants import check

WORKERS = ("Researcher", "Analyst", "Writer", "Editor")
STAGES = (("Researcher", "Analyst"), ("Writer",), ("Editor",))


def enforcer(**rules: object) -> DelegationEnforcer:
    """Of a run with these rules and the four workers."""
    return DelegationEnforcer(HierarchyRules(**rules), WORKERS)


def succeed(machine: DelegationEnforcer, *roles: str) -> None:
    """Each is approved and succeeds."""
    for role in roles:
        assert machine.approve(role) is None
        machine.record_success(role, f"work of {role}")


def test_everything_is_approved_when_no_rule_is_set() -> None:
    """S-HIER-71, S-HIER-72: empty means all, 0 means unlimited; nothing is told either."""
    machine = enforcer()
    assert [machine.approve(role) for role in WORKERS * 30] == [None] * 120
    assert (machine.hint(), machine.reminder(), machine.violations()) == ("", None, ())
    assert rules_text(HierarchyRules()) == ""


def test_worker_is_refused_when_it_is_not_allowed() -> None:
    """S-HIER-71: and not counted (S-HIER-41)."""
    machine = enforcer(allowed_workers=("Writer",), global_max_delegations=1)
    assert machine.approve("Analyst") == "Agent 'Analyst' is not in the allowed_workers list"
    assert machine.approve("Writer") is None


def test_everybody_is_refused_when_the_global_cap_is_reached() -> None:
    """S-HIER-72, S-HIER-41: attempts count, whatever became of them."""
    machine = enforcer(global_max_delegations=2)
    assert [machine.approve("Writer"), machine.approve("Analyst")] == [None, None]
    assert machine.approve("Editor") == "Global delegation cap of 2 has been reached"


def test_worker_is_refused_when_its_own_cap_is_reached() -> None:
    """S-HIER-73: others are not."""
    machine = enforcer(max_calls_per_worker={"Writer": 1})
    assert machine.approve("Writer") is None
    assert machine.approve("Writer") == "Agent 'Writer' has reached its delegation cap of 1"
    assert machine.approve("Analyst") is None


def test_worker_is_refused_when_an_earlier_stage_is_not_complete() -> None:
    """S-HIER-74, S-HIER-42, S-HIER-43, S-HIER-44: the first incomplete stage, from 1; successes alone complete one."""
    machine = enforcer(required_stages=STAGES)
    expected = "Cannot delegate to '{}': stage {} is not yet complete"
    assert machine.approve("Editor") == expected.format("Editor", 1)
    assert [machine.approve("Researcher"), machine.approve("Analyst")] == [None, None]
    machine.record_success("Researcher", "a")
    assert machine.approve("Writer") == expected.format("Writer", 1)  # the analyst failed
    succeed(machine, "Analyst", "Researcher")  # back to an earlier stage
    assert machine.approve("Editor") == expected.format("Editor", 2)
    succeed(machine, "Writer", "Editor", "Analyst")


def test_worker_is_not_ordered_when_it_is_in_no_stage() -> None:
    """S-HIER-43: nor held up by an empty stage."""
    machine = enforcer(required_stages=((), ("Researcher",), ("Writer",)))
    assert [machine.approve("Editor"), machine.approve("Researcher")] == [None, None]


def test_second_stage_is_refused_when_asked_for_beside_its_first() -> None:
    """S-SET-45, S-HIER-26: in one turn nothing has succeeded yet."""
    machine = enforcer(required_stages=(("Researcher",), ("Writer",)))
    assert machine.approve("Researcher") is None
    assert machine.approve("Writer") == "Cannot delegate to 'Writer': stage 1 is not yet complete"


def test_first_failing_check_decides_when_several_fail() -> None:
    """S-HIER-40, S-HIER-71, S-HIER-72, S-HIER-73, S-HIER-74: in this order."""
    rules: dict[str, object] = {
        "allowed_workers": ("Analyst", "Editor"),
        "global_max_delegations": 2,
        "max_calls_per_worker": {"Editor": 1},
        "required_stages": (("Analyst",), ("Writer",), ("Editor",)),
    }
    for mend, expected in (
        ({}, "Agent 'Editor' has reached its delegation cap of 1"),
        ({"global_max_delegations": 1}, "Global delegation cap of 1 has been reached"),
        ({"allowed_workers": ("Analyst",)}, "Agent 'Editor' is not in the allowed_workers list"),
    ):
        rules |= mend
        machine = enforcer(**rules)
        machine.reapply_recorded("Editor")
        assert machine.approve("Editor") == expected
    assert enforcer(required_stages=STAGES, max_calls_per_worker={"Editor": 1}).approve("Editor") == (
        "Cannot delegate to 'Editor': stage 1 is not yet complete"
    )


def test_attempt_is_charged_elsewhere_when_a_policy_moves_it() -> None:
    """S-HIER-46: it gives back its place under the one cap and takes one under the other; the global one stays."""
    machine = enforcer(max_calls_per_worker={"Writer": 1, "Editor": 1}, global_max_delegations=3)
    assert machine.approve("Writer") is None
    assert machine.move("Writer", "Editor") is None
    assert machine.approve("Writer") is None
    assert machine.approve("Editor") == "Agent 'Editor' has reached its delegation cap of 1"
    assert machine.approve("Analyst") is None
    assert machine.move("Analyst", "Researcher") is None  # the third of three is under the global cap already
    assert machine.approve("Analyst") == "Global delegation cap of 3 has been reached"


def test_attempt_stays_charged_when_it_may_not_be_moved() -> None:
    """S-HIER-46, S-HIER-41: an approved attempt counts although a later policy, or this check, refuses it."""
    machine = enforcer(
        allowed_workers=("Writer", "Editor", "Researcher"),
        max_calls_per_worker={"Writer": 1, "Researcher": 1},
        required_stages=(("Researcher",), ("Editor",)),
    )
    assert [machine.approve("Researcher"), machine.approve("Writer")] == [None, None]
    assert machine.move("Writer", "Analyst") == "Agent 'Analyst' is not in the allowed_workers list"
    assert machine.move("Writer", "Researcher") == "Agent 'Researcher' has reached its delegation cap of 1"
    assert machine.move("Writer", "Editor") == "Cannot delegate to 'Editor': stage 1 is not yet complete"
    assert machine.approve("Writer") == "Agent 'Writer' has reached its delegation cap of 1"


def test_attempt_keeps_its_place_when_it_is_moved_to_where_it_is() -> None:
    """S-HIER-46: a policy that only spells the role otherwise changes nothing."""
    machine = enforcer(max_calls_per_worker={"Writer": 1})
    assert machine.approve("Writer") is None
    assert machine.move("Writer", "Writer") is None
    assert machine.approve("Writer") is not None


def test_move_is_a_defect_when_nothing_is_charged() -> None:
    """S-HIER-46: only approved attempts are asked about."""
    with pytest.raises(ValueError, match="No attempt is charged to 'Writer'"):
        enforcer().move("Writer", "Editor")


def test_recalled_attempt_counts_when_it_was_approved_before() -> None:
    """S-HIER-41: caps and stages go on where the record ends; nothing recorded is decided again."""
    machine = enforcer(max_calls_per_worker={"Writer": 2}, global_max_delegations=4, required_stages=STAGES)
    for _ in range(3):
        machine.reapply_recorded("Writer")  # the definition may have allowed more then
    check(machine)
    assert machine.approve("Writer") == "Agent 'Writer' has reached its delegation cap of 2"
    assert machine.approve("Analyst") is None
    assert machine.approve("Researcher") == "Global delegation cap of 4 has been reached"


def test_counters_are_fresh_when_another_run_begins() -> None:
    """S-HIER-47: under the same rules."""
    rules = HierarchyRules(max_calls_per_worker={"Writer": 1}, required_workers=("Writer",))
    for _ in range(2):
        machine = DelegationEnforcer(rules, WORKERS)
        assert machine.reminder() is not None
        succeed(machine, "Writer")
        assert machine.approve("Writer") is not None


def test_violation_is_told_when_a_required_worker_never_succeeded() -> None:
    """S-HIER-50, S-HIER-42, S-SET-24: in the order of the rules; an attempt is not enough."""
    rules = HierarchyRules(required_workers=("Writer", "Analyst", "Editor"))
    machine = DelegationEnforcer(rules, WORKERS)
    assert machine.approve("Writer") is None
    succeed(machine, "Analyst")
    expected = tuple(f"Required worker '{role}' was not delegated to during this run." for role in ("Writer", "Editor"))
    assert machine.violations() == expected == violations_of(rules, {"Analyst", "Researcher"})
    succeed(machine, "Editor", "Writer")
    assert machine.violations() == ()


@pytest.mark.parametrize("cap", [1, 3, 49])
def test_exactly_the_cap_is_approved_when_one_turn_asks_for_fifty(cap: int) -> None:
    """S-HIER-26, S-HIER-41: none of them has succeeded while all are decided; the same under the global cap."""
    for rules in ({"max_calls_per_worker": {"Writer": cap}}, {"global_max_delegations": cap}):
        machine = enforcer(**rules)
        decisions = [machine.approve("Writer") for _ in range(50)]
        assert decisions[:cap] == [None] * cap
        assert None not in decisions[cap:]


# What a model is told.


def test_rules_are_told_when_any_is_set() -> None:
    """06: for the tool's description; each rule in a sentence of its own, with its roles."""
    text = rules_text(
        HierarchyRules(
            allowed_workers=("Researcher", "Analyst", "Writer"),
            max_calls_per_worker={"Writer": 1, "Analyst": 3},
            global_max_delegations=6,
            required_stages=(("Researcher", "Analyst"), ("Writer",)),
            required_workers=("Writer",),
        )
    )
    assert text == (
        "Only these agents may be used: 'Researcher', 'Analyst', 'Writer'. 'Writer' may be used at most once. "
        "'Analyst' may be used at most 3 times. You may delegate at most 6 times in all. "
        "Agents work in stages (stage 1: 'Researcher', 'Analyst'; stage 2: 'Writer'): "
        "every agent of a stage must have succeeded before one of a later stage is used. "
        "Each of these must succeed at least once before you finish: 'Writer'."
    )
    assert rules_text(HierarchyRules(required_stages=(("Writer",),))) == ""


def test_hint_says_what_is_possible_when_something_is() -> None:
    """06: what may be asked for now, what is left, what is missing."""
    machine = enforcer(
        required_stages=STAGES,
        required_workers=("Writer",),
        max_calls_per_worker={"Analyst": 2},
        global_max_delegations=9,
    )
    succeed(machine, "Analyst")
    assert machine.hint() == (
        "You may delegate now to: 'Researcher', 'Analyst' (1 left). Delegations left in all: 8. "
        "Still required: 'Writer'. Stage 1 is not complete: 'Researcher' must succeed before later stages."
    )
    succeed(machine, "Researcher", "Writer")
    assert machine.hint() == (
        "You may delegate now to: 'Researcher', 'Analyst' (1 left), 'Writer', 'Editor'. Delegations left in all: 6."
    )


def test_hint_says_to_finish_when_nothing_is_possible() -> None:
    """06: a cap that is used up (S-HIER-72) leaves nothing else."""
    machine = enforcer(global_max_delegations=1, required_workers=("Writer",))
    succeed(machine, "Analyst")
    assert machine.hint() == (
        "Nothing can be delegated right now: work with the results that you have, and with those still to come."
    )


def test_notice_is_given_when_the_same_was_done_already() -> None:
    """S-HIER-83: same worker, same words, white space apart; in an earlier turn, as who is first in one is chance."""
    machine = enforcer()
    assert machine.approve("Writer") is None
    assert machine.check_repetition("Writer", "Write it") is None
    machine.record_success("Writer", " Write\n it ")
    assert machine.check_repetition("Writer", "Write it") is None
    machine.turn_ended()
    once = machine.check_repetition("Writer", "Write  it")
    assert once is not None
    assert "'Writer'" in once
    assert "completed it once" in once
    machine.record_success("Writer", "Write it")
    machine.turn_ended()
    assert "completed it 2 times" in (machine.check_repetition("Writer", "Write it") or "")
    assert machine.check_repetition("Writer", "write it") is None
    assert machine.check_repetition("Editor", "Write it") is None


# A manager that wants to finish.


def test_manager_is_reminded_once_when_a_required_worker_is_missing() -> None:
    """`enforce_required`, S-HIER-50: what is missing, what has to come before it, and that the answer comes after."""
    machine = enforcer(required_workers=("Editor", "Analyst"), required_stages=STAGES)
    succeed(machine, "Analyst")
    assert machine.reminder() == (
        "You cannot finish yet: required, but not delegated to with success so far: 'Editor'. "
        "Stage 1 is not complete: 'Researcher' must succeed before later stages. "
        "Stage 2 is not complete: 'Writer' must succeed before later stages. "
        "Delegate to each of them with delegate_task now, and give your final answer after their results."
    )
    assert machine.reminder() is None
    assert len(machine.violations()) == 1


def test_manager_is_not_reminded_when_nothing_is_missing_or_the_run_is_to_fail() -> None:
    """`enforce_required`: `fail` gives no second chance."""
    done = enforcer(required_workers=("Writer",))
    succeed(done, "Writer")
    assert done.reminder() is None
    assert enforcer(required_workers=("Writer",), enforce_required="fail").reminder() is None


@pytest.mark.parametrize(
    "rules",
    [
        {"max_calls_per_worker": {"Writer": 1}},  # used up by a failure
        {"global_max_delegations": 1},
        {"global_max_delegations": 2, "required_stages": (("Analyst",), ("Writer",))},  # one place for two
        {"max_calls_per_worker": {"Researcher": 1}, "required_stages": (("Researcher",), ("Writer",))},
        {"allowed_workers": ("Writer",), "required_stages": (("Analyst",), ("Writer",))},
    ],
)
def test_manager_is_not_reminded_when_what_is_missing_cannot_be_done(rules: dict[str, object]) -> None:
    """`enforce_required`, S-HIER-41: caps that are used up, by the worker or by those before it; nothing is asked in vain."""
    machine = enforcer(required_workers=("Writer",), **rules)
    machine.reapply_recorded("Researcher" if "required_stages" in rules else "Writer")
    assert machine.reminder() is None
    assert machine.violations()


def test_only_what_can_be_done_is_asked_for_when_something_else_cannot() -> None:
    """`enforce_required`: a reminder that could not be spent is kept for later."""
    machine = enforcer(required_workers=("Writer", "Editor"), max_calls_per_worker={"Writer": 1})
    machine.reapply_recorded("Writer")
    expected = machine.reminder()
    assert expected is not None
    assert "'Editor'" in expected
    assert "'Writer'" not in expected


# A manager that does not come on.


def test_manager_is_ended_when_turns_bring_nothing_new() -> None:
    """06: refusals, failures and repetitions are no progress; one new success begins the count again."""
    machine = enforcer(stall_turns=3)
    succeed(machine, "Writer")
    assert not machine.turn_ended()
    assert [machine.turn_ended(), machine.turn_ended()] == [False, False]
    machine.record_success("Writer", "something else")
    machine.record_success("Writer", "something  else")
    assert [machine.turn_ended() for _ in range(3)] == [False] * 3
    machine.record_success("Writer", "something else")
    assert machine.turn_ended()
    assert machine.turn_ended()


def test_manager_is_never_ended_for_idling_when_that_is_off() -> None:
    """06: 0 turns."""
    machine = enforcer(stall_turns=0)
    assert not any(machine.turn_ended() for _ in range(50))
    assert enforcer(stall_turns=1).turn_ended()
