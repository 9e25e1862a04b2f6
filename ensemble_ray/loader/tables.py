"""The keys of a team file: those of the team, its agents and its tasks. Room: loader.

The names are those of `Ensemble`, `Agent` and `Task`; a test holds the tables to their fields. What a class calls for
as an object (a listener, a handler, a type) is named as `module:attribute` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from pydantic import BaseModel

from ensemble_ray.definition.durability import Durability, OnUnknown
from ensemble_ray.definition.retry_policy import RetryPolicy
from ensemble_ray.definition.workflow import ParallelErrorStrategy, Workflow
from ensemble_ray.errors import ValidationError
from ensemble_ray.events import EVENT_TYPES
from ensemble_ray.loader.document import Entries, Located, Scalar
from ensemble_ray.loader.hierarchy import CONSTRAINTS, POLICIES, STRATEGY
from ensemble_ray.loader.kinds import (
    BAD,
    FLAG,
    NUMBER,
    REFERENCE_PATTERN,
    TEXT,
    WHOLE,
    Field,
    Kind,
    Reading,
    choice,
    given,
    has_method,
    list_of,
    read_fields,
    reference,
)
from ensemble_ray.loader.models import LLM
from ensemble_ray.loader.tools import TOOL
from ensemble_ray.plan.synthesis import AgentSynthesizer
from ensemble_ray.values.messages import Effect, OnIncomplete
from ensemble_ray.values.metrics import CostConfiguration
from ensemble_ray.values.rate_limit import RateLimit
from ensemble_ray.values.trace import CaptureMode

__all__ = ["AGENT", "COST", "LIMIT", "RETRY", "TASK", "TEAM", "Named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The name of an agent or a task, where it is mentioned."""

    name: str
    node: Located
    where: str


def _read_name(reading: Reading, node: Located, where: str) -> object:
    text = TEXT.read(reading, node, where)
    return Named(name=str(text), node=node, where=where) if given(text) else BAD


def _read_inputs(reading: Reading, node: Located, where: str) -> object:
    """Values as they are written: `1.10` stays `1.10`."""
    if not isinstance(node, Entries):
        return reading.refuse(node, where, "must be a mapping of names to values")
    values: dict[str, str] = {}
    for name, entry in node.entries.items():
        if not isinstance(entry.value, Scalar):
            return reading.refuse(entry.value, f"{where}.{name}", "must be a text, a number, true or false")
        values[name] = "" if entry.value.value is None else entry.value.written
    return values


def _read_limit(reading: Reading, node: Located, where: str) -> object:
    values = read_fields(reading, node, LIMIT, where, what="a rate limit")
    if values is None:
        return BAD
    try:
        return RateLimit(**cast("dict[str, Any]", values))
    except ValidationError as error:
        return reading.refuse(node, where, str(error))


def _read_cost(reading: Reading, node: Located, where: str) -> object:
    values = read_fields(reading, node, COST, where, what="a cost configuration")
    if values is None:
        return BAD
    try:
        return CostConfiguration(**cast("dict[str, Any]", values))
    except ValidationError as error:
        return reading.refuse(node, where, str(error))


def _read_retry(reading: Reading, node: Located, where: str) -> object:
    if isinstance(node, Scalar) and node.value is None:
        return None  # no retries
    values = read_fields(reading, node, RETRY, where, what="a retry policy")
    if values is None:
        return BAD
    try:
        return RetryPolicy(**cast("dict[str, Any]", values))
    except ValidationError as error:
        return reading.refuse(node, where, str(error))


def _read_synthesizer(reading: Reading, node: Located, where: str) -> object:
    word = node.value if isinstance(node, Scalar) else None
    if word == "template":
        return AgentSynthesizer.template()
    if word == "llm_based":
        return AgentSynthesizer.llm_based()
    return _SYNTHESIZER.read(reading, node, where)


def _is_handler(found: object) -> bool:
    return callable(found) or callable(getattr(found, "execute", None))


def _is_made_as_handler(found: object) -> bool:
    from ensemble_ray.tools.tool import AgentTool  # nearly all handlers are functions of the user

    return issubclass(found, AgentTool) if isinstance(found, type) else isinstance(found, AgentTool)


def _is_exporter(found: object) -> bool:
    return callable(found) or has_method("export")(found)


def _is_synthesizer(found: object) -> bool:
    return callable(found) or has_method("synthesize")(found)


def _is_type(found: object) -> bool:
    return isinstance(found, type)


def _is_data_type(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, BaseModel)


def _has_all_counters(found: object) -> bool:
    return all(callable(getattr(found, name, None)) for name in _COUNTERS)


#: Types of the standard library that an answer may have; making one of a model's text does nothing else.
_DATA_TYPES = frozenset(
    {
        *("builtins:str", "builtins:dict", "datetime:date", "datetime:datetime", "datetime:time"),
        *("datetime:timedelta", "decimal:Decimal", "uuid:UUID"),
    }
)
_COUNTERS = ("increment_success", "increment_failure", "increment_error", "record_duration")

