"""What a team file says of a map-reduce: the keys of the section `map_reduce` (S-MR-175). Room: loader.

The names are those of `MapReduceEnsemble`; a test holds the table to its fields. The factories are sections of their own,
`map`, `reduce` and `direct`, with the keys of a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ensemble_ray.definition.run_rules import Watched
from ensemble_ray.errors import ValidationError
from ensemble_ray.items.dead_letters import DeadLetters
from ensemble_ray.items.sources import source_of
from ensemble_ray.loader.document import Entries, Items, Located, Scalar
from ensemble_ray.loader.kinds import (
    BAD,
    FLAG,
    NUMBER,
    PATH,
    WHOLE,
    Field,
    Kind,
    Reading,
    choice,
    given,
    plain,
    read_fields,
    reference,
)
from ensemble_ray.loader.tables import TASK, TEAM

__all__ = ["ITEM_TASK", "MAP_REDUCE", "MAP_TEAM", "SIDES", "Side"]

#: Sections that stand for factories, and the fields that those become.
SIDES: Mapping[str, str] = {"map": "map_task", "reduce": "reduce_task", "direct": "direct_task"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A section that stands for a factory, as it was read."""

    values: dict[str, object]
    node: Entries
    where: str


def _read_side(reading: Reading, node: Located, where: str) -> object:
    values = read_fields(reading, node, ITEM_TASK, where, what=f"the section '{where.rpartition('.')[2]}'")
    return BAD if values is None else Side(values=values, node=cast("Entries", node), where=where)


def _read_items(reading: Reading, node: Located, where: str) -> object:
    """A source; paths are those of files that are there."""
    if reading.items is not None:
        return reading.items
    items: object
    if isinstance(node, Scalar) and isinstance(node.value, str):
        items = PATH.read(reading, node, where)
    elif isinstance(node, Items):
        items = plain(reading, node, where)
    elif isinstance(node, Entries):
        values = read_fields(reading, node, _DEAD_LETTERS, where, what="the source of items")
        items = BAD if values is None else DeadLetters(cast("Path", values["dead_letters"]))
    else:
        return reading.refuse(node, where, "must be the path of a file, a list, or dead_letters: PATH")
    if not given(items):
        return BAD
    try:
        return source_of(items)
    except ValidationError as error:
        return reading.refuse(node, where, str(error))


_SIDE = Kind(read=_read_side, schema={"$ref": "#/definitions/item_task"})
_DEAD_LETTERS: Mapping[str, Field] = {"dead_letters": Field(kind=PATH, is_required=True)}
_ITEMS = Kind(
    read=_read_items,
    schema={
        "anyOf": [
            {"type": "string", "pattern": r"\.(jsonl|csv|parquet)$"},
            {"type": "array", "minItems": 1},
            {
                "type": "object",
                "properties": {
                    "dead_letters": {"type": "string", "description": "The failed items of an earlier run."}
                },
                "required": ["dead_letters"],
                "additionalProperties": False,
            },
        ]
    },
)
_ESTIMATOR = reference("a callable")
_FROM_HERE = " Seen from this file."

#: Keys of the sections that stand for factories.
ITEM_TASK: Mapping[str, Field] = {name: field for name, field in TASK.items() if name != "context"}
#: Keys of the section.
MAP_REDUCE: Mapping[str, Field] = {
    "items": Field(
        kind=_ITEMS,
        doc="What is mapped: the path of a .jsonl, .csv or .parquet file, seen from this file; a list; or dead_letters: PATH.",
    ),
    "map": Field(
        kind=_SIDE,
        is_required=True,
        doc="The task of an item. In its texts {name} is a field of the item, {item} the whole item.",
    ),
    "reduce": Field(
        kind=_SIDE, doc="The task that brings a group of outputs together; without it the outputs are all there is."
    ),
    "direct": Field(
        kind=_SIDE, doc="The one task over all items where they fit the budget anyway; {items} is where they stand."
    ),
    "chunk_size": Field(kind=WHOLE),
    "target_token_budget": Field(kind=WHOLE),
    "context_window_size": Field(kind=WHOLE),
    "budget_ratio": Field(kind=NUMBER),
    "max_reduce_levels": Field(kind=WHOLE),
    "token_estimator": Field(kind=_ESTIMATOR, doc="Tokens of an output whose provider counted none: module:function."),
    "input_estimator": Field(
        kind=_ESTIMATOR, doc="The text of an item, to tell whether the input fits the budget: module:function."
    ),
    "mode": Field(kind=choice(("levels", "pipelined"), "mode")),
    "ordered": Field(kind=FLAG),
    "on_item_error": Field(
        kind=choice(("fail", "skip", "collect"), "word"),
        doc="What a failed item means: `fail`: the run fails; `skip`: it is left out; `collect`: it is left out and listed.",
    ),
    "dead_letters": Field(kind=PATH, doc=f"Path of a .jsonl file that takes the items that failed.{_FROM_HERE}"),
    "results": Field(
        kind=PATH, doc=f"Path of a .jsonl or .parquet file that takes the outputs as they come.{_FROM_HERE}"
    ),
    "replicas": Field(kind=WHOLE),
    "max_concurrency": Field(kind=WHOLE),
}
_WATCHED = {info.alias or name for name, info in Watched.model_fields.items()}
#: Keys of the team that a map-reduce has too.
MAP_TEAM: Mapping[str, Field] = {name: field for name, field in TEAM.items() if name in _WATCHED}
