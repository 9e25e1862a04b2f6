"""InlineRuntime: runs in this process, without Ray.

Everything runs on the library's loop; synchronous user code runs in threads, CPU-heavy tools in a process pool.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Self

from ensemble_ray.inline.run import InlineRun, outputs_of
from ensemble_ray.inline.session import InlineSession
from ensemble_ray.llm.limits.limiter import process_limiter
from ensemble_ray.ports import Services
from ensemble_ray.process.forks import bridge, run_blocking
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.runs.claimed import claim_planned
from ensemble_ray.runs.ownership import release_run
from ensemble_ray.tools.cpu import LokyCpuPool

if TYPE_CHECKING:
    from pathlib import Path

    from ensemble_ray.ports import Journal
    from ensemble_ray.runs.ports import Deliver, PlannedWork, RunRequest


class InlineRuntime:
    """Runs in this process. Nothing is pickled, so anything works as tool, handler or model."""

    name = "inline"

    def __init__(self, *, home: str | Path | None = None, store: str | None = None) -> None:
        """Make one.

        Args:
            home: Directory of the records; default: `ENSEMBLE_RAY_HOME` or the user's state directory.
            store: URL of a database that keeps them instead; default: `ENSEMBLE_RAY_STORE`.
        """
        self._home = home
        self._store = store
        self._cpu = LokyCpuPool()

    @property
    def store_address(self) -> StoreAddress:
        """Where its runs are recorded."""
        return StoreAddress.of(self._home, self._store)

    async def submit(self, request: RunRequest, work: PlannedWork) -> InlineRun:
        """Begin a planned run in this process, or go on with one."""
        outputs = outputs_of(work.planned)
        claimed = await claim_planned(
            request.store,
            request.context,
            work.header,
            submission=work.submission,
            preliminary=work.preliminary,
            keep=lambda instance, given: outputs.keep_recorded(instance, json.dumps(given.output_data()).encode()),
        )
        try:
            run = InlineRun(request, work, claimed, outputs, self._services())
        except BaseException:
            await release_run(claimed.owned)
            raise
        await run.begin()
        return run

    async def open_session(self, request: RunRequest, *, journal: Journal, deliver: Deliver) -> InlineSession:
        """Open an executor for tasks that are made while their run goes on."""
        return InlineSession(request, self._services(), journal=journal, deliver=deliver)

    def _services(self) -> Services:
        return Services(limiter=process_limiter(), cpu=self._cpu)

    async def close(self) -> None:
        """End the process pool of CPU-heavy tools."""
        self._cpu.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await bridge(self.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        run_blocking(self.close())
