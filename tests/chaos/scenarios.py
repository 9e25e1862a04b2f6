"""What is run and killed: a team, its inputs, what the model says, and what must be true at the end.

A new construct adds its teams to `teams.py`, what its model says to `answers.py` and its scenarios to `SCENARIOS`; the
harness knows nothing else of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ensemble_ray.testing import Fault, Reply, ServedRequest
from tests.chaos.answers import (
    answer_in_big,
    answer_in_map_reduce,
    answer_in_newsroom,
    answer_of_peers,
    answer_with_reviews,
    answer_with_tools,
    answer_with_units,
    answer_without_credit,
    plain_answer,
)
from tests.chaos.audit_map_reduce import judge_marks
from tests.chaos.teams import BIG
from tests.chaos.world import World

__all__ = ["SCENARIOS", "Scenario", "big"]


def _nothing_more(_output: Mapping[str, object], _world: World) -> Sequence[str]:
    return ()


def _made_of_all(output: Mapping[str, object], world: World) -> Sequence[str]:
    return judge_marks(str(output["raw"]), world.rows())


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A team to kill."""

    name: str
    #: where `ensemble-ray` finds it: `module:attribute`
    target: str
    #: how many model calls it makes when nobody disturbs it
    calls: int
    #: what the model answers; it must follow from the request alone
    answer: Callable[[ServedRequest, World], Reply | Fault]
    #: how often its policies are asked when nobody disturbs it
    questions: int = 0
    #: whether a manager leads it, who can be killed
    has_manager: bool = False
    #: whether its tasks are made while it runs, by its driver
    is_fed: bool = False
    #: with which its programs end when it has completed
    exit_code: int = 0
    #: whether its shape, and so the number of its calls, hangs on which of its tasks is done first
    has_own_shape: bool = False
    #: whether somebody has to decide at its gates while it waits in its record; it is killed, and disturbed in no other way
    is_reviewed: bool = False
    inputs: Mapping[str, str] = field(default_factory=lambda: {"topic": "chaos"})
    #: what its programs find in their environment, beside what all find there
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    #: whether it is run undisturbed first, and compared with that
    is_compared: bool = True
    #: longest wait for its end, and for anything else that must come, s
    patience_s: float = 240.0
    #: what is wrong with the output, beside its being unlike that of the undisturbed run
    check: Callable[[Mapping[str, object], World], Sequence[str]] = _nothing_more


def big(items: int) -> Scenario:
    """A map-reduce over so many items, for one look at counts and sizes; no part of the lot."""
    calls, left = items, items
    while left > 1:
        left = -(-left // 20)
        calls += left

    def is_right(output: Mapping[str, object], _world: World) -> Sequence[str]:
        expected = f"<<{items}:{items * (items - 1) // 2}>>"
        return [] if output["raw"] == expected else [f"the last answer is {output['raw']} instead of {expected}"]

    return Scenario(
        name="big",
        target="tests.chaos.teams:big",
        calls=calls,
        answer=answer_in_big,
        is_fed=True,
        environment={BIG: str(items)},
        is_compared=False,
        patience_s=1200.0,
        check=is_right,
    )


SCENARIOS = {
    each.name: each
    for each in (
        Scenario(name="chain", target="tests.chaos.teams:chain", calls=8, answer=plain_answer),
        Scenario(name="dag", target="tests.chaos.teams:dag", calls=12, answer=plain_answer),
        Scenario(
            name="chain-with-tools", target="tests.chaos.teams:chain_with_tools", calls=24, answer=answer_with_tools
        ),
        # Each of the eight tasks asks the first model once, which has no credit.
        Scenario(name="fallback", target="tests.chaos.teams:fallback", calls=32, answer=answer_without_credit),
        Scenario(name="dag-with-tools", target="tests.chaos.teams:dag_with_tools", calls=33, answer=answer_with_tools),
        Scenario(
            name="newsroom",
            target="tests.chaos.teams:newsroom",
            calls=34,
            answer=answer_in_newsroom,
            questions=25,
            has_manager=True,
        ),
        Scenario(
            name="mapreduce",
            target="tests.chaos.teams:mapreduce",
            calls=68,
            answer=answer_in_map_reduce,
            is_fed=True,
            exit_code=3,
            check=_made_of_all,
        ),
        Scenario(
            name="pipelined",
            target="tests.chaos.teams:pipelined",
            calls=65,
            answer=answer_in_map_reduce,
            is_fed=True,
            exit_code=3,
            has_own_shape=True,
            check=_made_of_all,
        ),
        Scenario(
            name="ordered",
            target="tests.chaos.teams:ordered",
            calls=69,
            answer=answer_in_map_reduce,
            is_fed=True,
            exit_code=3,
            check=_made_of_all,
        ),
        Scenario(name="loop", target="tests.chaos.team_units:loop", calls=22, questions=4, answer=answer_with_units),
        Scenario(
            name="phases", target="tests.chaos.team_units:phases", calls=22, questions=2, answer=answer_with_units
        ),
        Scenario(name="graph", target="tests.chaos.team_units:graph", calls=21, questions=4, answer=answer_with_units),
        Scenario(
            name="reviews",
            target="tests.chaos.team_reviews:reviewed",
            calls=15,
            answer=answer_with_reviews,
            is_reviewed=True,
        ),
        Scenario(name="peers", target="tests.chaos.teams:peers", calls=30, questions=21, answer=answer_of_peers),
    )
}
