"""The base of all sections of a team file: pydantic models that report errors by path."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
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
    PlainValidator,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.items.sources import ItemSource
from ensemble_ray.ports import ChatModel
from ensemble_ray.teamfile.document import (
    Entries,
    Items,
    Loc,
    Located,
    Problems,
    Scalar,
    list_known_names,
    locate,
    nearest,
    suggestion,
)
from ensemble_ray.teamfile.references import Expected, find_permitted, is_reference, make_importable
from ensemble_ray.text.foreign_text import header_flaw
from ensemble_ray.values.value import AGE_PATTERN, Value, age_from, find_own_name

_MAX_REFERENCES = 1_000  # in one file: each costs a search on the disk


@dataclass(slots=True)
class Reading:
    """Context of validators."""

    directory: Path
    _: KW_ONLY
    llm: ChatModel | None  # replaces all models
    needs_keys: bool  # False: the team is only inspected
    items: ItemSource | None = None  # replaces the items
    evaluates: bool = False  # the models of judges are needed, too
    _references: int = field(default=0, init=False)

    def resolve_path(self, path: str) -> Path:
        if "\0" in path:
            raise ValidationError("a path cannot contain the character NUL")
        try:
            return self.directory / Path(path).expanduser()
        except RuntimeError:
            raise ValidationError(f"'{path.partition('/')[0]}' names the home of an unknown user") from None

    def read_key(self, variable: str) -> str:
        """Return a key, or a placeholder if no key is needed."""
        key = os.environ.get(variable, "").strip()
        if not key and self.needs_keys:
            raise ValidationError(f"the environment variable '{variable}' is not set: export {variable}=...")
        if flaw := header_flaw(key):
            raise ValidationError(f"the environment variable '{variable}' {flaw}")
        return key or "not-set"

    def find(self, name: str, expected: Expected) -> object:
        self._references += 1
        if self._references > _MAX_REFERENCES:
            raise ValidationError(f"a team file names at most {_MAX_REFERENCES} pieces of code")
        # Only now: a file without references must not turn a module beside it into a library.
        make_importable(Path.cwd())
        make_importable(self.directory)
        return find_permitted(name, expected, (self.directory.resolve(), Path.cwd().resolve()))


def context_of(info: pydantic.ValidationInfo) -> Reading:
    return cast("Reading", info.context)


def refuse(text: str, *path: str | int, at: Literal["key", "value", "around"] = "value") -> pydantic.ValidationError:
    """Return an error about a value inside the validated node."""
    return refuse_all([(text, path, at)])


def refuse_all(found: Iterable[tuple[str, tuple[str | int, ...], str]]) -> pydantic.ValidationError:
    details = [
        InitErrorDetails(type=PydanticCustomError("refused", "refused", {"text": text, "at": at}), loc=path, input=None)
        for text, path, at in found
    ]
    return pydantic.ValidationError.from_exception_data("", details)


REFERENCE_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"  # for editors
_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+")
_MAX_VALUES = 10_000  # in free data, which aliases multiply
_MAX_NUMBER = 10**12  # larger numbers overflow durations and counters


def text_in(node: object) -> str | None:
    return node.value if isinstance(node, Scalar) and isinstance(node.value, str) else None


def require_text(node: object) -> str:
    text = text_in(node)
    if text is not None:
        return text
    hint = f': put it in quotes, "{node.written}"' if isinstance(node, Scalar) and node.value is not None else ""
    raise ValidationError(f"must be text{hint}")


def plain(kind: type[float], what: str) -> PlainValidator:

    def read(node: object) -> float:
        value = node.value if isinstance(node, Scalar) else None
        if kind is float and isinstance(node, Scalar) and _EXPONENT.fullmatch(node.written):
            value = float(node.written)  # YAML 1.1 reads `1e3` as a text
        is_flag = isinstance(value, bool)
        if is_flag is not (kind is bool) or not isinstance(value, int | float if kind is float else kind):
            raise ValidationError(f"must be {what}")
        if not -_MAX_NUMBER <= value <= _MAX_NUMBER:
            raise ValidationError(f"must be a number between -{_MAX_NUMBER:,} and {_MAX_NUMBER:,}")
        return value

    return PlainValidator(read, json_schema_input_type=kind)


def convert_freely(node: Located) -> Any:
    count = 0

    def convert(part: Located) -> object:
        nonlocal count
        count += 1
        if count > _MAX_VALUES:
            raise ValidationError(f"more than {_MAX_VALUES} values")
        if isinstance(part, Items):
            return [convert(item) for item in part]
        if isinstance(part, Entries):
            return {key: convert(value) for key, value in part.items()}
        return part.value

    return convert(node)


def mapping(text: str = "must be a mapping") -> BeforeValidator:

    def check(node: object) -> object:
        if isinstance(node, Entries):
            return node
        raise ValidationError(text)

    return BeforeValidator(check)


Text = Annotated[str, PlainValidator(require_text, json_schema_input_type=str)]
Flag = Annotated[bool, plain(bool, "true or false")]
Whole = Annotated[int, plain(int, "a whole number")]
Number = Annotated[float, plain(float, "a number")]
Age = Annotated[
    timedelta,
    PlainValidator(
        lambda node: age_from(require_text(node)),
        json_schema_input_type=Annotated[str, Field(pattern=f"^{AGE_PATTERN}$")],
    ),
]
#: relative to the team file's directory
PathText = Annotated[
    Path,
    PlainValidator(lambda node, info: context_of(info).resolve_path(require_text(node)), json_schema_input_type=str),
]
Free = Annotated[object, PlainValidator(convert_freely, json_schema_input_type=Any)]
FreeMapping = Annotated[
    dict[str, object], PlainValidator(convert_freely, json_schema_input_type=dict[str, Any]), mapping()
]
ReferenceText = Annotated[str, Field(pattern=REFERENCE_PATTERN)]


def one_of(names: Iterable[str], what: str = "word") -> PlainValidator:
    """Read one of these words as written: `off` is no boolean."""
    known = tuple(names)

    def read(node: object) -> str:
        word = node.written if isinstance(node, Scalar) else None
        if word in known:
            return word
        shown = f"must be a {what}." if word is None else f"unknown {what} '{word}'.{suggestion(word, known)}"
        raise ValidationError(f"{shown} {list_known_names(known)}")

    return PlainValidator(read, json_schema_input_type=Literal[known])


def has_methods(*names: str) -> Callable[[object], bool]:
    return lambda found: all(callable(getattr(found, name, None)) for name in names)


def has_method(*names: str) -> Callable[[object], bool]:
    return lambda found: any(callable(getattr(found, name, None)) for name in names)


def reference(
    what: str,
    *,
    makes: bool = False,
    accepts: Callable[[object], bool] = callable,
    is_intended: Callable[[object], bool] = lambda _: False,
    standard: frozenset[str] = frozenset(),
) -> PlainValidator:
    """Read `module:attribute`. `makes`: a class is called without arguments."""
    expected = Expected(what=what, accepts=accepts, is_intended=is_intended, standard=standard)

    def read(node: object, info: ValidationInfo) -> object:
        name = text_in(node)
        if name is None or not is_reference(name):
            raise ValidationError(f"must be module:attribute, which names {what}")
        found = context_of(info).find(name, expected)
        try:
            value = found() if makes and isinstance(found, type) else found
        except ValidationError:
            raise
        except Exception as error:
            raise ValidationError(f"{name}() failed: {type(error).__name__}: {message_of(error)}") from error
        if not accepts(value):
            raise ValidationError(f"'{name}' is a {type(value).__name__}, and not {what}")
        return value

    return PlainValidator(read, json_schema_input_type=ReferenceText)


def object_of(what: str, is_it: Callable[[object], bool]) -> PlainValidator:
    """Read an object for which the check holds, or a class that makes one."""
    return reference(what, makes=True, accepts=is_it, is_intended=is_it)


def object_with(method: str) -> PlainValidator:
    is_intended = has_methods(method)
    return reference(
        f"a callable or an object with '{method}'",
        makes=True,
        accepts=lambda found: callable(found) or is_intended(found),
        is_intended=is_intended,
    )


CallableName = Annotated[object, reference("a callable")]


S = TypeVar("S", bound="type[FileSection]")
_MAX_GUESSES = 100  # unknown keys for which a similar key is searched
_OF_SECTIONS = {"extra_forbidden", "missing", "section_type"}
#: form of each field type; other modules add their classes
KINDS: dict[object, object] = {
    bool: Flag, int: Whole, float: Number, Decimal: Number, timedelta: Number, str: Text, Path: PathText,
}  # fmt: skip


def _describe(schema: dict[str, Any], section: type[FileSection]) -> None:
    import docstring_parser

    bases = [] if section.makes is None else [each for each in section.makes.__mro__ if issubclass(each, Value)]
    documented = [word for each in reversed(bases) for word in docstring_parser.parse(each.__doc__ or "").params]
    words = {word.arg_name: " ".join((word.description or "").split()) for word in documented}
    fields = {} if section.makes is None else section.makes.model_fields
    defaults = {info.alias or name: info.default for name, info in fields.items()}
    properties: dict[str, Any] = schema.get("properties", {})
    schema.pop("description", None)
    for name, shown in properties.items():
        shown.pop("default", None)
        shown.setdefault("description", words.get(name, ""))
        if shown.get("type") == "array" and name not in section.only_lists:
            array = {word: shown.pop(word) for word in ("type", "items", "minItems") if word in shown}
            shown["anyOf"] = [array["items"], array]
        if isinstance(default := defaults.get(name), str | int | float) and default != "":
            shown["default"] = default
    schema["properties"] = {name: properties[name] for name in section.list_keys()}


class FileSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, json_schema_extra=cast("Any", _describe))

    called: ClassVar[str] = ""  # in messages; `{name}` is its key or name
    makes: ClassVar[type[Value] | None] = None  # class of the object
    nullable: ClassVar[frozenset[str]] = frozenset()  # may be present without a value
    only_lists: ClassVar[frozenset[str]] = frozenset()  # lists that do not accept a single value (S-DOM-100)
    first: ClassVar[tuple[str, ...]] = ()  # in messages and the schema
    misplaced: ClassVar[Mapping[str, str]] = {}  # advice for keys that users often expect here

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, node: object, read: ModelWrapValidatorHandler[Self]) -> Self:
        """Drop keys without a value; attach the section to each error."""
        if not isinstance(node, Entries):
            raise PydanticCustomError("section_type", "no mapping", {"section": cls})
        absent = cls.model_fields.keys() - cls.nullable
        fields = cls.model_fields.items()
        lists = {name for name, info in fields if get_origin(info.annotation) is list} - cls.only_lists
        values = {name: None if is_null(value) else value for name, value in node.items()}
        present = {
            name: _as_items(value) if name in lists else value
            for name, value in values.items()
            if name not in absent or value is not None
        }
        try:
            return read(present)
        except pydantic.ValidationError as error:
            details: list[InitErrorDetails] = []
            for found in error.errors(include_url=False):
                context = found.get("ctx", {})
                if found["type"] in _OF_SECTIONS:
                    context = {"section": cls, **context}
                is_ours = found["type"] == "value_error"
                kind = found["type"] if is_ours else PydanticCustomError(cast("Any", found["type"]), "refused", context)
                details.append(InitErrorDetails(type=kind, loc=found["loc"], input=None, ctx=context))
            raise pydantic.ValidationError.from_exception_data(cls.__name__, details) from None

    @classmethod
    def list_keys(cls) -> list[str]:
        fields = {} if cls.makes is None else cls.makes.model_fields
        order = [*cls.first, *(info.alias or name for name, info in fields.items())]
        return sorted(cls.model_fields, key=lambda name: order.index(name) if name in order else -1)

    @classmethod
    def name_for(cls, path: Loc, node: Located) -> str:
        name = path[-1] if path and isinstance(path[-1], str) else name_in(node)
        is_nameless = name is None and "{name}" in cls.called
        return f"this {cls.called.partition(' ')[0]}" if is_nameless else cls.called.format(name=name)

    @classmethod
    def explain_kind(cls, path: Loc, node: Located) -> str:
        return f"{cls.name_for(path, node)} must be a mapping with keys of [{', '.join(cls.list_keys())}]"

    @classmethod
    def explain_missing(cls, name: str, path: Loc, node: Located) -> str:
        return f"{cls.name_for(path, node)} needs the key '{name}'"

    def values(self) -> dict[str, Any]:
        """Return the values that the file contains."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def build(self) -> Any:
        return cast("type[Value]", self.makes)(**self.values())


