"""`ensemble-ray map`: run the same prompt on every item of a file, and optionally reduce the answers.

The record contains the options, so that `resume` can rebuild the definition.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.commands.run import (
    AsJson,
    MaxCost,
    MaxTokens,
    Quiet,
    RunId,
    RuntimeChoice,
    RuntimeName,
    TraceFile,
)
from ensemble_ray.cli.inputs.tags import Tags, run_options
from ensemble_ray.cli.view.terminal import FINE, show, show_json

if TYPE_CHECKING:
    from ensemble_ray.cli.map_team import MapTeam
    from ensemble_ray.definition.run_options import RunOptions


_STANDARD_INPUT = "-"


class Mode(StrEnum):
    """When reduces start."""

    levels = "levels"
    pipelined = "pipelined"


class ItemPolicy(StrEnum):
    """The effect of a failed item."""

    fail = "fail"
    skip = "skip"
    collect = "collect"


def map_items(
    items: Annotated[
        str | None,
        typer.Argument(
            metavar="ITEMS", help="A .jsonl, .csv or .parquet file, or - for JSON lines from standard input."
        ),
    ] = None,
    *,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", "-p", metavar="TEXT", help="Prompt for each item; {name} is a field, {item} the whole item."
        ),
    ] = None,
    ensemble: Annotated[
        Path | None, typer.Option("--ensemble", metavar="FILE", help="A team file with map_reduce in place of prompts.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="A .jsonl or .parquet file for the rows."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns",
            metavar="NAME,...",
            help="Columns of the rows: raw, agent_role, fields of the item; default: all.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="NAME", help="Field of the item that rows have first, in place of the item."),
    ] = None,
    reduce: Annotated[
        str | None, typer.Option("--reduce", metavar="TEXT", help="Bring the answers together, as this text says.")
    ] = None,
    chunk_size: Annotated[
        int | None, typer.Option("--chunk-size", metavar="N", help="Answers per reduce; default: 5.")
    ] = None,
    token_budget: Annotated[
        int | None,
        typer.Option("--token-budget", metavar="N", help="Tokens of answers per reduce, in place of a number."),
    ] = None,
    mode: Annotated[Mode | None, typer.Option("--mode", help="Reduce level by level, or as answers come.")] = None,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Pipelined: groups follow the order of the items.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--llm",
            metavar="MODEL",
            help="openai:NAME, local, local:PATH.gguf; default: openai:gpt-4o-mini.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", metavar="N", help="Items at the same time, per process.")
    ] = None,
    replicas: Annotated[int | None, typer.Option("--replicas", metavar="N", help="Processes on Ray.")] = None,
    on_item_error: Annotated[
        ItemPolicy | None, typer.Option("--on-item-error", help="Effect of a failed item; default: collect.")
    ] = None,
    dead_letters: Annotated[
        Path | None,
        typer.Option("--dead-letters", metavar="FILE", help="A .jsonl file for the failed items."),
    ] = None,
    retry_dead: Annotated[
        Path | None,
        typer.Option("--retry-dead", metavar="FILE", help="In place of ITEMS: those of a dead-letter file."),
    ] = None,
    max_tokens: MaxTokens = None,
    max_cost: MaxCost = None,
    tags: Tags = None,
    input_rate: Annotated[
        float | None, typer.Option("--input-rate", metavar="C", help="Money per million input tokens.")
    ] = None,
    output_rate: Annotated[
        float | None, typer.Option("--output-rate", metavar="C", help="Money per million output tokens.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="The first N items only.")] = None,
    delimiter: Annotated[
        str | None,
        typer.Option("--delimiter", metavar="C", help="Delimiter of a .csv file; \\t is a tab. Default: detected."),
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option("--encoding", metavar="NAME", help="Encoding of a .csv file, such as cp1252; default: UTF-8."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the first prompt and estimates; call no model.")
    ] = False,
    runtime: RuntimeChoice = None,
    run_id: RunId = None,
    as_json: AsJson = False,
    trace: TraceFile = None,
    quiet: Quiet = False,
) -> int:
    """Run the same prompt on every item of a file, and optionally bring the answers together.

    Rows go to --output as they come, the text of --reduce to standard output. Continue an interrupted run with: resume.

    Exit codes: 0 all items were done, 1 the run failed or spent its budget, 2 the command or the items are wrong,
    3 items failed and were left out, 130 interrupted.
    """
    parameters: dict[str, object | None] = {
        "items": items, "retry_dead": retry_dead, "prompt": prompt, "ensemble": ensemble, "reduce": reduce,
        "output": output, "columns": columns, "key": key, "dead_letters": dead_letters, "model": model, "chunk_size": chunk_size,
        "token_budget": token_budget, "mode": None if mode is None else mode.value, "ordered": ordered or None,
        "concurrency": concurrency, "replicas": replicas, "input_rate": input_rate, "output_rate": output_rate,
        "on_item_error": None if on_item_error is None else on_item_error.value, "limit": limit,
        "delimiter": delimiter, "encoding": encoding,
    }  # fmt: skip
    options = {name: value for name, value in parameters.items() if value is not None}
    _check(options, is_dry=dry_run)
    if dry_run:
        return _dry_run(options, as_json=as_json)
    chosen = run_options(max_tokens, max_cost, tags)
    return _run(options, runtime, run_id, chosen=chosen, as_json=as_json, trace=trace, is_quiet=quiet)


def _check(options: dict[str, object], *, is_dry: bool) -> None:
    """Check that the options are complete and do not conflict (S-MR-181).

    Raises:
        ValidationError: They are not; the message says what to do.
    """
    from ensemble_ray.errors import ValidationError  # the help does not need it

    if ("prompt" in options) == ("ensemble" in options):
        raise ValidationError("name the prompt for each item: --prompt TEXT, or --ensemble FILE (one of them)")
    if "items" in options and "retry_dead" in options:
        raise ValidationError("--retry-dead replaces ITEMS: name one of them")
    if "items" not in options and "retry_dead" not in options and "ensemble" not in options:
        raise ValidationError("there are no items: name a file, - for standard input, or --retry-dead FILE")
    if "ensemble" in options and "reduce" in options:
        raise ValidationError("--reduce needs --prompt: with --ensemble, the file defines the reduce")
    if not is_dry and not {"output", "reduce", "ensemble"} & options.keys():
        raise ValidationError("name a file for the answers: --output FILE.jsonl, or bring them together: --reduce TEXT")
    rates = {"input_rate", "output_rate"} & options.keys()
    if len(rates) == 1:
        raise ValidationError("--input-rate and --output-rate are given both: money per million tokens of each kind")


def _make_team(options: dict[str, object], run_id: str) -> MapTeam:
    """Copy standard input if it has the items, return the definition, and check the first item.

    Raises:
        ValidationError: Options are invalid, there are no items, or the first one lacks a field.
    """
    from ensemble_ray.cli.map_team import check_begin, copied_items, forget_items, map_team

    is_copied = options.get("items") == _STANDARD_INPUT
    if is_copied:
        options = {**options, "items": str(copied_items(run_id))}
    try:
        team = map_team(options)
        check_begin(team, run_id)
    except BaseException:
        if is_copied:
            forget_items(run_id)
        raise
    return team


def _dry_run(options: dict[str, object], *, as_json: bool) -> int:
    from ensemble_ray.cli.map_team import estimate, estimate_lines, forget_items
    from ensemble_ray.values.ids import new_run_id

    run_id = new_run_id()
    try:
        found = estimate(_make_team(options, run_id))
    finally:
        forget_items(run_id)
    if as_json:
        show_json(found)
    else:
        show("\n".join(estimate_lines(found)))
    return FINE


def _run(
    options: dict[str, object],
    runtime: RuntimeName | None,
    run_id: str | None,
    *,
    chosen: RunOptions | None,
    as_json: bool,
    trace: Path | None,
    is_quiet: bool,
) -> int:
    from ensemble_ray.cli.commands.run import carry_out
    from ensemble_ray.process.config import Settings
    from ensemble_ray.values.ids import new_run_id

    run_id = run_id or new_run_id()
    team = _make_team(options, run_id)
    name = Path(str(options.get("items") or options.get("retry_dead") or options.get("ensemble"))).name
    where = runtime.value if runtime else Settings.from_environment().runtime
    return carry_out(
        team,
        {},
        runtime=runtime,
        run_id=run_id,
        options=chosen,
        title=f"{'standard input' if name == _STANDARD_INPUT else name} on {where}",
        as_json=as_json,
        trace=trace,
        is_quiet=is_quiet,
    )
