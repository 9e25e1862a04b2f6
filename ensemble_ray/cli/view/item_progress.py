"""Progress of a run over items (S-MR-185). Of single items, it stores only the keys of the first failures."""

from __future__ import annotations

from typing import Protocol

from ensemble_ray.cli.view.progress import Block, label_of
from ensemble_ray.cli.view.terminal import screen_line
from ensemble_ray.errors import message_of
from ensemble_ray.events import (
    EnsembleStartedEvent,
    Event,
    LlmIterationCompletedEvent,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskStartEvent,
)
from ensemble_ray.record.identity.map_reduce import is_direct, is_of_items
from ensemble_ray.text.foreign_text import escape_controls
from ensemble_ray.values.ids import is_inside_unit

_EVERY_S = 10.0
_SHOWN_FAILURES = 20
_TEXT = 200


class ItemCounts(Protocol):
    """A run that counts its ended items."""

    @property
    def completed_count(self) -> int:
        """Items with an output."""
        ...

    @property
    def failed_count(self) -> int:
        """Items that failed."""
        ...


class ItemProgress:
    """`Progress` of a run over items.

    Args:
        title: Names the run.
        total: Number of items, or None if unknown.
        is_scanned: Whether a scan of a file counts the items while the run works.
    """

    #: no further events: there may be a hundred thousand tasks
    event_types = (EnsembleStartedEvent, TaskStartEvent, TaskCompleteEvent, TaskFailedEvent)

    def __init__(self, title: str = "", total: int | None = None, *, is_scanned: bool = False) -> None:
        self.title = escape_controls(title)
        self.total = total
        #: counted from events and from the record
        self._reported_done = 0
        self._reported_failed = 0
        self.reduces_done = 0
        #: whether one task handled all items (S-MR-82)
        self.is_direct = False
        self.running = 0
        self.input_tokens = 0
        self.output_tokens = 0
        #: keys of failed items whose errors were shown
        self.shown_failures: set[str] = set()
        self._is_scanned = is_scanned
        self._run: ItemCounts | None = None
        #: items that were done before this process resumed the run
        self._recorded = 0
        self._first_at: float | None = None
        self._last_at = 0.0
        self._next_line_at = _EVERY_S

    def add_recorded(self, tasks: int, *, items: int = 0) -> None:
        self._reported_done += items
        self.reduces_done += tasks - items
        self._recorded = items

    def follow(self, run: ItemCounts) -> None:
        """Use the run's counts too: refused items, and items that run as a loop, have no task event."""
        self._run = run

    @property
    def items_done(self) -> int:
        """Items with an output, by the run's counts or by events, whichever is higher."""
        return max(self._reported_done, 0 if self._run is None else self._run.completed_count)

    @property
    def items_failed(self) -> int:
        """Failed items, by the run's counts or by events, whichever is higher."""
        return max(self._reported_failed, 0 if self._run is None else self._run.failed_count)

    def set_total(self, total: int) -> None:
        self.total = total

    def receive(self, event: Event, at: float, *, is_live: bool = False) -> str | None:
        self._count(event, at)
        match event:
            case TaskFailedEvent() if self._reported_failed <= _SHOWN_FAILURES:
                label = label_of(event)
                self.shown_failures.add(label)
                more = "; further ones are only counted" if self._reported_failed == _SHOWN_FAILURES else ""
                return f"failed   {label}: {screen_line(message_of(event.cause), _TEXT)}{more}"
            case EnsembleStartedEvent() if not is_live:
                return self.title + ("" if self.total is None else f": {self.total:,} items")
            case TaskCompleteEvent() if not is_live and at >= self._next_line_at:
                self._next_line_at = at + _EVERY_S
                return f"{self.counts()}, {self.running:,} running; {self.pace(at)}"
            case _:
                return None

    def _count(self, event: Event, at: float) -> None:
        match event:
            case TaskStartEvent():
                self.running += 1
                self._first_at = at if self._first_at is None else self._first_at
            case TaskCompleteEvent():
                self._end(at)
                if is_inside_unit(event.instance):
                    pass  # one of several tasks of an item; the run counts the item
                elif is_of_items(event.instance):
                    self._reported_done += 1
                    self.is_direct = is_direct(event.instance)
                else:
                    self.reduces_done += 1
                metrics = event.task_output.metrics
                self._add_tokens(metrics.input_tokens, metrics.output_tokens)
            case LlmIterationCompletedEvent():  # of an attached run, whose outputs have no metrics
                self._add_tokens(event.input_tokens, event.output_tokens)
            case TaskFailedEvent():
                self._end(at)
                self._reported_failed += is_of_items(event.instance)
            case _:
                pass

    def _add_tokens(self, sent: int, received: int) -> None:
        self.input_tokens += max(0, sent)
        self.output_tokens += max(0, received)

    def _end(self, at: float) -> None:
        self.running = max(0, self.running - 1)
        self._last_at = at

    @property
    def ended(self) -> int:
        return self.items_done + self.items_failed

    def items_per_s(self, at: float) -> float:
        """Return items per second from the first start to now, or to the last end if no task is running."""
        if self._first_at is None:
            return 0.0
        passed_s = (at if self.running else self._last_at) - self._first_at
        return (self.ended - self._recorded) / passed_s if passed_s > 0 else 0.0

    def left_s(self, at: float) -> float | None:
        """Return the estimated seconds until the last item ends, or None if unknown."""
        pace = self.items_per_s(at)
        if self.total is None or not pace or not self.running or self.ended >= self.total:
            return None
        return (self.total - self.ended) / pace

    def counts(self, *, is_complete: bool = False) -> str:
        """Return the counts: `120/1,000 items, 2 failed`.

        Args:
            is_complete: The run has read all items, so the ended items are the total even if the scan has not ended.
        """
        # One task for all items does not reveal their number.
        total = self.ended if is_complete and self._is_scanned and not self.is_direct else self.total
        if self.is_direct:
            return "all items in one task" if total is None else f"{total:,} items in one task"
        of_total = "" if total is None else f"/{total:,}"
        failed = f", {self.items_failed:,} failed" if self.items_failed else ""
        reduces = f", {self.reduces_done:,} reduced" if self.reduces_done else ""
        return f"{self.items_done:,}{of_total} items{failed}{reduces}"

    def pace(self, at: float) -> str:
        parts = [f"{self.items_per_s(at):.1f} items/s", f"{self.input_tokens:,} + {self.output_tokens:,} tokens"]
        left_s = self.left_s(at)
        return ", ".join([*parts, f"{_duration(left_s)} left"] if left_s is not None else parts)

    def block(self, at: float) -> Block:
        return Block(
            counts=f"{self.counts()}, {self.running:,} running",
            bar=(self.ended, self.total) if self.total else None,
            pace=self.pace(at) if self.ended else "",
            is_idle=not (self.running or self.ended),
        )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
