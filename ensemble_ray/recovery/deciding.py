"""Decide at review gates of recorded runs from any process (S-REV-125 to S-REV-131)."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Collection, Sequence
from datetime import datetime

from msgspec import Struct

from ensemble_ray.definition.redactor import recorded_redaction
from ensemble_ray.errors import EnsembleError, ReviewDecidedError, ReviewRoleError, RunExistsError, ValidationError
from ensemble_ray.execute.redaction import clean_fact
from ensemble_ray.execute.review.gates import TIMEOUT
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import ReviewDecided, RunEnded
from ensemble_ray.ports import Persistence
from ensemble_ray.process.concurrency import bridge, run_blocking
from ensemble_ray.record.head import head_facts, read_head
from ensemble_ray.record.open_reviews import Gate, Obstacle, fold_gates, obstacle_at
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import RecordedRun, RunStore, resume_advice
from ensemble_ray.runs.ports import Runtime
from ensemble_ray.runtime import connect
from ensemble_ray.values.ids import RUN
from ensemble_ray.values.outputs import ExitReason, RunState
from ensemble_ray.values.reviews import Continue, Edit, ExitEarly, OpenReview, ReviewAnswer, ReviewDecision
from ensemble_ray.values.value import utc_of

_SHOWN_GATES = 5


def pending_reviews(*, runtime: Runtime | str | None = None) -> tuple[OpenReview, ...]:
    """Return the open review gates of all recorded runs that have not ended, oldest first.

    Args:
        runtime: Runtime that stores the records; default: the runtime that the environment names.

    Raises:
        RecordError: the records cannot be read.
    """
    return run_blocking(_pending(runtime))


async def apending_reviews(*, runtime: Runtime | str | None = None) -> tuple[OpenReview, ...]:
    """`pending_reviews` for async code."""
    return await bridge(_pending(runtime))


def decide(
    run_id: str,
    gate_id: str,
    decision: ReviewDecision,
    *,
    by: str | None = None,
    comment: str | None = None,
    roles: str | Collection[str] | None = None,
    runtime: Runtime | str | None = None,
) -> RunState:
    """Decide at a review gate of a run, from any process. The decision is on disk when this returns.

    Args:
        run_id: The run's id, a unique prefix of it, or `latest`.
        gate_id: The gate's id, or a unique prefix of it.
        decision: `ReviewDecision.continue_execution()`, `.edit(text)` or `.exit_early()`.
        by: Name of the person who decides; default: the user of this process.
        comment: Reason; it is recorded with the decision.
        roles: Roles of that person. If the gate has a `required_role`, it must be one of them, and is recorded. None: they
            are not checked.
        runtime: Runtime that stores the record; default: the runtime that the environment names.

    Returns:
        State of the run. If it is `waiting` or `interrupted`, `resume(run_id)` continues the run.

    Raises:
        ReviewDecidedError: the gate was already decided or has expired; the message names the person, time and
            decision.
        ReviewRoleError: `roles` lacks the role that the gate requires.
        RunExistsError: a process waits for the decision of its review handler.
        ValidationError: there is no such run or gate, the gate is closed, or `decision` is no decision.
        RecordError: the record cannot be read or written.
    """
    return run_blocking(_decide(run_id, gate_id, decision, by=by, comment=comment, roles=roles, runtime=runtime))


async def adecide(
    run_id: str,
    gate_id: str,
    decision: ReviewDecision,
    *,
    by: str | None = None,
    comment: str | None = None,
    roles: str | Collection[str] | None = None,
    runtime: Runtime | str | None = None,
) -> RunState:
    """`decide` for async code, with the same contract."""
    return await bridge(_decide(run_id, gate_id, decision, by=by, comment=comment, roles=roles, runtime=runtime))


class PendingReview(Struct, frozen=True, kw_only=True):
    review: OpenReview
    run: RecordedRun
    obstacle: Obstacle | None  # why the gate cannot be decided although it is open


async def find_pending(store: RunStore) -> list[PendingReview]:
    """Return the open gates of all runs, oldest first."""
    found: list[PendingReview] = []
    for run, facts in await store.gates():
        gates = (gate for gate in fold_gates(facts) if gate.is_open)
        found += [PendingReview(review=gate.review(), run=run, obstacle=_obstacle(run, gate)) for gate in gates]
    return sorted(found, key=lambda each: (each.review.created_at, each.review.run_id, each.review.gate_id))


async def find_decided_runs(store: RunStore) -> list[RecordedRun]:
    """Return the waiting runs that have all decisions and can resume, oldest first."""
    return [
        run
        for run, facts in await store.gates()
        if run.state is RunState.WAITING and not any(gate.is_open for gate in fold_gates(facts))
    ]


async def find_gate(store: RunStore, run_id: str, gate_id: str) -> tuple[RecordedRun, Gate]:
    """Return a run and one of its gates, open or decided, by a unique prefix of the gate's id."""
    run = await store.find(run_id)
    return run, _choose(run, fold_gates(await store.gates_of(run.run_id)), gate_id)


