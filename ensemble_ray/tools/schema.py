"""Package tools: JSON schemas and argument validators of typed functions and models.

In: a function's signature, or a pydantic model. Out: what the model reads (`parameters`) and what reads its answer.
Built once per function and kept beside it, never on it, so that a function still travels light.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, cast, get_type_hints
from weakref import WeakKeyDictionary

import pydantic
from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticSerializationError, to_jsonable_python

from ensemble_ray.errors import ValidationError

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


#: How deep values are compared with their schema.
_DEEPEST = 40
#: Changes that are named; more are made, and not named.
_MOST_REPAIRS = 20
_LONGEST_NAME = 60
_WHOLE = "arguments"
_FENCE = "```"
#: Texts, also one without an end, are stepped over; what is left are commas before a bracket that closes.
_SPARE_COMMA = re.compile(r'("(?:[^"\\]|\\.)*+(?:"|\\?\Z))|,(?=\s*+[}\]])', re.DOTALL)
_lenient = json.JSONDecoder(strict=False)


class RepairedArguments(NamedTuple):
    """Arguments as JSON text, and what was repaired in them, one short text each."""

    text: str
    repairs: tuple[str, ...]


def repair_arguments(text: str, schema: Mapping[str, object]) -> RepairedArguments | None:
    """Return arguments as the model meant them; None: there is nothing to repair, or no sure way to do it.

    Args:
        text: What the model wrote.
        schema: JSON schema of the parameters; its keywords about types, properties and required ones are read.
    """
    repair = _Repair(schema)
    try:
        arguments = repair.read_object(text)
        if arguments is None:
            return None
        fitting = repair.fit(arguments, schema, "", 0)
        if not repair.changes:
            return None
        return RepairedArguments(json.dumps(fitting), tuple(list(repair.changes)[:_MOST_REPAIRS]))
    except RecursionError:  # nested beyond reason
        return None


class _Repair:
    """Reads one text, and notes what it changes."""

    def __init__(self, schema: Mapping[str, object]) -> None:
        self._definitions = schema.get("$defs")
        self.changes: dict[str, None] = {}

    def read_object(self, text: str) -> dict[str, object] | None:
        """Return the object that a text is, or is meant to be."""
        value = self._decode(text, _WHOLE)
        if value is None and text.strip() == "null":
            value = {}
            self._note(_WHOLE, "null")
        if isinstance(value, str):
            value = self._decode(value, _WHOLE)
            self._note(_WHOLE, "JSON in a string")
        return cast("dict[str, object]", value) if isinstance(value, dict) else None

    def fit(self, value: object, schema: object, where: str, depth: int) -> object:
        """Return a value such that it fits its schema as far as types go."""
        if depth > _DEEPEST or not isinstance(schema, Mapping):
            return value
        schemas = list(self._alternatives(cast("Mapping[str, object]", schema), 0))
        kinds = _kinds_of(schemas)
        if isinstance(value, str) and kinds and "string" not in kinds:
            inner = self._decode(value, where, is_whole=False)
            if inner is not _NO_JSON and not isinstance(inner, str) and kinds & _kind_of(inner):
                self._note(where, "JSON in a string")
                value = inner
        matching = [each for each in schemas if (_kinds_of([each]) or set()) & _kind_of(value)]
        if len(matching) != 1:
            return value
        (schema,) = matching
        if isinstance(value, list):
            return [self.fit(each, schema.get("items"), where, depth + 1) for each in cast("list[object]", value)]
        if isinstance(value, dict):
            return self._fit_object(cast("dict[str, object]", value), schema, where, depth)
        return value

    def _fit_object(
        self, value: dict[str, object], schema: Mapping[str, object], where: str, depth: int
    ) -> dict[str, object]:
        named = schema.get("properties")
        properties = cast("Mapping[str, object]", named) if isinstance(named, Mapping) else {}
        required = schema.get("required")
        needed = cast("list[object]", required) if isinstance(required, list) else []
        fitting: dict[str, object] = {}
        for name, each in value.items():
            inner = properties.get(name, schema.get("additionalProperties"))
            place = f"{where}.{name}" if where else name
            if each is None and name in properties and name not in needed and not self._may_be_null(inner):
                self._note(place, "null for an argument that can be left out")
            else:
                fitting[name] = self.fit(each, inner, place, depth + 1)
        return fitting

    def _may_be_null(self, schema: object) -> bool:
        if not isinstance(schema, Mapping):
            return True
        kinds = _kinds_of(list(self._alternatives(cast("Mapping[str, object]", schema), 0)))
        return kinds is None or "null" in kinds

    def _alternatives(self, schema: Mapping[str, object], depth: int) -> Iterable[Mapping[str, object]]:
        """Return the schemas of which a value fits one; references are followed."""
        reference = schema.get("$ref")
        if isinstance(reference, str) and isinstance(self._definitions, Mapping):
            named = cast("Mapping[str, object]", self._definitions).get(reference.rpartition("/")[2])
            schema = cast("Mapping[str, object]", named) if isinstance(named, Mapping) else {}
        choices = schema.get("anyOf", schema.get("oneOf"))
        if not isinstance(choices, list) or depth > _DEEPEST:
            yield schema
            return
        for each in cast("list[object]", choices):
            if isinstance(each, Mapping):
                yield from self._alternatives(cast("Mapping[str, object]", each), depth + 1)
            else:
                yield {}

    def _decode(self, text: str, where: str, *, is_whole: bool = True) -> object:
        """Return the JSON value of a text, around which a model may have written more."""
        try:
            return cast("object", json.loads(text))
        except ValueError:
            pass
        body, notes = text.strip(), dict[str, None]()
        if body.startswith(_FENCE) and body.endswith(_FENCE) and "\n" in body:
            body = body.partition("\n")[2].removesuffix(_FENCE).strip()
            notes["a code fence"] = None
        for repaired in (body, _SPARE_COMMA.sub(r"\1", body)):
            try:
                value, end = _lenient.raw_decode(repaired)
            except ValueError:
                continue
            rest = repaired[end:].strip()
            if not isinstance(value, dict | list) or any(each in rest for each in "{[") or (rest and not is_whole):
                return _NO_JSON
            if len(repaired) < len(body):
                notes["a comma too many"] = None
            if rest:
                notes["text after it"] = None
            for note in notes or {"raw control characters": None}:
                self._note(where, note)
            return cast("object", value)
        return _NO_JSON

    def _note(self, where: str, what: str) -> None:
        self.changes[f"{where[:_LONGEST_NAME] or _WHOLE}: {what}"] = None


#: What a text is that is no JSON; None is.
_NO_JSON = object()


def _kinds_of(schemas: Iterable[Mapping[str, object]]) -> set[str] | None:
    """Return the types that schemas allow together; None: any."""
    kinds: set[str] = set()
    for schema in schemas:
        named = schema.get("type")
        listed = cast("list[object]", named) if isinstance(named, list) else [named]
        if not listed or not all(isinstance(each, str) for each in listed):
            return None
        kinds.update(cast("list[str]", listed))
        if schema.get("nullable") is True:
            kinds.add("null")
    return kinds


def _kind_of(value: object) -> set[str]:
    """Return the types that a value is of."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}
