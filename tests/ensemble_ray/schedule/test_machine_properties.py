"""The machines played with at random: graphs, outcomes, batches, cancellations and late messages."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ray import ExitReason, Plan, RunState
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import Cancel, End, Instruction, Skip, Start
from ensemble_ray.schedule.machine import TaskState
from ensemble_ray.schedule.stimuli import Begun, Cancelled, CancelRequested, Completed, Exited, Failed, Stimulus
from ensemble_ray.values.ids import instance_of, key_of
from tests.ensemble_ray.schedule.plans import CheckedMachine, done, failed, plan_of

#: Seeded and without a store of examples, so that a run gives the same everywhere.
SEEDED = settings(max_examples=40)
_REASONS = (ExitReason.TIMEOUT, ExitReason.USER_EXIT_EARLY, ExitReason.BUDGET_EXHAUSTED)


@dataclass(kw_only=True)
class Play:
    """A run as obedient executors would make it; keeps everything told and everything wanted."""

    plan: Plan
    checked: CheckedMachine
    batches: list[tuple[Stimulus, ...]] = field(default_factory=list)
    wanted: list[list[Instruction]] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    outcomes: dict[str, TaskState] = field(default_factory=dict)
    most_at_once: int = 0

    def handle(self, *batch: Stimulus) -> None:
        self.batches.append(batch)
        instructions = self.checked(*batch)
        self.wanted.append(instructions)
        self.running += [key_of(each.instance) for each in instructions if isinstance(each, Start)]
        self.most_at_once = max(self.most_at_once, len(self.running))

    def resolve(self, key: str, after: TaskState, at: float) -> Stimulus:
        self.running.remove(key)
        self.outcomes[key] = after
        return _fact(key, after, at)

    def all(self, kind: type[Instruction]) -> list[str]:
        return [key_of(each.instance) for step in self.wanted for each in step if isinstance(each, kind)]  # type: ignore[union-attr]  # of tasks

    @property
    def ends(self) -> list[End]:
        return [each for step in self.wanted for each in step if isinstance(each, End)]

    def after(self, *kinds: type[Stimulus]) -> list[Instruction]:
        """What was wanted from the first such fact on."""
        for position, batch in enumerate(self.batches):
            if any(isinstance(each, kinds) for each in batch):
                return [each for step in self.wanted[position:] for each in step]
        return []


def _fact(key: str, after: TaskState, at: float) -> Stimulus:
    match after:
        case TaskState.COMPLETED:
            return Completed(at=at, instance=instance_of(key))
        case TaskState.FAILED:
            return Failed(at=at, instance=instance_of(key), error_type="ValueError")
        case TaskState.EXITED:
            return Exited(at=at, instance=instance_of(key), reason=_REASONS[int(key) % len(_REASONS)])
        case _:
            return Cancelled(at=at, instance=instance_of(key))


@st.composite
def plans(draw: st.DrawFn, *, workflow: str | None = None, strategy: str | None = None) -> Plan:
    """Any graph of a few tasks, under any rules."""
    context: dict[str, list[str]] = {}
    for number in range(draw(st.integers(1, 7))):
        known = list(context)
        context[str(number)] = draw(st.lists(st.sampled_from(known), unique=True, max_size=3)) if known else []
    return plan_of(
        workflow or draw(st.sampled_from(["parallel", "sequential"])),
        context,
        error_strategy=strategy or draw(st.sampled_from(["fail_fast", "continue_on_error"])),
        cap=draw(st.none() | st.integers(1, 3)),
    )


WAYS = (TaskState.COMPLETED, TaskState.COMPLETED, TaskState.FAILED, TaskState.EXITED)


def play_to_its_end(
    draw: st.DrawFn, plan: Plan, *, ways: tuple[TaskState, ...] = WAYS, may_cancel: bool = True
) -> Play:
    """Let running tasks end, some together, until none runs; perhaps somebody cancels."""
    play = Play(plan=plan, checked=CheckedMachine(plan))
    play.handle(Begun(at=0.0))
    is_cancelled = False
    at = 0.0
    while play.running:
        at += 1.0
        if may_cancel and not is_cancelled and draw(st.integers(0, 9)) == 0:
            is_cancelled = True
            play.handle(CancelRequested(at=at))
            continue
        allowed = (*ways, TaskState.CANCELLED) if is_cancelled else ways
        ending = draw(st.lists(st.sampled_from(sorted(play.running)), min_size=1, max_size=3, unique=True))
        play.handle(*(play.resolve(key, draw(st.sampled_from(allowed)), at) for key in ending))
    return play


@st.composite
def plays(draw: st.DrawFn) -> Play:
    """Any run."""
    return play_to_its_end(draw, draw(plans()))


@st.composite
def uncancelled(draw: st.DrawFn, strategy: str) -> Play:
    """A parallel run in which tasks only complete or fail."""
    ways = (TaskState.COMPLETED, TaskState.FAILED)
    return play_to_its_end(draw, draw(plans(workflow="parallel", strategy=strategy)), ways=ways, may_cancel=False)


@SEEDED
@given(plays())
def test_every_task_resolves_once_and_the_run_ends_once(play: Play) -> None:
    """S-PAR-12: the end is the last thing wanted, and nothing was started twice or both started and skipped."""
    assert all(state.is_resolved for state in play.checked.machine.states.values())
    assert len(play.ends) == 1
    assert play.wanted[-1][-1] is play.ends[0]
    resolved = [*play.all(Start), *play.all(Skip)]
    assert sorted(resolved) == sorted(node.key for node in play.plan.nodes)
    for key, state in play.outcomes.items():
        assert play.checked.machine.states[instance_of(key)] is state


@SEEDED
@given(plays())
def test_no_more_tasks_run_than_the_cap_allows(play: Play) -> None:
    """S-PAR-17, S-ENG-10: sequential runs have one place."""
    cap = 1 if play.plan.workflow == "sequential" else play.plan.max_parallel_tasks
    assert cap is None or play.most_at_once <= cap


@pytest.mark.heavy
@SEEDED
@given(plays())
def test_no_task_starts_before_its_context_is_completed(play: Play) -> None:
    """S-PAR-11: whatever else happens."""
    if play.plan.workflow == "sequential":
        return
    completed: set[str] = set()
    context = {node.key: set(node.context) for node in play.plan.nodes}
    for batch, instructions in zip(play.batches, play.wanted, strict=True):
        completed |= {key_of(each.instance) for each in batch if isinstance(each, Completed)}
        assert all(context[key_of(each.instance)] <= completed for each in instructions if isinstance(each, Start))


@pytest.mark.heavy
@SEEDED
@given(plays())
def test_nothing_starts_after_a_cancellation_or_an_early_exit(play: Play) -> None:
    """S-SET-27, S-PAR-30, S-BUD-4: and the run's end says so, the cancellation before the exit, the exit before a failure."""
    assert not [each for each in play.after(CancelRequested, Exited) if isinstance(each, Start)]
    facts = [each for batch in play.batches for each in batch]
    exits = [each for each in facts if isinstance(each, Exited)]
    end = play.ends[0]
    if any(isinstance(each, CancelRequested) for each in facts):
        assert (end.state, end.exit_reason) == (RunState.CANCELLED, ExitReason.CANCELLED)
    elif exits:
        is_spent = exits[0].reason is ExitReason.BUDGET_EXHAUSTED
        state = RunState.BUDGET_EXHAUSTED if is_spent else RunState.COMPLETED
        assert (end.state, end.exit_reason) == (state, exits[0].reason)
    else:
        assert (end.state is RunState.FAILED) == (TaskState.FAILED in play.outcomes.values())


