"""`ensemble-ray map`. The record contains the options, so that `resume` can rebuild the definition."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ensemble_ray.cli.inputs import options
from ensemble_ray.cli.view.terminal import FINE, show_result
from ensemble_ray.errors import ValidationError

if TYPE_CHECKING:
    from ensemble_ray.cli.map_team import MapTeam

_STANDARD_INPUT = "-"


class Mode(StrEnum):
    levels = "levels"
    pipelined = "pipelined"


class DeliveryChoice(StrEnum):
    calls = "calls"
    batch = "batch"


class ItemPolicy(StrEnum):
    fail = "fail"
    skip = "skip"
    collect = "collect"


def map_items(
    items: Annotated[
        str | None,
        Argument(
            metavar="ITEMS",
            help="A .jsonl, .csv or .parquet file, a folder or 'FOLDER/*.jpg', or - for JSON lines from standard input.",
        ),
    ] = None,
    *,
    prompt: Annotated[
        str | None,
        Option(
            "--prompt", "-p", metavar="TEXT", help="Prompt for each item; {name} is a field, {item} the whole item."
        ),
    ] = None,
    ensemble: Annotated[
        Path | None, Option("--ensemble", metavar="FILE", help="A team file with map_reduce in place of prompts.")
    ] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="A .jsonl or .parquet file for the rows.")
    ] = None,
    columns: Annotated[
        str | None,
        Option(
            "--columns",
            metavar="NAME,...",
            help="Columns of the rows: raw, agent_role, fields of the item; default: all.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        Option("--key", metavar="NAME", help="Field of the item that rows have first, in place of the item."),
    ] = None,
    reduce: Annotated[
        str | None, Option("--reduce", metavar="TEXT", help="Bring the answers together, as this text says.")
    ] = None,
    chunk_size: Annotated[
        int | None, Option("--chunk-size", metavar="N", help="Answers per reduce; default: 5.")
    ] = None,
    token_budget: Annotated[
        int | None, Option("--token-budget", metavar="N", help="Tokens of answers per reduce, in place of a number.")
    ] = None,
    mode: Annotated[Mode | None, Option("--mode", help="Reduce level by level, or as answers come.")] = None,
    ordered: Annotated[bool, Option("--ordered", help="Pipelined: groups follow the order of the items.")] = False,
    model: Annotated[
        str | None,
        Option(
            "--model",
            "--llm",
            metavar="MODEL",
            help="openai:NAME, openai-responses:NAME, local, local:PATH.gguf; default: openai:gpt-4o-mini.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None, Option("--concurrency", "-c", metavar="N", help="Items at the same time, per process.")
    ] = None,
    replicas: Annotated[int | None, Option("--replicas", metavar="N", help="Processes on Ray.")] = None,
    on_item_error: Annotated[
        ItemPolicy | None, Option("--on-item-error", help="Effect of a failed item; default: collect.")
    ] = None,
    dead_letters: Annotated[
        Path | None, Option("--dead-letters", metavar="FILE", help="A .jsonl file for the failed items.")
    ] = None,
    retry_dead: Annotated[
        Path | None, Option("--retry-dead", metavar="FILE", help="In place of ITEMS: those of a dead-letter file.")
    ] = None,
    delivery: Annotated[
        DeliveryChoice | None,
        Option("--delivery", help="batch: through the provider's Batch API, at half the price, within a day."),
    ] = None,
    max_tokens: options.MaxTokens = None,
    max_cost: options.MaxCost = None,
    tags: options.Tags = None,
    user: options.User = None,
    input_rate: Annotated[
        float | None, Option("--input-rate", metavar="C", help="Money per million input tokens.")
    ] = None,
    output_rate: Annotated[
        float | None, Option("--output-rate", metavar="C", help="Money per million output tokens.")
    ] = None,
    limit: Annotated[int | None, Option("--limit", min=1, metavar="N", help="The first N items only.")] = None,
    delimiter: Annotated[
        str | None,
        Option("--delimiter", metavar="C", help="Delimiter of a .csv file; \\t is a tab. Default: detected."),
    ] = None,
    encoding: Annotated[
        str | None,
        Option("--encoding", metavar="NAME", help="Encoding of a .csv file, such as cp1252; default: UTF-8."),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Show the first prompt and estimates; call no model.")] = False,
    runtime: options.RuntimeChoice = None,
    run_id: options.RunId = None,
    as_json: options.AsJson = False,
    trace: options.TraceFile = None,
    quiet: options.Quiet = False,
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
        "delimiter": delimiter, "encoding": encoding, "delivery": None if delivery is None else delivery.value,
    }  # fmt: skip
    given = {name: value for name, value in parameters.items() if value is not None}
    _check(given, is_dry=dry_run)
    if dry_run:
        return _dry_run(given, as_json=as_json)
    from ensemble_ray.cli.commands.run import carry_out
    from ensemble_ray.values.ids import new_run_id

    limits = options.run_options(max_tokens, max_cost, tags, user)
    run_id = run_id or new_run_id()
    source = Path(str(items or retry_dead or ensemble)).name
    title = f"{'standard input' if source == _STANDARD_INPUT else source} on {options.runtime_name(runtime)}"
    shown = partial(carry_out, title=title, as_json=as_json, trace=trace, is_quiet=quiet)
    return shown(_make_team(given, run_id), {}, runtime=runtime, run_id=run_id, limits=limits)


def _check(given: dict[str, object], *, is_dry: bool) -> None:
    if ("prompt" in given) == ("ensemble" in given):
        raise ValidationError("name the prompt for each item: --prompt TEXT, or --ensemble FILE (one of them)")
    if "items" in given and "retry_dead" in given:
        raise ValidationError("--retry-dead replaces ITEMS: name one of them")
    if "items" not in given and "retry_dead" not in given and "ensemble" not in given:
        raise ValidationError("there are no items: name a file, - for standard input, or --retry-dead FILE")
    if "ensemble" in given and "reduce" in given:
        raise ValidationError("--reduce needs --prompt: with --ensemble, the file defines the reduce")
    if not is_dry and not {"output", "reduce", "ensemble"} & given.keys():
        raise ValidationError("name a file for the answers: --output FILE.jsonl, or bring them together: --reduce TEXT")
    rates = {"input_rate", "output_rate"} & given.keys()
    if len(rates) == 1:
        raise ValidationError("--input-rate and --output-rate are given both: money per million tokens of each kind")


def _make_team(given: dict[str, object], run_id: str) -> MapTeam:
    """Copy standard input if it has the items, and check the first item."""
    from ensemble_ray.cli.map_team import check_begin, copied_items, forget_items, map_team

    is_copied = given.get("items") == _STANDARD_INPUT
    if is_copied:
        given = {**given, "items": str(copied_items(run_id))}
    try:
        team = map_team(given)
        check_begin(team, run_id)
    except BaseException:
        if is_copied:
            forget_items(run_id)
        raise
    return team


def _dry_run(given: dict[str, object], *, as_json: bool) -> int:
    from ensemble_ray.cli.map_team import estimate, estimate_lines, forget_items
    from ensemble_ray.values.ids import new_run_id

    run_id = new_run_id()
    try:
        found = estimate(_make_team(given, run_id))
    finally:
        forget_items(run_id)
    show_result(found, estimate_lines(found), as_json=as_json)
    return FINE
