"""Phases and graphs played with at random, with loops inside of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ray import Plan, RunState
from ensemble_ray.plan.plan import EdgeEntry, GraphEntry, GraphUnit, LoopUnit, PhaseUnit, StateEntry, Unit
from ensemble_ray.schedule.instructions import (
    Announce,
    Cancel,
    End,
    Evaluate,
    GraphResult,
    PhaseResult,
    Start,
    StepEnded,
)
from ensemble_ray.schedule.phases import PhasesMachine
from ensemble_ray.schedule.stimuli import CancelRequested, Exited
from ensemble_ray.values.ids import key_of
from tests.ensemble_ray.schedule.graphs import edge, fork, join
from tests.ensemble_ray.schedule.nesting import loop, node
from tests.ensemble_ray.schedule.playing import CheckedNest, Played, play

SEEDED = settings(max_examples=40)


def plan_of(*units: Unit, **rules: object) -> Plan:
    """A plan of these units; every member that is no unit is a task."""
    keys: dict[str, None] = {}
    for unit in units:
        match unit:
            case LoopUnit():
                keys.update(dict.fromkeys(unit.body))
            case PhaseUnit():
                keys.update(dict.fromkeys(unit.members if unit.review is None else (*unit.members, unit.review)))
            case GraphUnit():
                keys.update(dict.fromkeys(state.member for state in unit.states))
    tasks = [key for key in keys if key not in {unit.key for unit in units}]
    return Plan(workflow="sequential", nodes=tuple(node(key) for key in tasks), units=units, **rules)  # type: ignore[arg-type]  # fields of a plan


@st.composite
def small_loops(draw: st.DrawFn, name: str) -> LoopUnit:
    """A loop that may stand inside of something else."""
    body = [f"{name}-{position}" for position in range(draw(st.integers(1, 2)))]
    action = draw(st.sampled_from(["return_last", "throw"]))
    return loop(
        name, *body, max_iterations=draw(st.integers(1, 3)), has_until=draw(st.booleans()), on_max_iterations=action
    )


# Phases.


@st.composite
def phase_plans(draw: st.DrawFn) -> Plan:
    """Any DAG of phases, some with loops, some reviewed."""
    units: list[Unit] = []
    for number in range(draw(st.integers(1, 5))):
        members = [f"t{number}-{position}" for position in range(draw(st.integers(1, 3)))]
        if draw(st.integers(0, 3)) == 0:
            units.append(draw(small_loops(f"l{number}")))
            members.append(units[-1].key)
        before = [unit.key for unit in units if isinstance(unit, PhaseUnit)]
        units.append(
            PhaseUnit(
                key=f"phase:p{number}",
                name=f"p{number}",
                members=tuple(members),
                workflow=draw(st.sampled_from(["sequential", "parallel"])),
                after=tuple(draw(st.lists(st.sampled_from(before), unique=True, max_size=3))) if before else (),
                review=f"check{number}" if draw(st.booleans()) else None,
                max_retries=draw(st.integers(0, 2)),
                max_predecessor_retries=draw(st.integers(0, 2)),
            )
        )
    phases = draw(st.permutations([unit for unit in units if isinstance(unit, PhaseUnit)]))
    loops = [unit for unit in units if isinstance(unit, LoopUnit)]
    strategy = draw(st.sampled_from(["fail_fast", "continue_on_error"]))
    return plan_of(*phases, *loops, error_strategy=strategy, max_parallel_tasks=draw(st.none() | st.integers(1, 3)))


# Graphs.


@st.composite
def graph_plans(draw: st.DrawFn) -> Plan:
    """Any graph: every state leads somewhere, and conditions, forks and joins stand anywhere."""
    names = [f"s{number}" for number in range(draw(st.integers(2, 6)))]
    targets = st.sampled_from([*names, "__END__"])
    entries: list[GraphEntry] = []
    for name in names:
        kind = draw(st.sampled_from(["fork", "fork", "join", "join", "edge"]))
        entries += [edge(name, draw(targets), asked=True) for _ in range(draw(st.integers(0, 1)))]
        if kind == "fork":
            entries.append(fork(name, *draw(st.lists(st.sampled_from(names), unique=True, min_size=2, max_size=3))))
        elif kind == "join":
            others = draw(st.lists(st.sampled_from(names), unique=True, max_size=2))
            states = tuple(dict.fromkeys((name, *others)))
            entries.append(join(states, draw(targets), draw(st.none() | st.integers(1, len(states)))))
        else:
            entries.append(edge(name, draw(targets), asked=draw(st.integers(0, 9)) == 9))
    loops = [draw(small_loops(f"l{number}")) for number, _ in enumerate(names) if draw(st.integers(0, 5)) == 0]
    members = dict(zip(names, [unit.key for unit in loops], strict=False))
    graph = GraphUnit(
        key="graph:g",
        name="g",
        states=tuple(StateEntry(name=name, member=members.get(name, name)) for name in names),
        edges=tuple(entries),
        start=draw(st.sampled_from(names)),
        max_steps=draw(st.integers(1, 25)),
        on_max_steps=draw(st.sampled_from(["return_last", "throw", "return_with_flag"])),
        inject_feedback_on_revisit=draw(st.booleans()),
    )
    return plan_of(graph, *loops, max_parallel_tasks=draw(st.none() | st.integers(1, 3)))


@dataclass
class Blocks:
    """A graph of sequences and forks that end in joins, and the order of its states."""

    edges: list[GraphEntry]
    order: list[str]
    loops: list[LoopUnit]


def blocks(draw: st.DrawFn, made: Blocks, depth: int) -> tuple[str, str]:
    """Draw a part; return the state that it begins with and the one that it ends with."""
    first = last = _state(draw, made)
    for _ in range(draw(st.integers(0, 2))):
        if depth and draw(st.booleans()):
            parts = [blocks(draw, made, depth - 1) for _ in range(draw(st.integers(2, 3)))]
            made.edges.append(fork(last, *(begin for begin, _ in parts)))
            follow = _state(draw, made)
            made.edges.append(join([end for _, end in parts], follow))
        else:
            follow = _state(draw, made)
            made.edges.append(edge(last, follow))
        last = follow
    return first, last


def _state(draw: st.DrawFn, made: Blocks) -> str:
    name = f"s{len(made.order)}"
    made.order.append(name)
    if draw(st.integers(0, 9)) == 0:
        made.loops.append(loop(name, f"in-{name}", max_iterations=2, has_until=False))
    return name


@st.composite
def played_blocks(draw: st.DrawFn) -> tuple[list[str], Played]:
    """A graph of blocks, played without trouble in any order; and the order of its states."""
    made = Blocks([], [], [])
    _, last = blocks(draw, made, 2)
    members = {unit.name: unit.key for unit in made.loops}
    states = tuple(StateEntry(name=name, member=members.get(name, name)) for name in made.order)
    edges = (*draw(st.permutations(made.edges)), EdgeEntry(from_state=last, to_state="__END__"))
    graph = GraphUnit(key="graph:g", name="g", states=states, edges=edges, start="s0", max_steps=500)
    return made.order, play(draw, plan_of(graph, *made.loops), trouble=0)


@st.composite
def plays(draw: st.DrawFn) -> Played:
    """Any run of either kind."""
    return play(draw, draw(phase_plans() | graph_plans()), trouble=draw(st.sampled_from([0, 1, 3])))


@st.composite
def played_phases(draw: st.DrawFn) -> Played:
    """Any run of phases."""
    return play(draw, draw(phase_plans()), trouble=draw(st.sampled_from([0, 0, 1, 3])))


@st.composite
def played_graphs(draw: st.DrawFn) -> Played:
    """Any run of a graph."""
    return play(draw, draw(graph_plans()), trouble=draw(st.sampled_from([0, 0, 1, 3])))


@pytest.mark.heavy
@SEEDED
@given(plays())
def test_run_ends_once_and_nothing_is_started_twice(played: Played) -> None:
    """S-PAR-12: the end is the last word, nothing runs then, and only what runs is stopped, each once."""
    nest = played.nest
    assert isinstance(nest.wanted[-1], End)
    assert len(nest.ends) == 1
    assert len(set(nest.started)) == len(nest.started)
    assert nest.source.list_unanswered() == []
    stopped = [each.instance for each in nest.all(Cancel)]
    assert len(set(stopped)) == len(stopped)
    assert set(stopped) <= set(nest.started)


@pytest.mark.heavy
@SEEDED
@given(plays())
def test_end_says_what_happened(played: Played) -> None:
    """S-SET-27, S-PHASE-56, S-GRAPH-53: a cancellation outranks an exit, and an exit a failure; none of them is forgotten."""
    end = played.nest.end
    if played.is_cancelled:
        assert end.state is RunState.CANCELLED
    elif played.has_exited:
        assert end.state is RunState.COMPLETED
    elif end.unit_failures:
        assert end.state is RunState.FAILED
    elif not played.has_failed:
        assert end.state is RunState.COMPLETED


@pytest.mark.heavy
@SEEDED
@given(plays())
def test_nothing_begins_after_a_cancellation_or_an_exit(played: Played) -> None:
    """S-SET-27, S-PHASE-56, S-GRAPH-101: no task, and no question."""
    again = CheckedNest(played.nest.plan)
    is_ending = False
    for group in played.nest.told:
        running = set(again.source.running)
        done = again.handle(*group)
        if isinstance(group[0] if group else None, CancelRequested):
            assert {each.instance for each in done if isinstance(each, Cancel)} <= running
        is_ending = is_ending or any(isinstance(each, CancelRequested) for each in group)
        if is_ending:
            assert not [each for each in done if isinstance(each, Start | Evaluate)]
        is_ending = is_ending or any(isinstance(each, Exited) for each in group)


@pytest.mark.heavy
@SEEDED
@given(plays())
def test_same_words_give_the_same_run(played: Played) -> None:
    """S-DUR-30: a run that is told again what is recorded stands where it stood, after every group of words."""
    again = CheckedNest(Plan.from_dict(played.nest.plan.to_dict()))
    for group, open_words in zip(played.nest.told, played.open_words, strict=True):
        again.handle(*group)
        assert again.source.list_unanswered() == open_words
    assert again.wanted == played.nest.wanted


@pytest.mark.heavy
@SEEDED
@given(played_phases())
def test_every_phase_has_one_result(played: Played) -> None:
    """S-PHASE-41, S-PHASE-51, S-PHASE-65: of one attempt, with what completed in it; a skipped one shows nothing."""
    results = [each for each in played.nest.end.units if isinstance(each, PhaseResult)]
    units = {unit.key: unit for unit in played.nest.plan.units if isinstance(unit, PhaseUnit)}
    assert sorted(each.unit for each in results) == sorted(units)
    for each in results:
        paths = {path.rpartition("/")[0] for path in each.outputs}
        assert len(paths) <= 1
        assert len(set(each.outputs)) == len(each.outputs)
        assert {path for path in each.outputs if path.endswith("#0")} <= set(played.completed)
        assert not (each.status == "skipped" and each.outputs)
        assert len(each.reviews) <= each.attempts
        if each.status == "completed" and not (played.has_exited or played.is_cancelled):
            assert len(each.outputs) == len(units[each.unit].members)
        if each.status == "skipped" and not (played.has_exited or played.is_cancelled):
            before = {other.unit: other.status for other in results}
            assert any(before[key] != "completed" for key in units[each.unit].after)


@pytest.mark.heavy
@SEEDED
@given(played_phases())
def test_no_phase_begins_before_its_predecessors_were_accepted(played: Played) -> None:
    """S-PHASE-31, S-PHASE-36, S-PHASE-65: an attempt sees one accepted attempt of each, whose review is over."""
    again = CheckedNest(played.nest.plan)
    (machine,) = again.machines
    assert isinstance(machine, PhasesMachine)
    units = {unit.key: unit for unit in played.nest.plan.units if isinstance(unit, PhaseUnit)}
    for group in played.nest.told:
        done = again.handle(*group)
        for instance in {each.instance.partition("/")[0] for each in done if isinstance(each, Start)}:
            seen = machine._execution.scopes._outer[instance]
            assert {key_of(each) for each in seen} >= set(units[key_of(instance)].after)
            for each in seen:
                reviews = [start for start in again.started if start.startswith(f"{each}/check")]
                assert set(reviews) <= set(played.completed)
                assert not [start for start in again.source.running if start.startswith(f"{each}/")]


@pytest.mark.heavy
@SEEDED
@given(played_graphs())
def test_history_of_a_graph_is_what_completed(played: Played) -> None:
    """S-GRAPH-70, S-GRAPH-75, S-GRAPH-93: each step once, within the cap; those that were routed are announced, once each."""
    (result,) = [each for each in played.nest.end.units if isinstance(each, GraphResult)]
    (unit,) = [each for each in played.nest.plan.units if isinstance(each, GraphUnit)]
    numbers = [step.number for step in result.steps]
    assert len(set(numbers)) == len(numbers) <= unit.max_steps
    plain = {step.instance for step in result.steps if step.instance.endswith("#0")}
    assert plain <= set(played.completed)
    announced = {
        each.what.step: each.what.next_state for each in played.nest.all(Announce) if isinstance(each.what, StepEnded)
    }
    assert announced == {step.number: step.next_state for step in result.steps if step.next_state is not None}
    assert len(played.nest.all(Announce)) >= len(announced)


@pytest.mark.heavy
@SEEDED
@given(played_blocks())
def test_history_of_blocks_is_in_declared_order(drawn: tuple[list[str], Played]) -> None:
    """S-GRAPH-95, S-GRAPH-99: in whatever order tasks complete; every state runs once."""
    order, played = drawn
    (result,) = [each for each in played.nest.end.units if isinstance(each, GraphResult)]
    assert [step.state for step in result.steps] == order
    assert result.termination_reason == "terminal"
