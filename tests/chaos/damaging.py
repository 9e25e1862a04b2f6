"""Damages the record of a run whose processes were killed, and sees whether anybody is told.

In: a run, and a moment. Out: whether it goes on. Either nothing that is recorded is touched, and the run goes on as after
any kill; or `trace` and `resume` say what is lost, with an exit code, and ask the model nothing, until somebody allows the
loss. Never: a record that lost something, and a program that says nothing of it.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ensemble_ray import RecordError
from ensemble_ray.facts.fact import Fact
from tests.chaos.audit import answers_in
from tests.chaos.disturbed import Disturbed
from tests.chaos.killing import kill_only
from tests.chaos.moments import Moment
from tests.processes import Program

__all__ = ["HARMS", "RECORD", "damage", "harm", "tidy_up"]

RECORD = "record.sqlite"
#: What is done to a file.
HARMS = ("a flipped bit", "a flipped bit", "a page of zeros", "a page of noise", "a page of another place", "cut off")
_PAGE = 4096
#: How many of the files that are damaged hold everything, instead of their logs.
_TIDIED = 0.7
#: What a program says that meets a damaged record.
_DAMAGED = "The record is damaged"


def damage(run: Disturbed, moment: Moment, rng: random.Random) -> bool:
    """Wait for the moment, kill, damage, look and go on; False when the run is over, with an output or for good."""
    if not kill_only(run, moment, rng):
        return True  # it ended before
    if not run.has_begun:
        run.go_on()
        return True
    before = run.facts()
    backup = run.directory / "before"
    shutil.copytree(run.record, backup)
    file = run.record / rng.choice((RECORD, f"{RECORD}-wal", f"{RECORD}-wal"))
    if not file.exists() or not file.stat().st_size:
        file = run.record / RECORD
    if file.name == RECORD and rng.random() < _TIDIED:
        tidy_up(file)
    what = harm(file, rng)
    left = _left(run)
    run.tell(f"{what} in {file.name}: {len(before)} facts before, {'none can be read' if left is None else len(left)}")
    if not _is_refused(run, before, left):
        return True
    run.report.told += 1
    return _go_on_without(run, left)


def tidy_up(file: Path) -> None:
    """Bring the log into the file, as the last process to close it does; else the log stands for damaged pages of it."""
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def harm(file: Path, rng: random.Random) -> str:
    """Damage a file somewhere; gives how and where."""
    content = bytearray(file.read_bytes())
    how = rng.choice(HARMS)
    at = rng.randrange(len(content))
    if how == "cut off":
        file.write_bytes(content[:at])
        return f"{how} at {at}"
    if how == "a flipped bit":
        content[at] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
        return f"{how} at {at}"
    begin = at - at % _PAGE
    page = content[begin : begin + _PAGE]
    other = rng.randrange(0, len(content), _PAGE)
    filled = {"a page of zeros": bytes(len(page)), "a page of noise": rng.randbytes(len(page))}
    new = filled.get(how, bytes(content[other : other + len(page)]))
    content[begin : begin + len(new)] = new
    file.write_bytes(content)
    return f"{how} at {begin}"


def _left(run: Disturbed) -> list[Fact] | None:
    """What can still be read; None: nothing."""
    try:
        return run.facts(is_partial=True)
    except RecordError:
        return None


def _is_refused(run: Disturbed, before: Sequence[Fact], left: Sequence[Fact] | None) -> bool:
    """Ask for the run's tree, and go on with it; whether that is refused. Neither may be silent about what is lost."""
    known = {fact.seq: fact for fact in left or ()}
    lost = [fact for fact in before if known.get(fact.seq) != fact]
    told = f"{len(lost)} facts of {len(before)} are lost or altered ({', '.join(map(_name, lost[:5]))})"
    requests, owners = run.server.stats()["requests"], run.owners()
    shown = run.ask("trace", run.run_id)
    is_shown_as_damaged = _says_so(run, shown)
    # The tree of a run over many items is made of some kinds of facts, and says nothing of others.
    if lost and not is_shown_as_damaged and not run.scenario.is_fed:
        run.break_promise(f"{told}, and 'trace' ended with {shown.process.returncode}: {shown.text[-300:]}")
    again = run.start("resume", run.run_id)
    goes_on = run.until(lambda: run.wait_owner(owners)) or again.process.returncode == run.scenario.exit_code
    if goes_on and lost:
        run.break_promise(f"{told}, and 'resume' goes on")
    elif goes_on:
        with contextlib.suppress(subprocess.TimeoutExpired):
            again.process.wait(timeout=run.scenario.patience_s)
        if _says_so(run, again):
            return True  # the damage is outside the facts, and was met when something was written
        run.report.unaffected += 1
    if goes_on:
        return False
    if not _says_so(run, again):
        run.break_promise(f"{told}, and 'resume' ended with {again.process.returncode}: {again.text[-500:]}")
    if run.server.stats()["requests"] != requests:
        run.break_promise("'resume' of a damaged record asked the model before it said so")
    return True


def _says_so(run: Disturbed, asked: Program) -> bool:
    """Whether a program ended with the error of a damaged record, and named it."""
    return (
        asked.process.poll() not in {None, 0, run.scenario.exit_code}
        and _DAMAGED in asked.text
        and str(run.record) in asked.text
    )


def _name(fact: Fact) -> str:
    return f"{fact.kind} {fact.name}"


def _go_on_without(run: Disturbed, left: Sequence[Fact] | None) -> bool:
    """Somebody allows the loss: the run goes on, or that is refused as well; False then."""
    counts, owners = run.server.requests_by_key(), run.owners_of(left or ())
    settled = {key: counts[key] for key in answers_in(run.run_id, left or ())}
    run.kills[-1] = replace(run.kills[-1], settled=settled, is_loss=True, until=time.time())
    requests = run.server.stats()["requests"]
    heir = run.start("resume", run.run_id, "--allow-loss")
    if run.until(lambda: run.wait_owner(owners)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            heir.process.wait(timeout=run.scenario.patience_s)
        return not _says_so(run, heir)  # damage outside the facts is met when something is written
    code = heir.process.wait(timeout=run.scenario.patience_s)
    if code == run.scenario.exit_code:
        return True
    run.tell(f"refused for good: {heir.text[-300:]}")
    if not _says_so(run, heir):
        run.break_promise(f"'resume --allow-loss' ended with {code}: {heir.text[-500:]}")
    if run.server.stats()["requests"] != requests:
        run.break_promise("'resume --allow-loss' asked the model before it was refused")
    return False
