"""The judge of predicates itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from tests.chaos.audit_verdicts import judge_verdicts
from tests.chaos.kills import Kill

KILL = Kill(victim="process", at=10.0, repeats_calls=True, when="")


def verdict(at: float, iteration: int = 1) -> Fact:
    """A recorded answer of a loop's predicate."""
    data = {
        "type": "Evaluated",
        "at": at,
        "answer": False,
        "question": "until",
        "unit": "loop:l",
        "iteration": iteration,
    }
    return read_fact(run="r", kind="stimulus", name="run", at=at, data=data)


def judged(facts: Sequence[Fact], *asked: float, kills: Sequence[Kill] = (KILL,)) -> list[str]:
    """What the judge says; the predicate was asked about the first iteration at these times."""
    return list(judge_verdicts(facts, [{"verdict": "loop:l 1", "at": at} for at in asked], kills))


def test_predicate_may_be_asked_again_after_a_kill_that_came_before_its_verdict() -> None:
    """S-LOOP-54."""
    assert judged([verdict(12.0)], 9.0, 11.0) == []


@pytest.mark.parametrize(
    ("facts", "asked", "expected"),
    [
        pytest.param([verdict(9.5)], (9.0, 11.0), "after its verdict was taken", id="recorded"),
        pytest.param([verdict(12.0)], (11.0, 11.5), "no kill between explains it", id="no kill"),
        pytest.param([], (9.0,), "no verdict of it is recorded", id="not recorded"),
        pytest.param([verdict(9.5)], (), "nobody was asked", id="made up"),
        pytest.param([verdict(9.5), verdict(9.6)], (9.0,), "recorded 2 times", id="twice"),
    ],
)
def test_broken_promise_is_found(facts: Sequence[Fact], asked: Sequence[float], expected: str) -> None:
    """S-LOOP-54: a judge that never finds anything would prove nothing."""
    assert any(expected in each for each in judged(facts, *asked))
