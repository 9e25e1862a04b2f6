"""Describe a definition as JSON data: all that decides a run and is not in its plan (S-DUR-36), and the keys of items.

The data is by agent and task key and without defaults. It never contains keys, URLs, headers or captured values.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import pydantic
from msgspec import Struct

from ensemble_ray.definition.agent import Agent, effect_of_runner
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.phase import Phase
from ensemble_ray.definition.run_rules import RunRules
from ensemble_ray.definition.task import Task
from ensemble_ray.facts.fact import as_mapping, as_sequence
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.llm.fallback import REASONS, Fallback
from ensemble_ray.record.result import summaries
from ensemble_ray.values.attachments import Attachment
from ensemble_ray.values.task_output import full_name
from ensemble_ray.values.trace import jsonable

if TYPE_CHECKING:
    from ensemble_ray.plan.planner import Planned


_OWN = ("ensemble_ray.", "actors.")  # Identified by name only: another version of the library is no other definition.


def recorded_name(cls: type[object]) -> str:
    return stable_name(full_name(cls))


def stable_name(name: str) -> str:
    """Return a full name, without modules if it is the library's: code can then move, and its records stay resumable.

    Examples:
        >>> stable_name("ensemble_ray.tools.builtin.plain.CalculatorTool")
        'ensemble_ray.CalculatorTool'
        >>> stable_name("my_team.tools.Search")
        'my_team.tools.Search'
    """
    if not name.startswith(_OWN):
        return name
    _, *parts = name.split(".")
    while len(parts) > 1 and parts[0].islower():
        del parts[0]
    return ".".join(["ensemble_ray", *parts])


_DIGITS = 16  # Recorded digits of a hash: enough to distinguish versions of one function.
_OWN_PACKAGES = ("ensemble_ray", "actors")
_FOREIGN = ("builtins", "abc", "typing", "pydantic", "enum", *_OWN_PACKAGES)  # no user's code


def identity_of(target: object) -> dict[str, object]:
    """Return name and source hash of a function, method, partial, class, or object with `__call__`."""
    while isinstance(target, functools.partial):
        target = cast("functools.partial[object]", target).func
    if isinstance(target, type):
        return class_identity(target)
    function = inspect.unwrap(cast("Callable[..., object]", getattr(target, "__func__", target)))
    if not isinstance(function, FunctionType):
        if inspect.isbuiltin(function):
            return {"callable": stable_name(f"{function.__module__ or 'builtins'}.{function.__qualname__}")}
        return class_identity(type(target))
    named: dict[str, object] = {"callable": stable_name(f"{function.__module__}.{function.__qualname__}")}
    return named if _is_of(function.__module__, _OWN_PACKAGES) else {**named, "source": _source_hash(function.__code__)}


def class_identity(cls: type[object]) -> dict[str, object]:
    named: dict[str, object] = {"callable": recorded_name(cls)}
    return named if _is_of(cls.__module__, _OWN_PACKAGES) else {**named, "source": _class_hash(cls)}


def _is_of(module: str | None, packages: tuple[str, ...]) -> bool:
    return (module or "").partition(".")[0] in packages


_hashes: WeakKeyDictionary[CodeType, str] = WeakKeyDictionary()
_class_hashes: WeakKeyDictionary[type[object], str] = WeakKeyDictionary()


def _source_hash(code: CodeType) -> str:
    cached = _hashes.get(code)
    if cached is None:
        try:
            text = inspect.getsource(code)
        except (OSError, TypeError, SyntaxError, IndexError):  # an interactive prompt, `exec`, a removed file
            text = _bytecode(code)
        cached = _hashes[code] = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
    return cached


def _bytecode(code: CodeType) -> str:
    constants: list[str] = []
    for each in code.co_consts:
        if isinstance(each, CodeType):
            constants.append(_bytecode(each))
        else:  # sorted, because the order of a set differs between processes
            constants.append(str(sorted(map(repr, each))) if isinstance(each, frozenset) else repr(each))
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _class_hash(cls: type[object]) -> str:
    """The source of the class itself is not read: that would parse its whole file."""
    cached = _class_hashes.get(cls)
    if cached is not None:
        return cached
    parts: list[str] = []
    for owner in cls.__mro__:
        if _is_of(owner.__module__, _FOREIGN):
            continue
        for name, attribute in sorted(vars(owner).items()):
            target = attribute.fget if isinstance(attribute, property) else getattr(attribute, "__func__", attribute)
            if isinstance(target, FunctionType) and target.__module__ == owner.__module__:
                function = inspect.unwrap(target)
                parts.append(f"{name}:{_source_hash(function.__code__)}")
    cached = _class_hashes[cls] = sha256("\n".join(parts).encode()).hexdigest()[:_DIGITS]
    return cached


_HIDDEN = "object_id"  # Hidden id of a definition: for look-up inside one process, never recorded.
_ABSENT = object()
_SHOWN = 60


def without_object_ids(data: Mapping[str, object]) -> dict[str, object]:
    return cast("dict[str, object]", _strip(jsonable(data)))


def digest_of(data: Mapping[str, object]) -> str:
    """Return the SHA-256 in hex of the canonical JSON text: sorted keys, no spaces, no hidden ids."""
    text = json.dumps(without_object_ids(data), sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()


class FieldDifference(Struct, frozen=True):
    path: str
    recorded: str
    current: str

    def __str__(self) -> str:
        return f"{self.path}: {self.recorded} -> {self.current}"


def differences(recorded: Mapping[str, object], current: Mapping[str, object]) -> list[str]:
    """Return one line per different field: `nodes.0.description: 'a' -> 'b'`."""
    return [str(each) for each in compare_fields(recorded, current)]


def compare_fields(recorded: Mapping[str, object], current: Mapping[str, object]) -> list[FieldDifference]:
    found: list[FieldDifference] = []
    _compare(without_object_ids(recorded), without_object_ids(current), "", found)
    return found


def _strip(value: object) -> object:
    if isinstance(value, dict):
        mapping = cast("dict[str, object]", value)
        return {
            key: _strip(each) if isinstance(each, dict | list) else each
            for key, each in mapping.items()
            if key != _HIDDEN
        }
    if isinstance(value, list):
        return [_strip(each) if isinstance(each, dict | list) else each for each in cast("list[object]", value)]
    return value


def _compare(old: object, new: object, path: str, found: list[FieldDifference]) -> None:
    if isinstance(old, dict) and isinstance(new, dict):
        was, now = cast("dict[str, object]", old), cast("dict[str, object]", new)
        for key in sorted({*was, *now}):
            _compare(was.get(key, _ABSENT), now.get(key, _ABSENT), f"{path}.{key}" if path else key, found)
    elif isinstance(old, list) and isinstance(new, list):
        pairs = zip_longest(cast("Sequence[object]", old), cast("Sequence[object]", new), fillvalue=_ABSENT)
        for position, (left, right) in enumerate(pairs):
            _compare(left, right, f"{path}.{position}" if path else str(position), found)
    elif isinstance(old, str) and isinstance(new, str) and stable_name(old) == stable_name(new):
        pass  # library code may have moved between modules
    elif old != new:
        found.append(FieldDifference(path or "value", _format(old), _format(new)))


def _format(value: object) -> str:
    text = "absent" if value is _ABSENT else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def memory_data(definition: EnsembleDefinition) -> dict[str, object] | None:
    memory, store = definition.memory, definition.memory_store
    if memory is None and store is None:
        return None
    data: dict[str, object] = {}
    if store is not None:
        data["store"] = recorded_name(type(store))
    if memory is None:
        return data
    if memory.short_term:
        data["short_term"] = True
    if memory.long_term is not None:
        data["long_term"] = recorded_name(type(memory.long_term))
        data["long_term_max_results"] = memory.long_term_max_results
    if memory.entity_memory is not None:
        data["entity_memory"] = recorded_name(type(memory.entity_memory))
    if memory.extractor is not None:
        data["extractor"] = identity_of(memory.extractor)
    return data


#: Request options that may contain keys or addresses. Of the body, only the hash is recorded.
_HIDDEN_OPTIONS = frozenset({"extra_headers", "extra_query"})
_HASHED_OPTIONS = frozenset({"extra_body"})
_SECRET_ENDINGS = ("key", "secret", "password", "authorization", "url", "token")

_LIMITED_MODELS = "ensemble_ray.llm.limits.limiter"


def definition_data(planned: Planned, definition: EnsembleDefinition) -> dict[str, object]:
    data: dict[str, object] = {
        "agents": {key: _agent(agent) for key, agent in planned.agents.items()},
        "tasks": {key: found for key, task in planned.tasks.items() if (found := _task(task))},
    }
    data |= _attached(planned.attached)
    if definition.max_tool_output_length >= 0:
        data["max_tool_output_length"] = definition.max_tool_output_length
    if definition.context_budget is not None:
        data["context_budget"] = definition.context_budget
    data |= _chosen_texts(definition)
    if definition.on_incomplete != "warn":
        data["on_incomplete"] = definition.on_incomplete
    if definition.review_policy != "never":
        data["review_policy"] = definition.review_policy.value
    if asked := {key: found for key, unit in planned.units.items() if (found := _unit(unit))}:
        data["units"] = asked
    if planned.peers:  # limits of time and repetitions do not decide whether work may be delegated
        delegation: dict[str, object] = {"max_depth": definition.max_delegation_depth}
        if definition.delegation_policies:
            delegation["policies"] = [
                class_identity(type(policy)) if hasattr(policy, "evaluate") else identity_of(policy)
                for policy in definition.delegation_policies
            ]
        if planned.plan.hierarchy is not None and definition.manager_prompt_strategy is not None:
            delegation["manager_prompts"] = class_identity(type(definition.manager_prompt_strategy))
        data["delegation"] = delegation
    if (memory := memory_data(definition)) is not None:
        data["memory"] = memory
    return data


def _chosen_texts(definition: RunRules) -> dict[str, object]:
    """Return the text that a run's options add to its prompts. Limits do not decide what a task is."""
    chosen = definition.chosen_options
    return {} if chosen is None or not chosen.additional_context else {"additional_context": chosen.additional_context}