async def record_decision(
    store: RunStore,
    run_id: str,
    gate_id: str,
    decision: ReviewDecision,
    *,
    by: str | None,
    comment: str | None,
    roles: Collection[str] | None = None,
) -> tuple[RecordedRun, Gate]:
    """Record a decision (see `decide`). Return the run after it, and the gate."""
    if not isinstance(decision, Continue | Edit | ExitEarly):
        raise ValidationError(
            f"decision must be a ReviewDecision, got: {type(decision).__name__}. Use "
            "ReviewDecision.continue_execution(), .edit(text) or .exit_early()"
        )
    run, gate = await find_gate(store, run_id, gate_id)
    role = gate.asked.data.required_role if roles is not None else None
    if not by:
        try:
            by = getpass.getuser()
        except (KeyError, OSError, ImportError):  # a container's user may have no name
            by = f"user {os.getuid()}" if hasattr(os, "getuid") else "a user"
    answer = ReviewAnswer(decision=decision, by=by)
    data = ReviewDecided.of(answer, comment=comment or "", outside=True, role=role)
    if (header := (await read_head(store, run.run_id)).header).redaction is not None:
        data = clean_fact(recorded_redaction(header.redaction), data)
    obstacle = _obstacle(run, gate)
    if obstacle is None and run.state.is_final:
        raise ValidationError(
            f"Run '{run.run_id}' has ended: it is {run.state.value}, and its gates accept no decision"
        )
    if obstacle is None and role is not None and roles is not None and role not in roles:
        raise _role_error(run, gate, role, roles)
    if obstacle is None and (refused := await store.decide(run.run_id, gate.asked.name, data)) is not None:
        gate, obstacle = refused
    if obstacle is not None:
        raise _refusal(run, gate, obstacle)
    return await store.summary(run.run_id) or run, gate


async def _pending(runtime: Runtime | str | None) -> tuple[OpenReview, ...]:
    return tuple(each.review for each in await find_pending(_store(runtime)))


async def _decide(
    run_id: str,
    gate_id: str,
    decision: ReviewDecision,
    *,
    by: str | None,
    comment: str | None,
    roles: str | Collection[str] | None,
    runtime: Runtime | str | None,
) -> RunState:
    known = [roles] if isinstance(roles, str) else roles
    run, _ = await record_decision(_store(runtime), run_id, gate_id, decision, by=by, comment=comment, roles=known)
    return run.state


def _store(runtime: Runtime | str | None) -> RunStore:
    return store_at(connect(runtime or "inline").store_address)


def _obstacle(run: RecordedRun, gate: Gate) -> Obstacle | None:
    return obstacle_at(gate, at=time.time(), is_owned=bool(run.owner))


