"""Texts from users, models, endpoints and tools: make them valid UTF-8, and safe for logs, terminals and headers."""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

LOG_LIMIT = 1000  # characters of a foreign text in a log line

#: An escape in JSON text: a surrogate pair, half of one, or another character.
_JSON_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_HALF_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class TextLine(str):
    """A text that is cut to one line already."""

    __slots__ = ()


def whole_text(text: str) -> str:
    r"""Replace halves of surrogate pairs by U+FFFD; two matching halves become one character.

    Examples:
        >>> whole_text("caf\ud800") == "caf\ufffd"
        True
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def whole_data(value: object) -> object:
    """Apply `whole_text` to JSON data, unless it is nested too deeply."""
    try:
        return _whole(value)
    except RecursionError:
        return value


def _whole(value: object) -> object:
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, Mapping):
        return {_whole(key): _whole(each) for key, each in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list):
        return [_whole(each) for each in cast("list[object]", value)]
    return value


def whole_json(text: str) -> str:
    r"""Replace halves of surrogate pairs in JSON text, also escapes such as `\ud800`, by U+FFFD."""
    text = whole_text(text)
    if _HALF_ESCAPE.search(text) is None:
        return text
    return _JSON_ESCAPE.sub(lambda found: "\\ufffd" if found["half"] else found[0], text)


class SurrogateJoiner:
    """Applies `whole_text` to the pieces of a stream, also to a pair that two pieces share."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        piece, self._held = self._held + piece, ""
        if piece and "\ud800" <= piece[-1] <= "\udbff":
            self._held, piece = piece[-1], piece[:-1]
        return whole_text(piece)

    def finish(self) -> str:
        return whole_text(self._held)


def one_line(text: str, limit: int | None = LOG_LIMIT) -> TextLine:
    r"""Return a text as one line, cut to a length.

    Examples:
        >>> one_line("first\nsecond", 9)
        'first\\nsec... [12 characters in all]'
    """
    if isinstance(text, TextLine):
        return text
    shown = text if limit is None else text[:limit]
    clean = shown if shown.isprintable() else "".join(map(_printable, shown))
    return TextLine(f"{clean}... [{len(text)} characters in all]" if len(shown) < len(text) else clean)


def _printable(char: str) -> str:
    if char.isprintable():
        return char
    if char in _NAMED:
        return _NAMED[char]
    code = ord(char)
    if 0xD800 <= code <= 0xDFFF:  # noqa: PLR2004  halves of surrogate pairs
        return "\ufffd"
    if char.isspace() and code > 0xFF and char not in "\u2028\u2029":  # noqa: PLR2004  harmless
        return char
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004


#: Characters that control a terminal, or disguise a text.
_STEERING = (
    r"\x00-\x08\x0b-\x1f"  # C0, without tab and line feed
    r"\x7f-\x9f"  # DEL and C1
    r"\xad\u200b\u2060-\u2064\ufeff"  # no width; scripts and emoji need the joiners U+200C and U+200D
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # direction of writing
    r"\u2028\u2029"  # line breaks that `split("\n")` ignores
    r"\ufff9-\ufffb\U000e0000-\U000e007f"  # invisible annotations and tags
    r"\ud800-\udfff"  # halves of surrogate pairs
)
_CONTROL = re.compile(rf"(?!\r\n)[{_STEERING}]")  # a carriage return before a line feed is harmless
_IN_JSON = re.compile(rf"(?![\r\n])[{_STEERING}]")  # C0 characters are escaped in JSON text
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def escape_controls(text: str) -> str:
    r"""Escape characters that control a terminal, except tabs and line breaks (S-SEC-60).

    `rich` passes the escape character; `repr` escapes the blanks of other scripts too.
    """
    return _CONTROL.sub(_escape, text)


def escape_surrogates(text: str) -> str:
    r"""Replace halves of surrogate pairs, which no stream can encode, by visible escapes."""
    return _SURROGATE.sub(_escape, text)


