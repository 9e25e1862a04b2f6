"""`ensemble-ray reviews` and `review`."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ensemble_ray.cli.inputs import options
from ensemble_ray.cli.inputs.records import age_of, own_store, where
from ensemble_ray.cli.view.terminal import FINE, align, own_command, screen_line, show, show_json, write_note
from ensemble_ray.errors import ReviewRoleError, ValidationError, message_of
from ensemble_ray.process.concurrency import run_blocking

if TYPE_CHECKING:
    from datetime import datetime

    from ensemble_ray.record.open_reviews import Gate
    from ensemble_ray.record.stores import RecordedRun, RunStore
    from ensemble_ray.recovery.deciding import PendingReview
    from ensemble_ray.values.reviews import ReviewDecision

_SHOWN_ID = 8  # more if two gates have the same ones
_SHOWN_TASK = 80
_CLUSTER_S = 4.0  # a cluster polls once a second
_POLL_S = 0.2
_TIMINGS = {"before_execution": "before", "during_execution": "during", "after_execution": "after"}


class ReviewVerdict(StrEnum):
    APPROVE = "approve"
    EDIT = "edit"
    EXIT = "exit"


def reviews(*, as_json: options.ThemAsJson = False) -> int:
    """List the review gates that wait for a decision, of all recorded runs, oldest first.

    Shows run, gate, time left and task. Decide with: ensemble-ray review RUN GATE approve | edit FILE | exit.
    """
    from ensemble_ray.recovery.deciding import find_decided_runs, find_pending

    store = own_store()
    pending = run_blocking(find_pending(store))
    if as_json:
        show_json([each.review.model_dump(mode="json") for each in pending])
        return FINE
    _list(pending)
    command = own_command()
    if pending:
        write_note(
            f"Look at one: {command} review RUN GATE. Decide: {command} review RUN GATE approve | edit FILE | exit"
        )
    else:
        write_note(f"No review waits in {where()}")
    for run in run_blocking(find_decided_runs(store)):
        write_note(f"Run {run.run_id} has its decisions. Resume it: {command} resume {run.run_id}")
    return FINE


def review(
    run: options.RunName,
    gate: Annotated[str, Argument(metavar="GATE", help="The gate's id, or its start.", show_default=False)],
    verdict: Annotated[
        ReviewVerdict | None, Argument(help="The decision; without it, the gate is shown.", show_default=False)
    ] = None,
    file: Annotated[
        str | None, Argument(metavar="[FILE]", help="For edit: the file with the new text; -: standard input.")
    ] = None,
    *,
    comment: Annotated[
        str | None, Option("--comment", metavar="TEXT", help="The reason; it is recorded with the decision.")
    ] = None,
    by: Annotated[str | None, Option("--by", metavar="NAME", help="Who decides; default: your user name.")] = None,
    role: Annotated[list[str] | None, Option("--role", metavar="ROLE", help="Your role; repeatable.")] = None,
    resumes: Annotated[bool, Option("--resume", help="Resume the run immediately, and print its output.")] = False,
) -> int:
    """Decide at a review gate of a run that waits or was interrupted, or show it.

    approve: the run continues with the current output. edit: it continues with the text of FILE, without its last line
    break. exit: it ends with the completed tasks. The first decision counts. A gate that requires a role is decided with
    --role ROLE.

    Exit codes: 0 it is decided, 1 another decision was first or the time is up, 2 there is no such run or gate; with
    --resume as run.
    """
    from ensemble_ray.recovery.deciding import find_gate, record_decision

    store = own_store()
    if verdict is None:
        _, found_gate = run_blocking(find_gate(store, run, gate))
        _show(found_gate)
        return FINE
    decision = _decision_of(verdict, file)
    try:
        found, decided = run_blocking(
            record_decision(store, run, gate, decision, by=by, comment=comment, roles=role or ())
        )
    except ReviewRoleError as error:
        raise ValidationError(
            f"{message_of(error)}. If you have that role, add --role {shlex.quote(error.role)}"
        ) from None
    show(f"Decided gate {decided.gate_id} of run {found.run_id}: {verdict.value}")
    if resumes:
        from ensemble_ray.cli.commands.run import resume

        return resume(found.run_id)
    write_note(run_blocking(_next_of(store, found)))
    return FINE


def _list(pending: Sequence[PendingReview]) -> None:
    from ensemble_ray.values.value import utc_now

    now = utc_now()
    ids = {each.review.gate_id for each in pending}
    length = _SHOWN_ID
    while len({each[:length] for each in ids}) < len(ids):
        length += 1
    rows: list[tuple[str, ...]] = []
    for each in pending:
        found = each.review
        asked = screen_line(": ".join(filter(None, (found.task_description, found.prompt))), _SHOWN_TASK)
        times = _TIMINGS[found.timing.value], f"{age_of(found.created_at, now)} ago", _time_left(each, now)
        rows.append((found.run_id, found.gate_id[:length], *times, asked))
    if rows:
        show("\n".join(align(rows)))


def _time_left(pending: PendingReview, now: datetime) -> str:
    from ensemble_ray.record.open_reviews import Obstacle

    review = pending.review
    if pending.obstacle is Obstacle.ATTACHED:
        return f"asked in {pending.run.owner}"
    if review.expires_at is None:
        return "no limit"
    if review.expires_at <= now:
        return f"time is up: {review.on_timeout.value}"
    return f"{age_of(now, review.expires_at)} left"


def _show(gate: Gate) -> None:
    review, decided = gate.review(), gate.decided
    lines = [f"Run:    {review.run_id}", f"Gate:   {review.gate_id} ({_TIMINGS[review.timing.value]} the task)"]
    lines += [f"Task:   {review.task_description}"]
    lines += [f"Prompt: {review.prompt}"] if review.prompt else []
    lines += [f"Role:   {review.required_role}"] if review.required_role else []
    if decided is not None:
        lines.append(f"Decided: {decided.data.verdict}, by {decided.data.by}")
    elif review.expires_at is not None:
        lines.append(f"Until:  {review.expires_at:%Y-%m-%d %H:%M:%S} UTC, then {review.on_timeout.value}")
    show("\n".join([*lines, *(["", review.task_output] if review.task_output else [])]))


def _decision_of(verdict: ReviewVerdict, file: str | None) -> ReviewDecision:
    from ensemble_ray.values.reviews import ReviewDecision

    match verdict:
        case ReviewVerdict.EDIT if file is None:
            raise ValidationError("edit needs the file with the new text, or - for standard input")
        case ReviewVerdict.EDIT:
            return ReviewDecision.edit(_text_of(str(file)))
        case _ if file is not None:
            raise ValidationError(f"{verdict.value} takes no file, got: '{file}'")
        case ReviewVerdict.APPROVE:
            return ReviewDecision.continue_execution()
        case ReviewVerdict.EXIT:
            return ReviewDecision.exit_early()


def _text_of(file: str) -> str:
    try:
        if file == "-":
            if sys.stdin.isatty():
                write_note("The new text, then Ctrl-D:")
            text = sys.stdin.buffer.read().decode("utf-8-sig")
        else:
            text = Path(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValidationError(f"cannot read '{file}': {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValidationError(f"'{file}' is not UTF-8 text") from None
    return text.removesuffix("\n").removesuffix("\r")


async def _next_of(store: RunStore, run: RecordedRun) -> str:
    from ensemble_ray.record.open_reviews import open_reviews

    left = len(open_reviews(await store.gates_of(run.run_id)))
    more = f"{left} more {'gate waits' if left == 1 else 'gates wait'}: {own_command()} reviews. " if left else ""
    resume = f"{own_command()} resume {run.run_id}"
    if run.owner:
        return f"{more}The run is at work in {run.owner}. When its call has ended, resume it: {resume}"
    if await _is_resumed(store, run):
        return f"{more}The run continues on its cluster"
    return f"{more}Resume it: {resume}"


async def _is_resumed(store: RunStore, run: RecordedRun) -> bool:
    """Wait for a cluster to resume the run. Other runtimes never resume by themselves."""
    from ensemble_ray.record.head import read_head

    if (await read_head(store, run.run_id)).header.runtime != "ray":
        return False
    last = await _last_end(store, run.run_id)
    deadline = time.monotonic() + _CLUSTER_S
    while time.monotonic() < deadline:
        found = await store.summary(run.run_id)
        # Or it has reached its next gate.
        if found is not None and (found.state is not run.state or await _last_end(store, run.run_id) != last):
            return True
        await asyncio.sleep(_POLL_S)
    return False


async def _last_end(store: RunStore, run_id: str) -> int:
    from ensemble_ray.record.head import head_facts

    return max((fact.seq for fact in await head_facts(store, run_id)), default=0)
