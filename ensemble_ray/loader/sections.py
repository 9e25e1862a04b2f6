"""The sections of a team file: the team, its agents, its tasks, and its map-reduce (S-MR-175). Package: loader.

A section has the keys of the class that is made of it. Here stand those whose values are written in another way: what
a class calls for as an object (a listener, a handler, a type) is named as `module:attribute`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter, ValidationInfo

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.hierarchy import HierarchicalConstraints
from ensemble_ray.definition.map_reduce import MapReduceDefinition
from ensemble_ray.definition.retry_policy import RetryPolicy
from ensemble_ray.definition.run_rules import Watched
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.workflow import Workflow
from ensemble_ray.errors import ValidationError
from ensemble_ray.events import EVENT_TYPES
from ensemble_ray.items.dead_letters import DeadLetters
from ensemble_ray.items.sources import ItemSource, source_of
from ensemble_ray.loader.document import Entries, Items, Loc, Located, Scalar
from ensemble_ray.loader.kinds import (
    Flag,
    Number,
    PathText,
    Text,
    Whole,
    convert_freely,
    mapping,
    one_of,
    text_in,
)
from ensemble_ray.loader.models import Model
from ensemble_ray.loader.reading import context_of, refuse
from ensemble_ray.loader.reviews import ReviewHandlerName, ReviewName
from ensemble_ray.loader.section import KINDS, Section, key, keys_of
from ensemble_ray.loader.tools import Tool
from ensemble_ray.loader.user_code import (
    CallableName,
    CallbackNames,
    GuardrailNames,
    HandlerName,
    ListenerName,
    MetricsName,
    OutputTypeName,
    StrategyName,
    SynthesizerName,
    object_with,
)
from ensemble_ray.ports import ChatModel
from ensemble_ray.values.metrics import CostConfiguration
from ensemble_ray.values.rate_limit import RateLimit
from ensemble_ray.values.reviews import Review

__all__ = ["AgentKeys", "ItemTaskKeys", "MapReduceKeys", "MapTeamKeys", "TaskKeys", "TeamKeys"]


# Sections that become objects at once.


@keys_of(RateLimit)
class RateLimitKeys(Section):
    """So many requests in each period."""

    called = "a rate limit"
    requests: Whole = key(is_required=True)
    period: Number = key(is_required=True)


@keys_of(CostConfiguration)
class CostKeys(Section):
    """Money per token."""

    called = "a cost configuration"
    currency: Text = key("Shown behind amounts; USD unless told.")


@keys_of(RetryPolicy)
class RetryKeys(Section):
    """How patient a run is with model calls that fail by the provider's fault."""

    called = "a retry policy"


@keys_of(HierarchicalConstraints)
class ConstraintKeys(Section):
    """What the manager is held to, whatever its model says."""

    called = "the constraints"
    max_calls_per_worker: Annotated[dict[str, Whole], mapping("must be a mapping of roles to whole numbers")] = key()


_Retry = Annotated[RetryKeys, AfterValidator(RetryKeys.build)]
_TOOLS = "Tools it may call: a built-in one by name, or module:attribute; parameters as `name: {...}`."
KINDS.update(
    {
        ChatModel: Model,
        tuple: Annotated[list[Tool], Field(description=_TOOLS)],
        RateLimit: Annotated[RateLimitKeys, AfterValidator(RateLimitKeys.build)],
        CostConfiguration: Annotated[CostKeys, AfterValidator(CostKeys.build)],
        Review: ReviewName,
        HierarchicalConstraints: Annotated[ConstraintKeys, AfterValidator(ConstraintKeys.build)],
    }
)


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

# Agents and tasks.


class _Member(Section):
    """An agent or a task: one of several, by name or in a list."""

    @classmethod
    def explain_kind(cls, path: Loc, node: Located) -> str:
        """Say that something else stands in its place."""
        return f"{_each(cls) if isinstance(path[-1], int) else cls.name_for(path, node)} must be a mapping"

    @classmethod
    def explain_missing(cls, name: str, path: Loc, node: Located) -> str:
        """Say that a key is missing."""
        return f"{f'{_each(cls)} of a list' if name == 'name' else cls.name_for(path, node)} needs the key '{name}'"


def _each(section: type[Section]) -> str:
    return f"each {section.called.partition(' ')[0]}"


@keys_of(Agent)
class AgentKeys(_Member):
    """An agent."""

    called = "agent '{name}'"
    role: Text = key("Who it is; shown in prompts, events and traces. Default: its name.")


@keys_of(Task, without={"name", "context", "history", "revision_feedback", "prior_attempt_output", "attempt_number"})
class ItemTaskKeys(Section):
    """The task of an item, of a group or of all items: a task without a context."""

    called = "the section '{name}'"

    expected_output: Text = key("What the result looks like; a template as well. May be left out.")
    agent: Text = key("Name of the agent that does it; default: an agent is made for the run.")
    output_type: OutputTypeName = key("Type of the answer, as module:Class.")
    input_guardrails: GuardrailNames = key("Asked before anything else, each as module:function.")
    output_guardrails: GuardrailNames = key("Asked about the answer, each as module:function.")
    handler: HandlerName = key("Does the task without a model, as module:function.")


