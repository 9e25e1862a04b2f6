"""Runs of one team, begun by requests. Package: serve.

In: a request's body. Out: the run's answer, or the error that `Ensemble.arun` raises. Never: the end of a run because
whoever asked for it has gone; the run is recorded, and its id finds the answer again.
"""

from __future__ import annotations

import asyncio
import uuid
from functools import partial
from typing import TYPE_CHECKING

from ensemble_ray.errors.texts import describe
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.serve.failures import is_refusal
from ensemble_ray.serve.schemas import FinishedRun

if TYPE_CHECKING:
    from ensemble_ray import Ensemble, EnsembleOutput, Runtime
    from ensemble_ray.serve.run_schemas import NewRun

__all__ = ["Runs"]

_log = bounded_logger(__name__)


class Runs:
    """Begins runs of a team and waits for them."""

    def __init__(self, ensemble: Ensemble, runtime: Runtime) -> None:
        self._ensemble = ensemble
        self._runtime = runtime
        #: runs whose client may have gone; a loop alone would forget them
        self._waiting: set[asyncio.Task[EnsembleOutput]] = set()

    async def run(self, asked: NewRun) -> FinishedRun:
        """Run the team once; cancelling this wait leaves the run going.

        Raises:
            EnsembleError: as `Ensemble.arun`.
        """
        run_id = asked.run_id or str(uuid.uuid4())
        running = asyncio.create_task(self._ensemble.arun(asked.inputs, runtime=self._runtime, run_id=run_id))
        self._waiting.add(running)
        running.add_done_callback(partial(self._ended, run_id))
        try:
            await asyncio.wait([running])  # cancelling this wait does not reach the run
        except asyncio.CancelledError:
            _log.warning("Run %s: its client has gone; the run goes on", run_id)
            raise
        return FinishedRun.of(running.result())

    def _ended(self, run_id: str, running: asyncio.Task[EnsembleOutput]) -> None:
        """Log a failure, which else only a client that still waits would learn of (S-SET-53)."""
        self._waiting.discard(running)
        error = None if running.cancelled() else running.exception()
        if error is not None and not is_refusal(error):
            _log.warning("Run %s failed: %s", run_id, describe(error))
