"""Open the store of an address, and choose a run's capture mode."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from ensemble_ray.definition.fields import to_member
from ensemble_ray.errors import ValidationError
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.stores import RunStore, StoreAddress
from ensemble_ray.values.trace import CaptureMode


def store_at(address: StoreAddress) -> RunStore:
    if not address.url:
        from ensemble_ray.record.sqlite.store import SqliteStore

        return SqliteStore(Path(address.home))
    if address.url.startswith(("postgresql://", "postgres://")):
        from ensemble_ray.record.postgres.store import PostgresStore

        return PostgresStore(address.url)
    # Do not repeat a text without a scheme: it may be a password.
    scheme, colon, _ = address.url.partition("://")
    named = f" '{scheme}://...'" if colon else ""
    raise ValidationError(f"Unknown store{named}: use a postgresql:// URL, or none for files in ENSEMBLE_RAY_HOME")


_log = bounded_logger(__name__)
CAPTURE_MODE_VARIABLE = "ENSEMBLE_RAY_CAPTURE_MODE"


def effective_capture_mode(
    explicit: CaptureMode | str | None,
    environ: Mapping[str, str] | None = None,
    *,
    inform: Callable[[str], object] = _log.info,
) -> CaptureMode:
    """Return the capture mode: the ensemble's, else the environment's, else off (S-CAP-2, S-CAP-3).

    `environ` is of the calling process (S-CAP-5); None: of this process. `inform` receives the line that names a mode other
    than off (S-CAP-18).
    """
    said = (os.environ if environ is None else environ).get(CAPTURE_MODE_VARIABLE, "").strip().lower()
    source, value = (CAPTURE_MODE_VARIABLE, said or "off") if explicit is None else ("capture_mode", explicit)
    mode = cast("CaptureMode", to_member(CaptureMode, source)(value))
    if mode is not CaptureMode.OFF:
        inform(f"Capture mode: {mode.value}")
    return mode
