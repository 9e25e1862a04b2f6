"""Shows the progress of a run over many items on standard error (S-MR-185). Room: cli.

A block that redraws itself on a terminal; elsewhere a line every so often, and one for each of the first failed items.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from ensemble_ray.cli.view.display import Display, TaskWatcher
from ensemble_ray.cli.view.item_progress import ItemTally
from ensemble_ray.cli.view.progress import label_of
from ensemble_ray.cli.view.terminal import one_line
from ensemble_ray.errors import message_of
from ensemble_ray.events import EnsembleStartedEvent, Event, TaskCompleteEvent, TaskFailedEvent
from ensemble_ray.events.listeners import EnsembleListener

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ensemble_ray.items.sources import ItemSource

__all__ = ["ItemDisplay"]

_EVERY_S = 10.0
_SHOWN_FAILURES = 20
_TEXT = 200


class ItemDisplay(Display):
    """Progress of one run over items.

    Args:
        title: Names the run.
        is_quiet: Show nothing.
        source: Where the items come from; a file is looked through beside the run, to tell how many there are.
        clock: Seconds; for tests.
        is_live: Whether to redraw; default: on a terminal.
    """

    def __init__(
        self,
        title: str,
        *,
        is_quiet: bool = False,
        source: ItemSource | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_live: bool | None = None,
    ) -> None:
        super().__init__(title, is_quiet=is_quiet, clock=clock, is_live=is_live)
        self.items = ItemTally(None if source is None else source.count)
        self._look = None if source is None or source.count is not None else source.look
        self.listener: EnsembleListener = TaskWatcher(self._hear)
        self._next_at = _EVERY_S
        self._is_over = False
        #: keys of the failed items whose reasons were shown
        self.told: set[str] = set()

    def __enter__(self) -> Self:
        if self._look is not None and not self._is_quiet:
            threading.Thread(target=self._looked, args=(self._look,), daemon=True).start()
        return super().__enter__()

    def _looked(self, look: Callable[[], int]) -> None:
        with contextlib.suppress(OSError):  # the run tells what is wrong with its items
            total = look()
            with self._lock:
                if not self._is_over:
                    self.items.total = total

    def has_all(self) -> None:
        """The run took all items: there were as many as have ended, however far the look through their file has come."""
        with self._lock:
            self._is_over = not self.items.is_direct  # one task says nothing of how many there were
            if self._look is not None and self._is_over:
                self.items.total = self.items.ended

    def is_recorded(self, tasks: int, *, items: int = 0) -> None:
        """So many tasks were done when the run went on, and so many of them are of items."""
        self.items.is_recorded(items, reduces=tasks - items)
        super().is_recorded(tasks)

    def summary(self) -> str:
        """The counts at the end, in one line."""
        at = self.elapsed_s
        with self._lock:
            return f"{self.items.counts()} in {at:.1f} s: {self.items.pace(at)}"

    def _take(self, event: Event) -> None:
        at = self.elapsed_s
        with self._lock:
            self.items.take(event, at)
            line = None if self._is_quiet else self._line(event, at)
        if line is not None:
            self.note_line(line)

    def _line(self, event: Event, at: float) -> str | None:
        items = self.items
        if isinstance(event, TaskFailedEvent):
            if items.items_failed > _SHOWN_FAILURES:
                return None
            self.told.add(label_of(event))
            more = "; further ones are only counted" if items.items_failed == _SHOWN_FAILURES else ""
            return f"{at:7.1f} s  failed   {label_of(event)}: {one_line(message_of(event.cause), _TEXT)}{more}"
        if self._live is not None:
            return None
        if isinstance(event, EnsembleStartedEvent):
            count = "" if items.total is None else f": {items.total:,} items"
            return f"{at:7.1f} s  {self._title}{count}"
        if isinstance(event, TaskCompleteEvent) and at >= self._next_at:
            self._next_at = at + _EVERY_S
            return f"{at:7.1f} s  {items.counts()}, {items.running:,} running; {items.pace(at)}"
        return None

    def _block(self) -> RenderableType:
        from rich.console import Group  # only terminals pay for it
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        at = self.elapsed_s
        with self._lock:
            items = self.items
            total, ended = items.total, items.ended
            counts = f"{items.counts()}, {items.running:,} running, {at:.0f} s"
            pace = items.pace(at) if ended else ""
        head = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=total, completed=ended, width=24) if total else Text("")
        head.add_row(Text(self._title, style="bold"), bar, Text(counts))
        rows: list[RenderableType] = [head]
        if pace:
            rows.append(Text(f"  {pace}", style="cyan"))
        if self._note and not (items.running or ended):
            rows.append(Text(f"  {self._note}", style="dim"))
        return Group(*rows)
