"""Package tools: JSON schemas and argument validators of typed functions and models.

In: a function's signature, or a pydantic model. Out: what the model reads (`parameters`) and what reads its answer.
Built once per function and kept beside it, never on it, so that a function still travels light.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, cast, get_type_hints
from weakref import WeakKeyDictionary

import pydantic
from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticSerializationError, to_jsonable_python

from ensemble_ray.errors import ValidationError

__all__ = [
    "TEXT_INPUT",
    "ArgumentError",
    "Signature",
    "explain_arguments",
    "model_parameters",
    "parameter_types",
    "signature_of",
]

#: Parameters of a plain AgentTool (S-TOOL-20).
TEXT_INPUT: Mapping[str, object] = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The input to pass to the tool"}},
    "required": ["input"],
}

#: Surplus arguments are ignored (S-TOOL-13). A number where text is wanted is what small models often send.
_ARGUMENTS = ConfigDict(extra="ignore", coerce_numbers_to_str=True, arbitrary_types_allowed=True)


class ArgumentError(ValueError):
    """The model's arguments do not fit; the text tells it what to write instead."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a function as JSON schema, and the reader of a model's arguments for it."""

    parameters: Mapping[str, object]
    #: validates the arguments; its fields are aliased to the function's parameter names
    model: type[BaseModel]
    #: field of the model -> parameter name
    names: Mapping[str, str]
    #: parameters that cannot be given by name, with what to pass when the model left them out
    positional: Mapping[str, object]

    def read(self, arguments: str) -> tuple[tuple[object, ...], dict[str, object]]:
        """Positional and named arguments for the function; what the model left out is left to its defaults.

        Raises:
            ArgumentError: the text is no JSON object, or its values do not fit (S-TOOL-13).
        """
        text = arguments if arguments.strip() not in {"", "null"} else "{}"
        try:
            filled = self.model.model_validate_json(text)
        except pydantic.ValidationError as error:
            raise ArgumentError(f"invalid arguments: {explain_arguments(error)}") from None
        values = filled.__dict__
        named = {self.names[key]: values[key] for key in filled.model_fields_set}
        if not self.positional:
            return (), named
        return tuple(named.pop(name, default) for name, default in self.positional.items()), named


def explain_arguments(error: pydantic.ValidationError) -> str:
    """Say what was wrong with which argument, one clause each."""
    parts: list[str] = []
    for found in error.errors(include_url=False, include_context=False, include_input=False):
        where = ".".join(str(part) for part in found["loc"])
        parts.append(f"'{where}': {found['msg']}" if where else found["msg"])
    return "; ".join(parts)


#: Function -> (plain, bound) signature. Weak: a tool made for one run goes with it.
_signatures: WeakKeyDictionary[object, dict[bool, Signature]] = WeakKeyDictionary()


def signature_of(function: Callable[..., object], *, tool_name: str) -> Signature:
    """Return the signature of a function or bound method; built at the first call.

    Raises:
        ValidationError: a parameter's type is unknown or has no JSON form.
    """
    bound = inspect.ismethod(function)
    key = cast("object", function.__func__) if inspect.ismethod(function) else function
    try:
        kept = _signatures.setdefault(key, {})
    except TypeError:  # a callable object that cannot be referred to weakly, or has no hash
        kept = {}
    if bound not in kept:
        kept[bound] = _build(function, tool_name)
    return kept[bound]


def _build(function: Callable[..., object], tool_name: str) -> Signature:
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    ]
    types = _types_of(function, tool_name)
    words = _words_of(function)
    fields: dict[str, Any] = {}
    for index, parameter in enumerate(parameters):
        annotation = types.get(parameter.name, str)
        if parameter.default is None:
            annotation = _or_none(annotation)
        info = _field(parameter, described=_is_described(annotation), words=words.get(parameter.name))
        # a neutral field name, since a parameter may be called like a method of BaseModel, or begin with _
        fields[f"p{index}"] = (Annotated[annotation, info], _left_out(parameter))
    try:
        model = create_model("Arguments", __config__=_ARGUMENTS, **fields)
        schema = model_parameters(model)
    except (pydantic.errors.PydanticUserError, pydantic.errors.PydanticUndefinedAnnotation, TypeError) as error:
        raise ValidationError(f"Tool '{tool_name}': its parameters have no JSON schema: {error}") from error
    return Signature(
        parameters=schema,
        model=model,
        names={f"p{index}": parameter.name for index, parameter in enumerate(parameters)},
        positional={
            parameter.name: None if parameter.default is parameter.empty else parameter.default
            for parameter in parameters
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY
        },
    )


def parameter_types(function: Callable[..., object], around: Mapping[str, object]) -> dict[str, object]:
    """Types of the annotated parameters, strings resolved; the return type does not matter and may be unknown.

    Args:
        function: The function, not a bound method.
        around: Names in reach besides the function's globals.

    Raises:
        NameError: an annotation names what is not there; other errors are those of evaluating it.
    """
    raw = cast("Mapping[str, object]", getattr(function, "__annotations__", {}))
    wanted = {name: value for name, value in raw.items() if name != "return"}
    if not wanted:
        return {}
    holder = type("Parameters", (), {"__annotations__": wanted})
    return get_type_hints(holder, getattr(function, "__globals__", {}), dict(around), include_extras=True)


def _types_of(function: Callable[..., object], tool_name: str) -> dict[str, object]:
    inner = inspect.unwrap(cast("Callable[..., object]", getattr(function, "__func__", function)))
    if not hasattr(inner, "__annotations__"):
        inner = cast("Callable[..., object]", type(inner).__call__)
    try:
        return parameter_types(inner, inspect.getclosurevars(inner).nonlocals if inspect.isfunction(inner) else {})
    except Exception as error:
        raise ValidationError(
            f"Tool '{tool_name}': cannot resolve the annotations of its parameters: {error}"
        ) from error


def _words_of(function: Callable[..., object]) -> dict[str, str]:
    """Parameter descriptions in the docstring, whichever of the common styles it is written in."""
    doc = inspect.getdoc(function)
    if not doc or "\n" not in doc.strip():
        return {}
    from docstring_parser import ParseError, parse  # only tools with a longer docstring pay for it

    try:
        parsed = parse(doc)
    except ParseError:
        return {}
    return {entry.arg_name: " ".join((entry.description or "").split()) for entry in parsed.params}


def _or_none(annotation: object) -> object:
    """Return the same type with None: a parameter whose default is None takes it, whatever its annotation says."""
    if annotation is Any:
        return annotation
    metadata = cast("tuple[object, ...]", getattr(annotation, "__metadata__", ()))
    if metadata:
        inner = cast("Any", annotation).__origin__
        return cast("Any", Annotated)[(inner | None, *metadata)]
    return cast("object", cast("Any", annotation) | None)


def _is_described(annotation: object) -> bool:
    metadata = cast("tuple[object, ...]", getattr(annotation, "__metadata__", ()))
    return any(isinstance(item, FieldInfo) and item.description for item in metadata)


def _field(parameter: inspect.Parameter, *, described: bool, words: str | None) -> FieldInfo:
    extra: dict[str, Any] = {"alias": parameter.name}
    if words and not described:
        extra["description"] = words
    if parameter.default is not parameter.empty:
        with contextlib.suppress(PydanticSerializationError, ValueError):  # what JSON cannot say is not told
            extra["json_schema_extra"] = {"default": to_jsonable_python(parameter.default)}
    return cast("FieldInfo", Field(**extra))


def _left_out(parameter: inspect.Parameter) -> object:
    """Make a field required, or optional without a default: the function's default applies when it is called."""
    return ... if parameter.default is parameter.empty else Field(default_factory=_nothing)


