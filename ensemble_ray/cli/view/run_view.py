"""How a run is shown: its progress, its output, what is said behind it, its exit code. Room: cli.

One view for runs of a team, another for runs over many items; which one, the definition decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble_ray.cli.view.display import Display
from ensemble_ray.cli.view.item_display import ItemDisplay
from ensemble_ray.cli.view.progress import counted
from ensemble_ray.cli.view.terminal import FAILED, FINE, PARTLY, one_line
from ensemble_ray.definition.map_reduce import MapDefinition, MapReduceDefinition
from ensemble_ray.record.identity.map_reduce import map_key

if TYPE_CHECKING:
    from ensemble_ray.fed.run import MapReduceRun
    from ensemble_ray.runs.handle import Run
    from ensemble_ray.values.outputs import EnsembleOutput

__all__ = ["ItemView", "RunView", "view_of"]

#: Early ends that nobody asked for.
_UNWANTED_ENDS = frozenset({"error", "timeout", "budget_exhausted"})
#: Failed items that are told of at the end.
_SHOWN_FAILURES = 3
_TEXT = 160


class RunView:
    """How a run of a team is shown."""

    def __init__(
        self, title: str, *, is_quiet: bool = False, render: Callable[[EnsembleOutput], str] = attrgetter("raw")
    ) -> None:
        """Make one; `render` gives the text of the output."""
        self.is_quiet = is_quiet
        self.display: Display = Display(title, is_quiet=is_quiet)
        self._render = render

    def ended(self, run: Run | MapReduceRun | None, output: EnsembleOutput | None = None) -> None:
        """The run has ended; None: it never began, or gave no output."""
        # A run that is resumed has told its display before.
        if run is not None and output is not None and run.is_replayed and not run.recorded_tasks:
            self._count_recorded(output)

    def _count_recorded(self, output: EnsembleOutput) -> None:
        """Count what a run that had completed before has on record."""
        self.display.is_recorded(len(output.task_outputs))

    def text(self, output: EnsembleOutput) -> str | None:
        """What goes to standard output; None: nothing."""
        return self._render(output)

    def data(self, output: EnsembleOutput) -> dict[str, Any]:
        """The same as JSON data; its trace has a command of its own."""
        return output.model_dump(mode="json", exclude={"trace": True, "task_outputs": {"__all__": {"trace"}}})

    def summary(self, output: EnsembleOutput | None) -> Sequence[str]:  # noqa: ARG002  other views tell of it
        """What is said when it has ended; None: it failed."""
        return [self.display.summary()]

    def code(self, output: EnsembleOutput) -> int:
        """The exit code of a run that gave an output and was not cancelled."""
        return FAILED if output.exit_reason.value in _UNWANTED_ENDS else FINE


class ItemView(RunView):
    """How a run over many items is shown (S-MR-185 to S-MR-187)."""

    def __init__(self, definition: MapDefinition, title: str, *, is_quiet: bool = False) -> None:
        """Make one for a definition whose tasks are made while it runs."""
        super().__init__(title, is_quiet=is_quiet)
        self._definition = definition
        self.items = ItemDisplay(title, is_quiet=is_quiet, source=definition.item_source)
        self.display = self.items

    def ended(self, run: Run | MapReduceRun | None, output: EnsembleOutput | None = None) -> None:
        """Take over how many items failed: those that nothing could be made of had no task that told of it."""
        super().ended(run, output)
        tally = self.items.items
        tally.items_failed = max(getattr(run, "failed_count", 0), tally.items_failed)

    def _count_recorded(self, output: EnsembleOutput) -> None:
        """Count its items apart from its reduces."""
        self.items.is_recorded(len(output.task_outputs), items=self._done(output))
        first = next(iter(() if output.trace is None else output.trace.task_traces), None)
        self.items.items.is_direct = first is not None and first.node_type == "direct"

    @property
    def _has_text(self) -> bool:
        return isinstance(self._definition, MapReduceDefinition)

    def text(self, output: EnsembleOutput) -> str | None:
        """The last reduce's text; a map has rows instead, and where nobody takes those, its outputs."""
        if self._has_text:
            return super().text(output)
        return None if self._definition.results is not None else "\n".join(each.raw for each in output.task_outputs)

    def data(self, output: EnsembleOutput) -> dict[str, Any]:
        """Counts, places and costs; what each item gave is in the file of the rows."""
        metrics = output.metrics
        return {
            "run_id": output.run_id,
            "exit_reason": output.exit_reason.value,
            "items": {"done": self._done(output), "failed": self.items.items.items_failed},
            "raw": output.raw if self._has_text else None,
            "results": _path(self._definition.results),
            "dead_letters": _path(self._definition.dead_letters),
            "failed_items": [each.model_dump(mode="json", exclude={"item"}) for each in output.failed_items],
            "metrics": metrics.model_dump(mode="json"),
        }

    def summary(self, output: EnsembleOutput | None) -> Sequence[str]:
        """Counts, where rows and failed items are, and the first failures."""
        if output is not None and output.is_complete:
            self.items.has_all()
        lines = [self.display.summary()]
        if self._definition.results is not None:
            lines.append(f"Rows: {_rows_in(self._definition.results, self.items.items.items_done)}")
        # What the lines of the progress have told is not told again.
        failures = [] if output is None else [e for e in output.failed_items if map_key(e.index) not in self.items.told]
        shown = failures[:_SHOWN_FAILURES]
        lines += [f"  item {each.index} failed: {one_line(each.message, _TEXT)}" for each in shown]
        if len(failures) > len(shown):
            lines.append(f"  and {len(failures) - len(shown):,} more")
        letters = self._definition.dead_letters
        if letters is not None and self.items.items.items_failed and Path(letters).exists():
            lines.append(f"Failed items: {letters}; again, and only those: ensemble-ray map --retry-dead {letters} ...")
        return lines

    def code(self, output: EnsembleOutput) -> int:
        """0, or 3 where items were left out."""
        code = super().code(output)
        return PARTLY if code == FINE and self.items.items.items_failed else code

    @staticmethod
    def _done(output: EnsembleOutput) -> int:
        """Items that have an output."""
        levels = output.trace.map_reduce_levels
        return max(0, len(output.task_outputs) - sum(level.task_count for level in levels if level.level))


def _path(place: Path | None) -> str | None:
    return None if place is None else str(place)


def _rows_in(place: Path, done: int) -> str:
    """The file, and how many rows it has where that can be told at once."""
    if place.suffix.lower() != ".jsonl":
        return str(place)
    try:
        with place.open("rb") as file:
            rows = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        rows = done
    return f"{place} has {counted(rows, 'row')}"


def view_of(definition: object, title: str, *, is_quiet: bool = False) -> RunView:
    """How a run of that definition is shown; None: only a program has it."""
    is_planned = getattr(definition, "is_planned", False)
    if isinstance(definition, MapDefinition) and not is_planned:
        return ItemView(definition, title, is_quiet=is_quiet)
    return RunView(title, is_quiet=is_quiet)
