"""The sections of a team file: the team, its agents, its tasks, and its map-reduce (S-MR-175). Package: loader.

A section has the keys of the class that is made of it. Here stand those whose values are written in another way: what
a class calls for as an object (a listener, a handler, a type) is named as `module:attribute`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, ValidationInfo

from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.map_reduce import MapReduceDefinition
from ensemble_ray.definition.reflection import Reflects
from ensemble_ray.definition.run_rules import Watched
from ensemble_ray.definition.workflow import Workflow
from ensemble_ray.errors import ValidationError
from ensemble_ray.events import EVENT_TYPES
from ensemble_ray.items.dead_letters import DeadLetters
from ensemble_ray.items.sources import ItemSource, source_of
from ensemble_ray.items.text_files import CSV_ENCODING, CsvFile
from ensemble_ray.loader.document import Entries, Items, Scalar
from ensemble_ray.loader.field_types import (
    Flag,
    PathText,
    Text,
    convert_freely,
    mapping,
    one_of,
    text_in,
)
from ensemble_ray.loader.member_sections import AgentMembers, ItemTaskKeys, TaskMembers
from ensemble_ray.loader.memory import Memory, StoreName
from ensemble_ray.loader.models import Model
from ensemble_ray.loader.reading import context_of, refuse
from ensemble_ray.loader.reflection import ReflectionStoreName
from ensemble_ray.loader.reviews import ReviewHandlerName
from ensemble_ray.loader.section import FileSection, key, keys_of
from ensemble_ray.loader.unit_sections import GraphKeys, LoopMembers, PhaseMembers
from ensemble_ray.loader.user_code import (
    CallableName,
    CallbackNames,
    DashboardName,
    ListenerName,
    MetricsName,
    StrategyName,
    SynthesizerName,
    object_with,
)
from ensemble_ray.loader.value_sections import Retry

__all__ = ["MapReduceKeys", "MapTeamKeys", "TeamKeys"]


# Values by their words.


def _read_inputs(node: object) -> dict[str, str]:
    """Return values as they are written: `1.10` stays `1.10`."""
    if not isinstance(node, Entries):
        raise ValidationError("must be a mapping of names to values")
    for name, value in node.items():
        if not isinstance(value, Scalar):
            raise refuse("must be a text, a number, true or false", name)
    values = {name: value for name, value in node.items() if isinstance(value, Scalar)}
    return {name: "" if value.value is None else value.written for name, value in values.items()}


_Inputs = Annotated[
    dict[str, str],
    PlainValidator(_read_inputs, json_schema_input_type=dict[str, str | float | bool | None]),
]

# The map-reduce.


class _DeadLetterKeys(FileSection):
    called = "the source of items"
    dead_letters: PathText = key("The failed items of an earlier run.", is_required=True)


class _CsvKeys(FileSection):
    called = "the source of items"
    csv: PathText = key("A .csv file, seen from this file.", is_required=True)
    delimiter: Text = key("The character between its fields; without it the one that its first line has.")
    encoding: Text = key("Of its text, such as cp1252; without it UTF-8.")


def _read_items(node: object, info: ValidationInfo) -> ItemSource:
    reading = context_of(info)
    if reading.items is not None:
        return reading.items
    if (text := text_in(node)) is not None:
        return source_of(reading.resolve_path(text))
    if isinstance(node, Items):
        return source_of(convert_freely(node))
    if isinstance(node, Entries):
        if "csv" in node:
            keys = _CsvKeys.model_validate(node, context=reading)
            return source_of(CsvFile(keys.csv, keys.delimiter, keys.encoding or CSV_ENCODING))
        return source_of(DeadLetters(_DeadLetterKeys.model_validate(node, context=reading).dead_letters))
    raise ValidationError("must be the path of a file, a list, csv: PATH, or dead_letters: PATH")


_ItemsText = Annotated[str, Field(pattern=r"\.(jsonl|csv|parquet)$")]
_ItemsList = Annotated[list[Any], Field(min_length=1)]
_Items = Annotated[
    object, PlainValidator(_read_items, json_schema_input_type=_ItemsText | _ItemsList | _CsvKeys | _DeadLetterKeys)
]
_OF_FACTORIES = {f"{side}_{kind}" for side in ("map", "reduce", "direct") for kind in ("task", "agent")}
_WATCHED = {info.alias or name for name, info in (Watched.model_fields | Reflects.model_fields).items()}


@keys_of(MapReduceDefinition, without=_OF_FACTORIES | _WATCHED)
class MapReduceKeys(FileSection):
    """A map-reduce; the sections `map`, `reduce` and `direct` stand for its factories."""

    called = "the map-reduce"
    first = ("items", "map", "reduce", "direct", *MapReduceDefinition.__annotations__)
    items: _Items = key(
        "What is mapped: the path of a .jsonl, .csv or .parquet file, seen from this file; a list; csv: PATH; or dead_letters: PATH."
    )
    map: ItemTaskKeys = key(
        "The task of an item. In its texts {name} is a field of the item, {item} the whole item.", is_required=True
    )
    reduce: ItemTaskKeys = key(
        "The task that brings a group of outputs together; without it the outputs are all there is."
    )
    direct: ItemTaskKeys = key(
        "The one task over all items where they fit the budget anyway; {items} is where they stand."
    )
    token_estimator: CallableName = key("Tokens of an output whose provider counted none: module:function.")
    input_estimator: CallableName = key(
        "The text of an item, to tell whether the input fits the budget: module:function."
    )


# The whole file.

_CALLBACKS = dict.fromkeys(
    EVENT_TYPES, (CallbackNames, key("Called with each event of that kind; module:function, or several."))
)


@keys_of(Watched, others=_CALLBACKS)
class MapTeamKeys(FileSection):
    """A team with a map-reduce."""

    called = "a team with a map-reduce"
    first: ClassVar[tuple[str, ...]] = ("agents", "tasks", "map_reduce")
    nullable = frozenset({*first, "workflow", "retry"})
    misplaced: ClassVar[Mapping[str, str]] = {
        "tasks": "a file with 'map_reduce' has no tasks beside it: its tasks are made of its items"
    }
    agents: AgentMembers = key("Agents by name.")
    map_reduce: MapReduceKeys = key(
        "In place of tasks: a task for each of many items, and how their outputs are brought together."
    )
    tags: Annotated[dict[str, Text], mapping("must be a mapping of names to texts")] = key()
    stream: Flag = key("Whether answers stream where neither agent nor task say otherwise.")
    agent_synthesizer: SynthesizerName = key(
        "Makes agents for tasks that name none: `template`, `llm_based`, or module:attribute."
    )
    models: Annotated[dict[str, Model], mapping()] = key()
    inputs: _Inputs = key()
    listeners: list[ListenerName] = key(
        "Objects or classes with methods such as `on_task_start`, each as module:attribute."
    )
    tool_metrics: MetricsName = key("Counts tool calls for a monitoring system, as module:attribute.")
    trace_exporter: Annotated[object, object_with("export")] = key(
        "Takes the trace of each successful run, as module:attribute."
    )
    review_handler: ReviewHandlerName = key(
        "Decides at review gates: `console`, `auto_approve`, or module:attribute; without it gates are passed."
    )
    dashboard: DashboardName = key("A `WebDashboard` that shows the runs, as module:attribute.")
    reflection_store: ReflectionStoreName = key(
        "Keeps what is learned of tasks, from run to run: `in_memory`, `sqlite: {path: ...}`, or module:attribute."
    )
    retry: Retry | None = key()


@keys_of(EnsembleDefinition)
class TeamKeys(MapTeamKeys):
    """A team."""

    called = "a team"
    misplaced: ClassVar[Mapping[str, str]] = {}
    first: ClassVar[tuple[str, ...]] = ("agents", "tasks", "loops", "phases", "graph", "map_reduce")
    nullable = frozenset({*first, "workflow", "retry"})
    tasks: TaskMembers = key("What to do, in order; tasks by name.")
    loops: LoopMembers = key("Tasks that are repeated until a predicate holds or a cap is reached; loops by name.")
    phases: PhaseMembers = key("In place of tasks and loops: named groups of them, and which comes after which.")
    graph: GraphKeys = key("In place of all others: a state machine of tasks and loops.")
    workflow: Annotated[str, one_of(Workflow, "workflow")] | None = key(
        "`sequential`, in list order, unless told; `parallel`: each task as soon as its context is there; "
        "`hierarchical`: a manager hands the tasks to the agents."
    )
    memory: Memory = key("Memory that all tasks use.")
    memory_store: StoreName = key(
        "Keeps the scopes that tasks declare: `in_memory`, `sqlite: {path: ..., embedding_model: ...}`, "
        "`postgres: {url: ..., embedding_model: ...}`, or module:attribute."
    )
    manager_prompt_strategy: StrategyName = key("Writes the manager's prompts, as module:attribute.")
    delegation_policies: list[Annotated[object, object_with("evaluate")]] = key(
        "Asked in order about each delegation, each as module:attribute: allow, reject or change it."
    )
