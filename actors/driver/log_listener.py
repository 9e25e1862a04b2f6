"""What the processes of a run say, logged again in its driver, with the agent's role in front (S-SET-57).

Must never happen: a control character of somebody else in the driver's log, or a run that fails with what it says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import ray.exceptions

from ensemble_ray.actors.link.log_lines import LogLine
from ensemble_ray.process.bounded_log import is_repeated
from ensemble_ray.process.notices import notify

__all__ = ["LineListener", "show_line"]

#: How long the driver's call waits for lines, s; and how long it waits before it asks again where that failed.
_WAIT_S = 10.0
_RETRY_S = 0.5
#: How long lines that are on their way are waited for at the end, s.
_LEAVE_S = 2.0


class LineListener:
    """Logs again in the driver what the processes of its run say."""

    def __init__(self, service: Any, run_id: str) -> None:
        self._service = service
        self._run_id = run_id
        self._is_leaving = False
        #: what was said last, where that came with the run's end; None: it is still to be asked for
        self._last: Sequence[LogLine] | None = None
        self._collecting = asyncio.get_running_loop().create_task(self._collect())

    def keep_last(self, lines: Sequence[LogLine] | None) -> None:
        """Take what was said last, which `leave` shows behind what is on its way; the call for lines has ended with it."""
        self._last = lines

    async def leave(self, *, is_gone: bool) -> None:
        """Show what was said last, and listen no more; at once where the cluster is gone."""
        self._is_leaving = True
        if is_gone:
            self._collecting.cancel()
            return
        last = self._last or ()
        if self._last is None:
            with contextlib.suppress(ray.exceptions.RayError):  # its lines are lost with it
                last = await self._service.drain_lines.remote(self._run_id)
        # That woke the other call. It is not cancelled: lines that are on their way could not be taken again.
        await asyncio.wait([self._collecting], timeout=_LEAVE_S)
        self._collecting.cancel()
        for line in last:
            show_line(line, self._run_id)

    async def _collect(self) -> None:
        while not self._is_leaving:
            try:
                lines: Sequence[LogLine] | None = await self._service.collect_lines.remote(self._run_id, _WAIT_S)
            except ray.exceptions.RayError:  # it is being started again, or gone, which the run itself tells
                await asyncio.sleep(_RETRY_S)
            else:
                if lines is None:  # the run has ended
                    return
                for line in lines:
                    show_line(line, self._run_id)


def show_line(line: LogLine, run_id: str = "") -> None:
    """Log a line in this process: a record under its own logger and level, what was printed as a notice.

    Args:
        line: The line.
        run_id: Of the run that says it, whose equal warnings are merged.
    """
    text = f"{line.agent_role}: {line.text}" if line.agent_role else line.text
    if not line.logger:
        notify(text)
        return
    logger = logging.getLogger(line.logger)
    if not logger.isEnabledFor(line.level):
        return
    is_of_library = line.logger.startswith("ensemble_ray.") and not line.logger.startswith("ensemble_ray.tool.")
    if line.agent_role and is_of_library and is_repeated(run_id, logger, line.level, text):
        return
    record = logger.makeRecord(line.logger, line.level, "(agent)", 0, "%s", (text,), None)
    record.template = line.template
    record.exc_text = line.traceback or None
    logger.handle(record)
