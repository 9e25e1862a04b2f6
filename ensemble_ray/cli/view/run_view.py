"""Views of a run: progress, output, closing lines and exit code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ensemble_ray import events
from ensemble_ray.cli.view.progress import Display, ItemProgress, TaskProgress, UnitProgress
from ensemble_ray.cli.view.terminal import (
    FAILED,
    FINE,
    PARTLY,
    WAITING,
    count_noun,
    own_command,
    screen_line,
    show,
    write_note,
)
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.map_reduce import MapDefinition, MapReduceDefinition
from ensemble_ray.errors import EnsembleError, RecordError, ValidationError
from ensemble_ray.events import Event
from ensemble_ray.facts.fact import as_text
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.head import locate_errors, read_head
from ensemble_ray.record.history import ExecutionEnded, RunHistory
from ensemble_ray.record.identity.definition import DIRECT, FINAL, map_key
from ensemble_ray.record.trace import fold_output
from ensemble_ray.schedule.instructions import CAPS
from ensemble_ray.values.delegation import DelegationRequest, DelegationResponse, DelegationStatus
from ensemble_ray.values.ids import instance_of
from ensemble_ray.values.metrics import TaskMetrics
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from ensemble_ray.events.messages import WireEvent
    from ensemble_ray.facts.runs import RecordedError
    from ensemble_ray.record.stores import RecordedRun, RunStore
    from ensemble_ray.runs.handle import Run
    from ensemble_ray.runs.map_reduce.launcher import MapReduceRun
    from ensemble_ray.values.outputs import EnsembleOutput
    from ensemble_ray.values.trace import GraphTrace, LoopTrace
    from ensemble_ray.visualization.dag_model import DagModel
    from ensemble_ray.visualization.flow import Flow


_WITH_TEXT = frozenset({RunState.COMPLETED, RunState.BUDGET_EXHAUSTED})


def error_data(error: RecordedError) -> dict[str, object]:
    causes = [{"type": each.error_type, "message": each.message} for each in error.causes]
    more = {"place": error.place, "causes": causes}
    return {"type": error.error_type, "message": error.message, **{key: each for key, each in more.items() if each}}


def notes_of(incomplete_answers: int, capped: Iterable[str]) -> list[str]:
    """Report incomplete answers, and loops or graphs that ended at their caps."""
    counted = [count_noun(incomplete_answers, "incomplete answer")] if incomplete_answers else []
    return [*counted, *(f"{each} ended at its cap" for each in capped)]


async def read_notes(store: RunStore, run_id: str) -> list[str]:
    """Return no notes if the record has no end or cannot be read."""
    try:
        end = (await read_head(store, run_id)).end
    except RecordError:
        return []
    return [] if end is None else notes_of(end.incomplete_answers, end.capped)


async def read_end(store: RunStore, run_id: str) -> tuple[dict[str, Any], Sequence[str]]:
    """Return the state and the text as JSON data, and further lines about the first error."""
    found = await store.find(run_id)
    head = await read_head(store, run_id)
    end = head.end
    text = None
    if found.state in _WITH_TEXT:
        with locate_errors(found.location):
            text = await _last_text(store, run_id) if head.is_dynamic else fold_output(await store.facts(run_id)).raw
    errors = head.errors
    data = {
        "run_id": run_id, "state": found.state.value, "exit_reason": None if end is None else end.reason.value,
        "raw": text, "error": error_data(errors[0]) if errors else None,
        "errors": [f"task '{each.key}': {each.message}" if each.key else each.message for each in errors],
        "notes": [] if end is None else notes_of(end.incomplete_answers, end.capped), "record": found.location,
    }  # fmt: skip
    return data, errors[0].lines() if errors else ()


async def _last_text(store: RunStore, run_id: str) -> str | None:
    """Return None for a map without reduces."""
    history, text = RunHistory(), None
    for instance in map(instance_of, (FINAL, DIRECT)):
        for fact in await store.facts_of(run_id, instance):
            for change in history.apply(fact):
                if isinstance(change, ExecutionEnded) and change.execution.id == instance and change.output is not None:
                    text = change.output.raw
    return text


# Early ends that the user did not choose.
_UNWANTED_ENDS = frozenset({"error", "timeout", "budget_exhausted"})
_SHOWN_FAILURES = 3
_TEXT = 160


class TerminalRunView:
    """`render` returns the text of the output."""

    def __init__(
        self,
        title: str,
        *,
        is_quiet: bool = False,
        render: Callable[[EnsembleOutput], str] = attrgetter("raw"),
        units: UnitProgress | None = None,
    ) -> None:
        self.is_quiet = is_quiet
        self.display = Display(TaskProgress(title, units), is_quiet=is_quiet)
        self._render = render

    def begin(self, run: Run | MapReduceRun) -> None:
        self.display.add_recorded(run.recorded_tasks, items=run.recorded_items)

    def finish(self, run: Run | MapReduceRun | None, output: EnsembleOutput | None = None) -> None:
        """None: the run never started, or has no output."""
        # `begin` has counted the recorded tasks of a resumed run.
        if run is not None and output is not None and run.is_replayed and not run.recorded_tasks:
            self._add_recorded(output)

    def _add_recorded(self, output: EnsembleOutput) -> None:
        self.display.add_recorded(len(output.task_outputs))

    def to_text(self, output: EnsembleOutput) -> str | None:
        """Return None for a run that waits for reviews."""
        return None if output.state.value == "waiting" else self._render(output)

    def to_data(self, output: EnsembleOutput) -> dict[str, Any]:
        """The command `trace` shows the trace."""
        return output.model_dump(mode="json", exclude={"trace": True, "task_outputs": {"__all__": {"trace"}}})

    def summarize(self, output: EnsembleOutput | None, notes: Sequence[str] = ()) -> Sequence[str]:
        """A failed run has no output; its record has its `notes`."""
        counts = self.display.summary(is_complete=output is not None and output.is_complete)
        if output is None:
            return ["; ".join([counts, *notes])]
        graphs = [] if output.trace.graph_trace is None else [output.trace.graph_trace]
        units: list[LoopTrace | GraphTrace] = [*output.trace.loop_traces, *graphs]
        capped = dict.fromkeys(each.path.rpartition("/")[2] for each in units if each.termination_reason in CAPS)
        lines = ["; ".join([counts, *notes_of(output.metrics.total_incomplete_answers, capped)])]
        if output.open_reviews:  # each with the command that decides it (S-REV-122)
            lines.append(f"The run waits for {count_noun(len(output.open_reviews), 'review')}:")
        for review in output.open_reviews:
            asked = f"{review.task_description}: {review.prompt}" if review.prompt else review.task_description
            lines.append(f"  {screen_line(asked, _TEXT)}")
            lines.append(f"    {own_command()} review {review.run_id} {review.gate_id} approve | edit FILE | exit")
        return lines

    def exit_code(self, output: EnsembleOutput) -> int:
        if output.state.value == "waiting":
            return WAITING
        return FAILED if output.exit_reason.value in _UNWANTED_ENDS else FINE


class ItemView(TerminalRunView):
    """See S-MR-185 to S-MR-187."""

    def __init__(self, definition: MapDefinition, title: str, *, is_quiet: bool = False) -> None:
        super().__init__(title, is_quiet=is_quiet)
        self._definition = definition
        source = definition.item_source
        total, count = (None, None) if source is None else (source.count, source.look)
        if total is not None:
            count = None
        self._progress = ItemProgress(title, total, is_scanned=count is not None)
        self.display = Display(self._progress, is_quiet=is_quiet, count=count)

    def begin(self, run: Run | MapReduceRun) -> None:
        super().begin(run)
        self._follow(run)

    def finish(self, run: Run | MapReduceRun | None, output: EnsembleOutput | None = None) -> None:
        super().finish(run, output)
        self._follow(run)

    def _follow(self, run: Run | MapReduceRun | None) -> None:
        from ensemble_ray.runs.map_reduce.launcher import MapReduceRun

        if isinstance(run, MapReduceRun):
            self._progress.follow(run)

    def _add_recorded(self, output: EnsembleOutput) -> None:
        self.display.add_recorded(len(output.task_outputs), items=_count_done(output))
        first = next(iter(output.trace.task_traces), None)
        self._progress.is_direct = first is not None and first.node_type == "direct"

    @property
    def _has_text(self) -> bool:
        return isinstance(self._definition, MapReduceDefinition)

    def to_text(self, output: EnsembleOutput) -> str | None:
        """Return the last reduce's text; for a map without a file of rows, its outputs."""
        if self._has_text:
            return super().to_text(output)
        return None if self._definition.results is not None else "\n".join(each.raw for each in output.task_outputs)

    def to_data(self, output: EnsembleOutput) -> dict[str, Any]:
        """Results of items are in the file of rows."""
        metrics = output.metrics
        return {
            "run_id": output.run_id,
            "exit_reason": output.exit_reason.value,
            "items": {"done": _count_done(output), "failed": self._progress.items_failed},
            "raw": output.raw if self._has_text else None,
            "results": str(self._definition.results) if self._definition.results else None,
            "dead_letters": str(self._definition.dead_letters) if self._definition.dead_letters else None,
            "failed_items": [each.model_dump(mode="json", exclude={"item"}) for each in output.failed_items],
            "metrics": metrics.model_dump(mode="json"),
        }

    def summarize(self, output: EnsembleOutput | None, notes: Sequence[str] = ()) -> Sequence[str]:
        """Include files and the first failures."""
        progress, lines = self._progress, list(super().summarize(output, notes))
        if self._definition.results is not None:
            lines.append(f"Rows: {_describe_rows(self._definition.results, progress.items_done)}")
        # Skip failures that progress lines have shown.
        failed = () if output is None else output.failed_items
        failures = [each for each in failed if map_key(each.index) not in progress.shown_failures]
        shown = failures[:_SHOWN_FAILURES]
        lines += [f"  item {each.index} failed: {screen_line(each.message, _TEXT)}" for each in shown]
        if len(failures) > len(shown):
            lines.append(f"  and {len(failures) - len(shown):,} more")
        dead_letters = self._definition.dead_letters
        if dead_letters is not None and progress.items_failed and Path(dead_letters).exists():
            lines.append(
                f"Failed items: {dead_letters}; again, and only those: ensemble-ray map --retry-dead {dead_letters} ..."
            )
        return lines

    def exit_code(self, output: EnsembleOutput) -> int:
        code = super().exit_code(output)
        return PARTLY if code == FINE and self._progress.items_failed else code


