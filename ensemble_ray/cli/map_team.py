"""The definition that `ensemble-ray map` runs.

The same options build the same definition in any process (S-MR-184). Recorded paths are absolute.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ensemble_ray.cli.view.terminal import count_noun
from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import ValidationError
from ensemble_ray.items.pulling import RefusedItem
from ensemble_ray.items.results import DeadLetters, refuse_old_rows
from ensemble_ray.items.sources import NO_ITEMS, ItemSource, screen_source, source_of
from ensemble_ray.items.text_files import CsvFile
from ensemble_ray.llm.prices import price_of
from ensemble_ray.map_reduce import MapEnsemble, MapReduceEnsemble
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.process.config import home_directory
from ensemble_ray.prompts.task import build_system_prompt, build_user_prompt
from ensemble_ray.record.head import read_head
from ensemble_ray.teamfile.fields import GroupPrompt, ItemPrompt
from ensemble_ray.text.foreign_text import CHARACTERS_PER_TOKEN
from ensemble_ray.values.attachments import Attachment
from ensemble_ray.values.messages import TokenUsage
from ensemble_ray.values.metrics import CostConfiguration, CostEstimate
from ensemble_ray.values.prices import RunPrices

if TYPE_CHECKING:
    from ensemble_ray.items.pulling import ItemEntry

MapTeam = MapEnsemble | MapReduceEnsemble
DEFAULT_MODEL = "openai:gpt-4o-mini"
_MILLION = 1_000_000

_PATHS = frozenset({"items", "retry_dead", "ensemble", "output", "dead_letters"})
# Recorded options.
OPTIONS: Mapping[str, type[str | int | float | bool]] = {
    "items": str, "retry_dead": str, "prompt": str, "ensemble": str, "reduce": str, "output": str, "columns": str, "key": str,
    "dead_letters": str, "model": str, "chunk_size": int, "token_budget": int, "mode": str, "ordered": bool,
    "concurrency": int, "replicas": int, "on_item_error": str, "input_rate": float, "output_rate": float, "limit": int,
    "delimiter": str, "encoding": str, "delivery": str,
}  # fmt: skip
# Fields of the definition.
_FIELDS = {
    "output": "results", "key": "key", "dead_letters": "dead_letters", "concurrency": "max_concurrency",
    "replicas": "replicas", "on_item_error": "on_item_error", "delivery": "delivery",
}  # fmt: skip
# Only for a map-reduce.
_REDUCE_FIELDS = {
    "chunk_size": "chunk_size", "token_budget": "target_token_budget", "mode": "mode", "ordered": "ordered",
}  # fmt: skip


def map_team(options: Mapping[str, object]) -> MapTeam:
    options = {name: str(Path(str(value)).absolute()) if name in _PATHS else value for name, value in options.items()}
    team = _from_file(options) if "ensemble" in options else _from_prompts(options)
    written = {name: str(value) for name, value in options.items()}
    called = Path(written.get("ensemble", "map")).stem
    return team.with_origin(f"{__name__}:{recorded_map.__name__}", written, called=called)


def recorded_map(**options: str) -> MapTeam:
    # Options that are off are not recorded, so `bool("True")` is right.
    return map_team({name: OPTIONS[name](value) for name, value in options.items()})


def prompt_of(team: MapTeam) -> ItemPrompt:
    found = team.map_task
    assert isinstance(found, ItemPrompt)  # noqa: S101  `map_team` builds no other one
    return found


def _source(options: Mapping[str, object]) -> ItemSource | None:
    dead = options.get("retry_dead")
    items: object = DeadLetters(str(dead)) if dead is not None else options.get("items")
    written = {name: str(options[name]) for name in ("delimiter", "encoding") if name in options}
    if written:
        if dead is not None or items is None or str(items).lower().endswith((".jsonl", ".parquet")):
            named = " and ".join(f"--{name}" for name in written)
            raise ValidationError(f"{named}: of use only with a .csv file as ITEMS")
        if written.get("delimiter") in {"\\t", "tab"}:  # a tab is hard to type in a shell
            written["delimiter"] = "\t"
        items = CsvFile(str(items), **written)
    if items is None:
        return None
    limit = options.get("limit")
    return screen_source(source_of(items), limit=limit if isinstance(limit, int) else None)


def _fields(options: Mapping[str, object], *, reduces: bool) -> dict[str, Any]:
    wanted = {**_FIELDS, **(_REDUCE_FIELDS if reduces else {})}
    fields: dict[str, Any] = {field: options[name] for name, field in wanted.items() if name in options}
    if not reduces and (alone := [f"--{name.replace('_', '-')}" for name in _REDUCE_FIELDS if name in options]):
        raise ValidationError(f"{', '.join(alone)}: of use only with --reduce")
    if "columns" in options:
        fields["columns"] = [name.strip() for name in str(options["columns"]).split(",")]
    rates = {f"{side}_token_rate": options.get(f"{side}_rate") for side in ("input", "output")}
    if any(rate is not None for rate in rates.values()):
        per_token: dict[str, Any] = {name: float(str(rate or 0)) / _MILLION for name, rate in rates.items()}
        fields["cost_configuration"] = CostConfiguration(**per_token)
    return fields


def _from_prompts(options: Mapping[str, object]) -> MapTeam:
    from ensemble_ray.llm.factory import resolve_llm

    source = _source(options)
    if source is None:
        raise ValidationError("there are no items: name a file, - for standard input, or --retry-dead FILE")
    model = resolve_llm(str(options.get("model", DEFAULT_MODEL)))

    def make_task(text: object, role: str, goal: str) -> Task:
        return Task.of(str(text)).replace(agent=Agent(role=role, goal=goal, llm=model))

    prompt = ItemPrompt(make_task(options["prompt"], "Reader", "Do what is asked with the one item that it is about"))
    fields: dict[str, Any] = {"llm": model, "on_item_error": "collect", **_fields(options, reduces="reduce" in options)}
    items = screen_source(source, problem=prompt.problem)
    if "reduce" not in options:
        return MapEnsemble(items=items, map_task=prompt, **fields)
    bring = GroupPrompt(make_task(options["reduce"], "Editor", "Bring the given results together as asked"))
    return MapReduceEnsemble(items=items, map_task=prompt, reduce_task=bring, **fields)


def _from_file(options: Mapping[str, object]) -> MapTeam:
    from ensemble_ray.llm.factory import resolve_llm
    from ensemble_ray.teamfile.team import load_team_file

    path, model = str(options["ensemble"]), options.get("model")
    team = load_team_file(path, llm=None if model is None else resolve_llm(str(model)), items=_source(options))
    if not isinstance(team, MapEnsemble | MapReduceEnsemble):
        raise ValidationError(f"--ensemble: '{path}' has no 'map_reduce': run it with ensemble-ray run")
    fields = _fields(options, reduces=isinstance(team, MapReduceEnsemble))
    if "target_token_budget" in fields or "chunk_size" in fields:
        sizes = ("target_token_budget", "context_window_size", "budget_ratio", "chunk_size")
        fields = {**dict.fromkeys(sizes), **fields}
    return team.replace(**fields) if fields else team


_SAMPLE, _PAGE = 100, 1000  # items that the estimate samples, and items per read


def check_begin(team: MapTeam, run_id: str) -> None:
    """Check that the first item can be used, and that the rows have a place or belong to that run (S-MR-186)."""
    if team.results is not None and not _has_written(run_id, team):
        refuse_old_rows(team.results)
    entries = run_blocking(_read(team, 1))
    if not entries:
        raise ValidationError(f"{NO_ITEMS}: {team.item_source.place} has none")
    first, is_again = entries[0], team.item_source.identity["kind"] == "dead_letters"
    # An item of a dead-letter file may have failed because of a missing field, and a file may be damaged; others may be valid.
    is_damaged = isinstance(first, RefusedItem) and isinstance(first.read, Attachment) and not first.read.is_read
    if not is_again and not is_damaged and isinstance(first, RefusedItem) and first.read is not None:
        raise first.error


def _has_written(run_id: str, team: MapTeam) -> bool:
    """Whether a recorded run of that id writes its rows to the same file."""
    from ensemble_ray.cli.inputs.records import own_store

    store = own_store()
    if run_blocking(store.summary(run_id)) is None:
        return False
    recorded = run_blocking(read_head(store, run_id)).source.overrides
    return recorded.get("output") == team.source.overrides.get("output")


def estimate(team: MapTeam) -> dict[str, Any]:
    sample = run_blocking(_read(team, _SAMPLE))
    tasks = [prompt_of(team)(entry[1]) for entry in sample if not isinstance(entry, RefusedItem)]
    prompts = [
        "\n\n".join([*([build_system_prompt(task.agent)] if task.agent else []), build_user_prompt(task)])
        for task in tasks
    ]
    count, refused = run_blocking(_count(team))
    attached = sum(each.estimated_tokens for task in tasks for each in task.attachments)
    mean = (sum(len(prompt) for prompt in prompts) / CHARACTERS_PER_TOKEN + attached) / max(1, len(prompts))
    tokens = round(mean * (count - refused))
    money = _input_cost(team, tokens)
    return {
        "items": count, "refused": refused, "source": team.item_source.place,
        "reduces": isinstance(team, MapReduceEnsemble), "first_prompt": prompts[0] if prompts else None,
        "input_tokens": tokens, "input_cost": None if money is None else float(money.input_cost),
        "currency": None if money is None else money.currency,
    }  # fmt: skip


def _input_cost(team: MapTeam, tokens: int) -> CostEstimate | None:
    """Return the cost of the input of all items; None: the price of the team's model is unknown."""
    if team.cost_configuration is not None:
        return team.cost_configuration.estimate(tokens, 0)
    price = price_of(RunPrices(given=team.prices), team.llm)
    return None if price is None else price.estimate(TokenUsage(tokens, 0))


