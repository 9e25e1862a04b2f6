"""The steps of a run: rows of the executions in its history. Pure.

Of very many steps the first ones are shown; `left_out` says how many are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ensemble_ray.plan.plan import GraphUnit
from ensemble_ray.record import history
from ensemble_ray.schedule.instructions import StepEnded
from ensemble_ray.studio.views.step_state import ShownStep, title_of
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.trace import GraphTrace, GraphTraceStep

if TYPE_CHECKING:
    from ensemble_ray.facts.ends import RecordedOutput
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.record.history import RecordedExecution
    from ensemble_ray.record.totals import UsageTally
    from ensemble_ray.studio.schemas.steps import StepSchema

#: Steps that are shown of one run.
MOST_STEPS = 50_000
#: Changes that add nothing to a row.
_NOT_SHOWN = (history.ExecutionStarted, history.RunStarted, history.RunContinued, history.RunFinished)
_ROUNDS: Mapping[str, str] = {"iteration": "Iteration", "attempt": "Attempt", "state": "Step"}


class StepsView:
    """The steps of one run."""

    def __init__(self) -> None:
        self._history = history.RunHistory(limit=MOST_STEPS)
        self._shown: dict[str, ShownStep] = {}
        #: steps of the graph that ended
        self._graph_steps: list[GraphTraceStep] = []

    @property
    def states(self) -> Mapping[str, RecordedExecution]:
        """Its executions by instance, in the order in which they became known."""
        return self._history.executions

    @property
    def usage(self) -> UsageTally:
        """What the run used."""
        return self._history.totals

    @property
    def left_out(self) -> int:
        """How many steps are not shown."""
        return self._history.left_out

    def rows(self, *, after: int = 0) -> list[StepSchema]:
        """Return the rows of all steps that changed behind a position."""
        return [self.show(state).row() for state in self.states.values() if state.changed > after]

    def show(self, state: RecordedExecution) -> ShownStep:
        """Return what a page shows of a step."""
        found = self._shown.get(state.id)
        if found is None:
            found = self._shown[state.id] = ShownStep(state, self._title(state))
        return found

    def counts(self) -> dict[str, int]:
        """Return how many steps there are of each status, units and their executions not counted."""
        return dict(Counter(state.status for state in self.states.values() if not state.is_unit))

    def first_failed(self) -> RecordedExecution | None:
        """Return the step that failed first; None: none did."""
        failed = (each for each in self.states.values() if each.status == "failed" and not each.is_unit)
        return min(failed, key=lambda each: each.ended_at or 0.0, default=None)

    def apply(self, fact: Fact) -> RecordedOutput | None:
        """Apply the next fact and return the output that it recorded.

        Raises:
            RecordError: The fact is damaged.
        """
        output = None
        for change in self._history.apply(fact):
            if isinstance(change, _NOT_SHOWN):
                continue
            if isinstance(change, history.ExecutionEnded):
                output = change.output or output
            elif isinstance(change, history.RoundEnded):
                self._end_round(change)
            if not self.left_out or change.execution.id in self.states:
                self.show(change.execution).apply(change)
        return output

    def _end_round(self, change: history.RoundEnded) -> None:
        what = change.what
        if isinstance(what, StepEnded):
            step = GraphTraceStep(
                path=change.execution.id, state_name=what.state, step_number=what.step, next_state=what.next_state
            )
            self._graph_steps.append(step)

    def graph_trace(self) -> GraphTrace | None:
        """Return the steps of the run's graph that ended; None: it has no graph, or none has begun."""
        found = next((state for state in self.states.values() if state.kind == "graph" and state.started_at), None)
        unit = None if found is None else self._history.units.get(found.node or "")
        if found is None or not isinstance(unit, GraphUnit):
            return None
        return GraphTrace(
            graph_name=unit.name,
            path=found.id,
            start_state=unit.start,
            termination_reason=None,
            steps_run=len(self._graph_steps),
            max_steps=unit.max_steps,
            steps=tuple(self._graph_steps),
        )

    def interrupt(self, at: float) -> None:
        """Note that no process works on the run any more, though it has no end."""
        self._history.interrupt(at)

    def _title(self, state: RecordedExecution) -> str:
        if state.kind in _ROUNDS:
            return f"{_ROUNDS[state.kind]} {state.number}"
        unit, node = self._history.units.get(state.node or ""), self._history.nodes.get(state.node or "")
        text = unit.name if unit is not None else node.description if node is not None else state.label
        return title_of(text) or node_key(state.id) or state.id.rpartition("/")[2]
