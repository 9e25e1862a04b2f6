"""What a dashboard is told when it is made, with the texts that refuse it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from pydantic import model_validator

from ensemble_ray.errors import ValidationError
from ensemble_ray.values.reviews import OnTimeoutAction
from ensemble_ray.values.value import DurationField, Value

#: The usual port (S-WEB-1).
DEFAULT_PORT = 7329
_HIGHEST_PORT = 65535


def _seconds(value: object) -> float | None:
    if isinstance(value, timedelta):
        return value.total_seconds()
    return float(value) if isinstance(value, int | float) else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class DashboardSettings(Value):
    """The fields of a `WebDashboard`, in the order in which they are checked."""

    port: int
    host: str = "localhost"
    review_timeout: DurationField = cast("Any", timedelta(minutes=5))
    on_timeout: OnTimeoutAction = OnTimeoutAction.CONTINUE
    max_retained_runs: int = 10
    max_snapshot_iterations: int = 5
    trace_export_dir: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        """Refuse what cannot be (S-WEB-2); the first mistake is told."""
        given = cast("Mapping[str, object]", data)
        port, host, timeout = given.get("port"), given.get("host"), given.get("review_timeout")
        runs, iterations = given.get("max_retained_runs"), given.get("max_snapshot_iterations")
        number = _number(port)
        if number is None or not 0 <= number <= _HIGHEST_PORT:
            raise ValidationError(
                f"port must be in the range 0-{_HIGHEST_PORT} (0 = OS-assigned ephemeral port); got: {port}"
            )
        if not isinstance(host, str) or not host.strip():
            raise ValidationError(f"host must not be None or blank; got: {host}")
        if timeout is None:
            raise ValidationError("review_timeout must not be None")
        if (seconds := _seconds(timeout)) is not None and seconds < 0:
            raise ValidationError(f"review_timeout must not be negative; got: {timeout}")
        if (kept := _number(runs)) is None or kept < 1:
            raise ValidationError(f"max_retained_runs must be >= 1; got: {runs}")
        if (pairs := _number(iterations)) is None or pairs < 0:
            raise ValidationError(
                f"max_snapshot_iterations must be >= 0 (0 disables iteration snapshots); got: {iterations}"
            )
        return data
