"""Requests for runs, checked before anything is kept of them. Pure, but for the look at a file of items."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING

from ensemble_ray import Ensemble, ValidationError
from ensemble_ray.process.forks import SystemClock
from ensemble_ray.record.runs import check_run_id
from ensemble_ray.serve.driving.changed_team import change_team, count_tasks
from ensemble_ray.serve.driving.ledger import LedgerEntry
from ensemble_ray.serve.driving.limits import EndpointLimits, items_of, options_of
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.run_schemas import AcceptedRun, NewRun, RunStatus
from ensemble_ray.serve.team import known_inputs
from ensemble_ray.values.ids import new_run_id

if TYPE_CHECKING:
    from ensemble_ray.serve.datasets import DatasetCatalog
    from ensemble_ray.serve.team import ServedTeam
    from ensemble_ray.teamfile import Runnable


def team_of(name: str | None, teams: Mapping[str, ServedTeam]) -> ServedTeam:
    """Return the team that a request names, or the only one.

    Raises:
        Refusal: there is none of that name, or several and none is named.
    """
    if not teams:
        text = "No ensemble is served here yet, so there is nothing to run"
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NO_ENSEMBLE", text)
    known = ", ".join(sorted(teams))
    if name is None and len(teams) > 1:
        text = f"Several teams are served: say which one with 'ensemble'. There are: [{known}]"
        raise Refusal(HTTPStatus.BAD_REQUEST, "ENSEMBLE_REQUIRED", text)
    found = next(iter(teams.values())) if name is None else teams.get(name)
    if found is None:
        raise Refusal(HTTPStatus.NOT_FOUND, "ENSEMBLE_NOT_FOUND", f"There is no team '{name}'. There are: [{known}]")
    return found


def checked_entry(
    asked: NewRun,
    team: ServedTeam,
    limits: EndpointLimits,
    key: str | None,
    *,
    tools: Mapping[str, object],
    datasets: DatasetCatalog,
) -> tuple[LedgerEntry, Refusal | None]:
    """Return what is kept of a request that can be run, and the refusal of its unknown inputs, if it has any.

    It is for new requests: a repeated one may have been accepted before such inputs were refused.

    Args:
        asked: The request.
        team: Whose run it is.
        limits: What is allowed.
        key: The client's name for the request; None: it gave none.
        tools: Those that its tasks can name.
        datasets: Those that it may map.

    Raises:
        Refusal: inputs are missing, its tasks cannot be run, its id can name no record, or it asks for more than it may.
    """
    changed = change_team(team.definition, asked, tools)
    unknown = _refuse_unknown_inputs(asked, team, changed)
    tasks = _count_tasks(asked, team, changed, unknown)
    options_of(asked, team.definition, limits)
    if items_of(asked, limits, datasets) is not None and not team.info.takes_items:
        text = f"The team '{team.info.name}' maps nothing, so it takes no items"
        raise Refusal(HTTPStatus.BAD_REQUEST, "ITEMS_NOT_TAKEN", text)
    run_id = asked.run_id or new_run_id()
    try:
        check_run_id(run_id)
    except ValidationError as error:
        raise Refusal(
            HTTPStatus.BAD_REQUEST, "INVALID_RUN_ID", str(error), run_id=run_id, error="ValidationError"
        ) from None
    entry = LedgerEntry(
        run_id=run_id,
        key=key,
        digest=_digest(asked, team),
        ensemble=team.info.name,
        request=asked,
        tags={**team.info.tags, **asked.tags},
        tasks=tasks,
        workflow=team.info.workflow,
        status=RunStatus.ACCEPTED,
        created_at=datetime.fromtimestamp(SystemClock().now(), UTC),
    )
    return entry, unknown


def _count_tasks(asked: NewRun, team: ServedTeam, changed: Runnable, unknown: Refusal | None) -> int | None:
    """Return how many tasks the run will have; None where they are made while it runs.

    Args:
        asked: The request.
        team: Whose run it is.
        changed: The team with the tasks of the request.
        unknown: The refusal of unknown inputs, which says more than that others are missing.

    Raises:
        Refusal: inputs are missing, or its tasks cannot be run.
    """
    if changed is not team.definition:
        return count_tasks(changed, asked)
    missing = tuple(name for name in team.info.inputs if name not in asked.inputs)
    if missing:
        text = f"Inputs are missing: [{', '.join(missing)}]"
        raise unknown or Refusal(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "INPUTS_MISSING",
            text,
            missing=missing,
            run_id=asked.run_id,
            error="PromptTemplateError",
        )
    return team.info.tasks if asked.items is None else None


def _refuse_unknown_inputs(asked: NewRun, team: ServedTeam, changed: Runnable) -> Refusal | None:
    """Return the refusal of inputs that neither the team nor the tasks of the request have; None: it has them all."""
    known = team.inputs
    if known is None or asked.items is not None:  # the texts of its tasks are not known before they are made
        return None
    if asked.inputs.keys() - known and isinstance(changed, Ensemble):
        known |= known_inputs(changed)
    unknown = sorted(name[:200] for name in asked.inputs.keys() - known)
    if not unknown:
        return None
    text = f"Unknown inputs: [{', '.join(unknown[:10])}]. Known: [{', '.join(sorted(known))}]"
    return Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "INPUTS_UNKNOWN", text, run_id=asked.run_id)


def answer_repetition(entry: LedgerEntry, wanted: LedgerEntry) -> AcceptedRun:
    """Return the run that there is, for a request that was sent again (S-SRV-14, S-SRV-15).

    Args:
        entry: What is kept under the same key or id.
        wanted: What would be kept now.

    Raises:
        Refusal: it was another request.
    """
    if entry.digest == wanted.digest:
        return answer_accepted(entry)
    if wanted.key is not None and entry.key == wanted.key:
        text = "The Idempotency-Key was used for another request: send the same one again, or choose another key"
        raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "IDEMPOTENCY_KEY_REUSED", text)
    text = f"Run '{entry.run_id}' was of another request: choose another run_id"
    raise Refusal(HTTPStatus.CONFLICT, "RUN_EXISTS", text, run_id=entry.run_id, error="RunExistsError")


def answer_accepted(entry: LedgerEntry) -> AcceptedRun:
    """Return the answer to a request that is kept."""
    return AcceptedRun(
        run_id=entry.run_id,
        status=entry.status,
        ensemble=entry.ensemble,
        tasks=entry.tasks,
        workflow=entry.workflow,
    )


def _digest(asked: NewRun, team: ServedTeam) -> str:
    """Return a digest of what decides what a run does; its id and who traces it do not, and its team is the one that is meant."""
    data = asked.model_dump(mode="json", exclude={"run_id", "ensemble", "traceparent"})
    for name in ("task_overrides", "tasks"):  # requests that were kept before there were such are still the same
        if data[name] is None:
            del data[name]
    text = json.dumps([team.info.name, data], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