def key(description: str | None = None, *, is_required: bool = False) -> Any:
    """Declare a key. The description defaults to that of the built class's field."""
    return Field(default=... if is_required else None, description=description)


def keys_of(
    kind: type[Value], *, without: Collection[str] = (), others: Mapping[str, Any] | None = None
) -> Callable[[S], S]:
    """Add a key for each field of the built class, `without` these, and `others`, unless the section declares it."""

    def fill(section: S) -> S:
        of_section = cast("type[FileSection]", section)
        fields = dict(others or {})
        for field_name, info in kind.model_fields.items():
            name = info.alias or field_name
            if name not in of_section.model_fields and name not in without and name not in fields:
                fields[name] = (_derive(info.annotation, name), ... if info.is_required() else None)
        of_section.makes = kind
        return cast("S", create_model(section.__name__, __base__=section, __module__=section.__module__, **fields))

    return fill


def _derive(annotation: Any, name: str) -> object:
    """Return the form of a field."""
    if annotation in KINDS:
        return KINDS[annotation]
    origin, parts = get_origin(annotation), get_args(annotation)
    words: Any = annotation if isinstance(annotation, type) and issubclass(annotation, StrEnum) else parts
    if words is annotation or origin is Literal:
        what = "strategy" if name == "parallel_error_strategy" else name.replace("_", " ")
        return Annotated[str, one_of(words, "word" if name.startswith(("on_", "enforce_")) else what)]
    if origin is tuple:
        part: Any = _derive(parts[0], name)
        if get_origin(part) is list:
            part = Annotated[part, BeforeValidator(_as_items, json_schema_input_type=get_args(part)[0] | part)]
        return list[part]
    return _derive(next(part for part in parts if part is not type(None)), name)


