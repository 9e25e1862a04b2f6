"""The spans of a run and of the loops, phases and graphs in it. Package: telemetry. Pure.

A unit, and each of its rounds, lasts from the first of what is in it to the last; what is in it follows from the paths of
executions. A run that goes on has a span for each beginning, all of one trace; later ones link to the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ensemble_ray.events.telemetry import conventions as gen_ai
from ensemble_ray.events.telemetry.content import Content
from ensemble_ray.events.telemetry.span import SpanData, drop_empty
from ensemble_ray.events.telemetry.task_spans import INSTANCE, RUN_ID, rounds_around
from ensemble_ray.values.ids import delegating_call
from ensemble_ray.values.outputs import ExitReason

if TYPE_CHECKING:
    from ensemble_ray.events.telemetry.span import Attribute
    from ensemble_ray.events.tracing import RunTracedEvent, TaskTracedEvent

__all__ = ["UnitTimes", "run_spans"]

_WORKFLOW, _EXIT_REASON, _BEGINNING = "ensemble_ray.workflow", "ensemble_ray.exit_reason", "ensemble_ray.run.beginning"
_UNIT, _UNIT_NAME, _ROUND = "ensemble_ray.unit", "ensemble_ray.unit.name", "ensemble_ray.unit.round"
#: What the rounds of a unit are called.
_ROUNDS = {"loop": "iteration", "phase": "attempt", "graph": "step"}


class UnitTimes:
    """When the units of a run were at work, by path, as far as their executions tell."""

    def __init__(self, events: Iterable[TaskTracedEvent] = ()) -> None:
        """Take the executions, in any order."""
        self._times: dict[str, tuple[float, float]] = {}
        self._first: float | None = None
        for event in events:
            self.add(event)

    @property
    def first(self) -> float | None:
        """When the first execution of the run's first beginning began, Unix time, s; None: there was none."""
        return self._first

    def add(self, event: TaskTracedEvent) -> None:
        """Take an execution."""
        began, ended = event.trace.started_at.timestamp(), event.trace.completed_at.timestamp()
        if not event.tracing.beginning:  # of a later one it may be a task that waited for days
            self._first = began if self._first is None else min(self._first, began)
        if delegating_call(event.instance) is not None:
            return
        for path in _units_around(event.instance):
            first, last = self._times.get(path, (began, ended))
            self._times[path] = min(first, began), max(last, ended)

    def __iter__(self) -> Iterator[tuple[str, float, float]]:
        """Yield path, beginning and end, outer ones first."""
        for path in sorted(self._times):
            yield path, *self._times[path]


def _units_around(instance: str) -> Iterable[str]:
    """Yield the paths of units and rounds that an execution is in: `loop:refine`, `loop:refine#2`."""
    for path in rounds_around(instance):
        yield path.rpartition("#")[0]
        yield path


def run_spans(event: RunTracedEvent, units: UnitTimes, content: Content = Content.NO_CONTENT) -> list[SpanData]:
    """Return the span of a run, and those of its units."""
    tracing = event.tracing
    is_error = event.exit_reason is ExitReason.ERROR
    own: dict[str, Attribute | None] = {
        gen_ai.OPERATION: gen_ai.INVOKE_WORKFLOW,
        gen_ai.WORKFLOW_NAME: event.name,
        RUN_ID: event.run_id,
        _WORKFLOW: event.workflow,
        _EXIT_REASON: event.exit_reason.value,
        _BEGINNING: tracing.beginning or None,
        gen_ai.ERROR_TYPE: (event.error_type or "_OTHER") if is_error else None,
    }
    # The clock of a process that did a task may differ from that of who tells of the run.
    started_at = event.started_at if units.first is None else min(event.started_at, units.first)
    run = SpanData(
        name=f"{gen_ai.INVOKE_WORKFLOW} {event.name}".rstrip(),
        trace_id=tracing.trace_id,
        span_id=tracing.run_span(),
        parent_id=None if tracing.caller is None else tracing.caller.span_id,
        has_remote_parent=tracing.caller is not None,
        started_at=started_at,
        ended_at=max(event.ended_at, started_at),
        attributes=drop_empty(own),
        links=(tracing.run_span(0),) if tracing.beginning else (),
        is_error=is_error,
        status_text=event.error_message if is_error and content is not Content.NO_CONTENT else "",
        is_sampled=tracing.is_sampled,
    )
    return [run, *(_unit(event, *times) for times in units)]


def _unit(event: RunTracedEvent, path: str, started_at: float, ended_at: float) -> SpanData:
    """Return the span of a unit, or of one of its rounds."""
    tracing = event.tracing
    outer, _, own = path.rpartition("/")
    key, mark, number = own.partition("#") if "#" in own else (own, "", "")
    template, _, name = key.partition(":")
    if mark:
        shown, above = f"{_ROUNDS.get(template, 'round')} {int(number) + 1}", path.rpartition("#")[0]
    else:
        shown, above = f"{template} {name}".rstrip(), outer
    attributes = drop_empty(
        {
            RUN_ID: event.run_id,
            INSTANCE: path,
            _UNIT: template,
            _UNIT_NAME: name,
            _ROUND: int(number) + 1 if mark else None,
        }
    )
    return SpanData(
        name=shown,
        trace_id=tracing.trace_id,
        span_id=tracing.execution_span(path),
        parent_id=tracing.execution_span(above) if above else tracing.run_span(),
        started_at=started_at,
        ended_at=ended_at,
        attributes=attributes,
        is_sampled=tracing.is_sampled,
    )