def run_data(planned: Planned, definition: EnsembleDefinition) -> PlanRecorded:
    plan = planned.plan
    data, described = plan.to_dict(), definition_data(planned, definition)
    return PlanRecorded(
        plan=data,
        definition=described,
        workflow=plan.shown_workflow,
        inputs=dict(plan.inputs),
        agents=[summary.model_dump(mode="json") for summary in summaries(plan)],
        digest=digest_of({"plan": data, "definition": described}),
    )


def recorded_inputs(header: PlanRecorded) -> dict[str, object]:
    """Return the inputs of a recorded run, with references to its attachments."""
    attached = as_mapping(as_mapping(header.definition).get("attached"))
    found = {
        name: [Attachment.from_json(as_mapping(each)) for each in as_sequence(many)] for name, many in attached.items()
    }
    return {**(header.inputs or {}), **found}


def recorded_attachments(header: PlanRecorded) -> dict[tuple[str, str], Attachment]:
    """Return references to the attachments from paths and URLs of a recorded plan, by (kind, origin)."""
    tasks = as_mapping(as_mapping(header.definition).get("tasks"))
    listed = [each for task in tasks.values() for each in as_sequence(as_mapping(task).get("attachments"))]
    found = [Attachment.from_json(as_mapping(each)) for each in listed]
    return {(each.kind, each.origin): each for each in found if each.origin}


