"""The table of transitions."""

from __future__ import annotations

import pickle
from itertools import product

import pytest

from ensemble_ray.schedule.machine import TRANSITIONS, InvalidTransitionError, TaskState
from tests.ensemble_ray.schedule.plans import STARTED, CheckedMachine, sequence

FORBIDDEN = [pair for pair in product(TaskState, repeat=2) if pair not in TRANSITIONS]
OPEN = {TaskState.PENDING, TaskState.READY, TaskState.RUNNING, TaskState.WAITING}


def test_resolved_states_are_left_by_no_transition() -> None:
    """S-PAR-12: a task resolves exactly once."""
    assert {state for state in TaskState if not state.is_resolved} == OPEN
    assert {before for before, _ in TRANSITIONS} == OPEN


def test_every_state_is_reached_from_pending() -> None:
    """A state that nothing leads to would be a state that nobody needs."""
    reached = {TaskState.PENDING}
    for _ in TaskState:
        reached |= {after for before, after in TRANSITIONS if before in reached}
    assert reached == set(TaskState)


def test_only_running_tasks_have_results() -> None:
    """S-PAR-21, S-PAR-24: what never started can only be skipped or cancelled."""
    results = {TaskState.COMPLETED, TaskState.FAILED, TaskState.EXITED}
    assert {before for before, after in TRANSITIONS if after in results} == {TaskState.RUNNING}
    assert (TaskState.RUNNING, TaskState.SKIPPED) not in TRANSITIONS


@pytest.mark.parametrize(("before", "after"), FORBIDDEN)
def test_transition_is_refused_when_the_table_does_not_know_it(before: TaskState, after: TaskState) -> None:
    """S-PAR-12: it raises with the task's story, and changes nothing."""
    machine = CheckedMachine(sequence("a")).machine
    machine.handle(STARTED)
    machine._states["a#0"] = before
    with pytest.raises(InvalidTransitionError) as refused:
        machine._move("a#0", after, 2.0)
    assert str(refused.value) == (
        f"Task 'a': no transition {before} -> {after}. Story: ready at 0.000, running at 0.000"
    )
    assert machine.states["a#0"] is before


@pytest.mark.parametrize(("before", "after"), TRANSITIONS)
def test_transition_is_made_and_told_when_the_table_knows_it(before: TaskState, after: TaskState) -> None:
    """Each has its reason, and becomes part of the story."""
    machine = CheckedMachine(sequence("a")).machine
    machine._states["a#0"] = before
    machine._move("a#0", after, 1.5)
    assert machine.states["a#0"] is after
    assert machine.story("a#0") == f"{after} at 1.500"
    assert TRANSITIONS[before, after]


def test_refusal_travels_between_processes() -> None:
    """S-CONV-32: it pickles with all it says."""
    error = InvalidTransitionError("a", "completed", "running", "ready at 0.000")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    assert (copy.key, copy.before, copy.after, copy.story) == ("a", "completed", "running", "ready at 0.000")
    assert str(copy) == str(error)
