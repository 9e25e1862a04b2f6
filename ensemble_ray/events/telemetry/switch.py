"""The switch of the environment: `ENSEMBLE_RAY_OTEL=1` sends every run of this process. Package: telemetry."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

from ensemble_ray.errors import ValidationError
from ensemble_ray.events.tracing import RunTracer
from ensemble_ray.process.bounded_log import bounded_logger

__all__ = ["SWITCH", "tracers_here"]

SWITCH = "ENSEMBLE_RAY_OTEL"
_ON, _OFF = frozenset({"1", "true", "on", "yes"}), frozenset({"", "0", "false", "off", "no"})
_log = bounded_logger(__name__)


def tracers_here(listeners: Sequence[object]) -> tuple[object, ...]:
    """Return the listener that the environment adds to those of a run; none where one of them traces it already.

    It is the same for all runs of this process.
    """
    said = os.environ.get(SWITCH, "").strip().lower()
    if said in _OFF or any(isinstance(each, RunTracer) for each in listeners):
        return ()
    added = _make_exporter(said)
    return () if added is None else (added,)


@functools.cache
def _make_exporter(said: str) -> object | None:
    """Make it, once; what is wrong with it is told once, and concerns no run."""
    if said not in _ON:
        _log.warning("%s must be 1 or 0, got: '%s'; runs are not sent", SWITCH, said)
        return None
    from ensemble_ray.events.telemetry.listener import OpenTelemetryListener

    try:
        return OpenTelemetryListener()
    except ValidationError as error:
        _log.warning("Runs are not sent: %s", error)
        return None
