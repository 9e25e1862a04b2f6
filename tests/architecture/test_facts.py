"""Facts are known in one place: no code outside `ensemble_ray.facts` knows how they are written."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec import structs

from ensemble_ray.facts.fact import FactData
from ensemble_ray.facts.reading import KINDS
from tests.architecture.project import ROOT, python_files

#: Names of kinds that are no words of anything else.
_WORDS = {name for name in KINDS if "_" in name}


#: Found in every file that can break a rule; to parse the others takes seconds.
_SUSPECT = re.compile(rf"\bdata\b|\boutput_data\b|\bkind\b|{'|'.join(_WORDS)}")


def _code() -> Iterator[tuple[Path, ast.Module]]:
    for path in python_files("ensemble_ray", "actors", "serve"):
        text = path.read_text(encoding="utf-8")
        if ROOT / "ensemble_ray" / "facts" not in path.parents and _SUSPECT.search(text):
            yield path.relative_to(ROOT), ast.parse(text)


def _looks_into_data(node: ast.AST) -> bool:
    """Whether it is `x.data[...]` or `x.data.get(...)`."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="data")):
            return True
        case ast.Call(func=ast.Attribute(attr="get", value=ast.Attribute(attr="data"))):
            return True
        case _:
            return False


def _reads_output(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Give where a key of `x.output_data()` is read, there or by a name that the function gives it."""
    for function in nodes:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        inside = list(ast.walk(function))
        names = {
            target.id
            for node in inside
            if isinstance(node, ast.Assign) and _is_output_data(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in inside:
            match node:
                case ast.Subscript(value=read) | ast.Call(func=ast.Attribute(attr="get", value=read)):
                    if _is_output_data(read) or (isinstance(read, ast.Name) and read.id in names):
                        yield node
                case _:
                    pass


def _is_output_data(node: ast.AST) -> bool:
    """Whether it is `x.output_data()`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "output_data"


def _names_a_kind(node: ast.AST) -> bool:
    """Whether it compares a fact's kind with a text, or is the name of a kind that is no other word."""
    match node:
        case ast.Compare(left=ast.Attribute(attr="kind", value=ast.Name(id="fact" | "each" | "end"))):
            return any(isinstance(each, ast.Constant) for other in node.comparators for each in ast.walk(other))
        case ast.Constant(value=str(text)):
            return text in _WORDS
        case _:
            return False


@dataclass(frozen=True, slots=True)
class _Places:
    """Where code outside `ensemble_ray.facts` knows what it should not, as `path:line`."""

    keys: list[str] = field(default_factory=list)
    output_keys: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def places() -> _Places:
    """Of all code, which is parsed once."""
    found = _Places()
    for path, tree in _code():
        nodes = list(ast.walk(tree))
        found.keys.extend(f"{path}:{node.lineno}" for node in nodes if _looks_into_data(node))  # type: ignore[attr-defined]
        found.output_keys.extend(f"{path}:{node.lineno}" for node in _reads_output(nodes))  # type: ignore[attr-defined]
        if path not in _MESSAGES:
            found.kinds.extend(f"{path}:{node.lineno}" for node in nodes if _names_a_kind(node))  # type: ignore[attr-defined]
    return found


def test_nobody_else_knows_a_key(places: _Places) -> None:
    """Readers use attributes: a misspelt one is an error before it runs."""
    assert places.keys == []


def test_nobody_else_knows_a_key_of_an_output(places: _Places) -> None:
    """Its data are handed on as a whole, or read by `OutputRecorded.read()`."""
    assert places.output_keys == []


@pytest.mark.parametrize(
    "code",
    [
        "def f(x):\n    return x.output_data()['raw']",
        "def f(x):\n    data = x.output_data()\n    return data.get('raw')",
    ],
)
def test_keys_of_outputs_are_seen_when_they_are_read(code: str) -> None:
    """There, or by a name."""
    assert len(list(_reads_output(ast.walk(ast.parse(code))))) == 1


#: Messages to pages have types and fields of their own, and some of them are the same words (27).
_MESSAGES = {
    Path("ensemble_ray/record/following.py"),
    Path("ensemble_ray/cli/view/followed.py"),
    Path("serve/mcp_api.py"),
    Path("serve/schemas.py"),
    Path("ensemble_ray/events/messages.py"),
    Path("ensemble_ray/studio/dashboard/app.py"),
}


def test_nobody_else_knows_the_name_of_a_kind(places: _Places) -> None:
    """Readers match on classes."""
    assert places.kinds == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.KEYS], ids=lambda kind: kind.KIND)
def test_every_field_is_written(kind: type[FactData]) -> None:
    """What has no key would be lost on the way through the record."""
    assert set(kind.KEYS) == {each.name for each in structs.fields(kind)} - {"absent", "rest"}