def _count_done(output: EnsembleOutput) -> int:
    levels = output.trace.map_reduce_levels
    return max(0, len(output.task_outputs) - sum(level.task_count for level in levels if level.level))


def _describe_rows(path: Path, done: int) -> str:
    if path.suffix.lower() != ".jsonl":
        return str(path)
    try:
        with path.open("rb") as file:
            rows = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        rows = done
    return f"{path} has {count_noun(rows, 'row')}"


def view_of(definition: object, title: str, *, is_quiet: bool = False) -> TerminalRunView:
    is_planned = getattr(definition, "is_planned", False)
    if isinstance(definition, MapDefinition) and not is_planned:
        return ItemView(definition, title, is_quiet=is_quiet)
    units = UnitProgress.of(definition) if isinstance(definition, EnsembleDefinition) else None
    return TerminalRunView(title, is_quiet=is_quiet, units=units)


_EVENTS: Mapping[str, type[Event]] = {
    "ensemble_started": events.EnsembleStartedEvent,
    "task_started": events.TaskStartEvent,
    "task_completed": events.TaskCompleteEvent,
    "task_failed": events.TaskFailedEvent,
    "tool_called": events.ToolCallEvent,
    "llm_iteration_completed": events.LlmIterationCompletedEvent,
    "delegation_started": events.DelegationStartedEvent,
    "delegation_completed": events.DelegationCompletedEvent,
    "delegation_failed": events.DelegationFailedEvent,
    "loop_iteration_completed": events.LoopIterationCompletedEvent,
    "graph_state_completed": events.GraphStateCompletedEvent,
}
# Defaults by the field's type.
_EMPTY: Mapping[object, object] = {"str": "", "int": 0, "timedelta": timedelta(), "Sequence[ToolCallRequest]": ()}