def _attached(inputs: Mapping[str, Sequence[Attachment]]) -> dict[str, object]:
    data = {name: [each.to_json() for each in attachments] for name, attachments in inputs.items()}
    return {"attached": data} if data else {}


def task_data(task: Task) -> dict[str, object]:
    """Return a task that is in no plan: its texts, its agent, and all other fields that decide its work."""
    data: dict[str, object] = {"description": task.description, "expected_output": task.expected_output}
    agent = task.agent
    if agent is not None:
        shown = {"role": agent.role, "goal": agent.goal, "background": agent.background}
        data["agent"] = {**{name: text for name, text in shown.items() if text}, **_agent(agent)}
    elif task.tools:
        data["tools"] = _tools(task.tools)
    return {**data, **_task(task)}


def _agent(agent: Agent) -> dict[str, object]:
    data: dict[str, object]
    if agent.runner is None:
        data = {"llm": model_data(agent.llm), "max_iterations": agent.max_iterations}
    else:
        effect = effect_of_runner(agent.runner, agent.runner_effect)
        data = {"runner": {**class_identity(type(agent.runner)), "effect": effect}}
    if agent.response_format:
        data["response_format"] = agent.response_format
    if agent.on_incomplete is not None:
        data["on_incomplete"] = agent.on_incomplete
    if agent.keep_reasoning:
        data["keep_reasoning"] = True
    if agent.tools:
        data["tools"] = _tools(agent.tools)
    return data


