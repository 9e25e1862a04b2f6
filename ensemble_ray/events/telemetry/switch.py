"""The switch of the environment: `ENSEMBLE_RAY_OTEL=1` sends every run of this process. Package: telemetry."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ensemble_ray.errors import ValidationError
from ensemble_ray.events.tracing import RunTracer
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.config import read_switch

__all__ = ["SWITCH", "tracers_here"]

SWITCH = "ENSEMBLE_RAY_OTEL"
_log = bounded_logger(__name__)


def tracers_here(listeners: Sequence[object]) -> tuple[object, ...]:
    """Return the listener that the environment adds to those of a run; none where one of them traces it already.

    It is the same for all runs of this process.

    Raises:
        ValidationError: the variable is neither on nor off.
    """
    if not read_switch(SWITCH, default=False) or any(isinstance(each, RunTracer) for each in listeners):
        return ()
    added = _make_exporter()
    return () if added is None else (added,)


@functools.cache
def _make_exporter() -> object | None:
    """Make it, once; what is wrong with it is told once, and concerns no run."""
    from ensemble_ray.events.telemetry.listener import OpenTelemetryListener

    try:
        return OpenTelemetryListener()
    except ValidationError as error:
        _log.warning("Runs are not sent: %s", error)
        return None
