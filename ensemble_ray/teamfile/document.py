"""Parse YAML into a tree of limited size in which every node knows its line and column (S-SEC-76)."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias, cast

import yaml
from msgspec import Struct

from ensemble_ray.errors import ValidationError

_SHOWN_NAMES = 20
_SHOWN_PROBLEMS = 20
_MAX_CANDIDATES, _MAX_CANDIDATE_CHARS = 1000, 100  # of a similar name


@dataclass(frozen=True, slots=True, order=True)
class Position:
    line: int
    column: int


class Problems:
    def __init__(self, file: str) -> None:
        self._file = file
        self._found: dict[tuple[Position, str], None] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, spot: Position, where: str, text: str) -> None:
        """Add a mistake at a path of keys, such as `agents.writer.goal`; empty: the whole file."""
        self._found[spot, f"{where}: {text}" if where else text] = None

    def check(self) -> None:
        if not self._found:
            return
        lines = [f"{self._file}:{spot.line}:{spot.column}: {text}" for spot, text in sorted(self._found)]
        if len(lines) == 1:
            raise ValidationError(lines[0])
        more = [f"and {len(lines) - _SHOWN_PROBLEMS} more"] if len(lines) > _SHOWN_PROBLEMS else []
        listed = "\n  ".join([*lines[:_SHOWN_PROBLEMS], *more])
        raise ValidationError(f"{self._file} has {len(lines)} problems:\n  {listed}")


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the most similar known name, or an empty list."""
    if len(name) > _MAX_CANDIDATE_CHARS:
        return []
    by_lower = {each.lower(): each for each in islice(known, _MAX_CANDIDATES) if len(each) <= _MAX_CANDIDATE_CHARS}
    return [by_lower[close] for close in difflib.get_close_matches(name.lower(), by_lower, n=1)]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?`, or an empty text."""
    close = nearest(name, known)
    return f" Did you mean '{close[0]}'?" if close else ""


def list_known_names(known: Iterable[str]) -> str:
    """Return `Known: [a, b]`, shortened."""
    names = list(known)
    more = f", and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"Known: [{', '.join(names[:_SHOWN_NAMES])}{more}]"


#: `[^{}]` keeps matching linear: no text is scanned twice, however many `${` it opens.
_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}")
_INDEX = re.compile(r"\[\d+\]")
_SECTIONS = frozenset({"llm", "manager_llm", "models", "inputs"})  # values below may contain variables, except secrets
#: values that may contain variables anywhere
_KEYS = frozenset({
    "role", "goal", "background", "items", "results", "dead_letters", "directory", "base_directory", "url",
    "max_tokens", "max_cost", "max_parallel_tasks", "max_concurrency", "replicas", "max_iterations", "max_steps",
    "num_cpus", "num_gpus", "max_retries", "max_predecessor_retries",
})  # fmt: skip
_SECRET = frozenset({"api_key", "api_key_env", "headers", "extra_headers", "extra_query", "env"})


def takes_variables(where: str) -> bool:
    path = _INDEX.sub("", where).split(".")
    return path[-1] in _KEYS or not _SECTIONS.isdisjoint(path)


def may_be_secret(where: str) -> bool:
    """Return whether the value at a path may hold a key, which `api_key_env` or `env` should name."""
    return not _SECRET.isdisjoint(_INDEX.sub("", where).split("."))


def expand(text: str, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """Replace `${NAME}`, `${NAME:-default}` (used if unset or empty) and `$${` (`${`); also return unset names.

    Examples:
        >>> expand("openai:${MODEL:-small} at ${HOST}, $${HOST}", {"HOST": "here"})
        ('openai:small at here, ${HOST}', [])
    """
    missing: dict[str, None] = {}

    def value_of(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        if name is None:
            return "${"
        value = environ.get(name)
        if default is not None:
            return value or default
        if value is None:
            missing[name] = None
            return ""
        return value

    return _VARIABLE.sub(value_of, text), list(missing)


MAX_BYTES = 1_048_576

_CORE = "tag:yaml.org,2002:"
_MERGE = f"{_CORE}merge"
#: Tags of plain YAML. Timestamps and a lone `=` are read as texts.
_PLAIN = {f"{_CORE}{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp", "value")}
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_MAX_DEPTH = 100
_MAX_VALUES = 50_000
_MAX_ALIASED = 10_000  # values that aliases and merge keys add
_MAX_NUMBER = 400  # Python refuses longer integers; PyYAML reads base-60 numbers in quadratic time


class Scalar(Struct, frozen=True, kw_only=True):
    spot: Position
    value: str | int | float | bool | None
    written: str


class Items(list["Located"]):
    def __init__(self, spot: Position, items: Iterable[Located]) -> None:
        super().__init__(items)
        self.spot = spot


class Entries(dict[str, "Located"]):
    """A mapping. Keys are texts as written: `on:` is the key `on`, not a boolean."""

    def __init__(self, spot: Position, values: Mapping[str, Located], key_spots: dict[str, Position]) -> None:
        super().__init__(values)
        self.spot = spot
        self.key_spots = key_spots


Located = Scalar | Items | Entries
Loc: TypeAlias = tuple[int | str, ...]  # path of keys and list positions
NOWHERE = Position(1, 1)


class SourcePosition(Struct, frozen=True, kw_only=True):
    path: str
    value: Located
    key_spot: Position


def locate(root: Located, path: Loc) -> SourcePosition:
    place = SourcePosition(path="", value=root, key_spot=root.spot)
    for step in path:
        match place.value, step:
            case Entries() as node, str() if step in node:
                where = f"{place.path}.{step}" if place.path else step
                place = SourcePosition(path=where, value=node[step], key_spot=node.key_spots[step])
            case Items() as node, int() if step < len(node):
                place = SourcePosition(path=f"{place.path}[{step}]", value=node[step], key_spot=node[step].spot)
            case Scalar() | Entries(), 0:
                continue  # a single value instead of a list of one (S-DOM-100)
            case _:
                break
    return place


class _TooLargeError(Exception):
    def __init__(self, spot: Position, text: str) -> None:
        super().__init__(spot, text)
        self.spot = spot
        self.text = text

    def __str__(self) -> str:
        return self.text


class _Loader(yaml.SafeLoader):
    _count = 0
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._count += 1
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise RecursionError
        if self._count > _MAX_VALUES:
            spot = _spot(self.get_mark())
            raise _TooLargeError(spot, f"a team file has at most {_MAX_VALUES} keys and values")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def read_document(text: str, problems: Problems) -> Located | None:
    """Return the only document, or None. Mistakes are added to `problems`."""
    try:
        root = yaml.compose(text, Loader=_Loader)
        if root is not None:
            return _Reader(problems).read(root, "")
        problems.add(Position(1, 1), "", "the file is empty")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        hint = " (indent with spaces, not tabs)" if "'\\t'" in what else ""
        problems.add(_spot(mark) if mark else Position(1, 1), "", f"not valid YAML: {what}{hint}")
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        spot = Position(before.count("\n") + 1, len(before) - before.rfind("\n"))
        problems.add(spot, "", f"not valid YAML: the character U+{ord(text[error.position]):04X} is not allowed")
    except RecursionError:  # deep nesting, or a chain of aliases
        problems.add(Position(1, 1), "", "nested too deeply")
    except _TooLargeError as error:
        problems.add(error.spot, "", str(error))
    return None


def _spot(mark: yaml.Mark) -> Position:
    return Position(mark.line + 1, mark.column + 1)


class _Reader:
    """Converts the parser's nodes, each once, also if aliases use it again."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._constructor = yaml.constructor.SafeConstructor()
        self._resolver = yaml.resolver.Resolver()
        self._done: dict[int, Located] = {}
        self._sizes: dict[int, int] = {}  # values by id of the converted node
        self._aliased = 0
        self._open: set[int] = set()

    def read(self, node: yaml.Node, where: str) -> Located | None:
        spot = _spot(node.start_mark)
        done = self._done.get(id(node))
        if done is not None:
            self._aliased += self._sizes[id(done)]
            if self._aliased > _MAX_ALIASED:
                raise _TooLargeError(spot, f"its aliases add more than {_MAX_ALIASED} values")
            return done
        if id(node) in self._open:
            self._problems.add(spot, where, "the alias contains itself")
            return None
        if node.tag not in _PLAIN:
            shown = node.tag.replace(_CORE, "!!")
            self._problems.add(spot, where, f"the tag '{shown}' is not allowed: a team file is plain data")
            return None
        self._open.add(id(node))
        found = self._convert(node, spot, where)
        self._open.discard(id(node))
        self._done[id(node)] = found
        parts = () if isinstance(found, Scalar) else found.values() if isinstance(found, Entries) else found
        self._sizes[id(found)] = 1 + sum(self._sizes[id(part)] for part in parts)
        return found

    def _convert(self, node: yaml.Node, spot: Position, where: str) -> Located:
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, spot, where)
        if isinstance(node, yaml.SequenceNode):
            items = (self.read(item, f"{where}[{index}]") for index, item in enumerate(node.value))
            return Items(spot, [item for item in items if item is not None])
        scalar = self._expand_variables(cast("yaml.ScalarNode", node), where)
        self._check_text(str(scalar.value), spot, where)
        return Scalar(spot=spot, value=self._value(scalar, where), written=str(scalar.value))

    def _expand_variables(self, node: yaml.ScalarNode, where: str) -> yaml.ScalarNode:
        """Expand environment variables. The result of an unquoted scalar may be a number (S-SET-58)."""
        text = str(node.value)
        if "${" not in text or node.tag != f"{_CORE}str":
            return node
        if may_be_secret(where):
            text = "a key does not come into a file by ${...}: name its variable with api_key_env, or {env: NAME} in headers"
            self._problems.add(_spot(node.start_mark), where, text)
            return node
        if not takes_variables(where):
            return node
        value, missing = expand(text, os.environ)
        for name in missing:
            text = f"the environment variable '{name}' is not set: export {name}=..., or write ${{{name}:-default}}"
            self._problems.add(_spot(node.start_mark), where, text)
        is_plain = node.style is None
        resolve = cast("Callable[..., str]", self._resolver.resolve)
        tag = resolve(yaml.ScalarNode, value, (True, False)) if is_plain else node.tag
        if tag not in {f"{_CORE}int", f"{_CORE}float"}:
            tag = node.tag
        return yaml.ScalarNode(tag, value, node.start_mark, node.end_mark, node.style)

    def _value(self, node: yaml.ScalarNode, where: str) -> str | int | float | bool | None:
        kind = node.tag.removeprefix(_CORE)
        if kind in {"int", "float"} and len(node.value) > _MAX_NUMBER:
            self._problems.add(_spot(node.start_mark), where, f"a number has at most {_MAX_NUMBER} characters")
            return 0
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return bool(self._constructor.construct_yaml_bool(node))
            if kind == "int":
                return int(self._constructor.construct_yaml_int(node))
            if kind == "float":
                return float(self._constructor.construct_yaml_float(node))
        except (ValueError, KeyError, OverflowError):  # `!!int abc`
            self._problems.add(_spot(node.start_mark), where, f"'{node.value}' is no {kind}")
        return str(node.value)

    def _check_text(self, text: str, spot: Position, where: str) -> None:
        """Refuse a lone surrogate, which UTF-8 cannot contain."""
        if _HALF_CHARACTER.search(text):
            self._problems.add(spot, where, "half of a surrogate pair is no character: write the whole one")

    def _read_mapping(self, node: yaml.MappingNode, spot: Position, where: str) -> Entries:
        own, merged = Entries(spot, {}, {}), Entries(spot, {}, {})
        key_spots: dict[str, Position] = {}
        for key_node, value_node in node.value:
            key_spot = _spot(key_node.start_mark)
            if key_node.tag == _MERGE:
                self._merge(value_node, where, merged)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._problems.add(key_spot, where, "a key must be a text")
                continue
            key = str(key_node.value)
            self._check_text(key, key_spot, where)
            inside = f"{where}.{key}" if where else key
            if key in own:
                text = f"duplicate key; the first one is in line {key_spots[key].line}"
                self._problems.add(key_spot, inside, text)
                continue
            value = self.read(value_node, inside)
            if value is not None:
                own[key], key_spots[key] = value, key_spot
        inherited = {key: value for key, value in merged.items() if key not in own}
        return Entries(spot, {**inherited, **own}, {**merged.key_spots, **key_spots})

    def _merge(self, node: yaml.Node, where: str, merged: Entries) -> None:
        for source in node.value if isinstance(node, yaml.SequenceNode) else (node,):
            found = self.read(source, where)
            if isinstance(found, Entries):
                for key, value in found.items():
                    merged.setdefault(key, value)
                    merged.key_spots.setdefault(key, found.key_spots[key])
            elif found is not None:
                self._problems.add(found.spot, where, "only mappings can be merged")
