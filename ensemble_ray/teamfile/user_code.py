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
from ensemble_ray.teamfile.section import ReferenceText, has_method, has_methods, reference, text_in
from ensemble_ray.values.messages import Effect


def object_with(method: str) -> PlainValidator:
    """Read a callable, or an object or class with this method."""
    is_intended = has_method(method)
    return reference(
        f"a callable or an object with '{method}'",
        makes=True,
        accepts=lambda found: callable(found) or is_intended(found),
        is_intended=is_intended,
    )


CallableName = Annotated[object, reference("a callable")]
CallbackNames = Annotated[
    list[CallableName],
    BeforeValidator(
        lambda node: node if isinstance(node, Items) else [node],
        json_schema_input_type=ReferenceText | list[ReferenceText],
    ),
]
GuardrailNames = list[Annotated[object, reference("a guardrail: a callable")]]
MetricsName = Annotated[
    object,
    reference(
        "tool metrics",
        makes=True,
        accepts=lambda _: True,
        is_intended=has_methods("increment_success", "increment_failure", "increment_error", "record_duration"),
    ),
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
        is_intended=has_methods("build_system_prompt", "build_user_prompt"),
    ),
]
RunnerName = Annotated[
    object,
    reference(
        "an object with 'run'",
        makes=True,
        accepts=has_method("run"),
        # Many foreign classes have a `run`; a class with an effect is made to be a runner.
        is_intended=lambda found: has_method("run")(found) and getattr(found, "effect", None) in get_args(Effect),
    ),
]


def _is_tool(found: object) -> bool:
    from ensemble_ray.tools.tool import AgentTool  # slow to import, and most handlers are functions

    return issubclass(found, AgentTool) if isinstance(found, type) else isinstance(found, AgentTool)


HandlerName = Annotated[
    object,
    reference(
        "a function or a tool",
        makes=True,
        accepts=lambda found: callable(found) or has_method("execute")(found),
        is_intended=_is_tool,
    ),
]

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
    object,
    PlainValidator(_read_synthesizer, json_schema_input_type=Literal["template", "llm_based"] | ReferenceText),
]

_PLAIN_TYPES = {"str": str, "int": int, "float": float, "bool": bool, "list": list, "dict": dict}
#: Types of the standard library that an answer may have. Constructing them from a model's text has no side effects.
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


def _read_output_type(node: object, info: ValidationInfo) -> object:
    plain = _PLAIN_TYPES.get(text_in(node) or "")
    return _OUTPUT_TYPE.validate_python(node, context=info.context) if plain is None else plain


OutputTypeName = Annotated[
    object,
    PlainValidator(
        _read_output_type,
        json_schema_input_type=Literal["str", "int", "float", "bool", "list", "dict"] | ReferenceText,
    ),
]
