"""The drain of an endpoint: it refuses new runs while its accepted runs continue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http import HTTPStatus

import msgspec
from msgspec import Struct

from ensemble_ray.process.concurrency import SystemClock, threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.serve.driving.ledger import Document, RunLedger
from ensemble_ray.serve.schemas import DrainInfo, OpenRuns, Refusal

_log = bounded_logger(__name__)
DRAIN_KIND = "drain"
_NAME = "drain"
_RETRY_S = 10


class _Drain(Struct, frozen=True, kw_only=True):
    since: datetime
    until: datetime | None
    by: str
    #: of the deployment that drains, Unix time, s
    deployed_at: float


class DrainSwitch:
    """Whether an endpoint drains. The state is stored; a newer deployment ends a drain (S-VER-6).

    `count` returns the open runs. `on_change` is called with the new state.
    """

    def __init__(
        self,
        ledger: RunLedger,
        count: Callable[[], OpenRuns],
        *,
        deployed_at: float,
        on_change: Callable[[bool], object],
    ) -> None:
        self._ledger = ledger
        self._count = count
        self._deployed_at = deployed_at
        self._on_change = on_change
        self._drain: _Drain | None = None
        self._timer: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise a `Refusal` if new runs are refused."""
        if self._drain is not None:
            text = "This endpoint is draining, so it accepts no new runs. What to do: send the request again later"
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "DRAINING", text, retry_after_s=_RETRY_S)

    def info(self) -> DrainInfo:
        drain, found = self._drain, self._count()
        if drain is None:
            return DrainInfo(state="serving", open=found)
        return DrainInfo(
            state="draining" if found.total else "drained",
            open=found,
            since=drain.since,
            until=drain.until,
            by=drain.by,
        )

    async def restore(self) -> None:
        """Continue the drain of an earlier process of this deployment."""
        text = (await threads.run(self._ledger.documents, DRAIN_KIND)).get(_NAME)
        if text is None:
            return
        drain = msgspec.json.decode(text, type=_Drain)
        if drain.deployed_at < self._deployed_at:
            await self.end()
        else:
            self._use(drain)

    async def begin(self, timeout_s: float | None, by: str) -> None:
        """Refuse new runs from now on. A second call changes the limit of time."""
        now = datetime.fromtimestamp(SystemClock().now(), UTC)
        since = now if self._drain is None else self._drain.since
        until = None if timeout_s is None else now + timedelta(seconds=timeout_s)
        drain = _Drain(since=since, until=until, by=by, deployed_at=self._deployed_at)
        await threads.run(
            self._ledger.put, Document(kind=DRAIN_KIND, name=_NAME, text=msgspec.json.encode(drain).decode())
        )
        if self._drain is None:
            _log.info("The endpoint drains: it accepts no new runs. %d runs are open", self._count().total)
        self._use(drain)

    async def end(self) -> None:
        """Accept runs again."""
        await threads.run(self._ledger.put, Document(kind=DRAIN_KIND, name=_NAME, text=None))
        if self._drain is not None:
            _log.info("The drain has ended: the endpoint accepts runs")
        self._use(None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _use(self, drain: _Drain | None) -> None:
        own = asyncio.current_task()
        if self._timer is not own:
            self.close()
        self._timer = None
        self._drain = drain
        self._on_change(drain is not None)
        if drain is not None and drain.until is not None:
            self._timer = asyncio.create_task(self._end_at(drain, drain.until))

    async def _end_at(self, drain: _Drain, until: datetime) -> None:
        await asyncio.sleep(max(0.0, until.timestamp() - SystemClock().now()))
        if self._drain is drain and self._count().total:
            _log.warning("The time of the drain is over, and %d runs are open", self._count().total)
            await self.end()
