"""The sections of a team file for agents and tasks, by name or in a list. Package: loader.

A section has the keys of the class that is made of it. Here stand those whose values are written in another way: what
a class calls for as an object (a handler, a type) is named as `module:attribute`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, TypeAdapter, ValidationInfo

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import Task
from ensemble_ray.loader.document import Entries, Items, Loc, Located
from ensemble_ray.loader.field_types import Number, Text, mapping
from ensemble_ray.loader.memory import ScopeNames
from ensemble_ray.loader.reading import refuse
from ensemble_ray.loader.reflection import ReflectionName
from ensemble_ray.loader.secret_values import Headers
from ensemble_ray.loader.section import FileSection, key
from ensemble_ray.loader.user_code import GuardrailNames, HandlerName, OutputTypeName, RunnerName
from ensemble_ray.loader.value_sections import keys_of

__all__ = [
    "AgentKeys",
    "AgentMembers",
    "ItemTaskKeys",
    "MemberSection",
    "NamedTaskKeys",
    "TaskKeys",
    "TaskMembers",
    "members_of",
]


class MemberSection(FileSection):
    """An agent or a task: one of several, by name or in a list."""

    @classmethod
    def explain_kind(cls, path: Loc, node: Located) -> str:
        """Say that something else stands in its place."""
        return f"{_each(cls) if isinstance(path[-1], int) else cls.name_for(path, node)} must be a mapping"

    @classmethod
    def explain_missing(cls, name: str, path: Loc, node: Located) -> str:
        """Say that a key is missing."""
        return f"{f'{_each(cls)} of a list' if name == 'name' else cls.name_for(path, node)} needs the key '{name}'"


def _each(section: type[FileSection]) -> str:
    return f"each {section.called.partition(' ')[0]}"


class _RemoteKeys(FileSection):
    """An agent of another system, asked by the A2A protocol."""

    called = "the section 'a2a'"
    url: Text = key("Where its card is found: the part before /.well-known/agent-card.json.", is_required=True)
    headers: Headers = key("Headers: text, or {env: NAME} for what must not stand in a file.")
    hosts: list[Text] = key("Hosts that its card may name besides the one of the URL.")
    timeout: Number = key("Seconds that a task may take.")
    connect_timeout: Number = key("Seconds until a connection must stand.")


@keys_of(Agent)
class AgentKeys(MemberSection):
    """An agent."""

    called = "agent '{name}'"
    role: Text = key("Who it is; shown in prompts, events and traces. Default: its name.")
    runner: RunnerName = key("Does its tasks in place of a model, as module:attribute: an object or class with 'run'.")
    a2a: _RemoteKeys = key("Does its tasks in place of a model: an agent of another system, asked by the A2A protocol.")
    resources: Annotated[dict[str, Number], mapping("must be a mapping of names to numbers")] = key()
    labels: Annotated[dict[str, Text], mapping("must be a mapping of names to texts")] = key()


@keys_of(
    Task,
    without={
        "name",
        "context",
        "memory_scopes",
        "history",
        "revision_feedback",
        "prior_attempt_output",
        "attempt_number",
    },
)
class ItemTaskKeys(FileSection):
    """The task of an item, of a group or of all items: a task without a context."""

    called = "the section '{name}'"

    expected_output: Text = key("What the result looks like; a template as well. May be left out.")
    agent: Text = key("Name of the agent that does it; default: an agent is made for the run.")
    output_type: OutputTypeName = key("Type of the answer: str, int, float, bool, list, dict, or module:Class.")
    input_guardrails: GuardrailNames = key("Asked before anything else, each as module:function.")
    output_guardrails: GuardrailNames = key("Asked about the answer, each as module:function.")
    handler: HandlerName = key("Does the task without a model, as module:function.")
    reflection_config: ReflectionName = key(
        "Whether its outputs are reflected on, so that later runs do it better: true, or a section with a model or a strategy."
    )


class TaskKeys(MemberSection, ItemTaskKeys):
    """A task."""

    called = "task '{name}'"
    context: list[Text] = key("Names of the tasks whose outputs it is given, in this order.")
    memory_scopes: ScopeNames = key(
        "Parts of the memory store that it reads before and writes after: names, or sections."
    )


class _ListedAgentKeys(AgentKeys):
    name: Text = key("What the others call it by.", is_required=True)


class NamedTaskKeys(TaskKeys):
    """A task that no key names: in a list, or the one of a review."""

    name: Text = key("What the others call it by.")


def members_of(one: str, by_name: Any, listed: Any) -> PlainValidator:
    """Read the members of a section, by name or as a list."""
    # Made when they are first used: a file says its members in one of the two ways, and has few of the sections.
    adapters: dict[type[Entries | Items], TypeAdapter[object]] = {}

    def read(node: object, info: ValidationInfo) -> object:
        if not isinstance(node, Entries | Items):
            raise refuse(f"must be a mapping of names to {one}s, or a list of {one}s", at="key")
        if not node:
            raise refuse(f"there must be at least one {one}", at="key")
        kind = type(node)
        if kind not in adapters:
            adapters[kind] = TypeAdapter[object](by_name if kind is Entries else listed)
        return adapters[kind].validate_python(node, context=info.context)

    forms: list[Any] = [Annotated[form, Field(min_length=1)] for form in (by_name, listed)]
    return PlainValidator(read, json_schema_input_type=forms[0] | forms[1])


AgentMembers = Annotated[object, members_of("agent", dict[str, AgentKeys], list[_ListedAgentKeys])]
TaskMembers = Annotated[object, members_of("task", dict[str, TaskKeys], list[NamedTaskKeys])]
