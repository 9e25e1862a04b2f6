"""Texts cut into passages that fit the embedded model's window.

In: files, or nothing for Python's own language reference. Out: passages of bounded size, and how many there would be.
Never: a passage that could overflow a slot of the embedded model, whatever script or noise it is made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ensemble_ray.cli.view.terminal import screen_line
from ensemble_ray.errors import ValidationError

#: Statements of the language first, then what they are about; each is short enough to be read in seconds.
_TOPICS = (
    *("for", "while", "lambda", "return", "assert", "del", "global", "pass"),
    *("break", "continue", "if", "nonlocal", "yield", "with", "class", "raise", "async", "await"),
    *("booleans", "truth", "dict", "lists", "slicings", "subscriptions", "numbers", "context-managers", "exceptions"),
)
#: Longest passage. A slot of the embedded model holds 2,048 tokens; prompts and the answer need some 500 of them.
_MAX_CHARACTERS = 1900
_MAX_TOKENS = 1500
_MAX_FILE_BYTES = 50_000_000
_LABEL = 40
_PIECES = re.compile(r"[A-Za-z]+|\s+|.", re.DOTALL)
_ASCII = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A piece of a text."""

    #: what it is of: a topic, a file's name, with the passage's number where there are several
    label: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The passages that are read."""

    passages: tuple[Passage, ...]
    #: how many the sources have altogether
    available: int


def select_passages(files: Sequence[Path], *, count: int) -> Selection:
    """Return passages of the sources in turn, up to a count, so that each source has its part.

    Args:
        files: UTF-8 texts; none: topics of Python's language reference.
        count: How many at most.

    Raises:
        ValidationError: files that are missing, no text, or empty; all of them are named.
    """
    sources = _read(files) if files else topics()
    cut = [list(passages_of(label, text)) for label, text in sources]
    turns = [group[turn] for turn in range(max(map(len, cut), default=0)) for group in cut if turn < len(group)]
    chosen = {id(passage) for passage in turns[:count]}
    # Chosen in turn, read in the order of the sources.
    return Selection(
        passages=tuple(passage for group in cut for passage in group if id(passage) in chosen), available=len(turns)
    )


def topics() -> list[tuple[str, str]]:
    """Return topics of the language reference that this Python carries, each with its text."""
    from pydoc_data.topics import topics as carried  # a large module; only the demo needs it

    return [(name, carried[name]) for name in _TOPICS if name in carried]


def _read(files: Sequence[Path]) -> list[tuple[str, str]]:
    sources: list[tuple[str, str]] = []
    problems: list[str] = []
    names = [file.name for file in files]
    for file in files:
        try:
            if file.stat().st_size > _MAX_FILE_BYTES:
                problems.append(f"'{file}' is larger than {_MAX_FILE_BYTES // 1_000_000} MB")
                continue
            text = file.read_bytes().decode("utf-8-sig")
        except FileNotFoundError:
            problems.append(f"there is no file '{file}'")
        except IsADirectoryError:
            problems.append(f"'{file}' is a directory: name the files in it")
        except OSError as error:
            problems.append(f"cannot read '{file}': {error.strerror or error}")
        except UnicodeDecodeError:
            problems.append(f"'{file}' is not UTF-8 text")
        else:
            if not text.strip():
                problems.append(f"'{file}' is empty")
            sources.append((file.name if names.count(file.name) == 1 else str(file), text))
    if problems:
        raise ValidationError("; ".join(problems))
    return sources


def passages_of(label: str, text: str) -> Iterator[Passage]:
    """Cut the text at paragraphs, else at lines, else where it must be; nothing is left out but white space."""
    pieces = list(_cut(_tidy(text)))
    for number, piece in enumerate(pieces, start=1):
        shown = screen_line(label, _LABEL)
        yield Passage(label=shown if len(pieces) == 1 else f"{shown}, part {number}", text=piece)


def _tidy(text: str) -> str:
    """Drop rulers under headings and runs of empty lines: they say nothing and cost tokens."""
    without_rulers = re.sub(r"^[ \t]*([*=~^\"#+-])\1{3,}[ \t]*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n\s*\n", "\n\n", without_rulers).strip()


def _cut(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        rest = text[at : at + _MAX_CHARACTERS + 1]  # never all of it, which would be copied once per passage
        size = _fitting(rest)
        if size < len(rest):
            size = _boundary(rest, size)
        if piece := rest[:size].strip():
            yield piece
        at += size
        while at < len(text) and text[at].isspace():
            at += 1


def _fitting(text: str) -> int:
    """Return how many characters from the start fit."""
    tokens = 0
    for found in _PIECES.finditer(text):
        tokens += _piece_tokens(found[0])
        if tokens > _MAX_TOKENS or found.end() > _MAX_CHARACTERS:
            # One word can be longer than a passage; then it is cut inside.
            return found.start() or min(_MAX_CHARACTERS, _MAX_TOKENS)
    return len(text)


def _boundary(text: str, size: int) -> int:
    """Return the last good position to cut before that size, unless it would waste more than half."""
    for mark in ("\n\n", "\n", ". ", " "):
        at = text.rfind(mark, size // 2, size)
        if at > 0:
            return at + len(mark)
    return size


def at_most_tokens(text: str) -> int:
    """Return an upper bound of a text's tokens, for ordinary words and numbers of any script."""
    return sum(_piece_tokens(found[0]) for found in _PIECES.finditer(text))


def _piece_tokens(piece: str) -> int:
    if piece.isspace():
        return 1
    if ord(piece[0]) > _ASCII:
        return len(piece.encode("utf-8", "surrogatepass"))
    return -(-len(piece) // 3)
