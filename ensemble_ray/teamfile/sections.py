"""The sections of a team file: team, agents, tasks, loops, phases, graph and map-reduce (S-MR-175).

A section has the keys of the class that it builds. Here are only the keys with another form in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NewType, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationInfo,
    create_model,
)
from typing_extensions import TypeAliasType

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition, ManagerPromptStrategy
from ensemble_ray.definition.fields import Workflow
from ensemble_ray.definition.graph import END, Graph, GraphEdge, GraphFork, GraphJoin
from ensemble_ray.definition.loop import Loop, Until
from ensemble_ray.definition.map_reduce import MapReduceDefinition
from ensemble_ray.definition.phase import Phase, PhaseReview
from ensemble_ray.definition.run_rules import RunListeners
from ensemble_ray.definition.task import Task, WithReflection
from ensemble_ray.errors import ValidationError
from ensemble_ray.events import EVENT_TYPES
from ensemble_ray.items.results import DeadLetters
from ensemble_ray.items.sources import ItemSource, source_of
from ensemble_ray.items.text_files import CSV_ENCODING, CsvFile
from ensemble_ray.plan.planner import AgentSynthesizer
from ensemble_ray.ports import Dashboard
from ensemble_ray.process.run_context import provide
from ensemble_ray.teamfile.document import Entries, Items, Loc, Located, Scalar
from ensemble_ray.teamfile.evaluation import EvaluationSection
from ensemble_ray.teamfile.fields import (
    Attachments,
    Memory,
    Model,
    Prices,
    ReflectionName,
    ReflectionStoreName,
    Retry,
    ReviewHandlerName,
    ScopeNames,
    StoreName,
)
from ensemble_ray.teamfile.references import is_reference
from ensemble_ray.teamfile.section import (
    Age,
    CallableName,
    FileSection,
    Flag,
    Headers,
    Number,
    PathText,
    ReferenceText,
    Text,
    context_of,
    convert_freely,
    has_method,
    has_methods,
    key,
    keys_of,
    mapping,
    object_with,
    one_of,
    reference,
    refuse,
    text_in,
)
from ensemble_ray.tools.tool import AgentTool
from ensemble_ray.values.messages import Effect

# `accepts` checks the object, `is_intended` what an installed package may provide (S-SEC-71, S-SEC-72).

CallbackNames = Annotated[
    list[CallableName],
    BeforeValidator(
        lambda node: node if isinstance(node, Items) else [node],
        json_schema_input_type=ReferenceText | list[ReferenceText],
    ),
]
GuardrailNames = list[Annotated[object, reference("a guardrail: a callable")]]
_READ_METRICS = reference(
    "tool metrics",
    makes=True,
    accepts=lambda _: True,
    is_intended=has_methods("increment_success", "increment_failure", "increment_error", "record_duration"),
)
MetricsName = Annotated[object, _READ_METRICS]
_READ_LISTENER = reference(
    "a listener",
    makes=True,
    accepts=lambda found: any(hasattr(found, method) for method in EVENT_TYPES),
    is_intended=has_method(*EVENT_TYPES),
)
ListenerName = Annotated[object, _READ_LISTENER]
_READ_DASHBOARD = reference(
    "a WebDashboard",
    accepts=lambda found: isinstance(found, Dashboard),
    is_intended=lambda found: isinstance(found, Dashboard),
)
DashboardName = Annotated[object, _READ_DASHBOARD]
_READ_STRATEGY = reference(
    "an object with 'build_system_prompt' and 'build_user_prompt'",
    makes=True,
    accepts=lambda found: isinstance(found, ManagerPromptStrategy),
    is_intended=has_methods("build_system_prompt", "build_user_prompt"),
)
StrategyName = Annotated[object, _READ_STRATEGY]
_READ_RUNNER = reference(
    "an object with 'run'",
    makes=True,
    accepts=has_method("run"),
    # Many foreign classes have a `run`; a class with an effect is made to be a runner.
    is_intended=lambda found: has_method("run")(found) and getattr(found, "effect", None) in get_args(Effect),
)
RunnerName = Annotated[object, _READ_RUNNER]
_READ_HANDLER = reference(
    "a function or a tool",
    makes=True,
    accepts=lambda found: callable(found) or has_method("execute")(found),
    is_intended=lambda found: (
        isinstance(found, AgentTool) or (isinstance(found, type) and issubclass(found, AgentTool))
    ),
)
HandlerName = Annotated[object, _READ_HANDLER]
_SYNTHESIZER = TypeAdapter[object](Annotated[object, object_with("synthesize")])


def _read_synthesizer(node: object, info: ValidationInfo) -> object:
    match text_in(node):
        case "template":
            return AgentSynthesizer.template()
        case "llm_based":
            return AgentSynthesizer.llm_based()
        case _:
            return _SYNTHESIZER.validate_python(node, context=info.context)


SynthesizerName = Annotated[
    object, PlainValidator(_read_synthesizer, json_schema_input_type=Literal["template", "llm_based"] | ReferenceText)
]

_PLAIN_TYPES = {"str": str, "int": int, "float": float, "bool": bool, "list": list, "dict": dict}
#: Standard types that an answer may have: constructing them has no side effects.
_DATA_TYPES = frozenset({
    *(f"builtins:{name}" for name in _PLAIN_TYPES),
    *("datetime:date", "datetime:datetime", "datetime:time", "datetime:timedelta"),
    *("decimal:Decimal", "uuid:UUID"),
})  # fmt: skip
_OUTPUT_TYPE = TypeAdapter[object](
    Annotated[
        object,
        reference(
            "a type",
            # A class, or an alias such as `list[Report]` or `Report | None`.
            accepts=lambda found: isinstance(found, type | NewType | TypeAliasType) or get_origin(found) is not None,
            is_intended=lambda found: isinstance(found, type) and issubclass(found, BaseModel),
            standard=_DATA_TYPES,
        ),
    ]
)

_READ_OUTPUT_TYPE = PlainValidator(
    lambda node, info: (
        _PLAIN_TYPES.get(text_in(node) or "") or _OUTPUT_TYPE.validate_python(node, context=info.context)
    ),
    json_schema_input_type=Literal["str", "int", "float", "bool", "list", "dict"] | ReferenceText,
)
OutputTypeName = Annotated[object, _READ_OUTPUT_TYPE]


class MemberSection(FileSection):
    """A member of a mapping by name, or of a list."""

    @classmethod
    def explain_kind(cls, path: Loc, node: Located) -> str:
        return f"{cls._each() if isinstance(path[-1], int) else cls.name_for(path, node)} must be a mapping"

    @classmethod
    def explain_missing(cls, name: str, path: Loc, node: Located) -> str:
        return f"{f'{cls._each()} of a list' if name == 'name' else cls.name_for(path, node)} needs the key '{name}'"

    @classmethod
    def _each(cls) -> str:
        return f"each {cls.called.partition(' ')[0]}"


class _RemoteKeys(FileSection):
    called = "the section 'a2a'"
    url: Text = key("URL of its card, without /.well-known/agent-card.json.", is_required=True)
    headers: Headers = key("Headers: text, or {env: NAME} for secrets.")
    hosts: list[Text] = key("Hosts that its card may name in addition to the host of the URL.")
    timeout: Number = key("Longest time of a task, seconds.")
    connect_timeout: Number = key("Longest time to connect, seconds.")


@keys_of(Agent)
class AgentKeys(MemberSection):
    called = "agent '{name}'"
    role: Text = key("Its role, shown in prompts, events and traces. Default: its name.")
    runner: RunnerName = key("Does its tasks instead of a model, as module:attribute: an object or class with 'run'.")
    a2a: _RemoteKeys = key("An agent of another system that does its tasks, called by the A2A protocol.")
    resources: Annotated[dict[str, Number], mapping("must be a mapping of names to numbers")] = key()
    labels: Annotated[dict[str, Text], mapping("must be a mapping of names to texts")] = key()


_UNSET = {"name", "context", "memory_scopes", "history", "revision_feedback", "prior_attempt_output", "attempt_number"}


@keys_of(Task, without=_UNSET)
class ItemTaskKeys(FileSection):
    called = "the section '{name}'"

    expected_output: Text = key("Form of the result; a template as well. May be left out.")
    agent: Text = key("Name of the agent that does it; default: an agent is made for the run.")
    output_type: OutputTypeName = key("Type of the answer: str, int, float, bool, list, dict, or module:Class.")
    input_guardrails: GuardrailNames = key("Called before the task begins, each as module:function.")
    output_guardrails: GuardrailNames = key("Called with the answer, each as module:function.")
    attachments: Attachments = key(
        "Pictures, audio and files for the model: paths or URLs, or sections with image, audio or file. Templates as well."
    )
    handler: HandlerName = key("Does the task without a model, as module:function.")
    reuse: Age = key(
        "Age of answers of earlier runs that replace an identical request: 7d, 12h, 30m, 2w or 90s; default: none."
    )
    reflection_config: ReflectionName = key(
        "Whether the model reflects on its outputs to improve later runs: true, or a section with a model or a strategy."
    )


class TaskKeys(MemberSection, ItemTaskKeys):
    called = "task '{name}'"
    context: list[Text] = key("Names of the tasks whose outputs it receives, in this order.")
    memory_scopes: ScopeNames = key(
        "Parts of the memory store that it reads before and writes after: names, or sections."
    )


class NamedTaskKeys(TaskKeys):
    name: Text = key("Name by which others refer to it.")


def members_of(section: type[FileSection], listed: type[FileSection] | None = None) -> PlainValidator:
    one = section.called.partition(" ")[0]
    if listed is None:
        name: Any = (Text, key("Name by which others refer to it.", is_required=True))
        listed = create_model(f"_Listed{section.__name__}", __base__=section, __module__=__name__, name=name)
    forms: dict[type[Entries | Items], Any] = {Entries: dict[str, section], Items: list[listed]}  # type: ignore[valid-type]
    # Adapters are expensive: a file uses few of them.
    adapters: dict[type[Entries | Items], TypeAdapter[object]] = {}

    def read(node: object, info: ValidationInfo) -> object:
        if not isinstance(node, Entries | Items):
            raise refuse(f"must be a mapping of names to {one}s, or a list of {one}s", at="key")
        if not node:
            raise refuse(f"there must be at least one {one}", at="key")
        if (kind := type(node)) not in adapters:
            adapters[kind] = TypeAdapter[object](forms[kind])
        return adapters[kind].validate_python(node, context=info.context)

    return PlainValidator(
        read, json_schema_input_type=Union[*(Annotated[form, Field(min_length=1)] for form in forms.values())]
    )


AgentMembers = Annotated[object, members_of(AgentKeys)]
TaskMembers = Annotated[object, members_of(TaskKeys, NamedTaskKeys)]


_CONTEXT = "Names of tasks, and NAME.output for the outputs of a loop or phase, in this order."


class _TextKeys(FileSection):
    called = "the predicate"
    text_contains: Text = key("A text that the output must contain.", is_required=True)
    ignore_case: Flag = key("Whether to ignore case.")


class _ParsedKeys(FileSection):
    called = "the predicate"
    parsed: CallableName = key("Called with the parsed output: module:function.", is_required=True)


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


_READ_PREDICATE = PlainValidator(
    _read_predicate, json_schema_input_type=Literal["unchanged"] | ReferenceText | _TextKeys | _ParsedKeys
)
_Predicate = Annotated[object, _READ_PREDICATE]


@keys_of(Loop, without={"name"})
class LoopKeys(MemberSection):
    called = "loop '{name}'"
    body: TaskMembers = key("The tasks of one iteration, in this order, by name.", is_required=True)
    until: _Predicate = key(
        "Called after each iteration, as module:function; or `unchanged`, {text_contains: TEXT}, {parsed: module:function}."
    )
    context: list[Text] = key(f"Tasks that it waits for; its first task sees their outputs. {_CONTEXT}")


LoopMembers = Annotated[object, members_of(LoopKeys)]


@keys_of(PhaseReview)
class _ReviewKeys(FileSection):
    called = "the review"
    task: NamedTaskKeys = key(
        "Reviews each attempt: its answer is APPROVE, RETRY: ..., or REJECT: ...", is_required=True
    )


@keys_of(Phase, without={"name"})
class PhaseKeys(MemberSection):
    called = "phase '{name}'"
    tasks: TaskMembers = key("Its tasks, in order, by name.")
    loops: LoopMembers = key("Loops among its tasks, by name.")
    after: list[Text] = key("Names of the phases that must be completed first.")
    review: _ReviewKeys = key()


PhaseMembers = Annotated[object, members_of(PhaseKeys)]


def _by_key(other: type[FileSection], *, is_built: bool = False, **kinds: type[FileSection]) -> PlainValidator:
    """Read a section of the kind whose key it has, or of the other kind."""

    def read(node: object, info: ValidationInfo) -> object:
        kind = next((kind for name, kind in kinds.items() if isinstance(node, Entries) and name in node), other)
        section = kind.model_validate(node, context=info.context)
        return section.build() if is_built else section

    return PlainValidator(read, json_schema_input_type=Union[other, *kinds.values()])


_State = Annotated[object, _by_key(TaskKeys, body=LoopKeys)]
_ToState = Annotated[Text, AfterValidator(lambda name: END if name == "END" else name)]


@keys_of(GraphEdge)
class _EdgeKeys(FileSection):
    called = "an edge"
    from_state: Text = key(is_required=True)
    to_state: _ToState = key(is_required=True)
    condition: _Predicate = key(
        "Called after the state, as module:function; or {text_contains: TEXT}, {parsed: module:function}. Without it the edge "
        "is always taken."
    )


@keys_of(GraphFork)
class _ForkKeys(FileSection):
    called = "a fork"
    to_states: list[Text] = key(is_required=True)


@keys_of(GraphJoin)
class _JoinKeys(FileSection):
    called = "a join"
    from_states: list[Text] = key(is_required=True)
    to_state: _ToState = key(is_required=True)


_Edge = Annotated[object, _by_key(_EdgeKeys, to_states=_ForkKeys, from_states=_JoinKeys, is_built=True)]


@keys_of(Graph)
class GraphKeys(FileSection):
    called = "the graph"
    states: dict[str, _State] = key("The states by name: a task, or a loop, which has a `body`.", is_required=True)
    edges: list[_Edge] = key(
        "From state to state, tried in this order; `to_state: END` ends. `to_states` forks, `from_states` joins.",
        is_required=True,
    )
    no_feedback_states: list[Text] = key()


def _read_inputs(node: object) -> dict[str, str]:
    """Return values as written: `1.10` stays `1.10`."""
    if not isinstance(node, Entries):
        raise ValidationError("must be a mapping of names to values")
    for name, value in node.items():
        if not isinstance(value, Scalar):
            raise refuse("must be a text, a number, true or false", name)
    values = {name: value for name, value in node.items() if isinstance(value, Scalar)}
    return {name: "" if value.value is None else value.written for name, value in values.items()}


_Inputs = Annotated[
    dict[str, str], PlainValidator(_read_inputs, json_schema_input_type=dict[str, str | float | bool | None])
]


class _DeadLetterKeys(FileSection):
    called = "the source of items"
    dead_letters: PathText = key("The failed items of an earlier run.", is_required=True)


class _CsvKeys(FileSection):
    called = "the source of items"
    csv: PathText = key("A .csv file, relative to this file.", is_required=True)
    delimiter: Text = key("The character between its fields; without it the first line decides.")
    encoding: Text = key("Its text encoding, such as cp1252; default UTF-8.")


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
    raise ValidationError("must be the path of a file or folder, a list, csv: PATH, or dead_letters: PATH")


_ItemsText = Annotated[str, Field(pattern=r"\.(jsonl|csv|parquet)$|/|\*")]
_ItemsList = Annotated[list[Any], Field(min_length=1)]
_Items = Annotated[
    object, PlainValidator(_read_items, json_schema_input_type=_ItemsText | _ItemsList | _CsvKeys | _DeadLetterKeys)
]
_FACTORIES = {f"{side}_{kind}" for side in ("map", "reduce", "direct") for kind in ("task", "agent")}
_WATCHED = {info.alias or name for name, info in (RunListeners.model_fields | WithReflection.model_fields).items()}


@keys_of(MapReduceDefinition, without=_FACTORIES | _WATCHED)
class MapReduceKeys(FileSection):
    called = "the map-reduce"
    first = ("items", "map", "reduce", "direct", *MapReduceDefinition.__annotations__)
    items: _Items = key(
        "The items: the path of a .jsonl, .csv or .parquet file, relative to this file; a folder (`photos/`) or a pattern "
        "(`photos/*.jpg`) of files; a list; csv: PATH; or dead_letters: PATH."
    )
    map: ItemTaskKeys = key(
        "The task of an item. In its texts {name} is a field of the item, {item} the whole item.", is_required=True
    )
    reduce: ItemTaskKeys = key(
        "The task that reduces a group of outputs to one; without it the outputs of `map` are the result."
    )
    direct: ItemTaskKeys = key(
        "The single task over all items, for inputs within the budget; {items} is replaced by the items."
    )
    token_estimator: CallableName = key("Tokens of an output if the provider counted none: module:function.")
    input_estimator: CallableName = key(
        "The text of an item, to check whether the input is within the budget: module:function."
    )


_CALLBACKS = dict.fromkeys(
    EVENT_TYPES, (CallbackNames, key("Called with each event of that kind; module:function, or several."))
)


@keys_of(RunListeners, others=_CALLBACKS)
class MapTeamKeys(FileSection):
    called = "a team with a map-reduce"
    first: ClassVar[tuple[str, ...]] = ("agents", "tasks", "map_reduce")
    nullable = frozenset({*first, "workflow", "retry"})
    misplaced: ClassVar[Mapping[str, str]] = {
        "tasks": "a file with 'map_reduce' has no tasks beside it: its tasks are made of its items"
    }
    agents: AgentMembers = key("Agents by name.")
    map_reduce: MapReduceKeys = key(
        "Instead of tasks: a task for each of many items, and how their outputs are reduced."
    )
    tags: Annotated[dict[str, Text], mapping("must be a mapping of names to texts")] = key()
    stream: Flag = key("Whether answers stream if neither agent nor task decides.")
    agent_synthesizer: SynthesizerName = key(
        "Makes agents for tasks that name none: `template`, `llm_based`, or module:attribute."
    )
    models: Annotated[dict[str, Model], mapping()] = key()
    prices: Prices = key()
    inputs: _Inputs = key()
    listeners: list[ListenerName] = key(
        "Objects or classes with methods such as `on_task_start`, each as module:attribute."
    )
    tool_metrics: MetricsName = key("Counts tool calls for a monitoring system, as module:attribute.")
    trace_exporter: Annotated[object, object_with("export")] = key(
        "Receives the trace of each successful run, as module:attribute."
    )
    review_handler: ReviewHandlerName = key(
        "Decides at review gates: `console`, `auto_approve`, or module:attribute; without it all gates pass."
    )
    deps: Annotated[CallableName, AfterValidator(provide)] = key(
        "Opens the deps of a run, in each process: a function without arguments or of the run, as module:function."
    )
    deps_type: Annotated[object, reference("a class", accepts=lambda value: isinstance(value, type))] = key(
        "Class of the deps, which is checked; module:class."
    )
    dashboard: DashboardName = key("A `WebDashboard` that shows the runs, as module:attribute.")
    reflection_store: ReflectionStoreName = key(
        "Stores reflections on tasks across runs: `in_memory`, `sqlite: {path: ...}`, or module:attribute."
    )
    retry: Retry | None = key()


@keys_of(EnsembleDefinition)
class TeamKeys(MapTeamKeys):
    called = "a team"
    misplaced: ClassVar[Mapping[str, str]] = {}
    first: ClassVar[tuple[str, ...]] = ("agents", "tasks", "loops", "phases", "graph", "map_reduce")
    nullable = frozenset({*first, "workflow", "retry"})
    tasks: TaskMembers = key("The tasks in order, by name.")
    loops: LoopMembers = key("Tasks that repeat until a predicate holds or a limit is reached; loops by name.")
    phases: PhaseMembers = key("Instead of tasks and loops: named groups of them, and their order.")
    graph: GraphKeys = key("Instead of all others: a state machine of tasks and loops.")
    workflow: Annotated[str, one_of(Workflow, "workflow")] | None = key(
        "`sequential` (default): in list order; `parallel`: each task as soon as its context is complete; "
        "`hierarchical`: a manager delegates the tasks to the agents."
    )
    memory: Memory = key("Memory that all tasks use.")
    memory_store: StoreName = key(
        "Stores the scopes that tasks declare: `in_memory`, `sqlite: {path: ..., embedding_model: ...}`, "
        "`postgres: {url: ..., embedding_model: ...}`, or module:attribute."
    )
    manager_prompt_strategy: StrategyName = key("Writes the manager's prompts, as module:attribute.")
    evaluation: EvaluationSection = key("Cases and scorers of `ensemble-ray eval`, which runs have no use for.")
    delegation_policies: list[Annotated[object, object_with("evaluate")]] = key(
        "Called in order for each delegation, each as module:attribute: allow, reject or change it."
    )
