"""JSON schemas of typed functions and models, and the arguments that a model wrote for them."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, cast, get_origin, get_type_hints
from weakref import WeakKeyDictionary

import pydantic
from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticSerializationError, to_jsonable_python

from ensemble_ray.errors import ValidationError

TEXT_INPUT: Mapping[str, object] = {  # of a plain AgentTool (S-TOOL-20)
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The input to pass to the tool"}},
    "required": ["input"],
}

#: Unknown arguments are ignored (S-TOOL-13). Small models often write a number for a text.
_ARGUMENTS = ConfigDict(extra="ignore", coerce_numbers_to_str=True, arbitrary_types_allowed=True)


class ArgumentError(ValueError):
    """The message explains to the model how to correct its arguments."""


class Signature(Struct, frozen=True):
    parameters: Mapping[str, object]
    model: type[BaseModel]  # the aliases of its fields are the parameter names
    names: Mapping[str, str]  # field of the model -> parameter name
    positional: Mapping[str, object]  # positional-only parameters and their defaults
    context: str = ""  # the first parameter, if it is the context of the call
    is_context_positional: bool = False

    def with_context(
        self, context: object, positional: tuple[object, ...], named: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the arguments with the context of the call, of a function that has it as a parameter."""
        if self.is_context_positional:
            return (context, *positional), dict(named)
        return positional, {self.context: context, **named}

    def read(self, arguments: str) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return positional and named arguments, without omitted ones (S-TOOL-13)."""
        text = arguments if arguments.strip() not in {"", "null"} else "{}"
        try:
            filled = self.model.model_validate_json(text)
        except pydantic.ValidationError as error:
            raise ArgumentError(f"invalid arguments: {explain_arguments(error)}") from None
        values = filled.__dict__
        named = {self.names[key]: values[key] for key in filled.model_fields_set}
        return tuple(named.pop(name, default) for name, default in self.positional.items()), named


def explain_arguments(error: pydantic.ValidationError) -> str:
    parts: list[str] = []
    for found in error.errors(include_url=False, include_context=False, include_input=False):
        path = ".".join(str(part) for part in found["loc"])
        parts.append(f"'{path}': {found['msg']}" if path else found["msg"])
    return "; ".join(parts)


#: signature of a function, and of its bound method
_signatures: WeakKeyDictionary[object, dict[bool, Signature]] = WeakKeyDictionary()


def signature_of(
    function: Callable[..., object], *, tool_name: str, context_type: type[object] | None = None
) -> Signature:
    """Return the signature of a tool. A first parameter of `context_type` is no part of its schema."""
    bound = inspect.ismethod(function)
    key = cast("object", function.__func__) if inspect.ismethod(function) else function
    try:
        cached = _signatures.setdefault(key, {})
    except TypeError:  # without a hash or weak references
        cached = {}
    if bound not in cached:
        cached[bound] = _build_signature(function, tool_name, context_type)
    return cached[bound]


def _build_signature(function: Callable[..., object], tool_name: str, context_type: type[object] | None) -> Signature:
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    ]
    types = _resolve_types(function, tool_name)
    context = _take_context(parameters, types, context_type, tool_name)
    descriptions = _docstring_descriptions(function)
    fields: dict[str, Any] = {}
    for index, parameter in enumerate(parameters):
        annotation = types.get(parameter.name, str)
        if parameter.default is None:
            annotation = _or_none(annotation)
        info = _field_info(parameter, annotation, descriptions.get(parameter.name))
        # The function's own default applies to an omitted argument.
        default = ... if parameter.default is parameter.empty else Field(default_factory=lambda: None)
        # A parameter may begin with _ or have the name of a method of BaseModel.
        fields[f"p{index}"] = (Annotated[annotation, info], default)
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
        context="" if context is None else context.name,
        is_context_positional=context is not None and context.kind is inspect.Parameter.POSITIONAL_ONLY,
    )


def _take_context(
    parameters: list[inspect.Parameter],
    types: Mapping[str, object],
    context_type: type[object] | None,
    tool_name: str,
) -> inspect.Parameter | None:
    """Remove the parameter for the context of the call, and return it; None: there is none."""
    if context_type is None:
        return None
    annotations = [(each, types.get(each.name)) for each in parameters]
    found = [each for each, type_ in annotations if type_ is context_type or get_origin(type_) is context_type]
    if not found:
        return None
    if found != parameters[:1]:
        raise ValidationError(
            f"Tool '{tool_name}': the context must be its first parameter, and the only one: '{found[-1].name}' is another"
        )
    return parameters.pop(0)


def _resolve_types(function: Callable[..., object], tool_name: str) -> dict[str, object]:
    inner = inspect.unwrap(cast("Callable[..., object]", getattr(function, "__func__", function)))
    if not hasattr(inner, "__annotations__"):
        inner = cast("Callable[..., object]", type(inner).__call__)
    try:
        return parameter_types(inner, inspect.getclosurevars(inner).nonlocals if inspect.isfunction(inner) else {})
    except Exception as error:
        text = f"Tool '{tool_name}': cannot resolve the annotations of its parameters: {error}"
        raise ValidationError(text) from error


def parameter_types(function: Callable[..., object], around: Mapping[str, object]) -> dict[str, object]:
    """Resolve the annotations of the parameters; `around` has names in scope besides the globals."""
    raw = cast("Mapping[str, object]", getattr(function, "__annotations__", {}))
    wanted = {name: value for name, value in raw.items() if name != "return"}
    if not wanted:
        return {}
    holder = type("Parameters", (), {"__annotations__": wanted})
    return get_type_hints(holder, getattr(function, "__globals__", {}), dict(around), include_extras=True)


def _docstring_descriptions(function: Callable[..., object]) -> dict[str, str]:
    doc = inspect.getdoc(function)
    if not doc or "\n" not in doc.strip():
        return {}
    from docstring_parser import ParseError, parse  # only for longer docstrings

    try:
        parsed = parse(doc)
    except ParseError:
        return {}
    return {entry.arg_name: " ".join((entry.description or "").split()) for entry in parsed.params}


def _or_none(annotation: object) -> object:
    if annotation is Any:
        return annotation
    metadata = cast("tuple[object, ...]", getattr(annotation, "__metadata__", ()))
    if metadata:
        inner = cast("Any", annotation).__origin__
        return cast("Any", Annotated)[(inner | None, *metadata)]
    return cast("object", cast("Any", annotation) | None)


def _field_info(parameter: inspect.Parameter, annotation: object, description: str | None) -> FieldInfo:
    metadata = cast("tuple[object, ...]", getattr(annotation, "__metadata__", ()))
    extra: dict[str, Any] = {"alias": parameter.name}
    if description and not any(isinstance(item, FieldInfo) and item.description for item in metadata):
        extra["description"] = description
    if parameter.default is not parameter.empty:
        with contextlib.suppress(PydanticSerializationError, ValueError):  # a default without a JSON form
            extra["json_schema_extra"] = {"default": to_jsonable_python(parameter.default)}
    return cast("FieldInfo", Field(**extra))


class _SchemaGenerator(GenerateJsonSchema):
    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  pydantic's own declaration


def model_parameters(model: type[BaseModel]) -> JsonSchemaValue:
    """Return a model's JSON schema without titles and with nested types inlined."""
    schema = model.model_json_schema(by_alias=True, schema_generator=_SchemaGenerator)
    definitions = cast("dict[str, JsonSchemaValue]", schema.pop("$defs", {}))
    root = _definition_name(schema)
    if root is not None:  # a model that contains itself
        schema = definitions[root]
    inliner = _Inliner(definitions)
    inlined = cast("JsonSchemaValue", inliner.inline(schema))
    inlined.setdefault("properties", {})
    if inliner.recursive:
        inlined["$defs"] = {name: inliner.inline(definitions[name]) for name in sorted(inliner.recursive)}
    return inlined


