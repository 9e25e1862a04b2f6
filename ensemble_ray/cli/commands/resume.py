"""`ensemble-ray resume`: go on with a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.commands.run import AsJson, MaxCost, MaxTokens, Quiet, RuntimeName, TraceFile, show_run
from ensemble_ray.cli.inputs.records import RunName, own_store
from ensemble_ray.cli.inputs.tags import Tags, run_options

if TYPE_CHECKING:
    from ensemble_ray.record.head import RunHead
    from ensemble_ray.teamfile import Runnable


AllowChanges = Annotated[
    bool,
    typer.Option(
        "--allow-changes", help="Also with another definition than the recorded one; what is recorded is used as it is."
    ),
]
RuntimeAgain = Annotated[RuntimeName | None, typer.Option("--runtime", help="Default: where the run began.")]


def resume(
    run: RunName,
    *,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Also from a process that still owns the run, such as one that hangs."),
    ] = False,
    allow_changes: AllowChanges = False,
    allow_loss: Annotated[
        bool,
        typer.Option(
            "--allow-loss",
            help="Also where a part of the record is lost: what was done in it is done again, and calls of tools that may "
            "not be repeated are flagged.",
        ),
    ] = False,
    runtime: RuntimeAgain = None,
    max_tokens: MaxTokens = None,
    max_cost: MaxCost = None,
    tags: Tags = None,
    as_json: AsJson = False,
    trace: TraceFile = None,
    quiet: Quiet = False,
) -> int:
    """Go on with a run that was interrupted or cancelled, or spent its budget, and print its output.

    What is recorded is used and not done again. The team is loaded from where the run began: a YAML file or
    module:attribute. Of a completed run the recorded output is printed. A budget counts from the run's beginning.

    Exit codes: as run.
    """
    from ensemble_ray.cli.view.run_view import view_of  # the help does not need them
    from ensemble_ray.process.forks import run_blocking
    from ensemble_ray.record.head import read_head
    from ensemble_ray.recovery.resuming import begin_again

    options = run_options(max_tokens, max_cost, tags)
    store = own_store()
    found = run_blocking(store.find(run))
    if allow_loss:
        run_blocking(store.accept_loss(found.run_id, by_force=take_over))
    head = run_blocking(read_head(store, found.run_id))
    team = recorded_team(head)
    chosen = runtime_of(runtime, head)
    name = f"{found.run_id} ({Path(found.origin).name})" if found.origin else found.run_id
    return show_run(
        lambda listener: run_blocking(
            begin_again(
                found.run_id,
                None if team is None else team.with_additional_listener(listener),
                runtime=chosen,
                options=options,
                take_over=take_over,
                allow_changes=allow_changes,
            )
        ),
        view_of(team, f"{name} on {chosen}", is_quiet=quiet),
        as_json=as_json,
        trace=trace,
    )


def recorded_team(head: RunHead) -> Runnable | None:
    """Return the team as it stands today where the run began; None where only a program has it.

    Raises:
        ValidationError: there is no such place any more, or what stands there is wrong.
    """
    from ensemble_ray.teamfile import load_source

    return load_source(head.source) if head.source.place else None


def runtime_of(choice: RuntimeName | None, head: RunHead) -> str:
    """Return where the run goes on: as chosen, else where it ran, else as the environment says."""
    from ensemble_ray.process.config import Settings

    recorded = head.header.runtime
    return choice.value if choice else str(recorded or Settings.from_environment().runtime)
