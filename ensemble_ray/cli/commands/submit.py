"""`ensemble-ray submit`: run a team on a cluster as a job, and watch it here."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from ensemble_ray.cli.commands.run import (
    AsJson,
    Inputs,
    InputsFile,
    Llm,
    MaxCost,
    MaxTokens,
    Quiet,
    RunId,
    Target,
    Workflow,
    WorkflowName,
)
from ensemble_ray.cli.inputs.tags import Tags, run_options
from ensemble_ray.cli.view.terminal import own_command, say

JobAddress = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="URL",
        help="The cluster's job server: http://HOST:8265. Default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, this machine.",
    ),
]


def submit(
    target: Target,
    *,
    address: JobAddress = None,
    inputs: Inputs = None,
    inputs_file: InputsFile = None,
    workflow: Workflow = None,
    llm: Llm = None,
    run_id: RunId = None,
    max_tokens: MaxTokens = None,
    max_cost: MaxCost = None,
    tags: Tags = None,
    working_dir: Annotated[
        Path | None,
        typer.Option(
            "--working-dir",
            metavar="DIRECTORY",
            help="Directory to upload. Default: the team file's, or the current one.",
        ),
    ] = None,
    pip: Annotated[
        list[str] | None,
        typer.Option("--pip", metavar="REQUIREMENT", help="Install this for the job on every node; repeatable."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME[=VALUE]",
            help="A variable of the job and its workers; without a value: as here. All users of the cluster can read it. "
            "Repeatable.",
        ),
    ] = None,
    checks: Annotated[
        bool, typer.Option("--check/--no-check", help="Ask every node first whether the team can run there.")
    ] = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Run a team on a cluster, as a job, and print its output.

    Uploads the team's directory (without files that .gitignore and .rayignore name), runs `ensemble-ray run` there, and
    shows its progress here. Ctrl-C asks whether the run should continue; a second one stops it. Without a terminal it
    continues.

    Exit codes: as run; 130 also if you leave a running run.
    """
    from ensemble_ray.cli.inputs.arguments import read_inputs
    from ensemble_ray.cli.jobs import ClusterCommand, confirm_leaving, path_within, ships, wanted_environment
    from ensemble_ray.runtime import ray_runtime_class
    from ensemble_ray.values.ids import new_run_id

    read_inputs(inputs or (), inputs_file)  # reports their errors before the upload
    run_options(None, None, tags)
    directory, name = ships(target, working_dir)
    chosen = run_id or new_run_id()
    words = ["run", name, "--runtime", "ray", "--run-id", chosen]
    words += [word for each in inputs or () for word in ("--input", each)]
    words += [word for each in tags or () for word in ("--tag", each)]
    if inputs_file is not None:
        words += ["--inputs-file", path_within(inputs_file, directory, "--inputs-file")]
    options: tuple[tuple[str, WorkflowName | str | float | None], ...] = (
        ("--workflow", workflow),
        ("--llm", llm),
        ("--max-tokens", max_tokens),
        ("--max-cost", max_cost),
    )
    words += [word for option, value in options if value is not None for word in (option, str(value))]
    flags = (("--check-nodes", checks), ("--json", as_json), ("--quiet", quiet))
    words += [flag for flag, is_set in flags if is_set]
    variables = wanted_environment(env or (), os.environ)
    server = ray_runtime_class().job_server(address)
    job_id = f"ensemble-ray-{chosen}-{secrets.token_hex(3)}"
    if not quiet:
        say(f"Run {chosen}, job {job_id} at {server.address}")
        say(f"Sending {directory}")
    again = f"{own_command()} attach {chosen} --address {server.address}"
    stops = f"{own_command()} cancel {chosen} on the cluster, or ray job stop {job_id}"
    command = ClusterCommand(
        words=words,
        job_id=job_id,
        on_interrupt=lambda: confirm_leaving(f"The run continues. Watch it: {again}\nEnd it: {stops}"),
        working_dir=directory,
        pip=pip or (),
        env=variables,
        run_id=chosen,
    )
    return command.carry_out(server)