#: keys for maps from names to schemas, and keys for data
_MAPS = frozenset({"properties", "patternProperties", "dependentSchemas"})
_DATA = frozenset({"default", "const", "enum", "examples", "required"})
_DROPPED = frozenset({"title", "discriminator"})
_PREFIX = "#/$defs/"


class _Inliner:
    def __init__(self, definitions: Mapping[str, JsonSchemaValue]) -> None:
        self._definitions = definitions
        self.recursive = {name for name in definitions if name in self._reachable(name)}

    def inline(self, node: object) -> object:
        if isinstance(node, list):
            return [self.inline(item) for item in cast("list[object]", node)]
        if not isinstance(node, dict):
            return node
        schema = cast("dict[str, object]", node)
        inlined: dict[str, object] = {}
        for key, value in schema.items():
            if key in _MAPS:
                inlined[key] = {name: self.inline(inner) for name, inner in cast("dict[str, object]", value).items()}
            elif key not in _DROPPED:
                inlined[key] = value if key in _DATA else self.inline(value)
        name = _definition_name(schema)
        if name is None or name in self.recursive:
            return inlined
        del inlined["$ref"]
        return {**cast("dict[str, object]", self.inline(self._definitions[name])), **inlined}

    def _reachable(self, start: str) -> set[str]:
        seen: set[str] = set()
        ahead: list[object] = [self._definitions[start]]
        while ahead:
            node = ahead.pop()
            if isinstance(node, list):
                ahead.extend(cast("list[object]", node))
            elif isinstance(node, dict):
                schema = cast("dict[str, object]", node)
                ahead.extend(schema.values())
                name = _definition_name(schema)
                if name is not None and name not in seen:
                    seen.add(name)
                    ahead.append(self._definitions[name])
        return seen


def _definition_name(schema: Mapping[str, object]) -> str | None:
    reference = schema.get("$ref")
    return reference.removeprefix(_PREFIX) if isinstance(reference, str) and reference.startswith(_PREFIX) else None


_DEEPEST = 40
_MOST_REPAIRS = 20  # further repairs are not reported
_LONGEST_NAME = 60
_WHOLE = "arguments"
_FENCE = "```"
#: Matches strings, also unterminated ones, to skip them; and each comma before a closing bracket.
_SPARE_COMMA = re.compile(r'("(?:[^"\\]|\\.)*+(?:"|\\?\Z))|,(?=\s*+[}\]])', re.DOTALL)
_lenient = json.JSONDecoder(strict=False)
_NO_JSON = object()  # JSON itself can be None