def _task(task: Task) -> dict[str, object]:
    data: dict[str, object] = {} if task.llm is None else {"llm": model_data(task.llm)}
    if task.handler is not None:
        from ensemble_ray.tools.tool import AgentTool

        data["handler"] = _tool(task.handler) if isinstance(task.handler, AgentTool) else identity_of(task.handler)
        if task.effect is not None:
            data["effect"] = task.effect
    if task.output_type is not None:
        data["output_type"] = _schema(cast("Hashable", task.output_type))
        data["max_output_retries"] = task.max_output_retries
    data |= _checks(task)
    if task.attachments:
        data["attachments"] = [each.to_json() for each in task.attachments]
    if task.history:
        data["history"] = [{"role": message.role, "content": message.content} for message in task.history]
    if task.memory_scopes:
        data["memory_scopes"] = [scope.to_data() for scope in task.memory_scopes]
    if task.reflection_config is not None:
        reflection = task.reflection_config
        data["reflection"] = (
            {"strategy": identity_of(reflection.strategy)}
            if reflection.strategy is not None
            else {}
            if reflection.model is None
            else {"llm": model_data(reflection.model)}
        )
    data |= _prompt_fields(task)
    if task.revision_feedback is not None:
        data["revision"] = [task.revision_feedback, task.prior_attempt_output, task.attempt_number]
    return data


def _prompt_fields(task: Task) -> dict[str, object]:
    fields = {"context_budget": task.context_budget, "additional_context": task.additional_context}
    return {name: value for name, value in fields.items() if value is not None}


def _checks(task: Task) -> dict[str, object]:
    data: dict[str, object] = {}
    for name in ("input_guardrails", "output_guardrails"):
        if checks := getattr(task, name):
            data[name] = [identity_of(each) for each in checks]
    for name in ("before_review", "review"):
        if (review := getattr(task, name)) is not None:
            data[name] = review.model_dump(mode="json", exclude_defaults=True)
    return data


def _unit(unit: Loop | Phase | Graph) -> dict[str, object]:
    from ensemble_ray.definition.graph import Graph, GraphEdge
    from ensemble_ray.definition.loop import Loop

    if isinstance(unit, Loop):
        return {} if unit.until is None else {"until": _predicate(unit.until)}
    if isinstance(unit, Graph):
        conditions = {
            str(index): _predicate(edge.condition)
            for index, edge in enumerate(unit.edges)
            if isinstance(edge, GraphEdge) and edge.condition is not None
        }
        return {"edges": conditions} if conditions else {}
    return {}


def _predicate(until: object) -> dict[str, object]:
    from ensemble_ray.definition.loop import Until

    if not isinstance(until, Until):
        return identity_of(until)
    data: dict[str, object] = {"callable": f"Until.{until.kind}"}
    if until.text:
        data |= {"text": until.text, "ignore_case": until.ignore_case}
    if until.condition is not None:
        data["condition"] = identity_of(until.condition)
    return data


# Models.


