"""Export the traces of runs that ended without failure, to files or to the user's exporter.

A failure of an exporter never affects the result of a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Union

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.errors import message_of
from ensemble_ray.events import RunTracedEvent, TaskTracedEvent
from ensemble_ray.events.telemetry.spans import Content, SpanData, UnitTimes, run_spans, task_spans
from ensemble_ray.facts.effects import is_making_agent
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import PlanRecorded, RunEnded, RunResumed, StimulusRecorded
from ensemble_ray.process.concurrency import call_user
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.head import name_in
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.work import RecordedWork
from ensemble_ray.values.ids import delegating_call
from ensemble_ray.values.outputs import ExitReason, RunState
from ensemble_ray.values.trace import CaptureMode, ExecutionTrace, ExecutionTraceExporter, RunTracing, parse_traceparent

_log = bounded_logger(__name__)
_DEFAULT_FOLDER = "./traces/"  # In capture mode full (S-CAP-15).

#: Types that `trace_exporter` accepts (S-TRC-60).
AnyExporter = Union[ExecutionTraceExporter, "Callable[[ExecutionTrace], object]"]


class JsonTraceExporter:
    """Writes each trace as a JSON file. A failure is a WARN line, never an error."""

    def __init__(self, path: str | Path, *, directory_mode: bool = True) -> None:
        """Set the target.

        Args:
            path: A folder, created if missing, for one file `{ensemble_id}.json` per run.
            directory_mode: If False, `path` is the file itself, overwritten by every run.
        """
        self.path = Path(path)
        self.directory_mode = directory_mode

    def export(self, trace: ExecutionTrace) -> None:
        """Write one trace."""
        target = self.path
        if self.directory_mode:
            # The user may choose the id, and it must not point out of the folder.
            name = re.sub(r"[^A-Za-z0-9._-]|^\.+", "_", trace.ensemble_id) or "_"
            target /= f"{name}.json"
        try:
            trace.write_json(target)
        except OSError as error:
            _log.warning("The trace could not be written to %s: %s", target, message_of(error))

    def __repr__(self) -> str:
        return f"JsonTraceExporter({str(self.path)!r}, directory_mode={self.directory_mode})"


def effective_exporter(capture_mode: CaptureMode, trace_exporter: AnyExporter | None) -> AnyExporter | None:
    """Return the chosen exporter, or else in capture mode full one that writes to `./traces/` (S-CAP-15)."""
    if trace_exporter is None and capture_mode is CaptureMode.FULL:
        return JsonTraceExporter(_DEFAULT_FOLDER)
    return trace_exporter


async def export_safely(exporter: AnyExporter, trace: ExecutionTrace) -> None:
    """Call the exporter, in a thread if it is synchronous. Its errors are logged as a WARN line (S-TRC-62)."""
    function = exporter.export if isinstance(exporter, ExecutionTraceExporter) else exporter
    try:
        await call_user(function, trace)
    except Exception as error:  # noqa: BLE001  an exporter cannot fail a run
        _log.warning("Trace exporter %s failed: %s", type(exporter).__name__, message_of(error))


class _Beginning(Struct, kw_only=True):
    tracing: RunTracing
    started_at: float
    last_at: float
    end: RunEnded | None = None
    tasks: list[TaskTracedEvent] = msgspec.field(default_factory=list[TaskTracedEvent])

    @property
    def has_told(self) -> bool:
        """Whether the run has reported all its tasks; a run that waits for reviews has not reported waiting tasks."""
        return self.end is not None and self.end.state is not RunState.WAITING


def recorded_spans(facts: Sequence[Fact], content: Content = Content.NO_CONTENT) -> list[SpanData]:
    history = RunHistory(has_details=True)
    spans: list[SpanData] = []
    for beginning in _read(facts, history):
        for event in beginning.tasks:
            spans += task_spans(event, content)
        spans += run_spans(_run_ended(history.head.header, beginning), UnitTimes(beginning.tasks), content)
    # A tool call that was interrupted and repeated is reported in the period in which it ended.
    return list({span.span_id: span for span in spans}.values())


def _read(facts: Iterable[Fact], history: RunHistory) -> Sequence[_Beginning]:
    """Return the periods of a run, each with the executions that it reported or would have reported.

    An execution that was active when the run was interrupted or suspended belongs to the period of its last fact.
    """
    beginnings: list[_Beginning] = []
    untold: dict[str, _Beginning] = {}  # executions that are not reported yet -> the period of their last fact
    for fact in facts:
        match fact.data:
            case PlanRecorded(started_at=at, traceparent=caller):
                tracing = RunTracing(run_id=fact.run, caller=parse_traceparent(caller or ""))
                began = fact.at if at is None else at
                beginnings.append(_Beginning(tracing=tracing, started_at=began, last_at=fact.at))
            case RunResumed(is_restart=False) if beginnings:
                if beginnings[-1].has_told:
                    _tell(history, untold)
                reported_until = history.head.reported_until
                tracing = replace(beginnings[0].tracing, beginning=len(beginnings), reported_until=reported_until)
                beginnings.append(_Beginning(tracing=tracing, started_at=fact.at, last_at=fact.at))
            case RunEnded() as end if beginnings:
                beginnings[-1].end = end
            case _:
                pass
        history.apply(fact)
        if not beginnings:
            continue
        beginnings[-1].last_at = max(beginnings[-1].last_at, fact.at)
        is_work = not (fact.is_of_run or is_making_agent(fact))
        if is_work and (fact.instance in untold or not isinstance(fact.data, StimulusRecorded)):
            untold[fact.instance] = beginnings[-1]
    _tell(history, untold)
    return beginnings


def _tell(history: RunHistory, untold: dict[str, _Beginning]) -> None:
    for instance in sorted(history.work, key=lambda each: delegating_call(each) is not None):
        work = RecordedWork(history, instance)
        if instance in untold and work.is_recorded:
            untold[instance].tasks.append(_make_traced(work, untold[instance]))
    untold.clear()


def _make_traced(work: RecordedWork, beginning: _Beginning) -> TaskTracedEvent:
    state = RunState.INTERRUPTED if beginning.end is None else beginning.end.state or RunState.INTERRUPTED
    trace = work.trace(state.value)
    failure = work.failure if work.has_failed else None
    status = "completed" if work.output is not None else str(trace.metadata.get("state", "exited"))
    return TaskTracedEvent(
        run_id=beginning.tracing.run_id,
        instance=work.instance,
        tracing=beginning.tracing,
        trace=trace,
        status="failed" if failure is not None else status,
        error_type="" if failure is None else failure.data.error_type,
        error_message="" if failure is None else failure.data.message,
        call_ids=work.call_ids,
        is_handler=work.is_handler,
    )


def _run_ended(header: PlanRecorded, beginning: _Beginning) -> RunTracedEvent:
    end = beginning.end
    reason, error_type, message = ExitReason.ERROR, "Interrupted", "The run was interrupted"
    if end is not None:
        reason = end.reason
        error_type, message = next(((each.error_type, each.message) for each in end.errors), ("", ""))
    return RunTracedEvent(
        run_id=beginning.tracing.run_id,
        tracing=beginning.tracing,
        workflow=header.workflow or "",
        name=name_in(header),
        started_at=beginning.started_at,
        ended_at=beginning.last_at,
        exit_reason=reason,
        error_type=error_type,
        error_message=message,
    )
