"""What is shown of a run over many items (S-MR-185). Pure; every event comes with its time.

In: ends of tasks, and seconds since the start. Out: items and reduces that are done, items per second, the time that is
left; a line every so often, and one for each of the first failed items. Never: anything per item that is kept.
"""

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
    """A run that knows how many of its items have ended."""

    @property
    def completed_count(self) -> int:
        """Return how many have their output until now."""
        ...

    @property
    def failed_count(self) -> int:
        """Return how many have failed until now."""
        ...


class ItemProgress:
    """`Progress` of a run over items.

    Args:
        title: Names the run.
        total: Items, where that is known.
        is_scanned: Whether the items are in a file that is looked through beside the run, to know how many there are.
    """

    #: of a hundred thousand tasks nothing else is sent
    event_types = (EnsembleStartedEvent, TaskStartEvent, TaskCompleteEvent, TaskFailedEvent)

    def __init__(self, title: str = "", total: int | None = None, *, is_scanned: bool = False) -> None:
        self.title = escape_controls(title)
        self.total = total
        #: by their events, and those on record
        self._reported_done = 0
        self._reported_failed = 0
        self.reduces_done = 0
        #: whether all items were one task (S-MR-82)
        self.is_direct = False
        self.running = 0
        self.input_tokens = 0
        self.output_tokens = 0
        #: keys of the failed items whose reasons were shown
        self.shown_failures: set[str] = set()
        self._is_scanned = is_scanned
        self._run: ItemCounts | None = None
        #: done before the run went on
        self._recorded = 0
        self._first_at: float | None = None
        self._last_at = 0.0
        self._next_line_at = _EVERY_S

    def add_recorded(self, tasks: int, *, items: int = 0) -> None:
        """Count items and reduces that were done before the run went on."""
        self._reported_done += items
        self.reduces_done += tasks - items
        self._recorded = items

    def follow(self, run: ItemCounts) -> None:
        """Count what the run counts, too: items that nothing could be made of, or a loop, have no task that says so."""
        self._run = run

    @property
    def items_done(self) -> int:
        """Items that have their output, by its counts or by events, whichever is ahead."""
        return max(self._reported_done, 0 if self._run is None else self._run.completed_count)

    @property
    def items_failed(self) -> int:
        """Items that have failed, in the same way."""
        return max(self._reported_failed, 0 if self._run is None else self._run.failed_count)

    def set_total(self, total: int) -> None:
        """Take over how many items there are."""
        self.total = total

    def receive(self, event: Event, at: float, *, is_live: bool = False) -> str | None:
        """Count the next event and return its line; in a block only failures get one."""
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
                    pass  # one of several tasks of an item, whose end the run counts
                elif is_of_items(event.instance):
                    self._reported_done += 1
                    self.is_direct = is_direct(event.instance)
                else:
                    self.reduces_done += 1
                metrics = event.task_output.metrics
                self._add_tokens(metrics.input_tokens, metrics.output_tokens)
            case LlmIterationCompletedEvent():  # of a followed run, whose outputs have no metrics
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
        """Items of which nothing more comes."""
        return self.items_done + self.items_failed

    def items_per_s(self, at: float) -> float:
        """Return items that ended, per second since the first began; to the last end where nothing runs."""
        if self._first_at is None:
            return 0.0
        passed_s = (at if self.running else self._last_at) - self._first_at
        return (self.ended - self._recorded) / passed_s if passed_s > 0 else 0.0

    def left_s(self, at: float) -> float | None:
        """Return seconds until the last item ends at this pace; None where that is not known."""
        pace = self.items_per_s(at)
        if self.total is None or not pace or not self.running or self.ended >= self.total:
            return None
        return (self.total - self.ended) / pace

    def counts(self, *, is_complete: bool = False) -> str:
        """Return what is done: `120/1,000 items, 2 failed`.

        Args:
            is_complete: The run has taken all items: as many have ended as there were, however far the scan has come.
        """
        # One task for all of them does not say how many there were.
        total = self.ended if is_complete and self._is_scanned and not self.is_direct else self.total
        if self.is_direct:
            return "all items in one task" if total is None else f"{total:,} items in one task"
        of_total = "" if total is None else f"/{total:,}"
        failed = f", {self.items_failed:,} failed" if self.items_failed else ""
        reduces = f", {self.reduces_done:,} reduced" if self.reduces_done else ""
        return f"{self.items_done:,}{of_total} items{failed}{reduces}"

    def pace(self, at: float) -> str:
        """Return items per second, tokens, the time that is left."""
        parts = [f"{self.items_per_s(at):.1f} items/s", f"{self.input_tokens:,} + {self.output_tokens:,} tokens"]
        left_s = self.left_s(at)
        return ", ".join([*parts, f"{_duration(left_s)} left"] if left_s is not None else parts)

    def block(self, at: float) -> Block:
        """Return the block of that moment."""
        return Block(
            counts=f"{self.counts()}, {self.running:,} running",
            bar=(self.ended, self.total) if self.total else None,
            pace=self.pace(at) if self.ended else "",
            is_idle=not (self.running or self.ended),
        )


def _duration(seconds: float) -> str:
    """Return a time in two units at most."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
