"""Services that only the driver of a run has, asked from the process of a task, through the hub."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from typing import Any

import ray.exceptions

from ensemble_ray.actors.link.events import note_lost_events
from ensemble_ray.actors.link.failures import last_line
from ensemble_ray.errors import IllegalStateError

__all__ = ["RemoteDriverServices", "ReportedToolMetrics"]


class RemoteDriverServices:
    """The driver's services, for processes away from the driver. Fulfils the `DriverServices` port.

    One batch of notifications is on its way at a time: Ray may start calls of an asynchronous actor out of order (S-MET-35).
    """

    def __init__(self, hub: Any, run_id: str) -> None:
        self._hub = hub
        self._run_id = run_id
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[str, Mapping[str, object]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def ask(self, name: str, payload: Mapping[str, object]) -> object:
        """Ask and wait.

        Raises:
            IllegalStateError: the driver is gone or has no such service.
        """
        try:
            body = await self._hub.ask.remote(self._run_id, name, dict(payload))
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, IllegalStateError):
                raise cause from None
            text = f"Run {self._run_id}: the event hub cannot be reached, so the driver cannot be asked"
            raise IllegalStateError(f"{text}: {last_line(error)}") from None
        answer = pickle.loads(body)  # noqa: S301  our own driver's bytes
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def notify(self, name: str, payload: Mapping[str, object]) -> None:
        """Notify it, without an answer, in the order of the calls; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._add, name, dict(payload))

    async def flush(self) -> None:
        """Return when the hub has everything that was sent so far."""
        await asyncio.sleep(0)  # what other threads told is sent in the loop's next turn
        if self._sending is not None:
            await asyncio.wait([self._sending])

    def _add(self, name: str, payload: Mapping[str, object]) -> None:
        self._waiting.append((name, payload))
        if self._sending is None:
            self._sending = self._loop.create_task(self._send())

    async def _send(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                await note_lost_events(self._hub.notify.remote(self._run_id, batch), self._run_id)
        finally:
            self._sending = None


class ReportedToolMetrics:
    """`ToolMetrics` whose counts go to the driver's own object (S-CONV-33)."""

    def __init__(self, services: RemoteDriverServices) -> None:
        self._services = services

    def increment_success(self, tool_name: str, agent_role: str) -> None:
        """Count a call that succeeded."""
        self._send("increment_success", tool_name, agent_role)

    def increment_failure(self, tool_name: str, agent_role: str) -> None:
        """Count a call that returned a failure."""
        self._send("increment_failure", tool_name, agent_role)

    def increment_error(self, tool_name: str, agent_role: str) -> None:
        """Count a call that raised."""
        self._send("increment_error", tool_name, agent_role)

    def record_duration(self, tool_name: str, agent_role: str, duration_s: float) -> None:
        """Note how long a call took, s."""
        self._send("record_duration", tool_name, agent_role, duration_s)

    def increment_counter(self, metric: str, tool_name: str, tags: Mapping[str, str] | None = None) -> None:
        """Count something of a tool's own."""
        self._send("increment_counter", metric, tool_name, tags)

    def record_value(self, metric: str, tool_name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Note a value of a tool's own."""
        self._send("record_value", metric, tool_name, value, tags)

    def _send(self, method: str, *arguments: object) -> None:
        self._services.notify("tool_metrics", {"method": method, "arguments": arguments})
