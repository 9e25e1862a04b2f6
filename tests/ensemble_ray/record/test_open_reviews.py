"""Review gates as facts tell of them: which are open, and what is in the way of a decision."""

from __future__ import annotations

from itertools import permutations

import pytest

from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.open_reviews import Obstacle, ends_of, ends_of_open, fold_gates, obstacle_at, open_reviews
from tests.ensemble_ray.record.facts_of_runs import fact

ASKED = {"timing": "after_execution", "task_description": "Draft", "on_timeout": "fail", "ends_run": True}


def _asked(name: str, at: float = 103.0, **data: object) -> Fact:
    return fact("review", name, at, **{**ASKED, "review_id": name, **data})


def _decided(name: str, by: str) -> Fact:
    return fact("review_decision", name, 104, verdict="approve", by=by)


def test_gates_are_decided_in_any_order() -> None:
    """S-REV-17, S-REV-125: deciding at one leaves the others as they are; what is left is told oldest first."""
    names = ["a#0/0/before-review", "b#0/0/after-review", "c#0/2/call-1-review-0"]
    for order in permutations(names):
        facts = [_asked(name) for name in names]
        for count, name in enumerate(order):
            facts.append(_decided(name, "Ann"))
            waiting = [each for each in names if each not in order[: count + 1]]
            assert [review.gate_id for review in open_reviews(facts)] == waiting


def test_first_decision_counts_when_there_are_two() -> None:
    """S-REV-128: whoever wrote the second."""
    (gate,) = fold_gates([_asked("a"), _decided("a", "Ann"), _decided("a", "Bob")])
    assert gate.decided is not None
    assert (gate.decided.data.by, gate.is_open) == ("Ann", False)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("draft#0/0/before-review", ["draft#0"]),
        ("draft#0/0/call-2-review-1", ["draft#0", "draft#0/0/call-2"]),
        ("phase:p#1/draft#0/0/after-review", ["phase:p#1", "phase:p#1/draft#0"]),
        (
            "m#0/3/call-0/delegate#0/1/call-2-review-0",
            ["m#0", "m#0/3/call-0", "m#0/3/call-0/delegate#0", "m#0/3/call-0/delegate#0/1/call-2"],
        ),
    ],
)
def test_gate_ends_with_all_that_it_belongs_to(name: str, ends: list[str]) -> None:
    """S-REV-126: the instances around it, and the calls."""
    assert [end for _, end in ends_of(name)] == ends
    for instance, end in ends_of(name):
        assert instance == (end if end.endswith(("#0", "#1")) else end.rsplit("/", 2)[0])
    asked = [_asked(name)]
    assert [end for _, end in ends_of_open(asked)] == ends
    assert ends_of_open([*asked, _decided(name, "Ann")]) == []


@pytest.mark.parametrize(
    ("changes", "is_owned", "expected"),
    [
        ({}, False, None),
        ({}, True, Obstacle.ATTACHED),
        ({"detached": True}, True, None),
        ({"timeout_s": 60.0}, False, None),
        ({"timeout_s": 57.0}, False, Obstacle.EXPIRED),
        ({"timeout_s": 57.0, "detached": True}, True, Obstacle.EXPIRED),
        ({"timeout_s": 57.0}, True, Obstacle.ATTACHED),
    ],
)
def test_obstacle_says_who_else_decides(
    changes: dict[str, object],
    is_owned: bool,  # noqa: FBT001  a parameter of the test
    expected: Obstacle | None,
) -> None:
    """S-REV-128, S-REV-129: a process that waits for its handler keeps the time itself."""
    (gate,) = fold_gates([_asked("a#0/0/after-review", **changes)])
    assert obstacle_at(gate, at=160.0, is_owned=is_owned) is expected
    (gate,) = fold_gates([_asked("a#0/0/after-review", **changes), _decided("a#0/0/after-review", "Ann")])
    assert obstacle_at(gate, at=160.0, is_owned=is_owned) is Obstacle.DECIDED
