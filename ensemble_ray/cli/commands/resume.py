"""`ensemble-ray resume`: resume a recorded run."""

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
    typer.Option("--allow-changes", help="Accept a changed definition; recorded results are used unchanged."),
]
RuntimeAgain = Annotated[RuntimeName | None, typer.Option("--runtime", help="Default: the run's first runtime.")]


def resume(
    run: RunName,
    *,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Claim the run even if a process owns it, such as one that hangs."),
    ] = False,
    allow_changes: AllowChanges = False,
    allow_loss: Annotated[
        bool,
        typer.Option(
            "--allow-loss",
            help="Resume even if a part of the record is lost: its work is repeated, and calls of tools that may "
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
    """Resume a run that was interrupted or cancelled, or spent its budget, and print its output.

    Recorded results are used again. The team is loaded from where the run began: a YAML file or module:attribute. Of a
    completed run the recorded output is printed. A budget counts from the run's beginning.

    Exit codes: as run.
    """
    from ensemble_ray.cli.view.run_view import view_of  # the help does not need them
    from ensemble_ray.process.forks import run_blocking
    from ensemble_ray.record.head import read_head
    from ensemble_ray.recovery.resuming import start_resumed

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
            start_resumed(
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
    """Return the current team from the run's origin, or None if only a program has it.

    Raises:
        ValidationError: The origin no longer exists, or is invalid.
    """
    from ensemble_ray.teamfile import load_source

    return load_source(head.source) if head.source.place else None


def runtime_of(choice: RuntimeName | None, head: RunHead) -> str:
    """Return the runtime of a resumed run: the chosen one, else the recorded one, else the environment's."""
    from ensemble_ray.process.config import Settings

    recorded = head.header.runtime
    return choice.value if choice else str(recorded or Settings.from_environment().runtime)
