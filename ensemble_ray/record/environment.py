"""What the calling process's environment decides about a record. Package: record. Pure over a given environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from ensemble_ray.errors import ValidationError
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.values.trace import CaptureMode

__all__ = ["CAPTURE_MODE_VARIABLE", "effective_capture_mode"]

_log = bounded_logger(__name__)
#: Environment variable that chooses the capture mode where the ensemble does not.
CAPTURE_MODE_VARIABLE = "ENSEMBLE_RAY_CAPTURE_MODE"


def effective_capture_mode(
    explicit: CaptureMode | str | None,
    environ: Mapping[str, str] | None = None,
    *,
    warn: Callable[[str], object] = _log.warning,
    inform: Callable[[str], object] = _log.info,
) -> CaptureMode:
    """Return the capture mode of a run: the ensemble's, else the environment's, else off (S-CAP-2, S-CAP-3).

    Args:
        explicit: The ensemble's own choice; None looks at the environment, `off` does not.
        environ: The calling process's environment (S-CAP-5); None: this process's.
        warn: Takes the line about a value that is none (S-CAP-4).
        inform: Takes the line that names a mode other than off (S-CAP-18).

    Raises:
        ValidationError: the explicit choice is none.
    """
    mode = (
        _explicit(explicit)
        if explicit is not None
        else _of_environment(os.environ if environ is None else environ, warn)
    )
    if mode is not CaptureMode.OFF:
        inform(f"Capture mode: {mode.value}")
    return mode


def _explicit(value: CaptureMode | str) -> CaptureMode:
    try:
        return CaptureMode(value)
    except ValueError:
        msg = f"Unknown capture_mode '{value}'. Known: [{_list_modes()}]"
        raise ValidationError(msg) from None


def _of_environment(environ: Mapping[str, str], warn: Callable[[str], object]) -> CaptureMode:
    value = environ.get(CAPTURE_MODE_VARIABLE, "").strip()
    if not value:
        return CaptureMode.OFF
    try:
        return CaptureMode(value.lower())
    except ValueError:
        warn(f"{CAPTURE_MODE_VARIABLE} is '{value}', which is no capture mode and is ignored. Known: [{_list_modes()}]")
        return CaptureMode.OFF


def _list_modes() -> str:
    return ", ".join(mode.value for mode in CaptureMode)