class RepairedArguments(NamedTuple):
    text: str
    repairs: tuple[str, ...]


def repair_arguments(text: str, schema: Mapping[str, object]) -> RepairedArguments | None:
    """Repair arguments that nearly match their schema; None if there is no need or no safe way."""
    repair = _Repair(schema)
    try:
        arguments = repair.read_object(text)
        if arguments is None:
            return None
        fitting = repair.fit(arguments, schema, "", 0)
        if not repair.changes:
            return None
        return RepairedArguments(json.dumps(fitting), tuple(list(repair.changes)[:_MOST_REPAIRS]))
    except RecursionError:
        return None


class _Repair:
    def __init__(self, schema: Mapping[str, object]) -> None:
        self._definitions = schema.get("$defs")
        self.changes: dict[str, None] = {}

    def read_object(self, text: str) -> dict[str, object] | None:
        value = self._decode(text, _WHOLE)
        if value is None and text.strip() == "null":
            value = {}
            self._note(_WHOLE, "null")
        if isinstance(value, str):
            value = self._decode(value, _WHOLE)
            self._note(_WHOLE, "JSON in a string")
        return cast("dict[str, object]", value) if isinstance(value, dict) else None

    def fit(self, value: object, schema: object, path: str, depth: int) -> object:
        if depth > _DEEPEST or not isinstance(schema, Mapping):
            return value
        schemas = list(self._alternatives(cast("Mapping[str, object]", schema), 0))
        types = _schema_types(schemas)
        if isinstance(value, str) and types and "string" not in types:
            inner = self._decode(value, path, is_whole=False)
            if inner is not _NO_JSON and not isinstance(inner, str) and types & _VALUE_TYPES[type(inner)]:
                self._note(path, "JSON in a string")
                value = inner
        matching = [each for each in schemas if (_schema_types([each]) or set()) & _VALUE_TYPES[type(value)]]
        if len(matching) != 1:
            return value
        (schema,) = matching
        if isinstance(value, list):
            return [self.fit(each, schema.get("items"), path, depth + 1) for each in cast("list[object]", value)]
        if isinstance(value, dict):
            return self._fit_object(cast("dict[str, object]", value), schema, path, depth)
        return value

    def _fit_object(
        self, value: dict[str, object], schema: Mapping[str, object], path: str, depth: int
    ) -> dict[str, object]:
        listed = schema.get("properties")
        properties = cast("Mapping[str, object]", listed) if isinstance(listed, Mapping) else {}
        required = schema.get("required")
        needed = cast("list[object]", required) if isinstance(required, list) else []
        fitting: dict[str, object] = {}
        for name, each in value.items():
            inner = properties.get(name, schema.get("additionalProperties"))
            inner_path = f"{path}.{name}" if path else name
            types: set[str] | None = None
            if each is None and name in properties and name not in needed and isinstance(inner, Mapping):
                types = _schema_types(list(self._alternatives(cast("Mapping[str, object]", inner), 0)))
            if types is not None and "null" not in types:
                self._note(inner_path, "null for an argument that can be left out")
            else:
                fitting[name] = self.fit(each, inner, inner_path, depth + 1)
        return fitting

    def _alternatives(self, schema: Mapping[str, object], depth: int) -> Iterable[Mapping[str, object]]:
        reference = schema.get("$ref")
        if isinstance(reference, str) and isinstance(self._definitions, Mapping):
            target = cast("Mapping[str, object]", self._definitions).get(reference.rpartition("/")[2])
            schema = cast("Mapping[str, object]", target) if isinstance(target, Mapping) else {}
        choices = schema.get("anyOf", schema.get("oneOf"))
        if not isinstance(choices, list) or depth > _DEEPEST:
            yield schema
            return
        for each in cast("list[object]", choices):
            if isinstance(each, Mapping):
                yield from self._alternatives(cast("Mapping[str, object]", each), depth + 1)
            else:
                yield {}

    def _decode(self, text: str, path: str, *, is_whole: bool = True) -> object:
        """Return the value without code fences, spare commas and, if it `is_whole`, further text."""
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
                self._note(path, note)
            return cast("object", value)
        return _NO_JSON

    def _note(self, path: str, change: str) -> None:
        self.changes[f"{path[:_LONGEST_NAME] or _WHOLE}: {change}"] = None


def _schema_types(schemas: Iterable[Mapping[str, object]]) -> set[str] | None:
    types: set[str] = set()
    for schema in schemas:
        declared = schema.get("type")
        listed = cast("list[object]", declared) if isinstance(declared, list) else [declared]
        if not listed or not all(isinstance(each, str) for each in listed):
            return None
        types.update(cast("list[str]", listed))
        if schema.get("nullable") is True:
            types.add("null")
    return types


_VALUE_TYPES: Mapping[type[object], set[str]] = {
    type(None): {"null"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, str: {"string"},
    list: {"array"}, dict: {"object"},
}  # fmt: skip
