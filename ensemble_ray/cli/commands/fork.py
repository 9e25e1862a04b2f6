"""`ensemble-ray fork`: start a new run that reuses the record of another one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.commands.resume import AllowChanges, RuntimeAgain, recorded_team, runtime_of
from ensemble_ray.cli.commands.run import (
    AsJson,
    Inputs,
    InputsFile,
    MaxCost,
    MaxTokens,
    Quiet,
    RunId,
    TraceFile,
    show_run,
)
from ensemble_ray.cli.inputs.records import RunName, own_store
from ensemble_ray.cli.inputs.tags import Tags, run_options
from ensemble_ray.cli.view.terminal import FINE, say, screen_line, show, show_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.recovery.forking import ForkOffer


_SHOWN = 80


def fork(
    run: RunName,
    *,
    from_task: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="TASK",
            help="The first task to run again, or an execution such as loop:refine#2.",
            show_default=False,
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="TARGET", help="The team; default: the run's own team."),
    ] = None,
    inputs: Inputs = None,
    inputs_file: InputsFile = None,
    run_id: RunId = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the tasks that would run again, and stop.")] = False,
    allow_changes: AllowChanges = False,
    max_tokens: MaxTokens = None,
    max_cost: MaxCost = None,
    tags: Tags = None,
    runtime: RuntimeAgain = None,
    as_json: AsJson = False,
    trace: TraceFile = None,
    quiet: Quiet = False,
) -> int:
    """Start a new run that uses the results of a recorded run before a task.

    That task and later ones run again: all later tasks of a sequential run, all dependent tasks of a parallel one, and
    tasks without an output. The definitions and inputs of these tasks may have changed.
    Iterations, attempts, steps and tasks inside of them have the names that trace shows.

    Exit codes: as run.
    """
    from ensemble_ray.cli.inputs.arguments import input_warnings, read_inputs
    from ensemble_ray.cli.view.run_view import TerminalRunView  # the help does not need them
    from ensemble_ray.process.forks import run_blocking
    from ensemble_ray.record.head import read_head
    from ensemble_ray.recovery.forking import accept_fork, offer_fork
    from ensemble_ray.teamfile import load_ensemble

    values, options = read_inputs(inputs or (), inputs_file), run_options(max_tokens, max_cost, tags)
    store = own_store()
    found = run_blocking(store.find(run))
    head = run_blocking(read_head(store, found.run_id))
    team = recorded_team(head) if target is None else load_ensemble(target)
    chosen = runtime_of(runtime, head)
    offer = run_blocking(offer_fork(found.run_id, from_task, team, inputs=values, runtime=chosen))
    text = "\n".join([*input_warnings(inputs or (), offer.ensemble, values), *_describe_offer(offer)])
    if dry_run:
        if as_json:
            show_json(_offer_data(offer))
        else:
            show(text)
        return FINE
    if not quiet:
        say(text)
    title = f"fork of {found.run_id}" + (f" ({Path(found.origin).name})" if found.origin else "") + f" on {chosen}"
    return show_run(
        lambda listener: run_blocking(
            accept_fork(
                offer,
                runtime=chosen,
                new_run_id=run_id,
                allow_changes=allow_changes,
                options=options,
                listeners=(listener,),
            )
        ),
        TerminalRunView(title, is_quiet=quiet),
        as_json=as_json,
        trace=trace,
    )


def _offer_data(offer: ForkOffer) -> dict[str, object]:
    used, again = (
        [{"task": key, "description": offer.descriptions[key]} for key in keys]
        for keys in (offer.plan.reused, offer.plan.again)
    )
    return {
        "run_id": offer.run_id,
        "from": offer.from_task,
        "used": used,
        "done_again": again,
        "differences": list(offer.differences),
    }


def _describe_offer(offer: ForkOffer) -> list[str]:
    is_task = any(node.key == offer.from_task for node in offer.planned.plan.nodes)
    lines = [f"Fork of run {offer.run_id} from {'task ' if is_task else ''}'{offer.from_task}'"]
    lines += _list_tasks("Used as recorded", offer, offer.plan.reused)
    lines += _list_tasks("Done again", offer, offer.plan.again)
    if offer.differences:
        lines += ["Defined otherwise now, though used:", *(f"  {each}" for each in offer.differences)]
    return lines


def _list_tasks(title: str, offer: ForkOffer, keys: Sequence[str]) -> list[str]:
    if not keys:
        return [f"{title}: nothing"]
    width = max(map(len, keys))
    lines = (f"  {key:<{width}}  {screen_line(offer.descriptions[key], _SHOWN)}" for key in keys)
    return [f"{title}:", *map(str.rstrip, lines)]
