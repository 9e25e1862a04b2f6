"""Names are the field's: words that said the same in a language of this project's own do not come back."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.project import PACKAGES, ROOT, python_files

#: By word, what the field says; see the glossary in `docs/architecture.md`.
WORDS = {
    "attend": "connect",
    "attendance": "connection",
    "bell": "wakeup",
    "cargo": "payload",
    "colleague": "peer",
    "conductor": "coordinator",
    "cool": "evict",
    "courier": "sender",
    "desk": "service",
    "fed": "dynamic",
    "give": "return, release or set",
    "hear": "on_update",
    "heard": "is_connected, has_listeners",
    "house": "process",
    "housing": "placement",
    "intake": "buffer",
    "letter": "report, outbox",
    "lodger": "placement request",
    "news": "update",
    "overlay": "overrides",
    "pulse": "heartbeat",
    "seat": "slot",
    "shelf": "cache",
    "statement": "balance",
    "stillborn": "failed start",
    "vault": "store",
    "weight": "size, token count",
}
#: As above, of several words each.
PHRASES = {
    "free_places": "free_slots",
    "is_again": "is_resubmission",
    "let_go": "release, skip or drop",
    "lost_work": "failed_delegations",
}
#: The field's own uses: in names that match, of files below the folder.
ALLOWED = (
    ("ensemble_ray", re.compile("dead_?letter", re.IGNORECASE)),  # of message queues: what could not be handled
    ("ensemble_ray/llm/local.py", re.compile("weights", re.IGNORECASE)),  # of a neural network
    ("ensemble_ray/record/postgres", re.compile("_statement")),  # of SQL
    ("ensemble_ray/visualization", re.compile("letter", re.IGNORECASE)),  # of the alphabet: its width in a picture
)
#: Names of several public classes, and why they stay.
SHARED = {
    "OpenReview": "the face's value, and its schema, which the endpoint's OpenAPI document names so",
}
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@pytest.fixture(scope="module")
def trees() -> list[tuple[Path, ast.Module]]:
    """Syntax trees of all modules, which are parsed once."""
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in python_files(*PACKAGES)]


def test_no_name_has_a_word_that_the_field_says_otherwise(trees: list[tuple[Path, ast.Module]]) -> None:
    """Of modules, classes, functions, parameters and attributes."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: '{name}'; say {wanted}"
        for path, tree in trees
        for line, name in _names(path, tree)
        if (wanted := _wanted(name)) and not _is_allowed(path, name)
    ]
    assert not found, "\n" + "\n".join(found)


def test_a_name_means_one_public_class(trees: list[tuple[Path, ast.Module]]) -> None:
    """A reader who meets a name knows which class it is; names of one file, with `_` before them, are its own affair."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees:
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    shared = {name: places for name, places in found.items() if len(places) > 1}
    again = [f"{name}: {', '.join(places)}" for name, places in shared.items() if name not in SHARED]
    assert not again, "\n" + "\n".join(again)
    assert shared.keys() == SHARED.keys(), "a name that is no longer shared needs no reason"


def test_words_are_found_in_each_spelling() -> None:
    """Snake case and camel case, in the singular and in the plural."""
    names = ["house", "_open_houses", "HouseKeeper", "NEWS", "RemoteVault", "is_again", "_let_go"]
    assert all(map(_wanted, names))
    assert not any(map(_wanted, ["lighthouse", "newsroom", "cooldown", "given", "defaulted"]))


def _names(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    yield 0, path.stem
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case _:
                pass


def _wanted(name: str) -> str | None:
    """Return what to say instead; None: the name is one of the field's."""
    parts = [part.lower() for part in _PARTS.findall(name)]
    words = (WORDS.get(part) or WORDS.get(part.removesuffix("s")) for part in parts)
    whole = f"_{'_'.join(parts)}_"
    phrases = (wanted for phrase, wanted in PHRASES.items() if f"_{phrase}_" in whole)
    return next(filter(None, (*words, *phrases)), None)


def _is_allowed(path: Path, name: str) -> bool:
    return any(path.is_relative_to(ROOT / folder) and meant.search(name) is not None for folder, meant in ALLOWED)
