"""Graphs of bare states, the facts one tells about them, and a machine that is checked after every step."""

from __future__ import annotations

from collections.abc import Sequence

from ensemble_ray import ExitReason
from ensemble_ray.plan.plan import EdgeEntry, ForkEntry, GraphEntry, GraphUnit, JoinEntry, StateEntry
from ensemble_ray.schedule.graph import END_STATE, GraphMachine
from ensemble_ray.schedule.instructions import (
    Announce,
    Cancel,
    ContextPart,
    EdgeMatches,
    End,
    Evaluate,
    GraphResult,
    Instruction,
    Start,
    StepEnded,
    TaskChanges,
)
from ensemble_ray.schedule.stimuli import Begun, Cancelled, Completed, Evaluated, Exited, Failed
from ensemble_ray.schedule.unit import UnitStimulus
from tests.ensemble_ray.schedule.executions import execution_of
from tests.ensemble_ray.schedule.invariants import check

PATH = "graph:g"
BEGUN = Begun(at=0.0)


def edge(from_state: str, to_state: str = END_STATE, *, asked: bool = False) -> EdgeEntry:
    """An edge, with a condition or without."""
    return EdgeEntry(from_state=from_state, to_state=to_state, has_condition=asked)


def fork(from_state: str, *to_states: str) -> ForkEntry:
    """A fork."""
    return ForkEntry(from_state=from_state, to_states=to_states)


def join(from_states: Sequence[str], to_state: str = END_STATE, count: int | None = None) -> JoinEntry:
    """A join."""
    return JoinEntry(from_states=tuple(from_states), to_state=to_state, count=count)


def graph_of(*edges: GraphEntry, start: str = "a", members: dict[str, str] | None = None, **rules: object) -> GraphUnit:
    """A graph of the states that its edges leave; the member of a state has its name where none is named."""
    names: dict[str, None] = {start: None}
    for entry in edges:
        names.update(dict.fromkeys(entry.from_states if isinstance(entry, JoinEntry) else (entry.from_state,)))
    states = tuple(StateEntry(name=name, member=(members or {}).get(name, name)) for name in names)
    return GraphUnit(key=PATH, name="g", states=states, edges=edges, start=start, **rules)  # type: ignore[arg-type]


def place(number: int, state: str) -> str:
    """The instance of a step's task."""
    return f"{PATH}#{number - 1}/{state}#0"


def start(number: int, state: str, changes: TaskChanges | None = None) -> Start:
    """Start a step."""
    return Start(instance=place(number, state), changes=changes)


def stop(number: int, state: str) -> Cancel:
    """Stop a step."""
    return Cancel(instance=place(number, state))


def done(number: int, state: str, at: float = 1.0) -> Completed:
    """The step's task succeeded."""
    return Completed(at=at, instance=place(number, state))


def failed(number: int, state: str) -> Failed:
    """The step's task failed."""
    return Failed(at=1.0, instance=place(number, state), error_type="ValueError")


def exited(
    number: int, state: str, reason: ExitReason = ExitReason.USER_EXIT_EARLY, *, has_output: bool = False
) -> Exited:
    """The step's task, or the gate behind it, ended the run early."""
    return Exited(at=1.0, instance=place(number, state), reason=reason, has_output=has_output)


def stopped(number: int, state: str) -> Cancelled:
    """The step's task was stopped."""
    return Cancelled(at=2.0, instance=place(number, state))


def ask(number: int, position: int) -> Evaluate:
    """Ask the condition of an edge."""
    return Evaluate(question=EdgeMatches(unit=PATH, step=number, edge=position))


def answer(number: int, position: int, verdict: bool | None) -> Evaluated:  # noqa: FBT001  what is answered
    """Answer it; None: it raised."""
    error = {"error_type": "KeyError", "message": "boom"} if verdict is None else {}
    question = EdgeMatches(unit=PATH, step=number, edge=position)
    return Evaluated(at=1.5, question=question, answer=verdict, **error)


def ended(number: int, state: str, next_state: str, duration_s: float = 1.0) -> Announce:
    """Announce a step."""
    instance = place(number, state)
    what = StepEnded(
        unit=PATH,
        step=number,
        state=state,
        instance=instance,
        output=ContextPart((instance,)),
        next_state=next_state,
        duration_s=duration_s,
    )
    return Announce(what=what)


class CheckedGraph:
    """A machine whose invariants are checked after every step; calling it is telling it."""

    def __init__(self, unit: GraphUnit) -> None:
        self.machine = GraphMachine(unit, execution_of(unit, instance=f"{PATH}#0"))
        check(self.machine)
        self.end: End | None = None

    def __call__(self, *stimuli: UnitStimulus) -> list[Instruction]:
        wanted: list[Instruction] = []
        for stimulus in stimuli:
            wanted += self.machine.handle(stimulus)
            check(self.machine)
        for each in wanted:
            assert self.end is None, "nothing is wanted after the end"
            self.end = each if isinstance(each, End) else None
        return wanted

    def walk(self, *states: str, first: int = 1) -> list[Instruction]:
        """Let steps complete one after the other."""
        return [each for number, state in enumerate(states, first) for each in self(done(number, state))]

    @property
    def result(self) -> GraphResult:
        """Return what became of it."""
        assert self.end is not None
        (result,) = self.end.units
        assert isinstance(result, GraphResult)
        return result

    @property
    def steps(self) -> list[str]:
        """Return the states of its history."""
        return [step.state for step in self.result.steps]

    @property
    def reason(self) -> str | None:
        """Return why it ended."""
        return self.result.termination_reason
