"""`ensemble-ray doctor`: is everything here that a run needs, and what to do where not. Package: cli."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.view.terminal import FAILED, FINE, show, show_json

if TYPE_CHECKING:
    from ensemble_ray.cli.commands.checks import Finding

__all__ = ["doctor", "finding_lines"]

_MARKS = {"ok": "ok  ", "note": "note", "failed": "FAIL"}


def doctor(
    llm: Annotated[
        str | None,
        typer.Option(
            "--llm", metavar="MODEL", help="Ask that model for one word: openai:NAME, local, local:PATH.gguf."
        ),
    ] = None,
    ray: Annotated[bool, typer.Option("--ray/--no-ray", help="Start a small run on Ray (about 10 s).")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Check what runs need, and say what to do.

    Python, packages, records, models, Ray. Exit code 1 if a check failed.
    """
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
        show(f"\n{failed} failed." if failed else "\nEverything that was checked works.")
    return FAILED if failed else FINE


def finding_lines(finding: Finding) -> list[str]:
    """Return a finding as text."""
    lines = [f"{_MARKS[finding.state]}  {finding.name:<15} {finding.detail}"]
    if finding.advice:
        lines.append(f"      {'':<15} -> {finding.advice}")
    return lines
