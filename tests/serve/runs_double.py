"""A `RunService` whose runs do as a test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from ensemble_ray.access.quotas import Account
from ensemble_ray.serve.run_service import RunService
from ensemble_ray.serve.schemas import (
    AcceptedRun,
    ChatInfo,
    EnsembleInfo,
    FinishedRun,
    Metrics,
    NewRun,
    OpenReview,
    Refusal,
    RunDetail,
    RunEvent,
    RunFilter,
    RunPage,
    RunStatus,
)

INSTANT = datetime(2026, 1, 1, tzinfo=UTC)


def detail(
    status: RunStatus, raw: str | None = None, *, reviews: Sequence[str] = (), tokens: int | None = 2
) -> RunDetail:
    """A run as it stands."""
    metrics = Metrics(
        input_tokens=tokens,
        output_tokens=tokens,
        total_tokens=tokens,
        llm_calls=1,
        tool_calls=0,
        llm_latency_s=0,
        tool_execution_s=0,
        cost=None,
    )
    result = FinishedRun(run_id="r", raw=raw or "", exit_reason=status, duration_s=1, metrics=metrics, tasks=[])
    gates = [
        OpenReview(
            run_id="r",
            gate_id=each,
            timing="after_execution",
            task_description="",
            task_output="",
            prompt="",
            required_role=None,
            created_at=INSTANT,
            expires_at=None,
        )
        for each in reviews
    ]
    return RunDetail(
        run_id="r",
        status=status,
        ensemble="team",
        tags={},
        created_at=INSTANT,
        ended_at=None,
        result=None if raw is None else result,
        reviews=gates,
    )


def token(text: str, *, instance: str = "answer#0", turn: int = 0) -> RunEvent:
    """A fragment that a model said."""
    return RunEvent(type="token", data={"token": text, "instance": instance, "iteration_index": turn})


class RunsDouble:
    """Runs that have these events, and end so when they are let, or never."""

    def __init__(self, *events: RunEvent, end: RunDetail | None = None, has_last: bool = True) -> None:
        """Make it.

        Args:
            events: Of every run.
            end: How it stands when it is waited for; None: it goes on for ever.
            has_last: Whether the events come to an end.
        """
        self.started: list[NewRun] = []
        self.is_started = threading.Event()
        self.cancelled: list[str] = []
        self.is_cancelled = threading.Event()
        self._events = events
        self._end = end
        self._has_last = has_last

    @asynccontextmanager
    async def entered(self) -> AsyncGenerator[RunService]:
        yield self

    async def ensembles(self) -> Sequence[EnsembleInfo]:
        chat = ChatInfo(input="question", streamed_task="answer#0")
        return [EnsembleInfo(name="team", inputs=["question"], workflow="sequential", tasks=1, chat=chat)]

    async def start(
        self, asked: NewRun, *, idempotency_key: str | None = None, account: Account | None = None
    ) -> AcceptedRun:
        self.started.append(asked)
        return AcceptedRun(
            run_id=asked.run_id or "", status=RunStatus.ACCEPTED, ensemble="team", tasks=1, workflow="sequential"
        )

    async def wait(self, run_id: str, timeout_s: float) -> RunDetail:
        self.is_started.set()
        if self._end is None:
            await asyncio.Event().wait()
        return await self.get(run_id)

    async def get(self, run_id: str) -> RunDetail:
        found = self._end or detail(RunStatus.RUNNING)
        return found.model_copy(update={"run_id": run_id})

    async def list(self, wanted: RunFilter, *, cursor: str | None = None, size: int = 50) -> RunPage:
        return RunPage(runs=[], next_cursor=None)

    async def events(
        self, run_id: str, after: str | None = None, *, types: frozenset[str] | None = None
    ) -> AsyncGenerator[RunEvent]:
        for each in self._events:
            yield each
        if not self._has_last:
            await asyncio.Event().wait()
        yield RunEvent(type="ensemble_completed", data={}, cursor="9.1")

    async def cancel(self, run_id: str) -> RunDetail:
        self.cancelled.append(run_id)
        self.is_cancelled.set()
        if self._end is not None:
            raise Refusal(HTTPStatus.CONFLICT, "RUN_OVER", "It is over")
        return await self.get(run_id)


def as_service(double: RunsDouble) -> Any:
    """The double as `build_api` takes it."""
    return double.entered()
