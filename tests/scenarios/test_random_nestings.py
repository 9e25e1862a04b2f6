"""Loops, phases and graphs put together at random: one run, its record, and another runtime give the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Step
from hypothesis import strategies as st

from ensemble_ray import (
    Ensemble,
    EnsembleError,
    EnsembleOutput,
    Event,
    ExitEarlyError,
    Graph,
    GraphEdge,
    GraphFork,
    GraphJoin,
    GraphStateCompletedEvent,
    Loop,
    LoopIterationCompletedEvent,
    Phase,
    PhaseReview,
    Runtime,
    Task,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskStartEvent,
    resume,
)
from ensemble_ray.record.fold import fold_trace
from ensemble_ray.record.runs import read_facts
from tests.scenarios.answering import answering
from tests.scenarios.comparing import as_data
from tests.scenarios.teams import PATIENCE_S

SEEDED = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    phases=(Step.explicit, Step.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass
class Draws:
    """Choices by their place in a list, so that the same team can be made anew for every run."""

    choices: Sequence[int]
    #: one task in how many fails or leaves; 0: none
    trouble: int
    taken: int = 0
    made: int = 0

    def below(self, end: int) -> int:
        """Choose a number from 0 on."""
        self.taken += 1
        return self.choices[self.taken % len(self.choices)] % end

    def task(self, context: Sequence[object] = ()) -> Task:
        """Make a task that may fail, or leave the run, in one of its executions."""
        self.made += 1
        name = f"t{self.made}"
        answers: list[object] = []
        if self.trouble and self.below(self.trouble) == 0:
            answers = ["fine"] * self.below(2) + [(ValueError("broke"), ExitEarlyError("enough"))[self.below(2)]]
        return answering(name, *answers, context=[each for each in context if self.below(2)])

    def loop(self) -> Loop:
        """Make a loop of one or two tasks."""
        first = self.task()
        body = [first, self.task([first])][: 1 + self.below(2)]
        self.made += 1
        ends = 1 + self.below(4)
        return Loop(
            name=f"l{self.made}",
            body=body,
            until=None if self.below(2) else lambda context: context.iteration_number >= ends,
            max_iterations=1 + self.below(3),
            output_mode=("last_iteration", "final_task_only", "all_iterations")[self.below(3)],
            on_max_iterations="throw" if self.trouble and self.below(6) == 0 else "return_last",
        )

    def phases(self) -> Ensemble:
        """Make phases of tasks and loops, some of them reviewed."""
        made: list[Phase] = []
        for number in range(1 + self.below(4)):
            after = [each for each in made if self.below(2)]
            before = [each.output for each in after]
            loops = [self.loop() for _ in range(self.below(2))]
            tasks = [self.task([*before, *(each.output for each in loops)]) for _ in range(1 + self.below(2))]
            said = ["APPROVE", "RETRY: more", f"RETRY_PREDECESSOR p{number - 1}: more"]
            decisions = [said[self.below(3)], said[self.below(2)], "APPROVE"]
            if self.trouble and self.below(8) == 0:
                decisions = ["REJECT: no"]
            review = PhaseReview(task=answering(f"check{number}", *decisions)) if self.below(2) else None
            workflow = "parallel" if self.below(2) else None
            made.append(
                Phase(name=f"p{number}", tasks=tasks, loops=loops, after=after, review=review, workflow=workflow)
            )
        return Ensemble(phases=made, max_parallel_tasks=1)

    def graph(self) -> Ensemble:
        """Make a graph: a start, branches that may visit their state again, and an end that may lead back."""
        branches = [f"b{number}" for number in range(2 + self.below(2))]
        states: dict[str, Task | Loop] = {"start": self.task()}
        states |= {name: self.loop() if self.below(3) == 0 else self.task() for name in branches}
        states["end"] = self.task([each for name in branches if isinstance(each := states[name], Task)])
        edges: list[GraphEdge | GraphFork | GraphJoin] = [GraphFork(from_state="start", to_states=branches)]
        for name in branches:
            visits = 1 + self.below(3)
            edges.append(
                GraphEdge(
                    from_state=name,
                    to_state=name,
                    condition=lambda routing, name=name, visits=visits: len(routing.state_history[name]) < visits,
                )
            )
        count = None if self.below(2) else 1 + self.below(len(branches))
        edges.append(GraphJoin(from_states=branches, to_state="end", count=count))
        again = 1 + self.below(2)
        edges.append(
            GraphEdge(
                from_state="end",
                to_state="start",
                condition=lambda routing: len(routing.state_history["end"]) < again,
            )
        )
        edges.append(GraphEdge(from_state="end", to_state=Graph.END))
        steps = 4 + self.below(20)
        action = "throw" if self.trouble and self.below(3) == 0 else "return_with_flag"
        return Ensemble(
            graph=Graph(name="g", states=states, edges=edges, start="start", max_steps=steps, on_max_steps=action),
            max_parallel_tasks=1,
        )

    def flat(self) -> Ensemble:
        """Make tasks and loops that wait for each other."""
        loops = [self.loop() for _ in range(1 + self.below(3))]
        tasks = [self.task([each.output for each in loops]) for _ in range(self.below(3))]
        return Ensemble(
            tasks=tasks, loops=loops, workflow=("sequential", "parallel")[self.below(2)], max_parallel_tasks=1
        )


def team_of(choices: Sequence[int], trouble: int) -> Ensemble:
    """Make the team of these choices; the same choices make the same team."""
    draws = Draws(choices, trouble)
    return (draws.phases, draws.graph, draws.flat)[choices[0] % 3]()


CHOICES = st.lists(st.integers(0, 59), min_size=40, max_size=40)
TROUBLE = st.sampled_from([0, 0, 5, 12])


@dataclass
class Seen:
    """What a run shows."""

    run_id: str
    events: list[Event]
    output: EnsembleOutput | None
    error: EnsembleError | None


def histories_of(output: EnsembleOutput) -> dict[str, object]:
    """What an output tells beside its trace."""
    return {
        "raws": [each.raw for each in output.task_outputs],
        "raw": output.raw,
        "exit": output.exit_reason,
        "phases": {name: [each.raw for each in outputs] for name, outputs in output.phase_outputs.items()},
        "steps": [
            (each.state_name, each.step_number, each.output.raw, each.next_state) for each in output.graph_history
        ],
        "why": (output.graph_termination_reason, output.was_graph_terminated_by_max_steps),
        "loops": {
            name: [{key: each.raw for key, each in turn.items()} for turn in output.get_loop_history(name)]
            for name in sorted({each.loop_name for each in (output.trace.loop_traces if output.trace else ())})
        },
    }


def seen(team: Ensemble, runtime: Runtime) -> Seen:
    """Run a team and keep what it shows."""
    run = team.start(runtime=runtime)
    events = [each for each in run.events() if isinstance(each, Event)]
    try:
        return Seen(run.id, events, run.result(timeout_s=PATIENCE_S), None)
    except EnsembleError as error:
        return Seen(run.id, events, None, error)


def names_of(events: Sequence[Event]) -> Counter[tuple[str, object]]:
    """Return how often each event was told of each execution."""
    return Counter((type(each).__name__, getattr(each, "instance", None)) for each in events)


def check_events(events: Sequence[Event]) -> None:
    """Assert that each execution starts once and ends at most once, and what holds them ends behind them."""
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


@SEEDED
@given(CHOICES, TROUBLE)
def test_record_of_any_nesting_gives_what_its_run_gave(
    inline_runtime: Runtime, home: str, choices: list[int], trouble: int
) -> None:
    """S-SET-39, S-DUR-35, S-LOOP-80, S-PHASE-40, S-GRAPH-72, S-DUR-138: outputs, histories and traces; no task runs again."""
    run = seen(team_of(choices, trouble), inline_runtime)
    check_events(run.events)
    trace = run.output.trace if run.output is not None else run.error.trace if run.error is not None else None
    assert trace is not None
    # A record does not know of a task that left the run that it ended; its trace has that of every run with such a task.
    if run.output is None or run.output.is_complete:
        assert as_data(fold_trace(read_facts(run.run_id, Path(home)))) == as_data(trace)
    if run.output is not None:
        again = resume(run.run_id, team_of(choices, trouble), runtime=inline_runtime)
        assert histories_of(again) == histories_of(run.output)


@pytest.mark.parametrize("kind", ["phases", "loops"])
def test_any_nesting_is_the_same_on_both_runtimes(inline_runtime: Runtime, ray_runtime: Runtime, kind: str) -> None:
    """S-CONV-32: outputs, histories and events, whatever order things side by side come in."""
    first = ("phases", "graph", "loops").index(kind)
    for seed in (7, 11, 23):
        choices = [first, *((seed * place * place + 13 * place) % 59 for place in range(1, 40))]
        inline, on_ray = (seen(team_of(choices, 0), each) for each in (inline_runtime, ray_runtime))
        assert inline.output is not None
        assert on_ray.output is not None
        check_events(on_ray.events)
        for what in ("phases", "loops", "exit"):
            assert histories_of(on_ray.output)[what] == histories_of(inline.output)[what]
        assert sorted(each.raw for each in on_ray.output.task_outputs) == sorted(
            each.raw for each in inline.output.task_outputs
        )
        assert names_of(on_ray.events) == names_of(inline.events)