def event_of(message: WireEvent) -> Event | None:
    """Return None if progress ignores the event."""
    event_type = _EVENTS.get(message.type)
    if event_type is None:
        return None
    data, found = message.data, dict[str, Any]()
    for field in fields(event_type):
        if (make := _CONVERTED.get(field.name)) is not None:
            found[field.name] = make(data)
        elif f"{field.name}_ms" in data:
            found[field.name] = _duration(data, field.name)
        else:
            found[field.name] = data.get(field.name, _EMPTY.get(field.type))
    return event_type(**found)


def _duration(data: Mapping[str, object], name: str = "duration") -> timedelta:
    value = data.get(f"{name}_ms")
    return timedelta(milliseconds=value if isinstance(value, int) else 0)


def _output(data: Mapping[str, object]) -> TaskOutput:
    """Messages lack the text."""
    task, role = as_text(data.get("task_description")), as_text(data.get("agent_role"))
    took, at, counts = _duration(data), utc_of(0), TaskMetrics.EMPTY
    return TaskOutput(raw="", task_description=task, agent_role=role, completed_at=at, duration=took, metrics=counts)


# Fields that messages have in another form or lack.
_CONVERTED: Mapping[str, Callable[[Mapping[str, object]], object]] = {
    "task_output": _output,
    "output": _output,
    "iteration_outputs": lambda _: {},
    "cause": lambda data: EnsembleError(as_text(data.get("reason"))),
    "failure_reason": lambda data: as_text(data.get("reason")),
    "delegation_depth": lambda _: 1,
    "request": lambda data: DelegationRequest(
        task_id=as_text(data.get("delegation_id")),
        agent_role=as_text(data.get("worker_role")),
        task_description=as_text(data.get("task_description")),
    ),
    "response": lambda data: DelegationResponse(
        task_id=as_text(data.get("delegation_id")),
        status=DelegationStatus.FAILURE if "reason" in data else DelegationStatus.SUCCESS,
        worker_role=as_text(data.get("worker_role")),
        duration=_duration(data),
    ),
}