def _as_items(value: object) -> object:
    return Items(value.spot, [value]) if isinstance(value, Scalar | Entries) else value


def name_in(node: Located) -> str | None:
    return text_in(node.get("name")) if isinstance(node, Entries) else None


def report(error: pydantic.ValidationError, root: Located, problems: Problems) -> None:
    suggested: set[Loc] = set()  # keys that are missing because another spelling was used
    errors = error.errors(include_url=False, include_input=False)
    for found in sorted(errors, key=lambda it: it["type"] == "missing"):  # misspelt keys first
        path, context = found["loc"], found.get("ctx", {})
        section: type[FileSection] = context.get("section", FileSection)
        around = locate(root, path[:-1])
        place = locate(root, path)
        match found["type"]:
            case "extra_forbidden":
                name, names = str(path[-1]), section.list_keys()
                own = "" if section.makes is None else find_own_name(section.makes, name)
                near = nearest(name, names) if not own and len(problems) < _MAX_GUESSES else []
                suggested.update((*path[:-1], each) for each in near)
                text = section.misplaced.get(name) or (
                    f"unknown key of {section.name_for(path[:-1], around.value)}."
                    f"{f' {own}.' if own else suggestion(name, near)} {list_known_names(names)}"
                )
                problems.add(place.key_spot, place.path, text)
            case "missing" if path not in suggested:
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
    return isinstance(node, Scalar) and node.value is None


class _HeaderKey(FileSection):
    called = "a header"
    env: Text = key("Environment variable that holds the value.", is_required=True)


class _VariableKey(_HeaderKey):
    called = "a variable"


def _secret(section: type[_HeaderKey]) -> PlainValidator:
    """Read a text, or `{env: NAME}` for a secret."""

    def read(node: object, info: ValidationInfo) -> str:
        if not isinstance(node, Entries):
            return require_text(node)
        return context_of(info).read_key(section.model_validate(node, context=info.context).env)

    return PlainValidator(read, json_schema_input_type=str | section)


Headers = Annotated[
    dict[str, Annotated[str, _secret(_HeaderKey)]], mapping("must be a mapping of header names to values")
]
Variables = Annotated[
    dict[str, Annotated[str, _secret(_VariableKey)]], mapping("must be a mapping of variable names to values")
]
