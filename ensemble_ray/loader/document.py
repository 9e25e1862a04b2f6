"""A YAML text as a tree whose every node knows its line and column. Room: loader.

Plain data only: tags are refused, a key may stand once, aliases and merge keys are followed. Nothing is constructed
from the text but strings, numbers, booleans, lists and mappings. What a text costs is bounded: its length, its depth, the
values that it has, and those that aliases make of them (S-SEC-76).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import yaml

from ensemble_ray.loader.environment import expand, may_be_secret, takes_variables
from ensemble_ray.loader.problems import Problems, Spot

__all__ = ["MAX_BYTES", "Entries", "Entry", "Items", "Located", "Scalar", "read_document"]

#: Longest team file; those of people have some kilobytes.
MAX_BYTES = 1_048_576

_CORE = "tag:yaml.org,2002:"
_MERGE = f"{_CORE}merge"
#: Tags that plain YAML gives by itself; timestamps and lone `=` are texts to us.
_PLAIN = {f"{_CORE}{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp", "value")}
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_TOO_DEEP = "nested too deeply"
_MAX_DEPTH = 100
_MAX_VALUES = 50_000
#: Values that aliases and merge keys add to those that are written.
_MAX_ALIASED = 10_000
#: Python reads no longer ones; YAML's numbers to the base 60 would be read in quadratic time.
_MAX_NUMBER = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A text, number, boolean or nothing."""

    spot: Spot
    value: str | int | float | bool | None
    #: as it stands in the file
    written: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """A list."""

    spot: Spot
    items: tuple[Located, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key of a mapping and its value."""

    spot: Spot
    value: Located


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """A mapping; keys are the texts as written, so that `on:` is a key named `on`."""

    spot: Spot
    entries: Mapping[str, Entry]


Located = Scalar | Items | Entries


class _TooLargeError(Exception):
    """A text has more values than any team."""

    def __init__(self, spot: Spot, text: str) -> None:
        super().__init__(spot, text)
        self.spot = spot
        self.text = text

    def __str__(self) -> str:
        return self.text


class _Loader(yaml.SafeLoader):
    """Composes nodes as long as they are neither too many nor too deep."""

    _count = 0
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose the next node.

        Raises:
            RecursionError: it lies too deep.
            _TooLargeError: there are too many.
        """
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
    """The one document of a YAML text; what cannot be taken is noted, None when nothing can."""
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        told = ", ".join(part for part in (error.context, error.problem) if part)
        hint = " (indent with spaces, not tabs)" if "'\\t'" in told else ""
        problems.add(_spot(mark) if mark else Spot(1, 1), "", f"not valid YAML: {told}{hint}")
        return None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        spot = Spot(before.count("\n") + 1, len(before) - before.rfind("\n"))
        problems.add(spot, "", f"not valid YAML: the character U+{ord(text[error.position]):04X} is not allowed")
        return None
    except RecursionError:
        problems.add(Spot(1, 1), "", _TOO_DEEP)
        return None
    except _TooLargeError as error:
        problems.add(error.spot, "", str(error))
        return None
    if root is None:
        problems.add(Spot(1, 1), "", "the file is empty")
        return None
    try:
        return _Reader(problems).located(root, "")
    except RecursionError:  # through a chain of aliases
        problems.add(Spot(1, 1), "", _TOO_DEEP)
    except _TooLargeError as error:
        problems.add(error.spot, "", str(error))
    return None


def _spot(mark: yaml.Mark) -> Spot:
    return Spot(mark.line + 1, mark.column + 1)


def _parts(value: Located) -> Sequence[Located]:
    if isinstance(value, Items):
        return value.items
    return [entry.value for entry in value.entries.values()] if isinstance(value, Entries) else ()


class _Reader:
    """Turns the parser's nodes into ours, each once: an alias is the same node again, however often it is used."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._constructor = yaml.constructor.SafeConstructor()
        self._resolver = yaml.resolver.Resolver()
        self._made: dict[int, Located] = {}
        #: how many values each of them stands for
        self._sizes: dict[int, int] = {}
        self._aliased = 0
        self._open: set[int] = set()

    def located(self, node: yaml.Node, where: str) -> Located | None:
        spot = _spot(node.start_mark)
        made = self._made.get(id(node))
        if made is not None:
            self._count_aliased(self._sizes[id(made)], spot)
            return made
        if id(node) in self._open:
            self._problems.add(spot, where, "the alias contains itself")
            return None
        if node.tag not in _PLAIN:
            shown = node.tag.replace(_CORE, "!!")
            self._problems.add(spot, where, f"the tag '{shown}' is not allowed: a team file is plain data")
            return None
        self._open.add(id(node))
        found = self._converted(node, spot, where)
        self._open.discard(id(node))
        self._made[id(node)] = found
        self._sizes[id(found)] = 1 + sum(self._sizes[id(part)] for part in _parts(found))
        return found

    def _count_aliased(self, values: int, spot: Spot) -> None:
        self._aliased += values
        if self._aliased > _MAX_ALIASED:
            raise _TooLargeError(spot, f"through its aliases it stands for more than {_MAX_ALIASED} values")

    def _converted(self, node: yaml.Node, spot: Spot, where: str) -> Located:
        if isinstance(node, yaml.MappingNode):
            return Entries(spot=spot, entries=self._entries(node, where))
        if isinstance(node, yaml.SequenceNode):
            items = (self.located(item, f"{where}[{index}]") for index, item in enumerate(node.value))
            return Items(spot=spot, items=tuple(item for item in items if item is not None))
        scalar = self._expanded(cast("yaml.ScalarNode", node), where)
        self._check_text(str(scalar.value), spot, where)
        return Scalar(spot=spot, value=self._value(scalar, where), written=str(scalar.value))

    def _expanded(self, node: yaml.ScalarNode, where: str) -> yaml.ScalarNode:
        """The node with the values of environment variables; a plain one may become a number by that (S-SET-58)."""
        text = str(node.value)
        if "${" not in text or node.tag != f"{_CORE}str":
            return node
        if may_be_secret(where):
            told = "a key does not come into a file by ${...}: name its variable with api_key_env, or {env: NAME} in headers"
            self._problems.add(_spot(node.start_mark), where, told)
            return node
        if not takes_variables(where):
            return node
        value, missing = expand(text, os.environ)
        for name in missing:
            told = f"the environment variable '{name}' is not set: export {name}=..., or write ${{{name}:-default}}"
            self._problems.add(_spot(node.start_mark), where, told)
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

    def _check_text(self, text: str, spot: Spot, where: str) -> None:
        """Note a text that no UTF-8 can hold, so that neither a model nor a record can."""
        if _HALF_CHARACTER.search(text):
            self._problems.add(spot, where, "half of a surrogate pair is no character: write the whole one")

    def _entries(self, node: yaml.MappingNode, where: str) -> Mapping[str, Entry]:
        own: dict[str, Entry] = {}
        merged: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            spot = _spot(key_node.start_mark)
            if key_node.tag == _MERGE:
                self._merge(value_node, where, merged)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._problems.add(spot, where, "a key must be a text")
                continue
            key = str(key_node.value)
            self._check_text(key, spot, where)
            inside = f"{where}.{key}" if where else key
            if key in own:
                first = own[key].spot
                self._problems.add(spot, inside, f"the key stands here twice; the first is in line {first.line}")
                continue
            value = self.located(value_node, inside)
            if value is not None:
                own[key] = Entry(spot=spot, value=value)
        return {**{key: entry for key, entry in merged.items() if key not in own}, **own}

    def _merge(self, node: yaml.Node, where: str, merged: dict[str, Entry]) -> None:
        """Take what `<<:` brings; the first of several mappings wins."""
        for source in node.value if isinstance(node, yaml.SequenceNode) else (node,):
            found = self.located(source, where)
            if isinstance(found, Entries):
                for key, entry in found.entries.items():
                    merged.setdefault(key, entry)
            elif found is not None:
                self._problems.add(found.spot, where, "only mappings can be merged")
