"""Export the traces of runs that ended without failure, to files or to the user's exporter.

A failure of an exporter never affects the result of a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Union

from ensemble_ray.errors import message_of
from ensemble_ray.process.concurrency import call_user
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.trace import CaptureMode, ExecutionTrace, ExecutionTraceExporter

_log = bounded_logger(__name__)
_DEFAULT_FOLDER = "./traces/"  # In capture mode full (S-CAP-15).

#: Types that `trace_exporter` accepts (S-TRC-60).
AnyExporter = Union[ExecutionTraceExporter, "Callable[[ExecutionTrace], object]"]


class JsonTraceExporter:
    """Writes each trace as a JSON file. A failure is a WARN line, never an error."""

    def __init__(self, path: str | Path, *, directory_mode: bool = True) -> None:
        """Set the target.

        Args:
            path: A folder, created if missing, for one file `{ensemble_id}.json` per run.
            directory_mode: If False, `path` is the file itself, overwritten by every run.
        """
        self.path = Path(path)
        self.directory_mode = directory_mode

    def export(self, trace: ExecutionTrace) -> None:
        """Write one trace."""
        target = self.path
        if self.directory_mode:
            # The user may choose the id, and it must not point out of the folder.
            name = re.sub(r"[^A-Za-z0-9._-]|^\.+", "_", trace.ensemble_id) or "_"
            target /= f"{name}.json"
        try:
            trace.write_json(target)
        except OSError as error:
            _log.warning("The trace could not be written to %s: %s", target, message_of(error))

    def __repr__(self) -> str:
        return f"JsonTraceExporter({str(self.path)!r}, directory_mode={self.directory_mode})"


def effective_exporter(capture_mode: CaptureMode, trace_exporter: AnyExporter | None) -> AnyExporter | None:
    """Return the chosen exporter, or else in capture mode full one that writes to `./traces/` (S-CAP-15)."""
    if trace_exporter is None and capture_mode is CaptureMode.FULL:
        return JsonTraceExporter(_DEFAULT_FOLDER)
    return trace_exporter


async def export_safely(exporter: AnyExporter, trace: ExecutionTrace) -> None:
    """Call the exporter, in a thread if it is synchronous. Its errors are logged as a WARN line (S-TRC-62)."""
    function = exporter.export if isinstance(exporter, ExecutionTraceExporter) else exporter
    try:
        await call_user(function, trace)
    except Exception as error:  # noqa: BLE001  an exporter cannot fail a run
        _log.warning("Trace exporter %s failed: %s", type(exporter).__name__, message_of(error))
