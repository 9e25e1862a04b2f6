"""The sections of a team file for loops, phases and a graph. Package: loader.

Their tasks stand where they run, written as under `tasks`; a task names any other of the file as its context, and the
outputs of a loop or phase as `NAME.output`. What decides is named as `module:attribute`, or is one of `Until`.
"""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import PlainValidator, TypeAdapter, ValidationInfo

from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.graph_edges import END, GraphEdge, GraphFork, GraphJoin
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.phase import Phase, PhaseReview
from ensemble_ray.definition.until import Until
from ensemble_ray.loader.document import Entries
from ensemble_ray.loader.field_types import Flag, ReferenceText, Text, text_in
from ensemble_ray.loader.member_sections import MemberSection, NamedTaskKeys, TaskKeys, TaskMembers, members_of
from ensemble_ray.loader.reading import refuse
from ensemble_ray.loader.references import is_reference
from ensemble_ray.loader.section import FileSection, key, keys_of
from ensemble_ray.loader.user_code import CallableName
from ensemble_ray.values.value import Value

__all__ = ["GraphKeys", "LoopKeys", "LoopMembers", "PhaseKeys", "PhaseMembers"]

_CONTEXT = "Names of tasks, and NAME.output for the outputs of a loop or phase, in this order."


# What decides.


class _TextKeys(FileSection):
    called = "the predicate"
    text_contains: Text = key("A text that the output has to contain.", is_required=True)
    ignore_case: Flag = key("Whether case does not matter.")


class _ParsedKeys(FileSection):
    called = "the predicate"
    parsed: CallableName = key("Asked with the parsed output: module:function.", is_required=True)


_CALLABLE = TypeAdapter[object](CallableName)
_FORMS = "must be module:attribute, `unchanged`, {text_contains: TEXT} or {parsed: module:function}"


def _read_predicate(node: object, info: ValidationInfo) -> object:
    if text_in(node) == "unchanged":
        return Until.unchanged()
    if not isinstance(node, Entries):
        name = text_in(node)
        if name is None or not is_reference(name):
            raise refuse(_FORMS)
        return _CALLABLE.validate_python(node, context=info.context)
    if "parsed" in node:
        return Until.parsed(_ParsedKeys.model_validate(node, context=info.context).parsed)  # type: ignore[arg-type]  # it is a callable
    found = _TextKeys.model_validate(node, context=info.context)
    return Until.text_contains(found.text_contains, ignore_case=bool(found.ignore_case))


_Predicate = Annotated[
    object,
    PlainValidator(
        _read_predicate, json_schema_input_type=Literal["unchanged"] | ReferenceText | _TextKeys | _ParsedKeys
    ),
]


# Loops.


@keys_of(Loop, without={"name"})
class LoopKeys(MemberSection):
    """A loop."""

    called = "loop '{name}'"
    body: TaskMembers = key("What one iteration does, in this order; tasks by name.", is_required=True)
    until: _Predicate = key(
        "Asked after each iteration, as module:function; or `unchanged`, {text_contains: TEXT}, {parsed: module:function}."
    )
    context: list[Text] = key(f"What it waits for, and its first task is shown. {_CONTEXT}")


class _ListedLoopKeys(LoopKeys):
    name: Text = key("What the others call it by.", is_required=True)


LoopMembers = Annotated[object, members_of("loop", dict[str, LoopKeys], list[_ListedLoopKeys])]


# Phases.


@keys_of(PhaseReview)
class _ReviewKeys(FileSection):
    called = "the review"
    task: NamedTaskKeys = key(
        "Decides about each attempt: its answer is APPROVE, RETRY: ..., or REJECT: ...", is_required=True
    )


@keys_of(Phase, without={"name"})
class PhaseKeys(MemberSection):
    """A phase."""

    called = "phase '{name}'"
    tasks: TaskMembers = key("What it does, in order; tasks by name.")
    loops: LoopMembers = key("Loops among its tasks, by name.")
    after: list[Text] = key("Names of the phases that have to be completed first.")
    review: _ReviewKeys = key()


class _ListedPhaseKeys(PhaseKeys):
    name: Text = key("What the others call it by.", is_required=True)


PhaseMembers = Annotated[object, members_of("phase", dict[str, PhaseKeys], list[_ListedPhaseKeys])]


# The graph.


def _read_state(node: object, info: ValidationInfo) -> object:
    kind: type[LoopKeys | TaskKeys] = LoopKeys if isinstance(node, Entries) and "body" in node else TaskKeys
    return kind.model_validate(node, context=info.context)


_State = Annotated[object, PlainValidator(_read_state, json_schema_input_type=TaskKeys | LoopKeys)]


@keys_of(GraphEdge)
class _EdgeKeys(FileSection):
    called = "an edge"
    condition: _Predicate = key(
        "Asked after the state, as module:function; or {text_contains: TEXT}, {parsed: module:function}. Without it the edge "
        "is taken."
    )


@keys_of(GraphFork)
class _ForkKeys(FileSection):
    called = "a fork"
    to_states: list[Text] = key(is_required=True)


@keys_of(GraphJoin)
class _JoinKeys(FileSection):
    called = "a join"
    from_states: list[Text] = key(is_required=True)


def _read_edge(node: object, info: ValidationInfo) -> object:
    names = node if isinstance(node, Entries) else {}
    kind: type[FileSection] = _ForkKeys if "to_states" in names else _JoinKeys if "from_states" in names else _EdgeKeys
    values = kind.model_validate(node, context=info.context).values()
    if values.get("to_state") == "END":
        values["to_state"] = END
    return cast("type[Value]", kind.makes)(**values)


_Edge = Annotated[object, PlainValidator(_read_edge, json_schema_input_type=_EdgeKeys | _ForkKeys | _JoinKeys)]


@keys_of(Graph)
class GraphKeys(FileSection):
    """A graph."""

    called = "the graph"
    states: dict[str, _State] = key(
        "What is run in each state, by its name: a task, or a loop, which has a `body`.", is_required=True
    )
    edges: list[_Edge] = key(
        "From state to state, tried in this order; `to_state: END` ends. `to_states` forks, `from_states` joins.",
        is_required=True,
    )
    no_feedback_states: list[Text] = key()
