"""ItemResultWriter: brings what came of items to files and readers, beside the run.

In: completions and failures, on the library's loop. Out: rows, dead letters, results. Rules: files are written in batches,
by one task; a file that is slow holds the pull of further items back; one that cannot be written ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from ensemble_ray.values.outputs import FailedItem, ItemResult

if TYPE_CHECKING:
    from ensemble_ray.coordinator.map_reduce.item_log import ItemLog
    from ensemble_ray.items.results import DeadLetterFile, ResultsFile
    from ensemble_ray.values.task_output import TaskOutput

#: Rows that may wait for a file before items are held back.
_MOST_WAITING = 1024


class ItemResultWriter:
    """What hears of one run's items. Fulfils `ItemResults`."""

    def __init__(
        self,
        log: ItemLog,
        *,
        results: ResultsFile | None = None,
        dead_letters: DeadLetterFile | None = None,
        is_direct: bool = False,
    ) -> None:
        """Make one over open files; of the short-circuit, whose task is no item's, nobody hears (S-MR-82)."""
        self._is_direct = is_direct
        self._log = log
        self._results = results
        self._dead_letters = dead_letters
        self._waiting: list[ItemResult | FailedItem] = []
        self._writing: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        #: told that a file cannot be written
        self.on_error: Callable[[BaseException], None] = lambda _: None

    async def free_slots(self, in_flight: Callable[[], int]) -> int:
        """Return how many more items may be pulled, when some may."""
        while len(self._waiting) >= _MOST_WAITING and self._writing is not None:
            await asyncio.wait([self._writing])
        return await self._log.free_slots(in_flight)

    def write_output(self, number: int, index: int, item: object, output: TaskOutput) -> None:
        """Note that an item has its output."""
        if self._is_direct:
            return
        self._log.add_output(number, index)
        if self._results is not None and index not in self._results:
            self._write(ItemResult(index=index, item=item, output=output))

    def write_failure(self, index: int, item: object, error: BaseException, attempts: int) -> None:
        """Note that an item has none."""
        if self._is_direct:
            return
        failed = self._log.add_failure(index, item, error, attempts)
        if self._dead_letters is not None:
            self._write(failed)

    def _write(self, what: ItemResult | FailedItem) -> None:
        self._waiting.append(what)
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_waiting())

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                claimed, self._waiting = self._waiting, []
                rows = [each for each in claimed if isinstance(each, ItemResult)]
                lost = [each for each in claimed if isinstance(each, FailedItem)]
                if rows and self._results is not None:
                    await self._results.write(rows)
                if lost and self._dead_letters is not None:
                    await self._dead_letters.write(lost)
        except Exception as error:  # noqa: BLE001  whatever it is, the run must hear of it
            self._error = error
            self.on_error(error)
        finally:
            self._writing = None

    async def leave(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Close it as its run ended; `error` says why that was broken off, None where it was not."""
        await self.close(is_complete=error is None)

    async def wait_until_written(self) -> None:
        """Wait until nothing waits for a file."""
        while self._writing is not None:
            await asyncio.wait([self._writing])

    async def close(self, *, is_complete: bool = True) -> None:
        """Write what waits, then complete the files; a run that goes on later goes on with them.

        Args:
            is_complete: False: the run was broken off, perhaps since another process has it now and writes to them.

        Raises:
            RecordError: they cannot be written, or could not be while nobody else was there to be told.
        """
        await self.wait_until_written()
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._log.close)
            if self._dead_letters is not None:
                stack.push_async_callback(self._dead_letters.close)
            if self._results is not None:
                stack.push_async_callback(self._results.close, is_complete=is_complete)
        if self._error is not None:
            raise self._error
