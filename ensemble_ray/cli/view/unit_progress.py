"""How far the loops, phases and graph of a run are. Pure.

In: the instances of running tasks, and events of iterations and steps. Out: lines for people: iteration 3 of at most 5; state
`critique`, step 4; attempt 2 of a phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ensemble_ray.cli.view.terminal import screen_line
from ensemble_ray.definition.loop import Loop
from ensemble_ray.events import Event, GraphStateCompletedEvent, LoopIterationCompletedEvent

if TYPE_CHECKING:
    from ensemble_ray.definition.ensemble import EnsembleDefinition

_NAME = 32


class UnitProgress:
    """What is shown of the units of a run.

    Args:
        caps: Most iterations of loops and steps of the graph, by `loop:NAME` and `graph:NAME`; others come with events.
        start: State that the graph begins with.
    """

    def __init__(self, caps: Mapping[str, int] | None = None, start: str = "") -> None:
        self._caps = dict(caps or {})
        #: by the unit: the state that routing chose last
        self._states: dict[str, str] = {}
        self._start = start

    @classmethod
    def of(cls, definition: EnsembleDefinition) -> UnitProgress:
        """Return one that knows the caps of a team's loops and graph from the start."""
        loops = [*definition.loops, *(loop for phase in definition.phases for loop in phase.loops)]
        caps: dict[str, int] = {}
        graph = definition.graph
        if graph is not None:
            caps[f"graph:{graph.name}"] = graph.max_steps
            loops += [state for state in graph.states.values() if isinstance(state, Loop)]
        caps.update({f"loop:{loop.name}": loop.max_iterations for loop in loops if loop.max_iterations is not None})
        return cls(caps, "" if graph is None else graph.start)

    def receive(self, event: Event) -> str | None:
        """Take over the end of an iteration or a step; return its line."""
        match event:
            case LoopIterationCompletedEvent():
                self._caps[f"loop:{event.loop_name}"] = event.max_iterations
                took = event.iteration_duration.total_seconds()
                done = f"iteration {event.iteration_number} of at most {event.max_iterations}"
                return f"loop     {screen_line(event.loop_name, _NAME)}: {done} in {took:.1f} s"
            case GraphStateCompletedEvent():
                self._caps[f"graph:{event.graph_name}"] = event.max_steps
                self._states[f"graph:{event.graph_name}"] = event.next_state
                took = event.step_duration.total_seconds()
                led = f"{screen_line(event.state_name, _NAME)} -> {screen_line(event.next_state, _NAME)}"
                done = f"{led}, step {event.step_number} of at most {event.max_steps}"
                return f"graph    {screen_line(event.graph_name, _NAME)}: {done} in {took:.1f} s"
            case _:
                return None

    def lines(self, running: Iterable[str]) -> list[str]:
        """Return a line for each unit in which a task runs, in the order of those tasks."""
        segments = (segment for instance in running for segment in instance.split("/")[:-1])
        return [line for segment in dict.fromkeys(segments) for line in self._describe(segment)]

    def _describe(self, segment: str) -> Iterator[str]:
        key, _, occurrence = segment.rpartition("#")
        kind, _, name = key.partition(":")
        shown = screen_line(name, _NAME)
        number = int(occurrence) + 1 if occurrence.isdecimal() else 1
        cap = self._caps.get(key)
        match kind:
            case "loop":
                yield f"  loop {shown}: iteration {number}" + (f" of at most {cap}" if cap else "")
            case "graph":
                state = self._states.get(key, self._start)
                where = f"state {screen_line(state, _NAME)}, " if state else ""
                yield f"  graph {shown}: {where}step {number}" + (f" of at most {cap}" if cap else "")
            case "phase":
                yield f"  phase {shown}: attempt {number}"
            case _:
                return
