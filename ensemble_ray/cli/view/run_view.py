"""Views of a run: progress, output, closing lines and exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble_ray.cli.view.progress import Display, ItemProgress, TaskProgress, UnitProgress
from ensemble_ray.cli.view.terminal import (
    FAILED,
    FINE,
    PARTLY,
    WAITING,
    count_noun,
    own_command,
    role_option,
    screen_line,
)
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.map_reduce import MapDefinition, MapReduceDefinition
from ensemble_ray.errors import RecordError
from ensemble_ray.record.head import locate_errors, read_head
from ensemble_ray.record.history import ExecutionEnded, RunHistory
from ensemble_ray.record.identity.definition import DIRECT, FINAL, map_key
from ensemble_ray.record.trace import fold_output
from ensemble_ray.schedule.instructions import CAPS
from ensemble_ray.values.ids import instance_of
from ensemble_ray.values.outputs import RunState

if TYPE_CHECKING:
    from ensemble_ray.facts.runs import RecordedError
    from ensemble_ray.record.stores import RunStore
    from ensemble_ray.runs.handle import Run
    from ensemble_ray.runs.map_reduce.launcher import MapReduceRun
    from ensemble_ray.values.outputs import EnsembleOutput
    from ensemble_ray.values.trace import GraphTrace, LoopTrace

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
            role = role_option(review.required_role)
            lines.append(
                f"    {own_command()} review {review.run_id} {review.gate_id} approve | edit FILE | exit{role}"
            )
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
