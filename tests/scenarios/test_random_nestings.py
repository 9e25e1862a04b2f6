"""Loops, phases, graphs and maps put together at random: one run, its record, and another runtime give the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Step
from hypothesis import strategies as st

from ensemble_ray import (
    Ensemble,
    EnsembleCompletedEvent,
    EnsembleError,
    EnsembleOutput,
    EnsembleStartedEvent,
    Event,
    ExecutionTrace,
    GraphStateCompletedEvent,
    LoopIterationCompletedEvent,
    MapEnsemble,
    Runtime,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskStartEvent,
    resume,
)
from ensemble_ray.record.runs import read_facts
from ensemble_ray.record.trace import fold_trace
from tests.scenarios.comparing import as_data
from tests.scenarios.drawing import KINDS, Kind, team_of
from tests.scenarios.teams import PATIENCE_S

SEEDED = settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    phases=(Step.explicit, Step.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
CHOICES = st.lists(st.integers(0, 59), min_size=40, max_size=40)
TROUBLE = st.sampled_from([0, 0, 5, 12])


@dataclass
class Seen:
    """What a run shows."""

    run_id: str
    events: list[Event]
    output: EnsembleOutput | None
    error: EnsembleError | None

    @property
    def trace(self) -> ExecutionTrace:
        """Its trace, however it ended."""
        given = self.output if self.output is not None else self.error
        assert given is not None
        assert given.trace is not None
        return given.trace


def histories_of(output: EnsembleOutput) -> dict[str, object]:
    """What an output tells beside its trace."""
    return {
        "raws": [each.raw for each in output.task_outputs],
        "raw": output.raw,
        "exit": output.exit_reason,
        "phases": {name: [each.raw for each in outputs] for name, outputs in output.phase_outputs.items()},
        "steps": [(each.state_name, each.output.raw, each.next_state) for each in output.graph_history],
        "why": (output.graph_termination_reason, output.was_graph_terminated_by_max_steps),
        "loops": {
            name: [{key: each.raw for key, each in turn.items()} for turn in output.get_loop_history(name)]
            for name in sorted({each.loop_name for each in (output.trace.loop_traces if output.trace else ())})
        },
        "failed": [(each.index, each.error_type, each.message) for each in output.failed_items],
    }


def what_came_of(run: Seen) -> object:
    """What a run gave, or raised."""
    if run.output is not None:
        return histories_of(run.output)
    error = run.error
    gave = [each.raw for each in getattr(error, "completed_task_outputs", ())]
    return type(error), str(error), gave, getattr(error, "phase_statuses", None)


def seen(team: Ensemble | MapEnsemble, runtime: Runtime) -> Seen:
    """Run a team and keep what it shows."""
    run = team.start(runtime=runtime)
    events = [each for each in run.events() if isinstance(each, Event)]
    try:
        return Seen(run.id, events, run.result(timeout_s=PATIENCE_S), None)
    except EnsembleError as error:
        return Seen(run.id, events, None, error)


def without_numbers(path: str) -> str:
    """Return a path without the number of a graph's step, which branches share as they come."""
    return re.sub(r"^graph:g#\d+", "graph:g", path)


def names_of(events: Sequence[Event]) -> Counter[tuple[str, str]]:
    """Return how often each event was told of each execution."""
    return Counter((type(each).__name__, without_numbers(getattr(each, "instance", ""))) for each in events)


def traced(trace: ExecutionTrace) -> object:
    """Return a trace as data, its parts in an order that does not hang on what was done first."""
    data = cast("dict[str, Any]", as_data(trace))
    for name, value in data.items():
        if isinstance(value, list):
            data[name] = sorted(without_numbers(str(each)) for each in value)
    return data


