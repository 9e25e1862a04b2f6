"""What every section of a team file is: a pydantic model that is validated over the file's tree. Package: loader.

In: a part of the tree. Out: its values, or pydantic's errors, each with the path that leads to its place; `report` turns
those into findings with line and column. A key without a value counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast, get_args, get_origin

import pydantic
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    create_model,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from ensemble_ray.loader.document import Entries, Items, Loc, Located, Scalar, locate
from ensemble_ray.loader.field_types import Flag, Number, PathText, Text, Whole, one_of, text_in
from ensemble_ray.loader.problems import Problems, list_known_names, nearest, suggestion
from ensemble_ray.values.foreign_names import find_own_name
from ensemble_ray.values.value import Value

__all__ = ["KINDS", "FileSection", "is_null", "key", "keys_of", "name_in", "report"]

S = TypeVar("S", bound="type[FileSection]")
#: So many misspelt keys are compared with the known ones; no message shows more.
_MAX_GUESSES = 100
#: What is wrong with a section as a whole, or with a key of it.
_OF_SECTIONS = {"extra_forbidden", "missing", "section_type"}
#: How a file says values of a type; sections add their own classes.
KINDS: dict[object, object] = {
    bool: Flag, int: Whole, float: Number, Decimal: Number, timedelta: Number, str: Text, Path: PathText,
}  # fmt: skip


def _describe(schema: dict[str, Any], section: type[FileSection]) -> None:
    """Tell an editor of each key what it is for and what is taken without it; the class that is made of it knows."""
    words = {} if section.makes is None else _words_of(section.makes)
    defaults = {} if section.makes is None else _defaults_of(section.makes)
    properties: dict[str, Any] = schema.get("properties", {})
    schema.pop("description", None)
    for name, shown in properties.items():
        shown.pop("default", None)
        shown.setdefault("description", words.get(name, ""))
        if shown.get("type") == "array" and name not in section.only_lists:
            array = {word: shown.pop(word) for word in ("type", "items", "minItems") if word in shown}
            shown["anyOf"] = [array["items"], array]
        if name in defaults:
            shown["default"] = defaults[name]
    schema["properties"] = {name: properties[name] for name in section.list_keys()}


def _words_of(kind: type[Value]) -> dict[str, str]:
    """Return what the docstrings of a class, and of those that it is made of, say of its fields."""
    import docstring_parser  # only the schema needs it

    parsed = [docstring_parser.parse(each.__doc__ or "") for each in reversed(kind.__mro__) if issubclass(each, Value)]
    return {word.arg_name: " ".join((word.description or "").split()) for each in parsed for word in each.params}


def _defaults_of(kind: type[Value]) -> dict[str, object]:
    found = {info.alias or name: info.default for name, info in kind.model_fields.items()}
    return {name: value for name, value in found.items() if isinstance(value, str | int | float) and value != ""}


class FileSection(BaseModel):
    """A mapping of the file whose keys are known."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, json_schema_extra=cast("Any", _describe))

    #: how messages call it, with its key or its name
    called: ClassVar[str] = ""
    #: the class that is made of it
    makes: ClassVar[type[Value] | None] = None
    #: keys that may be there without a value
    nullable: ClassVar[frozenset[str]] = frozenset()
    #: keys of lists for which a single value is none (S-DOM-100)
    only_lists: ClassVar[frozenset[str]] = frozenset()
    #: keys that are named before the others
    first: ClassVar[tuple[str, ...]] = ()
    #: keys that people look for here in vain, and what they are told
    misplaced: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, node: object, read: ModelWrapValidatorHandler[Self]) -> Self:
        """Leave out keys without a value; say of each finding which section it is about."""
        if not isinstance(node, Entries):
            raise PydanticCustomError("section_type", "no mapping", {"section": cls})
        absent = cls.model_fields.keys() - cls.nullable
        values = {name: None if is_null(value) else value for name, value in node.items()}
        present = {
            name: _as_items(value) if cls._takes_one(name) else value
            for name, value in values.items()
            if name not in absent or value is not None
        }
        try:
            return read(present)
        except pydantic.ValidationError as error:
            raise pydantic.ValidationError.from_exception_data(
                cls.__name__, [cls._with_section(found) for found in error.errors(include_url=False)]
            ) from None

    @classmethod
    def _takes_one(cls, name: str) -> bool:
        """Return whether a key takes a list, or a single value in place of one."""
        info = cls.model_fields.get(name)
        return info is not None and get_origin(info.annotation) is list and name not in cls.only_lists

    @classmethod
    def _with_section(cls, found: ErrorDetails) -> InitErrorDetails:
        context = found.get("ctx", {})
        if found["type"] in _OF_SECTIONS:
            context = {"section": cls, **context}
        is_ours = found["type"] == "value_error"
        kind = found["type"] if is_ours else PydanticCustomError(cast("Any", found["type"]), "refused", context)
        return InitErrorDetails(type=kind, loc=found["loc"], input=None, ctx=context)

    @classmethod
    def list_keys(cls) -> list[str]:
        """Return its keys; those of the class that is made of it stand in the order of its fields."""
        fields = {} if cls.makes is None else cls.makes.model_fields
        order = [*cls.first, *(info.alias or name for name, info in fields.items())]
        return sorted(cls.model_fields, key=lambda name: order.index(name) if name in order else -1)

    @classmethod
    def name_for(cls, path: Loc, node: Located) -> str:
        """Return what messages call the section at a place."""
        name = path[-1] if path and isinstance(path[-1], str) else name_in(node)
        is_nameless = name is None and "{name}" in cls.called
        return f"this {cls.called.partition(' ')[0]}" if is_nameless else cls.called.format(name=name)

    @classmethod
    def explain_kind(cls, path: Loc, node: Located) -> str:
        """Say that something else stands in the section's place."""
        return f"{cls.name_for(path, node)} must be a mapping with keys of [{', '.join(cls.list_keys())}]"

    @classmethod
    def explain_missing(cls, name: str, path: Loc, node: Located) -> str:
        """Say that a key is missing."""
        return f"{cls.name_for(path, node)} needs the key '{name}'"

    def values(self) -> dict[str, Any]:
        """Return what the file gives, by key."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def build(self) -> Any:
        """Return the object that is made of it."""
        return cast("type[Value]", self.makes)(**self.values())


def key(description: str | None = None, *, is_required: bool = False) -> Any:
    """Declare a key; without a description an editor shows the words of the class that is made of the section."""
    return Field(default=... if is_required else None, description=description)


def keys_of(
    kind: type[Value], *, without: Collection[str] = (), others: Mapping[str, Any] | None = None
) -> Callable[[S], S]:
    """Give a section the keys of the class that is made of it, where it does not declare them itself.

    Args:
        kind: The class.
        without: Fields that a file cannot give.
        others: Type and declaration of keys that are many and alike.
    """

    def fill(section: S) -> S:
        of_section = cast("type[FileSection]", section)
        fields = dict(others or {})
        for field, info in kind.model_fields.items():
            name = info.alias or field
            if name not in of_section.model_fields and name not in without and name not in fields:
                fields[name] = (_derive(info.annotation, name), ... if info.is_required() else None)
        of_section.makes = kind
        return cast("S", create_model(section.__name__, __base__=section, __module__=section.__module__, **fields))

    return fill


def _derive(annotation: Any, name: str) -> object:
    """Return how a file says the value of a field: what is more than a word or a number is said by its section."""
    if annotation in KINDS:
        return KINDS[annotation]
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return Annotated[str, one_of(annotation, _word_for(name))]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return Annotated[str, one_of(parts, _word_for(name))]
    if origin is tuple:
        part: Any = _derive(parts[0], name)
        if get_origin(part) is list:
            part = Annotated[part, BeforeValidator(_as_items, json_schema_input_type=get_args(part)[0] | part)]
        return list[part]
    return _derive(next(part for part in parts if part is not type(None)), name)


def _as_items(value: object) -> object:
    """Return a single value as a list of one."""
    return Items(value.spot, [value]) if isinstance(value, Scalar | Entries) else value


def _word_for(name: str) -> str:
    if name.startswith(("on_", "enforce_")):
        return "word"
    return "strategy" if name == "parallel_error_strategy" else name.replace("_", " ")


def name_in(node: Located) -> str | None:
    """Return the name that a member of a list says."""
    return text_in(node.get("name")) if isinstance(node, Entries) else None


def report(error: pydantic.ValidationError, root: Located, problems: Problems) -> None:
    """Note everything that pydantic found, with its place in the file."""
    meant: set[Loc] = set()
    # A key that is missing and one that is misspelt are one mistake.
    for found in sorted(
        error.errors(include_url=False, include_input=False), key=lambda each: each["type"] == "missing"
    ):
        path, context = found["loc"], found.get("ctx", {})
        section: type[FileSection] = context.get("section", FileSection)
        around = locate(root, path[:-1])
        place = locate(root, path)
        match found["type"]:
            case "extra_forbidden":
                name, names = str(path[-1]), section.list_keys()
                own = "" if section.makes is None else find_own_name(section.makes, name)
                near = nearest(name, names) if not own and len(problems) < _MAX_GUESSES else []
                meant.update((*path[:-1], each) for each in near)
                text = section.misplaced.get(name) or (
                    f"unknown key of {section.name_for(path[:-1], around.value)}."
                    f"{f' {own}.' if own else suggestion(name, near)} {list_known_names(names)}"
                )
                problems.add(place.key_spot, place.path, text)
            case "missing" if path not in meant:
                text = section.explain_missing(str(path[-1]), path[:-1], around.value)
                is_mapping = isinstance(around.value, Entries)
                problems.add(around.value.spot if is_mapping else around.key_spot, around.path, text)
            case "missing":
                pass
            case "section_type":
                problems.add(place.value.spot, place.path, section.explain_kind(path, place.value))
            case "list_type":
                problems.add(place.value.spot, place.path, "must be a list")
            case "refused":
                spots = {"key": place.key_spot, "value": place.value.spot, "around": around.value.spot}
                problems.add(spots[context["at"]], place.path, context["text"])
            case _:
                problems.add(place.value.spot, place.path, str(context["error"]))


def is_null(node: object) -> bool:
    """Return whether a key has no value."""
    return isinstance(node, Scalar) and node.value is None
