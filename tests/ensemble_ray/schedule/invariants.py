"""Invariants of the machines, which hold between any two stimuli: `check` raises an AssertionError if one is broken."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from ensemble_ray.schedule.graph import BranchState, GraphMachine
from ensemble_ray.schedule.hierarchy import DelegationEnforcer
from ensemble_ray.schedule.machine import Machine, TaskState
from ensemble_ray.schedule.map_reduce import MapReduceMachine
from ensemble_ray.schedule.map_reduce_groups import Groups, LevelGrouper, OrderedGrouper, PoolGrouper, _Queue
from ensemble_ray.schedule.nested import _ROOT, NestedSource
from ensemble_ray.schedule.phases import _STATUS, PhasesMachine, PhaseState


@singledispatch
def check(machine: Any) -> None:
    raise TypeError(f"no invariants of {machine}")


@check.register
def _(machine: Machine) -> None:
    states = list(machine._states.values())
    assert machine._open == sum(not state.is_resolved for state in states), "open count"
    assert machine._running == {k for k, s in machine._states.items() if s is TaskState.RUNNING}, "running set"
    assert set(machine._waiting) == {k for k, s in machine._states.items() if s is TaskState.WAITING}, "waiting set"
    assert set(machine._ready) == {k for k, s in machine._states.items() if s is TaskState.READY}, "ready queue"
    assert machine._is_ended == (machine._open == 0), "ended exactly when all are resolved"


@check.register
def _(machine: DelegationEnforcer) -> None:
    rules, reapplied = machine._rules, machine._reapplied
    assert all(count >= 0 for count in machine._approved.values()), "charges"
    for role, cap in rules.max_calls_per_worker.items():
        assert machine._approved[role] <= cap + reapplied[role], f"cap of '{role}'"
    if rules.global_max_delegations > 0:
        most = rules.global_max_delegations + reapplied.total()
        assert machine._approved.total() <= most, "global cap"
    assert machine._completed == {role for role, _ in machine._done}, "completed roles"


@check.register
def _(machine: MapReduceMachine) -> None:
    assert len(machine._running) <= machine._rules.window, "window"
    assert machine._counting <= machine._running.keys(), "only tasks in flight are counted"
    assert 0 <= machine._next_map <= machine._pulled, "maps start after their items arrived"
    assert machine._waiting >= 0, "refused items are pulled ones"
    assert machine._waiting + machine._requested <= machine._rules.window, "never more than the window ahead"
    if machine._is_ended:
        assert not machine._running, "no task runs at the end"
    elif machine._is_begun:
        assert machine._running or machine._requested, "a stimulus will arrive"
    check(machine._groups)
    check(machine._grouper)


@check.register
def _(machine: NestedSource) -> None:
    assert len(machine._running) <= machine._cap, "cap"
    assert machine._cancelling <= machine._running.keys(), "only running tasks have a cancel"
    assert machine._owners.keys() == {*machine._running, *machine._queued, *machine._suspended}, "owners"
    assert not machine._queued or len(machine._running) == machine._cap, "no free slot while tasks wait"
    for each in (*machine._owners.values(), *machine._questions.values()):
        assert each in machine._machines, "every task and question has a machine"
    for nested in machine._machines.values():
        assert nested.parent in machine._machines, "the machine above is open"
    assert not machine._inbox, "every stimulus was applied"
    assert machine._is_ended == (_ROOT not in machine._machines), "ended with the run's machine"


@check.register
def _(machine: PhasesMachine) -> None:
    active = {PhaseState.RUNNING, PhaseState.REVIEWING}
    for phase in machine._phases.values():
        runs = sum(each is phase for each in machine._running.values())
        assert runs == (phase.state in active), "one attempt or review of an active phase"
        assert (phase.state in _STATUS) == (phase.unit.key in machine._settled), "settled"
        assert not (phase.requests and phase.state is PhaseState.COMPLETED), "requests are served"
        before = [machine._phases[key] for key in phase.unit.after]
        is_ready = all(each.state is PhaseState.COMPLETED for each in before)
        assert phase.state is not PhaseState.WAITING or not is_ready, "a ready phase has begun"
    assert machine._is_ended == (not machine._running and len(machine._settled) == len(machine._phases)), "ended"


@check.register
def _(machine: GraphMachine) -> None:
    leaves = machine._tree.leaves()
    in_state = {state: {id(each) for each in leaves if each.state is state} for state in BranchState}
    running = {id(each) for each in machine._running.values() if each.state is BranchState.RUNNING}
    assert running == in_state[BranchState.RUNNING], "a step of each running branch"
    routing = {id(step.branch) for step in machine._to_route}
    assert routing == in_state[BranchState.ROUTING], "routed in turn"
    assert len(in_state[BranchState.JOINING]) == machine._joining, "count of arrivals"
    assert bool(machine._to_route) == (machine._question is not None), "the oldest step has a question"
    assert machine._steps <= machine._unit.max_steps, "cap"
    is_over = not (machine._running or machine._to_route or machine._joining)
    assert machine._is_ended == (is_over and bool(machine._steps)), "ended when all branches have ended"


@check.register
def _(machine: Groups) -> None:
    assert machine._starts[-1] == len(machine._members), "the record's groups cover their members"
    assert min(machine._missing, default=0) >= 0, "no input of the record arrives twice"
    check(machine._queue)


@check.register
def _(machine: _Queue) -> None:
    assert len(machine._codes) == len(machine._sizes) == len(machine._counts), "queue"
    assert 0 <= machine._popped_groups <= len(machine._codes), "queue's start"
    waiting = sum(machine._counts[machine._popped_groups :])
    assert machine._popped_inputs + waiting == len(machine._inputs), "queue's inputs"


@check.register
def _(machine: LevelGrouper) -> None:
    pass  # no invariant of its own


@check.register
def _(machine: PoolGrouper) -> None:
    assert all(pool.size <= machine._capacity for pool in machine._pools), "the pools fit"
    assert not any(pool.codes for pool in machine._pools[: machine._closed]), "closed pools are empty"


@check.register
def _(machine: OrderedGrouper) -> None:
    for level, sequence in enumerate(machine._levels):
        assert sequence.cursor <= len(sequence.sizes), "cursor"
        is_sound = sequence.open_size <= machine._capacity or len(sequence.open) == 1 or machine._is_capped(level)
        assert is_sound, "the open group fits"