def escape_unencodable(text: str, encoding: str | None) -> str:
    r"""Replace characters that an encoding lacks by visible escapes; None: it has all."""
    return text if encoding is None else text.encode(encoding, "backslashreplace").decode(encoding)


def escape_json(text: str, encoding: str | None = None) -> str:
    """Escape characters of JSON text that control a terminal, or that the encoding lacks."""
    safe = _IN_JSON.sub(_escaped_in_json, text)
    try:
        safe.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return _NOT_ASCII.sub(_escaped_in_json, safe)
    return safe


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def _escaped_in_json(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


_NOT_CARRIED = re.compile(r"[^\t\x20-\x7e]")  # clients encode other characters in different ways, and most fail
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def header_flaw(value: str) -> str:
    r"""Return why a text cannot be a header's value, without its content, or "".

    Examples:
        >>> header_flaw("sk-1\nsk-2"), header_flaw("sk-\u201c1")
        ('holds a line break, which no header can carry', 'holds the character U+201C, which no header can carry')
    """
    found = _NOT_CARRIED.search(value)
    if found is None:
        return ""
    what = "a line break" if found[0] in "\r\n" else f"the character U+{ord(found[0]):04X}"
    return f"holds {what}, which no header can carry"


def header_name_flaw(name: str) -> str:
    return "" if _NAME.fullmatch(name) else "is no name of a header"


CHARACTERS_PER_TOKEN = 4


def estimate_tokens(characters: int) -> int:
    """Estimate the tokens of a text, rounded down."""
    return characters // CHARACTERS_PER_TOKEN


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


@dataclass(frozen=True, slots=True)
class FoundJson:
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


ACCEPTED_CODINGS = "gzip, deflate"
_CODINGS = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
_MOST_LAYERS = 2  # some servers compress twice by mistake
STEP_BYTES = 16_384  # small: zlib copies the rest after each gzip member, and a step may contain a thousand
_SLACK_BYTES, _SLACK_PART = 65_536, 1_000  # headers, and a thousandth of the content
_SHOWN = 40
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP, _ZLIB, _RAW_DEFLATE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


class UnpackingError(ValueError): ...


def bound_response(
    response: Any,
    fail: Callable[[str], Exception],
    *,
    max_bytes: int,
    check: Callable[[int], None] | None = None,
    cut_bytes: int | None = None,
    layers: int = _MOST_LAYERS,
    on_piece: Callable[[bytes], None] | None = None,
) -> None:
    """Decompress and limit the body of an `httpx` or `httpx2` response while it is read.

    `fail` makes the error for a refused body from the reason. `check` raises a `ValueError` for too many decompressed bytes; None:
    `max_bytes` is the limit. Reading stops after `cut_bytes`. `on_piece` is called with each piece before it is read.
    """
    try:
        unpacker = BodyUnpacker(codings_of(response.headers.pop("content-encoding", ""), layers), max_bytes=max_bytes)
    except UnpackingError as error:
        raise fail(str(error)) from None

    def check_limit(received_bytes: int) -> None:
        if received_bytes > max_bytes:
            raise UnpackingError(f"it is longer than {max_bytes} bytes, the limit of an answer")

    packed = response.stream

    def read(_: object) -> AsyncIterator[bytes]:
        return _read(packed, unpacker, check or check_limit, cut_bytes, fail, on_piece=on_piece)

    async def close(_: object) -> None:
        await packed.aclose()

    # The stream must be a class of the same package as the response.
    package: Any = sys.modules[type(packed).__module__.partition(".")[0]]
    response.stream = type("BoundedBody", (package.AsyncByteStream,), {"__aiter__": read, "aclose": close})()


async def _read(
    packed: Any,
    unpacker: BodyUnpacker,
    check: Callable[[int], None],
    cut_bytes: int | None,
    fail: Callable[[str], Exception],
    *,
    on_piece: Callable[[bytes], None] | None,
) -> AsyncIterator[bytes]:
    received_bytes = 0
    async for piece in packed:
        try:
            for content in unpacker.feed(piece):
                received_bytes += len(content)
                if cut_bytes is not None and received_bytes > cut_bytes:
                    return
                check(received_bytes)
                if on_piece is not None:
                    on_piece(content)
                yield content
        except ValueError as error:
            raise fail(str(error)) from None


def codings_of(header: str, layers: int = _MOST_LAYERS) -> tuple[str, ...]:
    """Return the codings in a `Content-Encoding`, in its order. An UnpackingError: one is not supported."""
    names = [name for part in header.split(",") if (name := part.strip().lower()) not in {"", "identity"}]
    if len(names) > layers:
        raise UnpackingError(f"the body is packed {len(names)} times; at most {layers} are unpacked")
    for name in names:
        if name not in _CODINGS:
            shown = ascii(name[:_SHOWN])
            msg = f"the body is packed as {shown}, which was not asked for; supported: {ACCEPTED_CODINGS}"
            raise UnpackingError(msg)
    return tuple(_CODINGS[name] for name in names)


class BodyUnpacker:
    """Decompresses one body; `max_bytes` limits the content."""

    def __init__(self, codings: Sequence[str], *, max_bytes: int) -> None:
        allowed = max_bytes + max_bytes // _SLACK_PART + _SLACK_BYTES
        self._layers = [_Layer(coding) for coding in reversed(codings)]
        self._left = [allowed] * len(codings)  # allowed bytes of the compressed body, and of all layers except the last

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the content in pieces of at most `STEP_BYTES`."""
        for at in range(0, len(data), STEP_BYTES):
            yield from self._through(0, data[at : at + STEP_BYTES])

    def finish(self) -> None:
        """Check that the body is complete or empty."""
        if any(layer.is_open for layer in self._layers):
            raise UnpackingError("the packed body ends in the middle")

    def _through(self, number: int, data: bytes) -> Iterator[bytes]:
        if number == len(self._layers):
            yield data
            return
        self._left[number] -= len(data)
        if self._left[number] < 0:
            raise UnpackingError("the packed body is larger than what it may hold")
        for piece in self._layers[number].feed(data):
            yield from self._through(number + 1, piece)


class _Layer:
    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._decoder = zlib.decompressobj(_GZIP) if coding == "gzip" else None
        self._head = b""  # start of a `deflate` body, until its form is known
        self.is_open = False
        self._is_over = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        data = self._next_member(data) if self._is_over else self._head + data
        if not data:
            return
        self.is_open = True
        if self._decoder is None:
            self._head = data
            if len(data) < 2:  # noqa: PLR2004  the header of a zlib stream
                return
            # Some servers send raw deflate data instead of a zlib stream.
            is_zlib = data[0] & 0x0F == zlib.DEFLATED and (data[0] << 8 | data[1]) % 31 == 0
            self._decoder, self._head = zlib.decompressobj(_ZLIB if is_zlib else _RAW_DEFLATE), b""
        while True:
            try:
                piece = self._decoder.decompress(data, STEP_BYTES)
            except zlib.error:
                raise UnpackingError(f"the body is no valid {self._coding} data") from None
            if piece:
                yield piece
            decoder = self._decoder
            data = self._next_member(decoder.unused_data) if decoder.eof else decoder.unconsumed_tail
            # After a full piece the decoder may hold more output, even without more input.
            if not data and (self._is_over or len(piece) < STEP_BYTES):
                return

    def _next_member(self, rest: bytes) -> bytes:
        """Return the next member of a gzip file. Other data after the end is padding."""
        self._is_over, self.is_open = True, False
        if self._coding != "gzip" or not rest or not _GZIP_MAGIC.startswith(rest[:2]):
            return b""
        self._decoder = zlib.decompressobj(_GZIP)
        self._is_over, self.is_open = False, True
        return rest
