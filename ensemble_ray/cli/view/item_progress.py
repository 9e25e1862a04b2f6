"""How far a run over many items is. Room: cli. Pure; every event comes with its time.

In: ends of tasks, and seconds since the start. Out: items and reduces that are done, items per second, the time that is left.
Never: anything per item that is kept.
"""

from __future__ import annotations

from ensemble_ray.events import Event, TaskCompleteEvent, TaskFailedEvent, TaskStartEvent
from ensemble_ray.record.identity.map_reduce import is_direct, is_of_items

__all__ = ["ItemTally"]


class ItemTally:
    """The counts of one run. Times are seconds since its start."""

    def __init__(self, total: int | None = None) -> None:
        #: items, where that is known
        self.total = total
        self.items_done = 0
        self.items_failed = 0
        self.reduces_done = 0
        #: whether all items were one task (S-MR-82)
        self.is_direct = False
        self.running = 0
        self.input_tokens = 0
        self.output_tokens = 0
        #: done before the run went on
        self._recorded = 0
        self._first_at: float | None = None
        self._last_at = 0.0

    def is_recorded(self, items: int, *, reduces: int = 0) -> None:
        """So many items and reduces were done when the run went on."""
        self.items_done += items
        self.reduces_done += reduces
        self._recorded = items

    def take(self, event: Event, at: float) -> None:
        """Count the next event."""
        match event:
            case TaskStartEvent():
                self.running += 1
                self._first_at = at if self._first_at is None else self._first_at
            case TaskCompleteEvent():
                self._end(at)
                if is_of_items(event.instance):
                    self.items_done += 1
                    self.is_direct = is_direct(event.instance)
                else:
                    self.reduces_done += 1
                metrics = event.task_output.metrics
                self.input_tokens += max(0, metrics.input_tokens)
                self.output_tokens += max(0, metrics.output_tokens)
            case TaskFailedEvent():
                self._end(at)
                self.items_failed += is_of_items(event.instance)
            case _:
                pass

    def _end(self, at: float) -> None:
        self.running = max(0, self.running - 1)
        self._last_at = at

    @property
    def ended(self) -> int:
        """Items of which nothing more comes."""
        return self.items_done + self.items_failed

    def items_per_s(self, at: float) -> float:
        """Items that ended, per second since the first began; to the last end where nothing runs."""
        if self._first_at is None:
            return 0.0
        passed_s = (at if self.running else self._last_at) - self._first_at
        return (self.ended - self._recorded) / passed_s if passed_s > 0 else 0.0

    def left_s(self, at: float) -> float | None:
        """Seconds until the last item ends at this pace; None where that cannot be told."""
        pace = self.items_per_s(at)
        if self.total is None or not pace or not self.running or self.ended >= self.total:
            return None
        return (self.total - self.ended) / pace

    def counts(self) -> str:
        """Items in words: `120/1,000 items, 2 failed`."""
        if self.is_direct:
            return "all items in one task" if self.total is None else f"{self.total:,} items in one task"
        total = "" if self.total is None else f"/{self.total:,}"
        failed = f", {self.items_failed:,} failed" if self.items_failed else ""
        reduces = f", {self.reduces_done:,} reduced" if self.reduces_done else ""
        return f"{self.items_done:,}{total} items{failed}{reduces}"

    def pace(self, at: float) -> str:
        """How quickly it goes: items per second, tokens, the time that is left."""
        parts = [f"{self.items_per_s(at):.1f} items/s", f"{self.input_tokens:,} + {self.output_tokens:,} tokens"]
        left_s = self.left_s(at)
        return ", ".join([*parts, f"{_duration(left_s)} left"] if left_s is not None else parts)


def _duration(seconds: float) -> str:
    """A time in two units at most."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
