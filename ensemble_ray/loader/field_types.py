"""Kinds of values in a team file, as types of pydantic: how each is read, and what the JSON Schema says of it.

Package: loader. In: a node of the file's tree. Out: its value, or an error of pydantic's with its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo

from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.loader.document import Entries, Items, Located, Scalar
from ensemble_ray.loader.problems import list_known_names, suggestion
from ensemble_ray.loader.provenance import Expected
from ensemble_ray.loader.reading import context_of
from ensemble_ray.loader.references import is_reference

__all__ = [
    "REFERENCE_PATTERN",
    "Flag",
    "Free",
    "FreeMapping",
    "Number",
    "PathText",
    "ReferenceText",
    "Text",
    "Whole",
    "convert_freely",
    "has_method",
    "mapping",
    "one_of",
    "reference",
    "require_text",
    "text_in",
]

#: What a module:attribute looks like to an editor.
REFERENCE_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+")
#: A file that says the same thing more often than this through aliases is a trap.
_MAX_VALUES = 10_000
#: Numbers beyond it fit neither a duration nor a counter.
_MAX_NUMBER = 10**12


def text_in(node: object) -> str | None:
    """Return the text that a node is; None: it is something else."""
    return node.value if isinstance(node, Scalar) and isinstance(node.value, str) else None


def require_text(node: object) -> str:
    """Return the text that a node is.

    Raises:
        ValidationError: it is something else.
    """
    text = text_in(node)
    if text is not None:
        return text
    hint = f': put it in quotes, "{node.written}"' if isinstance(node, Scalar) and node.value is not None else ""
    raise ValidationError(f"must be text{hint}")


def _read_flag(node: object) -> bool:
    if isinstance(node, Scalar) and isinstance(node.value, bool):
        return node.value
    raise ValidationError("must be true or false")


def _read_whole(node: object) -> int:
    value = node.value if isinstance(node, Scalar) else None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValidationError("must be a whole number")
    _check_size(value)
    return value


def _read_number(node: object) -> float:
    value = node.value if isinstance(node, Scalar) else None
    if isinstance(node, Scalar) and _EXPONENT.fullmatch(node.written):
        value = float(node.written)  # a number to everybody but YAML 1.1, which wants a point in it
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValidationError("must be a number")
    _check_size(value)
    return value


def _check_size(value: float) -> None:
    if not -_MAX_NUMBER <= value <= _MAX_NUMBER:
        raise ValidationError(f"must be a number between -{_MAX_NUMBER:,} and {_MAX_NUMBER:,}")


def _read_path(node: object, info: ValidationInfo) -> Path:
    return context_of(info).resolve_path(require_text(node))


def convert_freely(node: Located) -> Any:
    """Return free data as Python values.

    Raises:
        ValidationError: they are too many.
    """
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
    """Refuse, with this text, what is no mapping."""

    def check(node: object) -> object:
        if isinstance(node, Entries):
            return node
        raise ValidationError(text)

    return BeforeValidator(check)


Text = Annotated[str, PlainValidator(require_text, json_schema_input_type=str)]
Flag = Annotated[bool, PlainValidator(_read_flag, json_schema_input_type=bool)]
Whole = Annotated[int, PlainValidator(_read_whole, json_schema_input_type=int)]
Number = Annotated[float, PlainValidator(_read_number, json_schema_input_type=float)]
#: The path of a file or a directory, seen from the team file's directory.
PathText = Annotated[Path, PlainValidator(_read_path, json_schema_input_type=str)]
Free = Annotated[object, PlainValidator(convert_freely, json_schema_input_type=Any)]
FreeMapping = Annotated[
    dict[str, object], PlainValidator(convert_freely, json_schema_input_type=dict[str, Any]), mapping()
]
#: What an editor is told of a `module:attribute`.
ReferenceText = Annotated[str, Field(pattern=REFERENCE_PATTERN)]


def one_of(names: Iterable[str], what: str = "word") -> PlainValidator:
    """Read one of a few words, as it is written: `off` is a word."""
    known = tuple(names)

    def read(node: object) -> str:
        word = node.written if isinstance(node, Scalar) else None
        if word in known:
            return word
        shown = f"must be a {what}." if word is None else f"unknown {what} '{word}'.{suggestion(word, known)}"
        raise ValidationError(f"{shown} {list_known_names(known)}")

    return PlainValidator(read, json_schema_input_type=Literal[known])


# User code.


def has_method(*names: str) -> Callable[[object], bool]:
    """Make a check whether an object, or a class for its objects, has one of these methods."""
    return lambda found: any(callable(getattr(found, name, None)) for name in names)


def reference(
    what: str,
    *,
    makes: bool = False,
    accepts: Callable[[object], bool] = callable,
    is_intended: Callable[[object], bool] = lambda _: False,
    standard: frozenset[str] = frozenset(),
) -> PlainValidator:
    """Read `module:attribute`.

    Args:
        what: What it should be, for messages.
        makes: A class stands for an object made of it without arguments.
        accepts: Says whether the object will do.
        is_intended: Says whether an installed package may bring the object or class.
        standard: What may be named of the standard library.
    """
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
        except Exception as error:  # the user's constructor may raise anything
            raise ValidationError(f"{name}() failed: {type(error).__name__}: {message_of(error)}") from error
        if not accepts(value):
            raise ValidationError(f"'{name}' is a {type(value).__name__}, and not {what}")
        return value

    return PlainValidator(read, json_schema_input_type=ReferenceText)
