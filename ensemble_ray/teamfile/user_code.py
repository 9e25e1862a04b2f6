"""The places of a team file that accept `module:attribute`: listeners, handlers, guardrails, types.

For each place, `accepts` checks the object and `is_intended` checks what an installed package may provide (S-SEC-71, S-SEC-72).
"""

from __future__ import annotations

from typing import Annotated, Literal, NewType, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, PlainValidator, TypeAdapter, ValidationInfo
from typing_extensions import TypeAliasType

from ensemble_ray.definition.ensemble import ManagerPromptStrategy
from ensemble_ray.events import EVENT_TYPES
from ensemble_ray.plan.synthesis import AgentSynthesizer
from ensemble_ray.ports import Dashboard
from ensemble_ray.teamfile.document import Items
from ensemble_ray.teamfile.section import ReferenceText, has_method, reference, text_in
from ensemble_ray.values.messages import Effect


def _is_intended_as_handler(found: object) -> bool:
    from ensemble_ray.tools.tool import AgentTool  # slow to import, and most handlers are functions

    return issubclass(found, AgentTool) if isinstance(found, type) else isinstance(found, AgentTool)


def _is_intended_as_strategy(found: object) -> bool:
    return has_method("build_system_prompt")(found) and has_method("build_user_prompt")(found)


def _is_intended_as_runner(found: object) -> bool:
    # Many foreign classes have a `run`; a class with an effect is made to be a runner.
    return has_method("run")(found) and getattr(found, "effect", None) in get_args(Effect)


def _is_data_type(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, BaseModel)


def _is_intended_as_metrics(found: object) -> bool:
    return all(has_method(name)(found) for name in _COUNTERS)


def object_with(method: str) -> PlainValidator:
    """Read a callable, or an object or class with this method."""
    is_intended = has_method(method)
    return reference(
        f"a callable or an object with '{method}'",
        makes=True,
        accepts=lambda found: callable(found) or is_intended(found),
        is_intended=is_intended,
    )


def _read_synthesizer(node: object, info: ValidationInfo) -> object:
    match text_in(node):
        case "template":
            return AgentSynthesizer.template()
        case "llm_based":
            return AgentSynthesizer.llm_based()
        case _:
            return _SYNTHESIZER.validate_python(node, context=info.context)


def _read_output_type(node: object, info: ValidationInfo) -> object:
    plain = _PLAIN_TYPES.get(text_in(node) or "")
    return _OUTPUT_TYPE.validate_python(node, context=info.context) if plain is None else plain


def _is_type(found: object) -> bool:
    return isinstance(found, type | NewType | TypeAliasType) or get_origin(found) is not None


def _list_one(node: object) -> object:
    return node if isinstance(node, Items) else [node]


#: Types of the standard library that an answer may have. Constructing them from a model's text has no side effects.
_DATA_TYPES = frozenset(
    {
        *("builtins:str", "builtins:dict", "builtins:int", "builtins:float", "builtins:bool", "builtins:list"),
        *("datetime:date", "datetime:datetime", "datetime:time", "datetime:timedelta"),
        *("decimal:Decimal", "uuid:UUID"),
    }
)
_PLAIN_TYPES = {"str": str, "int": int, "float": float, "bool": bool, "list": list, "dict": dict}
_COUNTERS = ("increment_success", "increment_failure", "increment_error", "record_duration")

CallableName = Annotated[object, reference("a callable")]
CallbackNames = Annotated[
    list[CallableName], BeforeValidator(_list_one, json_schema_input_type=ReferenceText | list[ReferenceText])
]
GuardrailNames = list[Annotated[object, reference("a guardrail: a callable")]]
_SYNTHESIZER = TypeAdapter[object](Annotated[object, object_with("synthesize")])
SynthesizerName = Annotated[
    object,
    PlainValidator(_read_synthesizer, json_schema_input_type=Literal["template", "llm_based"] | ReferenceText),
]
MetricsName = Annotated[
    object, reference("tool metrics", makes=True, accepts=lambda _: True, is_intended=_is_intended_as_metrics)
]
ListenerName = Annotated[
    object,
    reference(
        "a listener",
        makes=True,
        accepts=lambda found: any(hasattr(found, method) for method in EVENT_TYPES),
        is_intended=has_method(*EVENT_TYPES),
    ),
]
HandlerName = Annotated[
    object,
    reference(
        "a function or a tool",
        makes=True,
        accepts=lambda found: callable(found) or has_method("execute")(found),
        is_intended=_is_intended_as_handler,
    ),
]
_OUTPUT_TYPE = TypeAdapter[object](
    Annotated[object, reference("a type", accepts=_is_type, is_intended=_is_data_type, standard=_DATA_TYPES)]
)
OutputTypeName = Annotated[
    object,
    PlainValidator(
        _read_output_type,
        json_schema_input_type=Literal["str", "int", "float", "bool", "list", "dict"] | ReferenceText,
    ),
]
DashboardName = Annotated[
    object,
    reference(
        "a WebDashboard",
        accepts=lambda found: isinstance(found, Dashboard),
        is_intended=lambda found: isinstance(found, Dashboard),
    ),
]
StrategyName = Annotated[
    object,
    reference(
        "an object with 'build_system_prompt' and 'build_user_prompt'",
        makes=True,
        accepts=lambda found: isinstance(found, ManagerPromptStrategy),
        is_intended=_is_intended_as_strategy,
    ),
]
RunnerName = Annotated[
    object, reference("an object with 'run'", makes=True, accepts=has_method("run"), is_intended=_is_intended_as_runner)
]