def _choose(run: RecordedRun, gates: Sequence[Gate], gate_id: str) -> Gate:
    found = [gate for gate in gates if gate_id and gate.gate_id.startswith(gate_id)]
    exact = [gate for gate in found if gate.gate_id == gate_id]
    if exact or len(found) == 1:
        return (exact or found)[0]
    if found:
        shown = ", ".join(gate.gate_id for gate in found[:_SHOWN_GATES])
        raise ValidationError(f"Several gates of run '{run.run_id}' begin with '{gate_id}': [{shown}]")
    waiting = [gate.gate_id for gate in gates if gate.is_open][:_SHOWN_GATES]
    known = f"Open gates: [{', '.join(waiting)}]" if waiting else "It has no open gate"
    raise ValidationError(
        f"Run '{run.run_id}' has no gate '{gate_id}'. {known}. List the open gates of all runs: ensemble-ray reviews"
    )


def _refusal(run: RecordedRun, gate: Gate, obstacle: Obstacle) -> EnsembleError:
    named = f"Gate '{gate.gate_id}' of run '{run.run_id}'"
    match obstacle:
        case Obstacle.DECIDED if gate.decided is not None:
            data, at = gate.decided.data, utc_of(gate.decided.at)
            why = f' ("{data.comment}")' if data.comment else ""
            return ReviewDecidedError(
                f"{named} has been decided: {data.verdict}, by {data.by or 'somebody'} at {_format_time(at)}{why}. The first "
                "decision counts",
                run.run_id, gate.gate_id, data.verdict, data.by, at, data.comment,
            )  # fmt: skip
        case Obstacle.EXPIRED:
            action, at = gate.asked.data.on_timeout, utc_of(gate.expires_at or 0.0)
            return ReviewDecidedError(
                f"{named} was open until {_format_time(at)} and had no decision: on_timeout={action.value} applies. Resume "
                f"the run: {resume_advice(run.run_id, run.origin)}",
                run.run_id, gate.gate_id, action.value, TIMEOUT, at,
            )  # fmt: skip
        case Obstacle.ATTACHED:
            return RunExistsError(
                f"{named} is asked in {run.owner or 'the process that owns the run'}, by the run's own review handler: "
                "decide there. Gates of an ensemble with review_wait='detach' are decided from anywhere"
            )
        case _:
            return ValidationError(f"{named} accepts no decision: its task or call has ended without one")


def _role_error(run: RecordedRun, gate: Gate, role: str, roles: Collection[str]) -> ReviewRoleError:
    has = f"has [{', '.join(sorted(roles))}]" if roles else "has none"
    text = f"Gate '{gate.gate_id}' of run '{run.run_id}' requires the role '{role}', and its reviewer {has}"
    return ReviewRoleError(text, run.run_id, gate.gate_id, role, sorted(roles))


def _format_time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


async def request_end(store: RunStore, run: RecordedRun) -> None:
    """Ask the owner of a run to end it, which needs a moment; end a run without an owner here.

    Raises:
        ValidationError: the run has ended.
        RecordError: the record cannot be written.
    """
    if run.state.is_final:
        raise ValidationError(f"Run '{run.run_id}' has ended: it is {run.state.value}")
    if run.state.is_active:
        await store.ask_cancel(run.run_id)
    else:
        await end_unowned(store, run.run_id)


async def end_unowned(store: RunStore, run_id: str) -> None:
    """Record the end of a run without an owner, unless another process claims it at this moment."""
    try:
        owned = await store.claim(run_id)
    except RunExistsError:  # that process sees the request to end it
        await store.ask_cancel(run_id)
        return
    data = RunEnded(state=RunState.CANCELLED, exit_reason=ExitReason.CANCELLED)
    end = Fact(run=run_id, name=RUN, at=time.time(), data=data, epoch=owned.epoch)
    try:
        if await head_facts(store, run_id):  # otherwise the run never began, and a new run may use its id
            await owned.journal.append((end,), epoch=owned.epoch, until=Persistence.COMMITTED)
    finally:
        await owned.close(RunState.CANCELLED)
