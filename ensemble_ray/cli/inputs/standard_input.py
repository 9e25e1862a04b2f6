"""Items from standard input, which nobody can read twice: they are copied first (S-MR-180). Package: cli.

In: a stream, and a run's id. Out: the path of a file beside the records, kept for as long as the run's record is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import IO

from ensemble_ray.errors import ValidationError
from ensemble_ray.process.config import home_directory

__all__ = ["copied_items", "forget_items"]

_YOUNG_S = 86_400.0


def copied_items(run_id: str, stream: IO[bytes] | None = None) -> Path:
    """Copy all that comes; gives the file.

    Raises:
        ValidationError: nobody writes into standard input, or the copy cannot be written.
    """
    source = sys.stdin.buffer if stream is None else stream
    if source.isatty():
        raise ValidationError("there are no items on standard input: pipe JSON lines into it, or name a file")
    path = _copy_path(run_id)
    _forget_orphans(path.parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:  # noqa: PTH123  only so it is nobody else's from the beginning
            shutil.copyfileobj(source, file)
    except OSError as error:
        raise ValidationError(f"the items of standard input cannot be copied to '{path}': {error.strerror}") from error
    return path


def forget_items(run_id: str) -> None:
    """Remove the copy of a run that needs it no more; there may be none."""
    with contextlib.suppress(OSError):
        _copy_path(run_id).unlink(missing_ok=True)


def _forget_orphans(directory: Path) -> None:
    """Remove copies whose runs are on no record any more; a young one may be of a run that is about to begin."""
    from ensemble_ray.cli.inputs.records import own_store
    from ensemble_ray.process.loop import run_blocking

    for path in directory.glob("*.jsonl"):
        with contextlib.suppress(OSError):
            is_old = time.time() - path.stat().st_mtime > _YOUNG_S
            if is_old and run_blocking(own_store().summary(path.stem)) is None:
                path.unlink()


def _copy_path(run_id: str) -> Path:
    return home_directory() / "items" / f"{run_id}.jsonl"
