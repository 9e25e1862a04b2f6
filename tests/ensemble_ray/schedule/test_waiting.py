"""Tasks that wait at gates, as sources see them: they hold no place, the run waits when nothing else can be done."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ensemble_ray import ExitReason, Plan, RunState
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import End, Evaluate, Instruction, Skip, Start
from ensemble_ray.schedule.machine import WAITS, TaskState
from ensemble_ray.schedule.stimuli import (
    Begun,
    CancelRequested,
    Completed,
    Continued,
    Evaluated,
    Exited,
    Stimulus,
    Waiting,
)
from ensemble_ray.values.ids import instance_of
from tests.ensemble_ray.schedule.invariants import check
from tests.ensemble_ray.schedule.nesting import loop, nested
from tests.ensemble_ray.schedule.plans import (
    CANCELLED,
    COMPLETED,
    EXITED,
    STARTED,
    CheckedMachine,
    done,
    exited,
    failed,
    plan_of,
    sequence,
    starts,
)
from tests.ensemble_ray.schedule.test_machine_properties import plans
from tests.ensemble_ray.schedule.test_nested_properties import plans as nested_plans

SEEDED = settings(max_examples=40)
DIAMOND = {"a": (), "b": (), "c": ("a",), "d": ("b", "c")}


def waiting(key: str, at: float = 1.0) -> Waiting:
    """The task was put down."""
    return Waiting(at=at, instance=instance_of(key))


def test_a_sequence_waits_and_goes_on_where_it_stood() -> None:
    """S-REV-116: nothing behind the task starts; told that it goes on, the run starts that task again."""
    machine = CheckedMachine(sequence("a", "b"))
    machine(STARTED)
    assert machine(waiting("a")) == [WAITS]
    assert machine.states("a", "b") == [TaskState.WAITING, TaskState.PENDING]
    assert machine(Continued(at=2.0)) == starts("a")
    assert machine(done("a", 3.0)) == starts("b")
    assert machine(done("b", 4.0)) == [COMPLETED]


def test_a_task_that_waits_holds_no_place() -> None:
    """S-REV-116: under a cap the next one starts; those that waited go first when the run goes on."""
    machine = CheckedMachine(plan_of("parallel", DIAMOND, cap=1))
    assert machine(STARTED) == starts("a")
    assert machine(waiting("a")) == starts("b")
    assert machine(waiting("b")) == [WAITS]
    assert machine(Continued(at=2.0)) == starts("a")
    assert machine(waiting("a", 3.0)) == starts("b")
    assert machine(done("b", 3.0)) == [WAITS]
    assert machine(Continued(at=4.0)) == starts("a")


def test_a_run_that_ends_lets_go_what_waits() -> None:
    """S-REV-119, S-REV-17: also a task that comes to its gate when the run is ending."""
    machine = CheckedMachine(plan_of("parallel", {"a": (), "b": (), "c": ()}))
    machine(STARTED)
    machine(waiting("a"))
    skip_a, skip_c = (Skip(instance=instance_of(key), reason="run ending early") for key in "ac")
    assert machine(exited("b", 2.0)) == [skip_a]
    assert machine(waiting("c", 3.0)) == [skip_c, EXITED]
    assert machine.states("a", "b", "c") == [TaskState.CANCELLED, TaskState.EXITED, TaskState.CANCELLED]
    machine = CheckedMachine(sequence("a"))
    machine(STARTED)
    machine(waiting("a"))
    assert machine(CancelRequested(at=2.0))[-1] == CANCELLED


def test_a_failure_beside_a_gate_leaves_the_run_waiting_where_others_go_on() -> None:
    """S-REV-119, S-PAR-24: with `continue_on_error` what does not depend on the failed task is still wanted."""
    machine = CheckedMachine(plan_of("parallel", {"a": (), "b": ()}, error_strategy="continue_on_error"))
    machine(STARTED)
    assert machine(waiting("a"), failed("b")) == [WAITS]
    machine = CheckedMachine(plan_of("parallel", {"a": (), "b": ()}))
    machine(STARTED)
    assert machine(waiting("a"), failed("b"))[-1] == End(state=RunState.FAILED, exit_reason=ExitReason.ERROR)


@dataclass(kw_only=True)
class Played:
    """A run that was played to its end, with tasks that were put down on the way."""

    plan: Plan
    told: list[tuple[Stimulus, ...]] = field(default_factory=list)
    completed: list[str] = field(default_factory=list)
    end: End | None = None
    most_at_once: int = 0


def _play(draw: st.DrawFn, plan: Plan, *, most_waits: int) -> Played:
    """Let everything complete, a few at a time; tasks may be put down first, and the run goes on when it waits."""
    source, played, waits = machine_for(plan), Played(plan=plan), most_waits

    def tell(*stimuli: Stimulus) -> list[Instruction]:
        wanted = source.handle(*stimuli)
        check(source)
        played.told.append(stimuli)
        return wanted

    wanted = tell(Begun(at=0.0))
    for at in range(1, 5000):
        ends = [each for each in wanted if isinstance(each, End)]
        if ends and ends[0].state is not RunState.WAITING:
            played.end = ends[0]
            return played
        if ends:
            assert not source.running
            wanted = tell(Continued(at=at))
            continue
        played.most_at_once = max(played.most_at_once, len(source.running))
        words = source.list_unanswered()
        group: list[Stimulus] = []
        for word in draw(st.lists(st.sampled_from(words), min_size=1, max_size=3, unique_by=repr)):
            if isinstance(word, Evaluate):
                group.append(Evaluated(at=at, question=word.question, answer=False))
            elif isinstance(word, Start) and waits and draw(st.booleans()):
                waits -= 1
                group.append(Waiting(at=at, instance=word.instance))
            elif isinstance(word, Start):
                played.completed.append(word.instance)
                group.append(Completed(at=at, instance=word.instance, total_tokens=1))
        wanted = tell(*group)
    raise AssertionError("it does not end")


any_plan = st.one_of(plans(), nested_plans())


@pytest.mark.heavy
@SEEDED
@given(st.data(), any_plan)
def test_gates_change_nothing_but_the_time(data: st.DataObject, plan: Plan) -> None:
    """S-REV-116, S-REV-117: the same tasks complete as without gates, each once, under the same cap."""
    plain = _play(data.draw, plan, most_waits=0)
    # A loop that raises at its cap cuts short what has not started by then.
    assume(plain.end is not None and plain.end.state is RunState.COMPLETED)
    gated = _play(data.draw, plan, most_waits=6)
    assert sorted(gated.completed) == sorted(plain.completed)
    assert gated.end is not None
    assert plain.end is not None
    assert (gated.end.state, gated.end.exit_reason) == (plain.end.state, plain.end.exit_reason)
    assert gated.most_at_once <= (sys.maxsize if plan.max_parallel_tasks is None else plan.max_parallel_tasks)


@pytest.mark.heavy
@SEEDED
@given(st.data(), any_plan)
def test_a_source_that_is_told_the_same_again_stands_where_it_stood(data: st.DataObject, plan: Plan) -> None:
    """S-REV-117, S-DUR-30: wherever its process died, and whatever waited then."""
    played = _play(data.draw, plan, most_waits=6)
    cut = data.draw(st.integers(1, len(played.told)))
    first, again = machine_for(plan), machine_for(plan)
    for stimuli in played.told[:cut]:
        assert first.handle(*stimuli) == again.handle(*stimuli)
    assert first.list_unanswered() == again.list_unanswered()
    for source in (first, again):
        source.handle(Continued(at=9999.0))
    assert first.list_unanswered() == again.list_unanswered()


def test_a_loop_does_not_hear_that_its_task_waits() -> None:
    """S-REV-116: another task of the run goes on, under a cap of one; then the run waits with the results so far."""
    source = machine_for(nested({"t": ()}, loop("l", "w", max_iterations=1), workflow="parallel", cap=1))
    (start,) = source.handle(Begun(at=0.0))
    assert isinstance(start, Start)
    assert start.instance == "t#0"
    (inner,) = source.handle(Waiting(at=1.0, instance="t#0"))
    assert isinstance(inner, Start)
    (waits,) = source.handle(Waiting(at=2.0, instance=inner.instance))
    assert isinstance(waits, End)
    assert waits.state is RunState.WAITING
    source.handle(Continued(at=3.0))
    assert source.running == ("t#0",)
    source.handle(Completed(at=4.0, instance="t#0"))
    assert source.running == (inner.instance,)
    ended = source.handle(Exited(at=5.0, instance=inner.instance, has_output=True))
    assert isinstance(ended[-1], End)
    assert ended[-1].state is RunState.COMPLETED