def model_data(model: object) -> dict[str, object]:
    """A rate limit is omitted: it does not change the model's output."""
    behind = model
    while type(behind).__module__ == _LIMITED_MODELS:
        behind = getattr(behind, "delegate", None)
    data: dict[str, object] = {"class": recorded_name(type(behind))}
    if isinstance(behind, Fallback):
        return {**data, **_chain(behind)}
    name = getattr(behind, "model", None)
    if isinstance(name, str):
        data["model"] = name
    else:
        path = getattr(behind, "_path", None)  # of a local model; a property `path` may read the disk
        if isinstance(path, str):
            data["model"] = Path(path).name
    options = getattr(behind, "request_options", None)
    if isinstance(options, Mapping) and options:
        data["options"] = _options(cast("Mapping[str, object]", options))
    return data


def _chain(chain: Fallback) -> dict[str, object]:
    data: dict[str, object] = {"models": [model_data(model) for model in chain.models]}
    if chain.on != REASONS:
        data["on"] = [recorded_name(each) if isinstance(each, type) else each for each in chain.on]
    if chain.when:
        data["when"] = [rule.to_data() for rule in chain.when]
    return data


def _options(options: Mapping[str, object]) -> dict[str, object]:
    shown: dict[str, object] = {}
    for name, value in options.items():
        if name in _HIDDEN_OPTIONS or name.lower().endswith(_SECRET_ENDINGS):
            continue
        if name in _HASHED_OPTIONS:
            shown[name] = sha256(str(jsonable(value)).encode()).hexdigest()[:_DIGITS]
        else:
            shown[name] = jsonable(value)
    return shown


# Tools.


def _tools(entries: Sequence[object]) -> dict[str, object]:
    # Runs without tools do not need them.
    from ensemble_ray.tools.tool import AgentTool, DynamicToolProvider, marked_functions, tool_mark

    data: dict[str, object] = {}
    for entry in entries:
        if isinstance(entry, AgentTool):
            data[entry.name] = _tool(entry)
        elif isinstance(entry, DynamicToolProvider):
            data[type(entry).__name__] = class_identity(type(entry))
        else:
            is_marked = tool_mark(entry) is not None
            functions = [entry] if is_marked else [getattr(entry, name) for name in marked_functions(type(entry))]
            for function in functions:
                if (mark := tool_mark(function)) is not None:
                    named = {"description": mark.description, "effect": mark.effect}
                    data[mark.name] = {**identity_of(function), **named}
    return data


def _tool(tool: object) -> dict[str, object]:
    from ensemble_ray.tools.registry import ToolPipeline
    from ensemble_ray.tools.tool import AgentTool

    assert isinstance(tool, AgentTool)  # noqa: S101  both callers checked
    data = {**class_identity(type(tool)), "description": tool.description, "effect": tool.effect}
    if isinstance(tool, ToolPipeline):
        data["steps"] = [{"name": step.name, **_tool(step)} for step in tool.steps]
    return data


# Types of outputs.


@lru_cache(maxsize=256)
def _schema(output_type: Hashable) -> object:
    try:
        return pydantic.TypeAdapter(cast("type[object]", output_type)).json_schema()
    except (pydantic.errors.PydanticUserError, TypeError):
        return {"type": full_name(output_type)}


DIRECT = "direct"  # Key of the short-circuit's only task, and of the final reduce (S-MR-160).
FINAL = "final-reduce"
DIGEST_DIGITS = 16  # Hexadecimal digits of an item's hash: short, as there may be millions.
_CALLABLES = (
    "map_task",
    "map_agent",
    "reduce_task",
    "reduce_agent",
    "direct_task",
    "direct_agent",
    "token_estimator",
    "input_estimator",
)
#: Fields that decide the groups and the handling of failures; limits of speed do not.
_RULES = (
    "chunk_size",
    "target_token_budget",
    "context_window_size",
    "budget_ratio",
    "max_reduce_levels",
    "mode",
    "ordered",
    "on_item_error",
    "parallel_error_strategy",
)
_TASK_KEY = re.compile(r"(?:map-(?P<index>\d+)|reduce-(?P<level>\d+)-(?P<number>\d+))")
_ADDRESS = re.compile(r"\bat 0x[0-9A-Fa-f]+")


# Kinds of tasks.


def is_direct(instance: str) -> bool:
    return instance.startswith(f"{DIRECT}#")


