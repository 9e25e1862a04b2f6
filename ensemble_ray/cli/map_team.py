"""What `ensemble-ray map` runs, as its options make it. Package: cli; `resume` finds it here by the options of the record.

In: texts: where the items are, prompts, numbers. Out: a `MapEnsemble` or a `MapReduceEnsemble`. The same options make the
same definition in any process (S-MR-184), so paths are told from the root on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import ValidationError
from ensemble_ray.items.dead_letters import DeadLetters
from ensemble_ray.items.screening import screen_source
from ensemble_ray.items.sources import ItemSource, source_of
from ensemble_ray.items.text_files import CsvFile
from ensemble_ray.loader.item_prompts import GroupPrompt, ItemPrompt
from ensemble_ray.map_reduce import MapEnsemble, MapReduceEnsemble
from ensemble_ray.values.metrics import CostConfiguration

if TYPE_CHECKING:
    from ensemble_ray.ports import ChatModel

__all__ = ["DEFAULT_MODEL", "OPTIONS", "MapTeam", "map_team", "prompt_of", "recorded_map"]

MapTeam = MapEnsemble | MapReduceEnsemble
DEFAULT_MODEL = "openai:gpt-4o-mini"
_MILLION = 1_000_000

#: Options that name files.
_PATHS = frozenset({"items", "retry_dead", "ensemble", "output", "dead_letters"})
#: Options as they are recorded, and how their texts are read.
OPTIONS: Mapping[str, type[str | int | float | bool]] = {
    "items": str,
    "retry_dead": str,
    "prompt": str,
    "ensemble": str,
    "reduce": str,
    "output": str,
    "columns": str,
    "key": str,
    "dead_letters": str,
    "model": str,
    "chunk_size": int,
    "token_budget": int,
    "mode": str,
    "ordered": bool,
    "concurrency": int,
    "replicas": int,
    "on_item_error": str,
    "input_rate": float,
    "output_rate": float,
    "limit": int,
    "delimiter": str,
    "encoding": str,
}
#: Of these options, the fields that they become as they are.
_FIELDS = {
    "output": "results",
    "key": "key",
    "dead_letters": "dead_letters",
    "concurrency": "max_concurrency",
    "replicas": "replicas",
    "on_item_error": "on_item_error",
}
#: Of these, only where outputs are brought together.
_REDUCE_FIELDS = {
    "chunk_size": "chunk_size",
    "token_budget": "target_token_budget",
    "mode": "mode",
    "ordered": "ordered",
}


def map_team(options: Mapping[str, object]) -> MapTeam:
    """Return the definition of these options; it knows how to be made again.

    Args:
        options: By the names of `OPTIONS`; what was not given is left out.

    Raises:
        ValidationError: something does not go together, a file cannot be read, or there is no such model.
    """
    options = {name: str(Path(str(value)).absolute()) if name in _PATHS else value for name, value in options.items()}
    team = _from_file(options) if "ensemble" in options else _from_prompts(options)
    return team.with_origin(
        f"{__name__}:{recorded_map.__name__}",
        {name: str(value) for name, value in options.items()},
        called=Path(str(options.get("ensemble", "map"))).stem,
    )


def recorded_map(**options: str) -> MapTeam:
    """Return the definition of recorded options."""
    types = {name: OPTIONS[name] for name in options}
    # What is false is not recorded.
    return map_team({name: convert(options[name]) for name, convert in types.items()})


def prompt_of(team: MapTeam) -> ItemPrompt:
    """Return the factory of an item's task."""
    found = team.map_task
    assert isinstance(found, ItemPrompt)  # noqa: S101  both ways of making a team make it so
    return found