def check_events(run: Seen) -> None:
    """Assert that each execution starts once and ends at most once, what holds them ends behind them, and the run at last."""
    events = run.events
    ended: Counter[str] = Counter()
    started: Counter[str] = Counter()
    told: Counter[str] = Counter()
    for each in events:
        match each:
            case TaskStartEvent():
                started[each.instance] += 1
            case TaskCompleteEvent() | TaskFailedEvent():
                assert started[each.instance] == 1
                ended[each.instance] += 1
            case LoopIterationCompletedEvent() | GraphStateCompletedEvent():
                told[each.instance] += 1
                inside = [name for name in started if name.startswith(f"{each.instance}/")]
                assert inside
                assert all(ended[name] for name in inside)
            case _:
                pass
    assert set(started.values()) | set(ended.values()) | set(told.values()) <= {1}
    whole = [type(each) for each in events if isinstance(each, EnsembleStartedEvent | EnsembleCompletedEvent)]
    assert whole == [EnsembleStartedEvent, EnsembleCompletedEvent][: 1 if run.output is None else 2]  # S-ENG-4
    assert run.output is None or isinstance(events[-1], EnsembleCompletedEvent)


@pytest.mark.parametrize("kind", KINDS)
@SEEDED
@given(CHOICES, TROUBLE)
def test_record_of_any_nesting_gives_what_its_run_gave(
    inline_runtime: Runtime, home: str, kind: Kind, choices: list[int], trouble: int
) -> None:
    """S-SET-39, S-DUR-35, S-LOOP-80, S-PHASE-40, S-GRAPH-72, S-MR-193: outputs, histories and traces; no task runs again."""
    run = seen(team_of(kind, choices, trouble), inline_runtime)
    check_events(run)
    # A record does not know of a task that left the run that it ended; its trace has that of every run with such a task.
    is_known = run.output is None or run.output.is_complete
    if is_known and kind != "map":
        assert as_data(fold_trace(read_facts(run.run_id, Path(home)))) == as_data(run.trace)
    if run.output is not None:
        again = resume(run.run_id, team_of(kind, choices, trouble), runtime=inline_runtime)
        assert histories_of(again) == histories_of(run.output)
        assert not is_known or as_data(again.trace) == as_data(run.trace)


def choices_of(seed: int) -> list[int]:
    """Return the choices of a seed."""
    return [(seed * place * place + 13 * place) % 59 for place in range(40)]


def on_both(runtimes: Sequence[Runtime], kind: Kind, seed: int, trouble: int, **fields: bool) -> tuple[Seen, Seen]:
    """Run one team on both runtimes."""
    inline, on_ray = (seen(team_of(kind, choices_of(seed), trouble, **fields), each) for each in runtimes)
    check_events(inline)
    check_events(on_ray)
    return inline, on_ray


@pytest.mark.parametrize("kind", KINDS)
def test_any_nesting_is_the_same_on_both_runtimes(inline_runtime: Runtime, ray_runtime: Runtime, kind: Kind) -> None:
    """S-CONV-32: outputs, histories, events and traces, whatever order things side by side come in."""
    for seed in (7, 11, 23):
        inline, on_ray = on_both([inline_runtime, ray_runtime], kind, seed, 0, is_racing=False)
        assert inline.output is not None
        assert on_ray.output is not None
        one, other = histories_of(inline.output), histories_of(on_ray.output)
        assert sorted(cast("list[str]", one.pop("raws"))) == sorted(cast("list[str]", other.pop("raws")))
        assert one | {"raw": ""} == other | {"raw": ""}  # of what completed last
        assert names_of(on_ray.events) == names_of(inline.events)
        assert traced(on_ray.trace) == traced(inline.trace)


@pytest.mark.parametrize("kind", KINDS)
def test_any_end_is_the_same_on_both_runtimes(inline_runtime: Runtime, ray_runtime: Runtime, kind: Kind) -> None:
    """S-CONV-32, S-ENG-13, S-ENG-59: tasks that fail or leave, caps that raise, reviews that reject."""
    for seed in (3, 5, 17, 29):
        inline, on_ray = on_both([inline_runtime, ray_runtime], kind, seed, 3, is_ordered=True)
        assert what_came_of(on_ray) == what_came_of(inline)
        assert names_of(on_ray.events) == names_of(inline.events)
        assert as_data(on_ray.trace) == as_data(inline.trace)