class TaskKeys(_Member, ItemTaskKeys):
    """A task."""

    called = "task '{name}'"
    context: list[Text] = key("Names of the tasks whose outputs it is given, in this order.")


class _ListedAgentKeys(AgentKeys):
    name: Text = key("What the others call it by.", is_required=True)


class _ListedTaskKeys(TaskKeys):
    name: Text = key("What the others call it by.")


def _members(one: str, by_name: Any, listed: Any) -> PlainValidator:
    """Read the members of a section, by name or as a list."""
    adapters = {Entries: TypeAdapter[object](by_name), Items: TypeAdapter[object](listed)}

    def read(node: object, info: ValidationInfo) -> object:
        if not isinstance(node, Entries | Items):
            raise refuse(f"must be a mapping of names to {one}s, or a list of {one}s", at="key")
        if not node:
            raise refuse(f"there must be at least one {one}", at="key")
        return adapters[type(node)].validate_python(node, context=info.context)

    forms: list[Any] = [Annotated[form, Field(min_length=1)] for form in (by_name, listed)]
    return PlainValidator(read, json_schema_input_type=forms[0] | forms[1])


_Agents = Annotated[object, _members("agent", dict[str, AgentKeys], list[_ListedAgentKeys])]
_Tasks = Annotated[object, _members("task", dict[str, TaskKeys], list[_ListedTaskKeys])]


# The map-reduce.


class _DeadLetterKeys(Section):
    called = "the source of items"
    dead_letters: PathText = key("The failed items of an earlier run.", is_required=True)


def _read_items(node: object, info: ValidationInfo) -> ItemSource:
    reading = context_of(info)
    if reading.items is not None:
        return reading.items
    if (text := text_in(node)) is not None:
        return source_of(reading.resolve_path(text))
    if isinstance(node, Items):
        return source_of(convert_freely(node))
    if isinstance(node, Entries):
        return source_of(DeadLetters(_DeadLetterKeys.model_validate(node, context=reading).dead_letters))
    raise ValidationError("must be the path of a file, a list, or dead_letters: PATH")


_ItemsText = Annotated[str, Field(pattern=r"\.(jsonl|csv|parquet)$")]
_ItemsList = Annotated[list[Any], Field(min_length=1)]
_Items = Annotated[
    object, PlainValidator(_read_items, json_schema_input_type=_ItemsText | _ItemsList | _DeadLetterKeys)
]
_OF_FACTORIES = {f"{side}_{kind}" for side in ("map", "reduce", "direct") for kind in ("task", "agent")}
_WATCHED = {info.alias or name for name, info in Watched.model_fields.items()}


@keys_of(MapReduceDefinition, without=_OF_FACTORIES | _WATCHED)
class MapReduceKeys(Section):
    """A map-reduce; the sections `map`, `reduce` and `direct` stand for its factories."""

    called = "the map-reduce"
    first = ("items", "map", "reduce", "direct", *MapReduceDefinition.__annotations__)
    items: _Items = key(
        "What is mapped: the path of a .jsonl, .csv or .parquet file, seen from this file; a list; or dead_letters: PATH."
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
class MapTeamKeys(Section):
    """A team with a map-reduce."""

    called = "a team with a map-reduce"
    first = ("agents", "tasks", "map_reduce")
    nullable = frozenset({*first, "workflow", "retry"})
    misplaced: ClassVar[Mapping[str, str]] = {
        "tasks": "a file with 'map_reduce' has no tasks beside it: its tasks are made of its items"
    }
    agents: _Agents = key("Agents by name.")
    map_reduce: MapReduceKeys = key(
        "In place of tasks: a task for each of many items, and how their outputs are brought together."
    )
    stream: Flag = key("Whether answers stream where neither agent nor task say otherwise.")
    agent_synthesizer: SynthesizerName = key(
        "Makes agents for tasks that name none: `template`, `llm_based`, or module:attribute."
    )
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
    retry: _Retry | None = key()


@keys_of(EnsembleDefinition, without={"loops", "phases", "graph"})
class TeamKeys(MapTeamKeys):
    """A team."""

    called = "a team"
    misplaced: ClassVar[Mapping[str, str]] = {}
    tasks: _Tasks = key("What to do, in order; tasks by name.")
    workflow: Annotated[str, one_of(Workflow, "workflow")] | None = key(
        "`sequential`, in list order, unless told; `parallel`: each task as soon as its context is there; "
        "`hierarchical`: a manager hands the tasks to the agents."
    )
    manager_prompt_strategy: StrategyName = key("Writes the manager's prompts, as module:attribute.")
    delegation_policies: list[Annotated[object, object_with("evaluate")]] = key(
        "Asked in order about each delegation, each as module:attribute: allow, reject or change it."
    )