#: Keys of a rate limit.
LIMIT: Mapping[str, Field] = {
    "requests": Field(kind=WHOLE, is_required=True),
    "period": Field(kind=NUMBER, is_required=True, doc="Length of the period, seconds."),
}
#: Keys of a cost configuration.
COST: Mapping[str, Field] = {
    "input_token_rate": Field(kind=NUMBER, is_required=True),
    "output_token_rate": Field(kind=NUMBER, is_required=True),
    "currency": Field(kind=TEXT, doc="Shown behind amounts; USD unless told."),
}

#: Keys of a retry policy.
RETRY: Mapping[str, Field] = {
    "max_attempts": Field(kind=WHOLE, doc="Times that a model is asked for one answer; 1: no retries."),
    "first_delay": Field(kind=NUMBER, doc="Wait before the second attempt, seconds; it doubles from there."),
    "max_delay": Field(kind=NUMBER, doc="The longest wait, seconds."),
    "max_wait": Field(kind=NUMBER, doc="All waits for one answer, seconds."),
}

_NAME = Kind(read=_read_name, schema=TEXT.schema)
_LIMIT = Kind(read=_read_limit, schema={"$ref": "#/definitions/rate_limit"})
_TOOLS = list_of(TOOL)
_GUARDRAILS = list_of(reference("a guardrail: a callable"))
_SYNTHESIZER = reference(
    "a callable or an object with 'synthesize'",
    makes=True,
    accepts=_is_synthesizer,
    is_made_for_it=has_method("synthesize"),
)
_METRICS = reference("tool metrics", makes=True, accepts=lambda _: True, is_made_for_it=_has_all_counters)
_LISTENER = reference(
    "a listener",
    makes=True,
    accepts=lambda found: any(hasattr(found, method) for method in EVENT_TYPES),
    is_made_for_it=has_method(*EVENT_TYPES),
)
_HANDLER = reference("a function or a tool", makes=True, accepts=_is_handler, is_made_for_it=_is_made_as_handler)
_OUTPUT_TYPE = reference("a type", accepts=_is_type, is_made_for_it=_is_data_type, standard=_DATA_TYPES)
_EXPORTER = reference(
    "a callable or an object with 'export'", makes=True, accepts=_is_exporter, is_made_for_it=has_method("export")
)
_CALLBACKS = list_of(reference("a callable"), or_one=True)
_TOOLS_DOC = "Tools it may call: a built-in one by name, or module:attribute; parameters as `name: {...}`."
_ON_INCOMPLETE = choice(get_args(OnIncomplete), "word")
_INCOMPLETE_DOC = (
    "What becomes of an answer that was cut off or is empty: `warn`, unless told: it is used, with a warning; `fail`: the "
    "task fails; `retry`: the model is asked again, twice at most."
)
_LIMITED = "{what}, as requests per period of seconds."

