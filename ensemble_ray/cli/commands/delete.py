"""`ensemble-ray delete` and `prune`: remove records of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.commands.runs import States, states_of
from ensemble_ray.cli.inputs.records import age_of, own_store
from ensemble_ray.cli.view.terminal import FINE, say, show

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunStore


def delete(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Ids, starts of ids, or 'latest'.", show_default=False),
    ],
) -> int:
    """Remove the records of runs permanently.

    Running runs are never removed. If one of the named runs cannot be removed, none is.
    """
    from ensemble_ray.process.forks import run_blocking

    for run_id in run_blocking(_delete(own_store(), runs)):
        show(f"Removed {run_id}")
    return FINE


async def _delete(store: RunStore, names: list[str]) -> list[str]:
    from ensemble_ray.cli.map_team import forget_items
    from ensemble_ray.errors import RunExistsError

    found = {run.run_id: run for run in [await store.find(name) for name in names]}
    for run in found.values():
        if run.state.is_active:
            owner = f" ({run.owner})" if run.owner else ""
            raise RunExistsError(
                f"Run '{run.run_id}' is running{owner}, and its record is not removed. End it first: "
                f"ensemble-ray cancel {run.run_id}"
            )
    for run_id in found:
        await store.delete(run_id)
        forget_items(run_id)
    return list(found)


def prune(
    *,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="Such as 30d, 12h or 2w.", show_default=False)
    ],
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", min=0, help="Keep the newest N, however old they are.")
    ] = 0,
    states: States = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs, and remove none.")] = False,
) -> int:
    """Remove the records of old runs.

    By default of runs that completed, failed, spent their budget or were cancelled; --state selects other states. Running
    ones are never removed. ENSEMBLE_RAY_RETENTION=30d does the same at the end of each run.
    """
    from ensemble_ray.process.forks import run_blocking
    from ensemble_ray.record.runs import age_from
    from ensemble_ray.record.runs import prune as remove
    from ensemble_ray.values.outputs import RunState
    from ensemble_ray.values.value import utc_now

    age = age_from(older_than)
    chosen = [RunState(state) for state in sorted(states_of(states or ()))]
    removed = run_blocking(remove(own_store(), age, keep=keep, states=chosen, is_dry=dry_run))
    now = utc_now()
    for run in removed:
        verb = "Would remove" if dry_run else "Removed"
        show(f"{verb} {run.run_id}  {run.state.value}  {age_of(run.created_at, now)}  {run.origin}".rstrip())
    if not removed:
        say("Nothing is that old")
    return FINE