def _source(options: Mapping[str, object]) -> ItemSource | None:
    dead = options.get("retry_dead")
    items: object = DeadLetters(str(dead)) if dead is not None else options.get("items")
    written = {name: str(options[name]) for name in ("delimiter", "encoding") if name in options}
    if written:
        if dead is not None or items is None or str(items).lower().endswith((".jsonl", ".parquet")):
            named = " and ".join(f"--{name}" for name in written)
            raise ValidationError(f"{named}: of use only with a .csv file as ITEMS")
        items = CsvFile(str(items), **{**written, **_delimiter_of(written)})
    if items is None:
        return None
    limit = options.get("limit")
    return screen_source(source_of(items), limit=limit if isinstance(limit, int) else None)


def _delimiter_of(written: Mapping[str, str]) -> dict[str, str]:
    """Return the delimiter, which a shell cannot easily be given where it is a tab."""
    return {"delimiter": "\t"} if written.get("delimiter") in {"\\t", "tab"} else {}


def _fields(options: Mapping[str, object], *, reduces: bool) -> dict[str, Any]:
    """Return the fields of the definition that options name as they are."""
    wanted = {**_FIELDS, **(_REDUCE_FIELDS if reduces else {})}
    fields: dict[str, Any] = {field: options[name] for name, field in wanted.items() if name in options}
    if not reduces and (alone := [f"--{name.replace('_', '-')}" for name in _REDUCE_FIELDS if name in options]):
        raise ValidationError(
            f"{', '.join(alone)}: of use only with --reduce, which says how outputs are brought together"
        )
    if "columns" in options:
        fields["columns"] = [name.strip() for name in str(options["columns"]).split(",")]
    rates = {f"{side}_token_rate": options.get(f"{side}_rate") for side in ("input", "output")}
    if any(rate is not None for rate in rates.values()):
        per_token: dict[str, Any] = {name: float(str(rate or 0)) / _MILLION for name, rate in rates.items()}
        fields["cost_configuration"] = CostConfiguration(**per_token)
    return fields


def _from_prompts(options: Mapping[str, object]) -> MapTeam:
    from ensemble_ray.llm.factory import resolve_llm  # its models are heavy

    source = _source(options)
    if source is None:
        raise ValidationError("there are no items: name a file, - for standard input, or --retry-dead FILE")
    model = resolve_llm(str(options.get("model", DEFAULT_MODEL)))
    prompt = ItemPrompt(
        _task(str(options["prompt"]), "Reader", "Do what is asked with the one item that it is about", model)
    )
    fields: dict[str, Any] = {"llm": model, "on_item_error": "collect", **_fields(options, reduces="reduce" in options)}
    items = screen_source(source, problem=prompt.problem)
    if "reduce" not in options:
        return MapEnsemble(items=items, map_task=prompt, **fields)
    bring = GroupPrompt(_task(str(options["reduce"]), "Editor", "Bring the given results together as asked", model))
    return MapReduceEnsemble(items=items, map_task=prompt, reduce_task=bring, **fields)


def _task(text: str, role: str, goal: str, model: ChatModel) -> Task:
    return Task.of(text).replace(agent=Agent(role=role, goal=goal, llm=model))


def _from_file(options: Mapping[str, object]) -> MapTeam:
    from ensemble_ray.llm.factory import resolve_llm
    from ensemble_ray.loader.team import load_team_file

    path, model = str(options["ensemble"]), options.get("model")
    team = load_team_file(path, llm=None if model is None else resolve_llm(str(model)), items=_source(options))
    if not isinstance(team, MapEnsemble | MapReduceEnsemble):
        raise ValidationError(f"--ensemble: '{path}' has no 'map_reduce': run it with ensemble-ray run")
    fields = _fields(options, reduces=isinstance(team, MapReduceEnsemble))
    if "target_token_budget" in fields:
        fields = {"chunk_size": None, "context_window_size": None, "budget_ratio": None, **fields}
    elif "chunk_size" in fields:
        fields = {"target_token_budget": None, "context_window_size": None, "budget_ratio": None, **fields}
    return team.replace(**fields) if fields else team