Svg = Annotated[str | None, Option("--svg", metavar="FILE", help="Draw it as an SVG file; - is standard output.")]
Mermaid = Annotated[
    str | None, Option("--mermaid", metavar="FILE", help="Write it as a Mermaid flowchart; - is standard output.")
]
Dag = Annotated[str | None, Option("--dag", metavar="FILE", help="Write it as JSON (.dag.json); - is standard output.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    svg: str | None
    mermaid: str | None
    dag: str | None

    @property
    def is_asked(self) -> bool:
        return any(each is not None for each in (self.svg, self.mermaid, self.dag))

    def write(self, title: str, make_flow: Callable[[], Flow], make_dag: Callable[[], DagModel]) -> None:
        if self.dag is not None:
            _write(self.dag, make_dag().to_json())
        if self.mermaid is not None:
            from ensemble_ray.visualization.dev_tools import render_mermaid

            _write(self.mermaid, render_mermaid(make_flow()))
        if self.svg is not None:
            from ensemble_ray.visualization.dev_tools import render_svg
            from ensemble_ray.visualization.flow import place_flow

            flow = make_flow()
            _write(self.svg, render_svg(flow, place_flow(flow), title=title))


def _write(target: str, text: str) -> None:
    if target == "-":
        show(text.rstrip("\n"))
        return
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    write_note(f"Wrote {path}")


Otlp = Annotated[
    str | None,
    Option(
        "--otlp",
        metavar="URL",
        help="Send its spans to that OTLP/HTTP receiver, such as http://localhost:4318; 'env': to that of OTEL_EXPORTER_OTLP_ENDPOINT.",
    ),
]
WithContent = Annotated[
    bool, Option("--content", help="With --otlp: send prompts, answers, arguments and results, too.")
]


def check_sending(url: str | None, *, has_content: bool, has_run: bool, is_shown: bool) -> None:
    if url is None and has_content:
        raise ValidationError("--content says what --otlp sends. What to do: add --otlp URL, or leave --content out")
    if url is not None and is_shown:
        advice = "leave --json, --task, --svg, --mermaid and --dag out"
        raise ValidationError(f"--otlp sends a whole run, and shows no output. What to do: {advice}")
    if url is not None and not has_run:
        advice = "name it, such as: ensemble-ray trace latest --otlp URL"
        raise ValidationError(f"--otlp sends one run. What to do: {advice}")


def send_run(store: RunStore, named: RecordedRun, url: str, *, has_content: bool) -> None:
    from ensemble_ray.events.telemetry.listener import missing_packages
    from ensemble_ray.events.telemetry.spans import content_mode
    from ensemble_ray.llm.failures import flaw_of, shown_url
    from ensemble_ray.record.head import locate_errors
    from ensemble_ray.record.view.exporters import recorded_spans

    receiver = None if url == "env" else url
    if receiver is not None and (flaw := flaw_of(receiver)):
        raise ValidationError(f"--otlp {flaw}")
    content = content_mode(True if has_content else None, os.environ)
    try:
        from ensemble_ray.events.telemetry.otlp import UnsentError, own_resource, readable, receiver_here, send_spans
    except ModuleNotFoundError as error:
        raise missing_packages(error) from error
    facts = run_blocking(store.facts(named.run_id))
    with locate_errors(named.location):
        spans = recorded_spans(facts, content)
    resource = own_resource()
    where = shown_url(receiver_here() if receiver is None else receiver)
    try:
        send_spans([readable(each, resource) for each in spans], receiver)
    except UnsentError as error:
        raise EnsembleError(
            f"The receiver of spans at {where} cannot be reached or refuses them: {error}. "
            "What to do: name an OTLP/HTTP receiver, such as a collector at http://localhost:4318"
        ) from error
    write_note(f"{len(spans)} spans of run {named.run_id} were sent to {where}")
