"""Metrics of tool calls: those that count nothing, and a guard around the user's. Package: tools.

What counts must not change what a tool gives (S-TM-3): what the user's object raises is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from ensemble_ray.ports import ToolMetrics
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.threads import USER_ERRORS

__all__ = ["GuardedToolMetrics", "NoOpToolMetrics", "record_metric"]

_log = bounded_logger(__name__)


class NoOpToolMetrics:
    """Counts nothing; the default `ToolMetrics`."""

    def increment_success(self, tool_name: str, agent_role: str) -> None:
        """Ignore it."""

    def increment_failure(self, tool_name: str, agent_role: str) -> None:
        """Ignore it."""

    def increment_error(self, tool_name: str, agent_role: str) -> None:
        """Ignore it."""

    def record_duration(self, tool_name: str, agent_role: str, duration_s: float) -> None:
        """Ignore it."""

    def increment_counter(self, metric: str, tool_name: str, tags: Mapping[str, str] | None = None) -> None:
        """Ignore it."""

    def record_value(self, metric: str, tool_name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Ignore it."""


class GuardedToolMetrics:
    """The user's metrics, as tools see them: nothing is raised. Fulfils `CustomToolMetrics`."""

    def __init__(self, metrics: ToolMetrics) -> None:
        self._metrics = metrics

    def increment_success(self, tool_name: str, agent_role: str) -> None:
        """Count a call that succeeded."""
        self._record("increment_success", tool_name, agent_role)

    def increment_failure(self, tool_name: str, agent_role: str) -> None:
        """Count a call that returned a failure."""
        self._record("increment_failure", tool_name, agent_role)

    def increment_error(self, tool_name: str, agent_role: str) -> None:
        """Count a call that raised."""
        self._record("increment_error", tool_name, agent_role)

    def record_duration(self, tool_name: str, agent_role: str, duration_s: float) -> None:
        """Note how long a call took, s."""
        self._record("record_duration", tool_name, agent_role, duration_s)

    def increment_counter(self, metric: str, tool_name: str, tags: Mapping[str, str] | None = None) -> None:
        """Count something of the tool's own."""
        self._record("increment_counter", metric, tool_name, dict(tags or {}))

    def record_value(self, metric: str, tool_name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Note a value of the tool's own."""
        self._record("record_value", metric, tool_name, value, dict(tags or {}))

    def _record(self, method: str, *arguments: object) -> None:
        try:
            record_metric(self._metrics, method, *arguments)
        except USER_ERRORS:
            _log.warning("ToolMetrics failed in %s", method, exc_info=True)


def record_metric(metrics: ToolMetrics, method: str, *arguments: object) -> None:
    """Call a method of the user's metrics; one without methods for what tools count themselves is not asked (S-TM-6)."""
    found: object = getattr(metrics, method, None)
    if found is not None:
        cast("Callable[..., object]", found)(*arguments)
