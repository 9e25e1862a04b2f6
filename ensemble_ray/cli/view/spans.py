"""Export of a recorded run to an OpenTelemetry receiver."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.view.terminal import say

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RecordedRun, RunStore

#: Value of `--otlp` for the receiver that the environment names.
_ENVIRONMENT = "env"

Otlp = Annotated[
    str | None,
    typer.Option(
        "--otlp",
        metavar="URL",
        help="Send its spans to that OTLP/HTTP receiver, such as http://localhost:4318; 'env': to that of OTEL_EXPORTER_OTLP_ENDPOINT.",
    ),
]
WithContent = Annotated[
    bool, typer.Option("--content", help="With --otlp: send prompts, answers, arguments and results, too.")
]


def check_sending(url: str | None, *, has_content: bool, has_run: bool, is_shown: bool) -> None:
    """Check the options of an export before any work.

    Args:
        url: The value of `--otlp`.
        has_content: Whether to send contents.
        has_run: Whether the command names a run.
        is_shown: Whether the command also shows or draws the run or a task.

    Raises:
        ValidationError: The options conflict.
    """
    from ensemble_ray.errors import ValidationError

    if url is None and has_content:
        raise ValidationError("--content says what --otlp sends. What to do: add --otlp URL, or leave --content out")
    if url is not None and is_shown:
        raise ValidationError(
            "--otlp sends a whole run, and shows no output. What to do: leave --json, --task, --svg, --mermaid and --dag out"
        )
    if url is not None and not has_run:
        raise ValidationError(
            "--otlp sends one run. What to do: name it, such as: ensemble-ray trace latest --otlp URL"
        )


def send_run(store: RunStore, named: RecordedRun, url: str, *, has_content: bool) -> None:
    """Send the spans of a run, and report their number.

    Raises:
        ValidationError: Packages are missing, or the URL is invalid.
        EnsembleError: The receiver is unreachable or refuses the spans, or the record cannot be read.
    """
    from ensemble_ray.errors import EnsembleError, ValidationError
    from ensemble_ray.events.telemetry.listener import missing_packages
    from ensemble_ray.events.telemetry.spans import content_mode
    from ensemble_ray.llm.failures import flaw_of, shown_url
    from ensemble_ray.process.forks import run_blocking
    from ensemble_ray.record.head import locate_errors
    from ensemble_ray.record.view.spans import recorded_spans

    receiver = None if url == _ENVIRONMENT else url
    if receiver is not None and (flaw := flaw_of(receiver)):
        raise ValidationError(f"--otlp {flaw}")
    content = content_mode(True if has_content else None, os.environ)
    try:
        from ensemble_ray.events.telemetry.otlp import UnsentError, own_resource, readable, receiver_here, send_spans
    except ModuleNotFoundError as error:
        raise missing_packages(error) from error
    facts = run_blocking(store.facts(named.run_id))
    with locate_errors(named.location):
        spans = recorded_spans(facts, content)
    resource = own_resource()
    where = shown_url(receiver_here() if receiver is None else receiver)
    try:
        send_spans([readable(each, resource) for each in spans], receiver)
    except UnsentError as error:
        raise EnsembleError(
            f"The receiver of spans at {where} cannot be reached or refuses them: {error}. "
            "What to do: name an OTLP/HTTP receiver, such as a collector at http://localhost:4318"
        ) from error
    say(f"{len(spans)} spans of run {named.run_id} were sent to {where}")
