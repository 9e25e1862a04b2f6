"""KeptEnds: keeps in the ledger how runs ended, however long the ledger is away.

In: ends of runs. Out: the same in the ledger, once. Rules: one end at a time asks the ledger, so that one thread waits for it whatever
has ended; none is given up while this process has the ledger; what a process that dies could not keep, the next one finds in the record.
On the library's loop.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING

from ensemble_ray import EnsembleError, RunExistsError
from ensemble_ray.errors.texts import describe
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import threads

if TYPE_CHECKING:
    from ensemble_ray.serve.driving.run_ledger import RunLedger
    from ensemble_ray.serve.run_schemas import RunDetail

_log = bounded_logger(__name__)
#: Pauses before the ledger is asked again, s; the last one repeats.
_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)


class KeptEnds:
    """The ends of one endpoint's runs, on their way to its ledger."""

    def __init__(self, ledger: RunLedger, *, kept: int, on_lost: Callable[[RunExistsError], object]) -> None:
        """Begin with none.

        Args:
            ledger: Where they are kept.
            kept: How many runs that ended are kept.
            on_lost: Called when another process has the ledger.
        """
        self._ledger = ledger
        self._on_lost = on_lost
        self._kept = kept
        self._turn = asyncio.Lock()

    async def keep(self, run_id: str, outcome: RunDetail) -> bool:
        """Keep the end of a run and return when that is done; False: it cannot be, since another process has the ledger now, say.

        A cancelled call gives up: the run ended all the same, and its record says so.
        """
        tries = 0
        async with self._turn:
            while True:
                try:
                    await threads.run(self._ledger.end, run_id, outcome, kept=self._kept)
                except RunExistsError as error:
                    _log.error("The end of run %s cannot be kept: %s", run_id, describe(error))
                    self._on_lost(error)
                    return False
                except (EnsembleError, sqlite3.Error, OSError) as error:
                    _log.warning("The end of run %s is not kept yet, trying again: %s", run_id, describe(error))
                except Exception as error:  # noqa: BLE001  a defect: whoever waits for the run is told all the same
                    _log.error("The end of run %s cannot be kept: %s", run_id, describe(error))
                    return False
                else:
                    return True
                await asyncio.sleep(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
                tries += 1