#: Keys of an agent.
AGENT: Mapping[str, Field] = {
    "role": Field(kind=TEXT, doc="Who it is; shown in prompts, events and traces. Default: its name."),
    "goal": Field(kind=TEXT, is_required=True),
    "background": Field(kind=TEXT),
    "tools": Field(kind=_TOOLS, doc=_TOOLS_DOC),
    "llm": Field(kind=LLM, doc="Its model; default: the team's."),
    "stream": Field(kind=FLAG, doc="Whether answers stream; default: as the task, then the team say."),
    "verbose": Field(kind=FLAG),
    "max_iterations": Field(kind=WHOLE),
    "response_format": Field(kind=TEXT),
    "on_incomplete": Field(kind=_ON_INCOMPLETE, doc=f"{_INCOMPLETE_DOC} Default: as the team says."),
    "allow_delegation": Field(kind=FLAG),
    "rate_limit": Field(kind=_LIMIT, doc=_LIMITED.format(what="Limit of this agent's model calls, kept across runs")),
    "max_concurrency": Field(kind=WHOLE, doc="Tasks it works on at the same time in one process; default: no cap."),
    "replicas": Field(kind=WHOLE),
    "isolation": Field(
        kind=choice(("process", "shared"), "isolation"),
        doc="`process`: always a process of its own on Ray; `shared`: never one; default: the runtime decides.",
    ),
}
#: Keys of a task.
TASK: Mapping[str, Field] = {
    "description": Field(kind=TEXT, is_required=True),
    "expected_output": Field(kind=TEXT, doc="What the result looks like; a template as well. May be left out."),
    "agent": Field(kind=_NAME, doc="Name of the agent that does it; default: an agent is made for the run."),
    "context": Field(kind=list_of(_NAME), doc="Names of the tasks whose outputs it is given, in this order."),
    "output_type": Field(kind=_OUTPUT_TYPE, doc="Type of the answer, as module:Class."),
    "max_output_retries": Field(kind=WHOLE),
    "input_guardrails": Field(kind=_GUARDRAILS, doc="Asked before anything else, each as module:function."),
    "output_guardrails": Field(kind=_GUARDRAILS, doc="Asked about the answer, each as module:function."),
    "llm": Field(kind=LLM),
    "stream": Field(kind=FLAG, doc="Whether the answer streams; default: as the team says."),
    "tools": Field(kind=_TOOLS, doc=_TOOLS_DOC),
    "max_iterations": Field(kind=WHOLE, doc="Tool requests allowed to the agent that is made for it."),
    "rate_limit": Field(kind=_LIMIT, doc=_LIMITED.format(what="Limit of its model calls, when it names no agent")),
    "handler": Field(
        kind=_HANDLER,
        doc="Does the task without a model, as module:function.",
    ),
    "effect": Field(
        kind=choice(get_args(Effect), "effect"),
        doc="What the handler does to the world; `none`: it only reads; `idempotent`: it may be repeated after a crash; "
        "`once`, unless told: it must not be done twice.",
    ),
}
#: Keys of the whole file.
TEAM: Mapping[str, Field] = {
    "workflow": Field(
        kind=choice([each.value for each in Workflow], "workflow"),
        doc="`sequential`, in list order, unless told; `parallel`: each task as soon as its context is there; "
        "`hierarchical`: a manager hands the tasks to the agents.",
    ),
    "verbose": Field(kind=FLAG),
    "llm": Field(kind=LLM, doc="Model of the agents that name none, and of those that are made for tasks."),
    "stream": Field(kind=FLAG, doc="Whether answers stream where neither agent nor task say otherwise."),
    "agent_synthesizer": Field(
        kind=Kind(
            read=_read_synthesizer,
            schema={
                "anyOf": [{"enum": ["template", "llm_based"]}, {"type": "string", "pattern": REFERENCE_PATTERN}],
            },
        ),
        doc="Makes agents for tasks that name none: `template`, `llm_based`, or module:attribute.",
    ),
    "inputs": Field(
        kind=Kind(
            read=_read_inputs,
            schema={
                "type": "object",
                "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
            },
        )
    ),
    "parallel_error_strategy": Field(kind=choice([each.value for each in ParallelErrorStrategy], "strategy")),
    "max_parallel_tasks": Field(kind=WHOLE, doc="Tasks that may run at the same time; default: no cap."),
    "max_tokens": Field(
        kind=WHOLE,
        doc="Tokens of input and output together that a run may spend; then it ends early, with what it has.",
    ),
    "max_cost": Field(
        kind=NUMBER, doc="Money that a run may spend, in the currency of `cost_configuration`; default: no limit."
    ),
    "listeners": Field(
        kind=list_of(_LISTENER),
        doc="Objects or classes with methods such as `on_task_start`, each as module:attribute.",
    ),
    "rate_limit": Field(kind=_LIMIT, doc=_LIMITED.format(what="Limit of the calls of `llm`; one bucket per run")),
    "max_tool_output_length": Field(kind=WHOLE),
    "tool_log_truncate_length": Field(kind=WHOLE),
    "tool_metrics": Field(kind=_METRICS, doc="Counts tool calls for a monitoring system, as module:attribute."),
    "capture_mode": Field(
        kind=choice([each.value for each in CaptureMode], "capture mode"), doc="How much the trace keeps."
    ),
    "trace_exporter": Field(
        kind=_EXPORTER,
        doc="Takes the trace of each successful run, as module:attribute.",
    ),
    "cost_configuration": Field(kind=Kind(read=_read_cost, schema={"$ref": "#/definitions/cost_configuration"})),
    "durability": Field(
        kind=choice([each.value for each in Durability], "durability"),
        doc="`effects`: nothing recorded is repeated after a crash; `run`: written within 200 ms; `off`: not at all.",
    ),
    "retry": Field(
        kind=Kind(read=_read_retry, schema={"anyOf": [{"$ref": "#/definitions/retry"}, {"type": "null"}]}),
        doc="How patient a run is with model calls that fail by the provider's fault; null: not at all.",
    ),
    "on_incomplete": Field(kind=_ON_INCOMPLETE, doc=f"{_INCOMPLETE_DOC} An agent's own word wins."),
    "on_unknown": Field(
        kind=choice([each.value for each in OnUnknown], "word"),
        doc="What becomes of a tool call that was begun before a crash and has no result.",
    ),
    "manager_llm": Field(kind=LLM, doc="Model of a hierarchical team's manager; default: the first agent's."),
    "manager_max_iterations": Field(kind=WHOLE),
    "manager_prompt_strategy": Field(kind=STRATEGY, doc="Writes the manager's prompts, as module:attribute."),
    "hierarchical_constraints": Field(kind=CONSTRAINTS),
    "enforce_required": Field(
        kind=choice(("remind", "fail"), "word"),
        doc="`remind`: a manager that wants to finish without a required worker is told so once; `fail`: it is not.",
    ),
    "manager_stall_turns": Field(kind=WHOLE),
    "max_delegation_depth": Field(kind=WHOLE),
    "delegation_policies": Field(
        kind=POLICIES, doc="Asked in order about each delegation, each as module:attribute: allow, reject or change it."
    ),
    "delegation_timeout": Field(kind=NUMBER, doc="Longest time of one delegation, seconds; default: no limit."),
    "delegation_retries": Field(kind=WHOLE),
    **{
        method: Field(kind=_CALLBACKS, doc="Called with each event of that kind; module:function, or several.")
        for method in EVENT_TYPES
    },
}