def estimate_lines(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{count_noun(found['items'], 'item')} in {found['source']}"]
    if found["refused"]:
        lines.append(f"  {found['refused']:,} of them cannot be used: they are not JSON, or lack a field")
    if found["first_prompt"] is not None:
        lines += ["", "First prompt", *(f"  {line}".rstrip() for line in found["first_prompt"].splitlines()), ""]
    cost = "" if found["input_cost"] is None else f", about {found['input_cost']:.4f} {found['currency']} of input"
    reduces = "; reduces come on top" if found["reduces"] else ""
    return [*lines, f"About {found['input_tokens']:,} tokens of input{cost}{reduces}", "No model was called."]


async def _read(team: MapTeam, count: int) -> list[ItemEntry]:
    reader = team.item_source.reader()
    entries: list[ItemEntry] = []
    try:
        while len(entries) < count:
            pulled = await reader.next(count - len(entries))
            entries += pulled.items
            if pulled.is_exhausted:
                break
    finally:
        await reader.close()
    return entries


async def _count(team: MapTeam) -> tuple[int, int]:
    """Return the number of entries and of refused ones."""
    reader = team.item_source.reader()
    count = refused = 0
    try:
        while True:
            pulled = await reader.next(_PAGE)
            count += len(pulled.items)
            refused += sum(isinstance(entry, RefusedItem) for entry in pulled.items)
            if pulled.is_exhausted:
                return count, refused
    finally:
        await reader.close()


# The run of a younger copy may start soon.
_YOUNG_S = 86_400.0


def copied_items(run_id: str, stream: IO[bytes] | None = None) -> Path:
    source = sys.stdin.buffer if stream is None else stream
    if source.isatty():
        raise ValidationError("there are no items on standard input: pipe JSON lines into it, or name a file")
    path = _copy_path(run_id)
    _remove_orphans(path.parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:  # noqa: PTH123  private from the start
            shutil.copyfileobj(source, file)
    except OSError as error:
        raise ValidationError(f"the items of standard input cannot be copied to '{path}': {error.strerror}") from error
    return path


def forget_items(run_id: str) -> None:
    with contextlib.suppress(OSError):
        _copy_path(run_id).unlink(missing_ok=True)


def _remove_orphans(directory: Path) -> None:
    from ensemble_ray.cli.inputs.records import own_store

    for path in directory.glob("*.jsonl"):
        with contextlib.suppress(OSError):
            is_old = time.time() - path.stat().st_mtime > _YOUNG_S
            if is_old and run_blocking(own_store().summary(path.stem)) is None:
                path.unlink()


def _copy_path(run_id: str) -> Path:
    return home_directory() / "items" / f"{run_id}.jsonl"
