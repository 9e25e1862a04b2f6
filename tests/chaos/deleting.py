"""Removes the record of a run that is running, and sees whether the run is told.

In: a run, and a moment. Out: whether it goes on: not when the record was removed in time. Never: a run that ends well, or
never, while nobody can read what it recorded.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import tempfile
import time
from pathlib import Path

from ensemble_ray import EnsembleError
from tests.chaos.damaging import RECORD
from tests.chaos.disturbed import Disturbed
from tests.chaos.moments import Moment

__all__ = ["delete"]

#: What is removed: the file, its log, or the directory.
_TARGETS = (RECORD, f"{RECORD}-wal", "")


def delete(run: Disturbed, moment: Moment, rng: random.Random) -> bool:
    """Wait for the moment, and remove; False when the run is over with that."""
    target = rng.choice(_TARGETS)
    if not run.until_reached(moment):
        return True
    with contextlib.nullcontext() if moment.most is None else run.gate.closed(run.server, moment.most):
        time.sleep(moment.delay_s)
        path = run.record / target if target else run.record
        if run.is_over() or not path.exists():
            return True
        kept = _link_files(run)
        _remove(path)
    run.tell(f"remove {path.name} of {moment}")
    run.report.strikes += 1
    driver = run.driver
    assert driver is not None
    try:
        code = driver.process.wait(timeout=run.scenario.patience_s)
    except subprocess.TimeoutExpired:
        run.break_promise(f"{path} was removed, and the run did not end")
        return False
    if code == run.scenario.exit_code and _has_end(kept):
        run.report.slipped += 1  # all was recorded before
    elif code in {0, run.scenario.exit_code} or str(run.record) not in driver.text:
        run.break_promise(f"{path} was removed, and the run ended with {code}: {driver.text[-500:]}")
    else:
        run.report.told += 1
    _judge_resumption(run)
    return False


def _link_files(run: Disturbed) -> Path:
    """Link the record's files to another folder, where they can be read after their removal."""
    folder = Path(tempfile.mkdtemp(prefix="removed-", dir=run.directory))
    for name in (RECORD, f"{RECORD}-wal"):
        with contextlib.suppress(FileNotFoundError):
            os.link(run.record / name, folder / name)
    return folder


def _has_end(folder: Path) -> bool:
    """Return whether the end of the run was recorded before the record was removed."""
    with contextlib.closing(sqlite3.connect(folder / RECORD)) as connection:
        return connection.execute("SELECT 1 FROM facts WHERE kind = 'end'").fetchone() is not None


def _remove(path: Path) -> None:
    if path.is_dir():
        # In one step, as `mv` does: else what is written to it meanwhile stands in the way of removing it.
        hidden = path.with_name(f".{path.name}.removed")
        path.rename(hidden)
        shutil.rmtree(hidden)
    else:
        path.unlink()


def _judge_resumption(run: Disturbed) -> None:
    """Nobody goes on with what is not there."""
    requests = run.server.stats()["requests"]
    with contextlib.suppress(EnsembleError):
        if run.facts():
            return  # its log had been brought into its file: nothing is lost
    again = run.ask("resume", run.run_id)
    if again.process.returncode == 0:
        run.break_promise(f"a run whose record was removed was resumed: {again.text[-500:]}")
    if run.server.stats()["requests"] != requests:
        run.break_promise("a run whose record was removed asked the model when it was resumed")
