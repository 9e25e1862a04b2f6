"""Kinds of values in a team file: how each is read, and what the published JSON Schema says of it. Room: loader.

Reading and schema stand side by side in one `Kind`, so that an editor accepts what the loader takes. A reader notes
what is wrong and gives `BAD`; it never raises for what the user wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeGuard

from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.loader.document import Entries, Items, Located, Scalar
from ensemble_ray.loader.problems import Problems, known_names, nearest, suggestion
from ensemble_ray.loader.provenance import Expected, find_permitted
from ensemble_ray.loader.references import is_reference, make_importable
from ensemble_ray.values.messages import JsonValue

if TYPE_CHECKING:
    from ensemble_ray.items.sources import ItemSource
    from ensemble_ray.ports import ChatModel

__all__ = [
    "BAD",
    "FLAG",
    "NUMBER",
    "PATH",
    "REFERENCE_PATTERN",
    "TEXT",
    "WHOLE",
    "Field",
    "Kind",
    "Reading",
    "choice",
    "given",
    "has_method",
    "list_of",
    "plain",
    "read_fields",
    "reference",
]

#: What a module:attribute looks like to an editor.
REFERENCE_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+")
#: A file that says the same thing more often than this through aliases is a trap.
_MAX_PLAIN = 10_000
#: So many misspelt keys are compared with the known ones; no message shows more.
_GUESSES = 100
#: Numbers beyond it fit neither a duration nor a counter.
_MAX_NUMBER = 10**12
#: So many pieces of code one file may name; looking for each takes a search on the disk.
_MAX_REFERENCES = 1_000


class _Bad(Enum):
    BAD = "bad"


#: What a reader gives for a value that it refused and noted.
BAD: Final = _Bad.BAD


def given(value: object) -> TypeGuard[object]:
    """Whether a reader took the value."""
    return value is not BAD


class Reading:
    """One reading of one file: what readers need to know, and where they put what is wrong."""

    def __init__(
        self,
        problems: Problems,
        directory: Path,
        *,
        llm: ChatModel | None,
        needs_keys: bool,
        items: ItemSource | None = None,
    ) -> None:
        self.problems = problems
        #: of the file; paths in it are relative to it
        self.directory = directory
        #: takes the place of every model that the file names
        self.llm = llm
        #: False: the team will only be looked at, so keys may be missing
        self.needs_keys = needs_keys
        #: takes the place of the items that the file names
        self.items = items
        self._references = 0

    def located(self, path: str) -> Path:
        """The path as it is seen from the file's directory.

        Raises:
            ValidationError: it can be no path.
        """
        if "\0" in path:
            raise ValidationError("a path has no character NUL in it")
        try:
            return self.directory / Path(path).expanduser()
        except RuntimeError:
            raise ValidationError(f"'{path.partition('/')[0]}' names the home of a user who is not there") from None

    def refuse(self, node: Located, where: str, text: str) -> object:
        """Note a problem; gives `BAD`."""
        self.problems.add(node.spot, where, text)
        return BAD

    def find(self, name: str, expected: Expected) -> object:
        """Find what the file names as `module:attribute`, beside the file and in the current directory first.

        The directories become importable here and not before: a file that names no code never has a module beside it
        taken for a library.

        Raises:
            ValidationError: as `find_permitted`.
        """
        self._references += 1
        if self._references > _MAX_REFERENCES:
            raise ValidationError(f"a team file names at most {_MAX_REFERENCES} pieces of code")
        make_importable(Path.cwd())
        make_importable(self.directory)
        return find_permitted(name, expected, (self.directory.resolve(), Path.cwd().resolve()))


Read = Callable[[Reading, Located, str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of value."""

    read: Read
    #: what a JSON Schema says of it
    schema: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A key of a mapping in the file."""

    kind: Kind
    is_required: bool = False
    #: what an editor shows; empty: the words of the class it belongs to
    doc: str = ""


def read_fields(
    reading: Reading, node: Located, table: Mapping[str, Field], where: str, *, what: str
) -> dict[str, object] | None:
    """The values of a mapping whose keys are known; a key without a value counts as absent.

    Args:
        reading: The reading of the file.
        node: Should be a mapping.
        table: Its keys.
        where: The mapping's own path.
        what: What it describes, for messages: `agent 'writer'`.

    Returns:
        What was taken; None when anything in it was refused.
    """
    if not isinstance(node, Entries):
        reading.refuse(node, where, f"{what} must be a mapping with keys of [{', '.join(table)}]")
        return None
    before = len(reading.problems)
    values: dict[str, object] = {}
    meant: set[str] = set()
    for name, entry in node.entries.items():
        inside = f"{where}.{name}" if where else name
        field = table.get(name)
        if field is None:
            guess = suggestion(name, table) if len(reading.problems) < _GUESSES else ""
            meant.update(nearest(name, table) if guess else ())
            text = f"unknown key of {what}.{guess} {known_names(table)}"
            reading.problems.add(entry.spot, inside, text)
        elif not (isinstance(entry.value, Scalar) and entry.value.value is None):
            values[name] = field.kind.read(reading, entry.value, inside)
    for name, field in table.items():
        if field.is_required and name not in values and name not in meant:
            reading.problems.add(node.spot, where, f"{what} needs the key '{name}'")
    return values if len(reading.problems) == before else None


def plain(reading: Reading, node: Located, where: str) -> object:
    """Free data as Python values."""
    count = 0

    def convert(part: Located) -> object:
        nonlocal count
        count += 1
        if count > _MAX_PLAIN:
            return None
        if isinstance(part, Items):
            return [convert(item) for item in part.items]
        if isinstance(part, Entries):
            return {key: convert(entry.value) for key, entry in part.entries.items()}
        return part.value

    found = convert(node)
    return reading.refuse(node, where, f"more than {_MAX_PLAIN} values") if count > _MAX_PLAIN else found


# Scalars.


def _read_text(reading: Reading, node: Located, where: str) -> object:
    if isinstance(node, Scalar) and isinstance(node.value, str):
        return node.value
    if isinstance(node, Scalar) and node.value is not None:
        return reading.refuse(node, where, f'must be text: put it in quotes, "{node.written}"')
    return reading.refuse(node, where, "must be text")


def _read_flag(reading: Reading, node: Located, where: str) -> object:
    if isinstance(node, Scalar) and isinstance(node.value, bool):
        return node.value
    return reading.refuse(node, where, "must be true or false")


def _read_whole(reading: Reading, node: Located, where: str) -> object:
    if isinstance(node, Scalar) and isinstance(node.value, int) and not isinstance(node.value, bool):
        return _bounded(reading, node, node.value, where)
    return reading.refuse(node, where, "must be a whole number")


def _read_number(reading: Reading, node: Located, where: str) -> object:
    if isinstance(node, Scalar) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _bounded(reading, node, node.value, where)
    if isinstance(node, Scalar) and _EXPONENT.fullmatch(node.written):
        # a number to everybody but YAML 1.1, which wants a point in it
        return _bounded(reading, node, float(node.written), where)
    return reading.refuse(node, where, "must be a number")


def _bounded(reading: Reading, node: Scalar, value: float, where: str) -> object:
    if -_MAX_NUMBER <= value <= _MAX_NUMBER:
        return value
    return reading.refuse(node, where, f"must be a number between -{_MAX_NUMBER:,} and {_MAX_NUMBER:,}")


def _read_path(reading: Reading, node: Located, where: str) -> object:
    text = _read_text(reading, node, where)
    if not given(text):
        return BAD
    try:
        return reading.located(str(text))
    except ValidationError as error:
        return reading.refuse(node, where, str(error))


TEXT = Kind(read=_read_text, schema={"type": "string"})
FLAG = Kind(read=_read_flag, schema={"type": "boolean"})
WHOLE = Kind(read=_read_whole, schema={"type": "integer"})
NUMBER = Kind(read=_read_number, schema={"type": "number"})
#: The path of a file or a directory, seen from the team file's directory.
PATH = Kind(read=_read_path, schema={"type": "string"})


def choice(names: Iterable[str], what: str) -> Kind:
    """One of a few words."""
    known = tuple(names)

    def read(reading: Reading, node: Located, where: str) -> object:
        word = node.written if isinstance(node, Scalar) else None
        if word in known:
            return word
        shown = f"unknown {what} '{word}'.{suggestion(word, known)}" if word is not None else f"must be a {what}."
        return reading.refuse(node, where, f"{shown} {known_names(known)}")

    return Kind(read=read, schema={"enum": list(known)})


def list_of(item: Kind, *, or_one: bool = False) -> Kind:
    """A list; with `or_one` a single value is a list of one."""

    def read(reading: Reading, node: Located, where: str) -> object:
        if not isinstance(node, Items):
            if not or_one:
                return reading.refuse(node, where, "must be a list")
            value = item.read(reading, node, where)
            return [value] if given(value) else BAD
        values = [item.read(reading, each, f"{where}[{index}]") for index, each in enumerate(node.items)]
        return values if all(given(value) for value in values) else BAD

    schema: dict[str, JsonValue] = {"type": "array", "items": dict(item.schema)}
    return Kind(read=read, schema={"anyOf": [dict(item.schema), schema]} if or_one else schema)


# User code.


def has_method(*names: str) -> Callable[[object], bool]:
    """Whether an object, or a class for its objects, has one of these methods."""
    return lambda found: any(callable(getattr(found, name, None)) for name in names)


def reference(
    what: str,
    *,
    makes: bool = False,
    accepts: Callable[[object], bool] = callable,
    is_made_for_it: Callable[[object], bool] = lambda _: False,
    standard: frozenset[str] = frozenset(),
) -> Kind:
    """`module:attribute`.

    Args:
        what: What it should be, for messages.
        makes: A class stands for an object made of it without arguments.
        accepts: Says whether the object will do.
        is_made_for_it: Says whether an installed package may bring the object or class.
        standard: What may be named of the standard library.
    """
    expected = Expected(what=what, accepts=accepts, is_made_for_it=is_made_for_it, standard=standard)

    def read(reading: Reading, node: Located, where: str) -> object:
        name = node.value if isinstance(node, Scalar) else None
        if not isinstance(name, str) or not is_reference(name):
            return reading.refuse(node, where, f"must be module:attribute, which names {what}")
        try:
            found = reading.find(name, expected)
            if makes and isinstance(found, type):
                found = found()
        except ValidationError as error:
            return reading.refuse(node, where, str(error))
        except Exception as error:  # noqa: BLE001  the user's constructor may raise anything
            return reading.refuse(node, where, f"{name}() failed: {type(error).__name__}: {message_of(error)}")
        if not accepts(found):
            return reading.refuse(node, where, f"'{name}' is a {type(found).__name__}, and not {what}")
        return found

    return Kind(read=read, schema={"type": "string", "pattern": REFERENCE_PATTERN})
