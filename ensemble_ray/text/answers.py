"""Split tagged reasoning from the answers of models, and find JSON in text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from msgspec import Struct

_NAMES = ("think", "thinking", "reasoning", "thought")
_TAG = re.compile(rf"<(/?)({'|'.join(_NAMES)})>", re.IGNORECASE | re.ASCII)
_BLANKS = re.compile(r"\s++")
_TAGS = tuple(f"<{slash}{name}>" for name in _NAMES for slash in ("", "/"))
_LONGEST_TAG = max(map(len, _TAGS))
_MOST_BLANKS = 256  # most blanks before the first tag of a text
_QUOTED_BEFORE, _QUOTED_BEHIND = " \t\"'`([", " \t\"'`)].,;:!?"  # Characters around a tag that a sentence mentions.
_FENCE = "```"


class ReasoningSplitter:
    """Splits reasoning in tags from the answer while the text arrives in pieces.

    A tag counts at the start of the text, or directly after a closed one. Reasoning without a closing tag lasts to the end.
    """

    def __init__(self) -> None:
        self.has_tag = False
        self._held = ""
        self._closing: str | None = None  # closing tag of the reasoning; None: outside of it
        self._is_answer = False

    def feed(self, piece: str) -> list[tuple[str, bool]]:
        """Return the parts that are known now, and whether they are reasoning."""
        text, self._held = self._held + piece, ""
        parts: list[tuple[str, bool]] = []
        position = 0
        while position < len(text):
            if self._is_answer:
                parts.append((text[position:], False))
                break
            if self._closing is not None:
                position = self._read_reasoning(text, position, self._closing, parts)
                continue
            blanks = _BLANKS.match(text, position)
            begun = position if blanks is None else blanks.end()
            found = _TAG.match(text, begun)
            is_near = self.has_tag or begun - position <= _MOST_BLANKS
            position = begun if self.has_tag else position
            if found is not None and is_near:
                self.has_tag = True
                self._closing = None if found[1] else f"</{found[2].lower()}>"
                position = found.end()
            elif is_near and any(tag.startswith(text[begun : begun + _LONGEST_TAG].lower()) for tag in _TAGS):
                self._held = text[position:]
                break
            else:
                self._is_answer = True
        return parts

    def finish(self) -> list[tuple[str, bool]]:
        held, self._held = self._held, ""
        return [(held, self._closing is not None)] if held else []

    def _read_reasoning(self, text: str, start: int, closing: str, parts: list[tuple[str, bool]]) -> int:
        """Return the position after the closing tag."""
        found = next((each for each in _TAG.finditer(text, start) if each[0].lower() == closing), None)
        if found is not None:
            self._closing = None
            end, behind = found.span()
        else:
            end, behind = text.rfind("<", max(start, len(text) - _LONGEST_TAG)), len(text)
            if end < 0 or not closing.startswith(text[end:].lower()):
                end = len(text)
            self._held = text[end:]
        if end > start:
            parts.append((text[start:end], True))
        return behind


def split_reasoning(text: str) -> tuple[str | None, str]:
    r"""Return the reasoning in a model's text, or None, and the answer, in linear time.

    Examples:
        >>> split_reasoning("<think>\nPerhaps 41?\n</think>\n\n42")
        ('Perhaps 41?', '42')
        >>> split_reasoning("Write <think> first.")
        (None, 'Write <think> first.')
    """
    if "<" not in text:
        return None, text
    splitter = ReasoningSplitter()
    parts = splitter.feed(text)
    for held, is_reasoning in splitter.finish():
        # Reasoning without a closing tag and the part before it form one block.
        before = parts.pop()[0] if is_reasoning and parts and parts[-1][1] else ""
        parts.append((before + held, is_reasoning))
    if not splitter.has_tag:
        found = _TAG.search(text)
        if found is None or not found[1] or _is_mentioned(text, found):
            return None, text
        parts = [(text[: found.start()], True), (text[found.end() :].lstrip(), False)]
    reasoning = "\n\n".join([part.strip() for part, is_reasoning in parts if is_reasoning and part.strip()])
    return reasoning or None, "".join([part for part, is_reasoning in parts if not is_reasoning])


def _is_mentioned(text: str, tag: re.Match[str]) -> bool:
    """Whether a closing tag without an opening one is part of code, JSON or a sentence in the answer."""
    start, end = tag.span()
    line = text[text.rfind("\n", 0, start) + 1 : start]
    before, behind = line[-1:], text[end : end + 1]
    if before and before in _QUOTED_BEFORE and behind and behind in _QUOTED_BEHIND:
        return True
    if text.count(_FENCE, 0, start) % 2 or line.count("`") % 2:
        return True
    if text.lstrip()[:1] not in {"{", "[", '"'}:
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


_MOST_OPENINGS = 1000  # most failed attempts per text: each counts the lines before it
_MOST_PASSES = 8  # limit of the characters read in failed attempts, in lengths of the text
_decoder = json.JSONDecoder()


class FoundJson(Struct, frozen=True):
    value: object
    start: int
    end: int


def find_json(text: str, openings: re.Pattern[str]) -> FoundJson | None:
    return next(iter_json(text, openings), None)


def iter_json(text: str, openings: re.Pattern[str]) -> Iterator[FoundJson]:
    """Yield the outermost JSON values in a text, in order. The search ends early if too many attempts fail."""
    left = _MOST_PASSES * len(text)
    failed = position = 0
    while failed < _MOST_OPENINGS and left >= 0 and (opening := openings.search(text, position)) is not None:
        start = opening.start()
        failed += 1
        position = start + 1
        try:
            value, end = _decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            # Its position is the start of the string, which was read to the end.
            left -= (len(text) if error.msg.startswith("Unterminated") else error.pos) - start
            position = max(position, error.pos)
        except ValueError:  # a number with too many digits, at an unknown position
            left -= len(text) - start
        except RecursionError:  # nested too deeply, also from the next positions on
            return
        else:
            failed -= 1
            position = end
            yield FoundJson(value, start, end)
