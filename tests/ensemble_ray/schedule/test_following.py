"""Tasks that certainly follow a running task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray import Plan
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import Start
from ensemble_ray.schedule.stimuli import CancelRequested, Waiting
from ensemble_ray.values.ids import instance_of, key_of
from tests.ensemble_ray.schedule.plans import CANCEL, STARTED, done, plan_of, sequence
from tests.ensemble_ray.schedule.test_machine_properties import SEEDED, plans


def following(plan: Plan, *completed: str, after: str) -> list[str]:
    machine = machine_for(plan)
    machine.handle(STARTED)
    for key in completed:
        machine.handle(done(key))
    return [key_of(each) for each in machine.list_following(instance_of(after))]


def test_rest_of_a_sequence_follows() -> None:
    """S-DUR-156."""
    assert following(sequence("a", "b", "c"), after="a") == ["b", "c"]
    assert following(sequence("a", "b", "c"), "a", after="b") == ["c"]


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ({"a": [], "b": ["a"], "c": ["a", "b"]}, ["b", "c"]),
        ({"a": [], "b": ["a"], "c": ["a"]}, []),
        ({"a": [], "b": ["a"], "c": ["b"], "d": ["b"]}, ["b"]),
        ({"a": [], "b": []}, []),
    ],
)
def test_only_a_task_that_starts_alone_follows_in_a_parallel_run(
    context: Mapping[str, Sequence[str]], expected: list[str]
) -> None:
    """S-DUR-156."""
    assert following(plan_of("parallel", context), after="a") == expected


@pytest.mark.parametrize("stimulus", [CANCEL, Waiting(at=2.0, instance="a#0")])
def test_no_task_follows_when_the_run_is_ending_or_suspended(stimulus: CancelRequested | Waiting) -> None:
    """S-DUR-156."""
    machine = machine_for(sequence("a", "b"))
    machine.handle(STARTED)
    machine.handle(stimulus)
    assert list(machine.list_following("a#0")) == []


@SEEDED
@given(plans(), st.data())
def test_source_starts_exactly_the_tasks_that_follow(plan: Plan, data: st.DataObject) -> None:
    """S-DUR-156: the process of a task starts what the source would start, and nothing else runs then."""
    machine = machine_for(plan)
    running = [each.instance for each in machine.handle(STARTED) if isinstance(each, Start)]
    while running:
        instance = data.draw(st.sampled_from(sorted(running)))
        for expected in list(machine.list_following(instance)):
            assert running == [instance]
            started = [each for each in machine.handle(done(key_of(instance))) if isinstance(each, Start)]
            assert [each.instance for each in started] == [expected]
            instance, running = expected, [expected]
        running.remove(instance)
        running += [each.instance for each in machine.handle(done(key_of(instance))) if isinstance(each, Start)]