@pytest.mark.heavy
@SEEDED
@given(plays())
def test_only_what_runs_is_stopped(play: Play) -> None:
    """S-SET-27: each once."""
    stopped = play.all(Cancel)
    assert len(stopped) == len(set(stopped))
    assert set(stopped) <= set(play.all(Start))


@pytest.mark.heavy
@SEEDED
@given(uncancelled("fail_fast"))
def test_fail_fast_starts_nothing_after_a_failure(play: Play) -> None:
    """S-PAR-21: and what runs then is left to finish."""
    assert not [each for each in play.after(Failed) if isinstance(each, Start | Cancel)]


@pytest.mark.heavy
@SEEDED
@given(uncancelled("continue_on_error"))
def test_continue_on_error_skips_exactly_the_transitive_dependents(play: Play) -> None:
    """S-PAR-24: everything else is run to its end."""
    cursed = {key for key, state in play.outcomes.items() if state is TaskState.FAILED}
    expected: set[str] = set()
    for node in play.plan.nodes:  # context tasks stand before their dependents here
        if not (cursed | expected).isdisjoint(node.context):
            expected.add(node.key)
    assert set(play.all(Skip)) == expected
    assert set(play.outcomes) == {node.key for node in play.plan.nodes} - expected


@pytest.mark.heavy
@SEEDED
@given(plays())
def test_same_facts_give_the_same_instructions(play: Play) -> None:
    """Rule 1 of the machines: a recorded run can be scheduled again, from a plan that went through JSON."""
    again = machine_for(Plan.from_dict(play.plan.to_dict()))
    assert [again.handle(*batch) for batch in play.batches] == play.wanted


@pytest.mark.heavy
@SEEDED
@given(plays(), st.data())
def test_late_messages_change_nothing(play: Play, data: st.DataObject) -> None:
    """S-PAR-12: every report said again, at any later moment, as anything."""
    again = CheckedMachine(play.plan)
    known: set[str] = set()
    for batch, instructions in zip(play.batches, play.wanted, strict=True):
        assert again(*batch) == instructions
        known |= {key_of(each.instance) for each in batch if not isinstance(each, Begun | CancelRequested)}
        late = data.draw(st.sets(st.sampled_from(sorted(known)), max_size=2)) if known else set[str]()
        for key in sorted(late):
            state = data.draw(st.sampled_from([*WAYS, TaskState.CANCELLED]))
            assert again(_fact(key, state, 99.0)) == []
    assert again.machine.states == play.checked.machine.states
    assert (again.machine.completed, again.machine.failed) == (
        play.checked.machine.completed,
        play.checked.machine.failed,
    )


@SEEDED
@given(plans(workflow="parallel", strategy="continue_on_error"))
def test_order_of_reports_in_one_step_does_not_change_what_is_resolved(plan: Plan) -> None:
    """S-PAR-24: the roots' ends, told forwards or backwards, resolve the same tasks."""
    uncapped = plan_of("parallel", {node.key: node.context for node in plan.nodes}, error_strategy="continue_on_error")
    roots = [node.key for node in plan.nodes if not node.context]
    facts: list[Stimulus] = [done(key) if number % 2 else failed(key) for number, key in enumerate(roots)]
    forwards, backwards = CheckedMachine(uncapped), CheckedMachine(uncapped)
    for handle, order in ((forwards, facts), (backwards, facts[::-1])):
        handle(Begun(at=0.0))
        handle(*order)
    assert forwards.machine.states == backwards.machine.states