def _nothing() -> None:
    return None


class _Parameters(GenerateJsonSchema):
    """Silent about defaults that JSON cannot say; they are left out of the schema."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  pydantic's own declaration


def model_parameters(model: type[BaseModel]) -> JsonSchemaValue:
    """Return the JSON schema of a model's fields as a model reads it: no titles, nested types spelled out in place."""
    schema = model.model_json_schema(by_alias=True, schema_generator=_Parameters)
    definitions = cast("dict[str, JsonSchemaValue]", schema.pop("$defs", {}))
    root = _name_of(schema)
    if root is not None:  # a model that contains itself
        schema = definitions[root]
    inliner = _Inliner(definitions)
    spelled = cast("JsonSchemaValue", inliner.spell(schema))
    spelled.setdefault("properties", {})
    if inliner.recursive:
        spelled["$defs"] = {name: inliner.spell(definitions[name]) for name in sorted(inliner.recursive)}
    return spelled


#: Keys of a schema whose values map names to schemas, and keys whose values are data.
_MAPS = frozenset({"properties", "patternProperties", "dependentSchemas"})
_DATA = frozenset({"default", "const", "enum", "examples", "required"})
#: A title repeats the name; a discriminator points at definitions that are spelled out.
_DROPPED = frozenset({"title", "discriminator"})
_PREFIX = "#/$defs/"


class _Inliner:
    """Replaces references by what they name; a type that contains itself stays a reference."""

    def __init__(self, definitions: Mapping[str, JsonSchemaValue]) -> None:
        self._definitions = definitions
        self.recursive = {name for name in definitions if name in self._reachable(name)}

    def spell(self, node: object) -> object:
        """Return the node with its references spelled out."""
        if isinstance(node, list):
            return [self.spell(item) for item in cast("list[object]", node)]
        if not isinstance(node, dict):
            return node
        schema = cast("dict[str, object]", node)
        spelled = {key: self._value(key, value) for key, value in schema.items() if key not in _DROPPED}
        name = _name_of(schema)
        if name is None or name in self.recursive:
            return spelled
        del spelled["$ref"]
        return {**cast("dict[str, object]", self.spell(self._definitions[name])), **spelled}

    def _value(self, key: str, value: object) -> object:
        if key in _DATA:
            return value
        if key in _MAPS:
            return {name: self.spell(inner) for name, inner in cast("dict[str, object]", value).items()}
        return self.spell(value)

    def _reachable(self, start: str) -> set[str]:
        """Names of the definitions that a definition mentions, directly or not."""
        seen: set[str] = set()
        ahead: list[object] = [self._definitions[start]]
        while ahead:
            node = ahead.pop()
            if isinstance(node, list):
                ahead.extend(cast("list[object]", node))
            elif isinstance(node, dict):
                schema = cast("dict[str, object]", node)
                ahead.extend(schema.values())
                name = _name_of(schema)
                if name is not None and name not in seen:
                    seen.add(name)
                    ahead.append(self._definitions[name])
        return seen


def _name_of(schema: Mapping[str, object]) -> str | None:
    reference = schema.get("$ref")
    return reference.removeprefix(_PREFIX) if isinstance(reference, str) and reference.startswith(_PREFIX) else None