def is_of_items(instance: str) -> bool:
    return instance.startswith("map-") or is_direct(instance)


# The first fact.


def map_reduce_run_data(
    definition: object,
    *,
    workflow: str,
    inputs: Mapping[str, object],
    items: Mapping[str, object],
    attached: Mapping[str, Sequence[Attachment]] = MappingProxyType({}),
) -> PlanRecorded:
    """Return the first fact of a dynamic run (S-DUR-36); `items` describes the source for people."""
    rules = {name: jsonable(value) for name in _RULES if (value := getattr(definition, name, None)) is not None}
    described: dict[str, object] = {}
    for name in _CALLABLES:
        factory = getattr(definition, name, None)
        if factory is not None and factory is not str:
            declared = getattr(factory, "declared", None)  # of a factory that is built from data (S-MR-173)
            data = cast("Mapping[str, object]", declared()) if callable(declared) else {}
            described[name] = {**identity_of(factory), **data}
    if (model := getattr(definition, "llm", None)) is not None:
        described["llm"] = model_data(model)
    if (budget := getattr(definition, "context_budget", None)) is not None:
        described["context_budget"] = budget
    if (length := getattr(definition, "max_tool_output_length", -1)) >= 0:
        described["max_tool_output_length"] = length
    if (policy := getattr(definition, "on_incomplete", "warn")) != "warn":
        described["on_incomplete"] = policy
    if isinstance(definition, RunRules):
        described |= _chosen_texts(definition)
    described |= _attached(attached)
    plan: dict[str, object] = {"workflow": workflow, **rules}
    return PlanRecorded(
        plan=plan,
        definition=described,
        workflow=workflow,
        inputs=dict(inputs),
        items=dict(items),
        digest=digest_of({"plan": {**plan, "inputs": dict(inputs)}, "definition": described}),
    )


# Work and its keys (S-MR-160).


def map_key(index: int) -> str:
    return f"map-{index}"


def reduce_key(level: int, number: int) -> str:
    return f"reduce-{level}-{number}"


def position_of(key: str) -> tuple[int, int] | None:
    """Return level and number of a map (level 0, index of its item) or reduce; None for any other key."""
    found = _TASK_KEY.fullmatch(key)
    if found is None:
        return None
    if found["index"] is not None:
        return 0, int(found["index"])
    return int(found["level"]), int(found["number"])


# Items.


class _Unnameable(Exception):  # noqa: N818  no error: the item cannot be compared
    """A value has no text that is equal in other processes."""


def item_digest(item: object) -> str:
    """Return a hash that is equal in all processes; empty if the item cannot be compared (S-MR-162).

    It is of the JSON text. Values that JSON cannot represent are replaced by their `repr`, unless that has an address.
    """
    try:
        try:
            text = _json_of(item)
        except TypeError:  # keys that JSON cannot represent or sort
            text = _json_of(_with_named_keys(item))
    except (_Unnameable, TypeError, ValueError, RecursionError):
        return ""
    return sha256(text.encode()).hexdigest()[:DIGEST_DIGITS]


def _json_of(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_to_named)


def _with_named_keys(value: object) -> object:
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value).items()
        return sorted(
            ([_text_of(key), _with_named_keys(each)] for key, each in entries), key=lambda entry: str(entry[0])
        )
    if isinstance(value, list | tuple):
        return [_with_named_keys(each) for each in cast("Sequence[object]", value)]
    return value


def _to_named(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(_text_of(each) for each in cast("Iterable[object]", value))
    if isinstance(value, Attachment):
        data = value.to_json()
        if value.is_read:  # a file that moved is the same
            data.pop("origin", None)
        return {"": type(value).__qualname__, **data}
    if isinstance(value, pydantic.BaseModel):
        return {"": type(value).__qualname__, **value.__dict__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"": type(value).__qualname__, **fields}
    return _text_of(value)


def _text_of(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:  # user code: an item without a text cannot be compared
        raise _Unnameable from error
    if _ADDRESS.search(text):
        raise _Unnameable
    return text.encode("utf-8", "backslashreplace").decode()
