"""What processes of a run say on its way to the run's driver: bounded lines, a bounded number of them. Plain, no Ray.

In: lines of log records and prints, by run. Out: the same, to the driver that listens for that run. Must never happen:
lines that pile up where nobody listens, or a process that floods its driver.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ensemble_ray.text.foreign_text import one_line

__all__ = ["CLUSTER_LOGGER", "LineBudget", "LineService", "LogLine", "scheduler_line"]

#: Logger of what the scheduler tells a run's driver of the cluster.
CLUSTER_LOGGER = "ensemble_ray.cluster"
#: Lines that one process forwards in a second.
LINES_PER_S = 20
#: Lines of a run that are kept until its driver takes them; the oldest are dropped.
_KEPT_LINES = 1000
#: Runs whose lines are kept though no driver asks for them just now.
_KEPT_RUNS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line that a process of a run says."""

    text: str
    #: empty where it is not said in a task
    agent_role: str
    #: name of the logger; empty: it was printed
    logger: str = ""
    level: int = 0
    #: the message before its arguments were put in, by which a command knows what it tells in its own words
    template: str = ""
    #: frames of user code, of an error that was logged
    traceback: str = ""


def scheduler_line(text: str, logger: str, level: int = logging.WARNING) -> LogLine:
    """Return a line of the scheduler's own; people read their driver's log, and not the scheduler's."""
    return LogLine(text=str(one_line(text)), agent_role="", logger=logger, level=level)


class LineBudget:
    """How many lines may still be said in this second."""

    def __init__(self, lines_per_s: int = LINES_PER_S) -> None:
        self._lines_per_s = lines_per_s
        self._second = -math.inf
        self._admitted = 0
        self._left_out = 0

    def admit(self, at_s: float) -> bool:
        """Return whether a line may be said at that time; one that may not is counted."""
        if at_s - self._second >= 1.0:
            self._second, self._admitted = at_s, 0
        self._admitted += 1
        if self._admitted <= self._lines_per_s:
            return True
        self._left_out += 1
        return False

    def reset_left_out(self) -> int:
        """Return how many were left out since this was asked last."""
        count, self._left_out = self._left_out, 0
        return count


@dataclass(slots=True)
class _Box:
    lines: deque[LogLine] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    #: calls that wait for lines
    waiting: int = 0
    #: whether its last lines were taken
    is_drained: bool = False


class LineService:
    """Keeps lines until drivers take them; a part of the scheduler, which needs no further process for it."""

    def __init__(self) -> None:
        self._boxes: OrderedDict[str, _Box] = OrderedDict()

    async def put_lines(self, run_id: str, lines: Sequence[LogLine]) -> None:
        """Take lines of a run; returning is the acknowledgement."""
        self.add_lines(run_id, lines)

    def add_lines(self, run_id: str, lines: Sequence[LogLine]) -> None:
        """Take lines that this process itself has for a run's driver."""
        box = self._box(run_id)
        box.lines.extend(lines)
        box.changed.set()

    def is_listening(self, run_id: str) -> bool:
        """Return whether a call waits for lines of that run, which `drain_lines` then ends."""
        box = self._boxes.get(run_id)
        return box is not None and box.waiting > 0

    async def collect_lines(self, run_id: str, wait_s: float) -> Sequence[LogLine] | None:
        """Return what was said since the last call, None where others took the last lines; waits up to that long for something to come."""
        box = self._box(run_id)
        if not box.lines and wait_s > 0:
            box.changed.clear()
            box.waiting += 1
            try:
                await asyncio.wait_for(box.changed.wait(), wait_s)
            except TimeoutError:
                return None if box.is_drained else ()
            finally:
                box.waiting -= 1
        if box.is_drained:
            return None
        lines = tuple(box.lines)
        box.lines.clear()
        return lines

    async def drain_lines(self, run_id: str) -> Sequence[LogLine]:
        """Return what was said last; who still waits for lines hears that there are none, and none are kept from now on."""
        box = self._boxes.pop(run_id, None)
        if box is None:
            return ()
        lines = tuple(box.lines)
        box.lines.clear()
        box.is_drained = True
        box.changed.set()
        return lines

    def _box(self, run_id: str) -> _Box:
        if run_id not in self._boxes:
            self._boxes[run_id] = _Box()
        self._boxes.move_to_end(run_id)
        if len(self._boxes) > _KEPT_RUNS:
            # Those that drivers listen to stay, however many: a driver would only ask anew, and drop another's.
            left = [name for name, box in self._boxes.items() if not box.waiting and name != run_id]
            for name in left[: max(0, len(left) + 1 - _KEPT_RUNS)]:
                del self._boxes[name]
        return self._boxes[run_id]
