"""`ensemble-ray doctor`: check the environment of runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.commands.submit import JobAddress
from ensemble_ray.cli.view.terminal import FAILED, FINE, show, show_json

if TYPE_CHECKING:
    from ensemble_ray.cli.commands.checks import Finding


_MARKS = {"ok": "ok  ", "note": "note", "failed": "FAIL"}


def doctor(
    team: Annotated[
        str | None,
        typer.Argument(metavar="[TARGET]", help="With --cluster: also check the modules and endpoints of this team."),
    ] = None,
    *,
    llm: Annotated[
        str | None,
        typer.Option(
            "--llm", metavar="MODEL", help="Ask that model for one word: openai:NAME, local, local:PATH.gguf."
        ),
    ] = None,
    ray: Annotated[bool, typer.Option("--ray/--no-ray", help="Start a small run on Ray (about 10 s).")] = True,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the nodes of a cluster instead: that of --address or RAY_ADDRESS.")
    ] = False,
    address: JobAddress = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
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
    if as_json:
        show_json([finding.to_dict() for finding in findings])
    failed = sum(finding.state == "failed" for finding in findings)
    if not as_json:
        show(f"\n{failed} failed." if failed else "\nAll checks passed.")
    return FAILED if failed else FINE


def _check_cluster(team: str | None, address: str | None, *, as_json: bool) -> int:
    """Check the nodes of a cluster from one of its processes: this process joins it, or a job does the check."""
    from ensemble_ray.runtime import ray_runtime_class

    if address is not None and "://" in address:
        return _check_by_job(team, address, as_json=as_json)
    place = address or os.environ.get("RAY_ADDRESS", "").strip()
    if not place:
        from ensemble_ray.errors import ValidationError

        raise ValidationError(
            "There is no cluster to check. What to do: --address http://HOST:8265 for its job server, or RAY_ADDRESS on a "
            "machine of the cluster"
        )
    from ensemble_ray.cli.view.node_table import node_data, node_lines
    from ensemble_ray.process.forks import run_blocking
    from ensemble_ray.teamfile import load_runnable

    definition = None if team is None else load_runnable(team, needs_keys=False)
    found = run_blocking(ray_runtime_class()(place).check_nodes(definition))
    if as_json:
        show_json(node_data(found))
    else:
        show("\n".join(node_lines(found)))
    return FINE if found.is_fine else FAILED


def _check_by_job(team: str | None, address: str, *, as_json: bool) -> int:
    import secrets

    from ensemble_ray.cli.jobs import ClusterCommand, ships
    from ensemble_ray.runtime import ray_runtime_class

    directory, words = None, ["doctor", "--cluster"]
    if team is not None:
        directory, name = ships(team, None)
        words.append(name)
    command = ClusterCommand(
        words=[*words, "--json"] if as_json else words,
        job_id=f"ensemble-ray-doctor-{secrets.token_hex(4)}",
        working_dir=directory,
        on_interrupt=lambda: True,
    )
    return command.carry_out(ray_runtime_class().job_server(address))


def finding_lines(finding: Finding) -> list[str]:
    lines = [f"{_MARKS[finding.state]}  {finding.name:<15} {finding.detail}"]
    if finding.advice:
        lines.append(f"      {'':<15} -> {finding.advice}")
    return lines
