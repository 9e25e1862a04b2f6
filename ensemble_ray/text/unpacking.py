"""Unpacks and bounds the body of an HTTP answer while it comes: of models, pages, MCP servers and A2A agents. Layer: lowest; pure.

In: the names of its content codings, and its bytes as they come. Out: what they hold, in small pieces. Each stage, the
packed bytes included, is held to the limit of the whole: a kilobyte may unfold to gigabytes, at the last stage or
at one before it.
Never: more of a stage in memory than one piece, a piece larger than `STEP_BYTES`.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, cast

#: What is asked for, and all that is unpacked.
ACCEPTED_CODINGS = "gzip, deflate"
_CODINGS = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
#: A server that packs twice by mistake is understood; more is no mistake.
_MOST_LAYERS = 2
#: Small, since what follows the end of a gzip member is copied, and a body may be made of a thousand members per step.
STEP_BYTES = 16_384
#: A packed form may be larger than what it holds by this much: headers, and a thousandth where nothing can be packed.
_SLACK_BYTES, _SLACK_PART = 65_536, 1_000
_SHOWN = 40
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP, _ZLIB, _RAW_DEFLATE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


class UnpackingError(ValueError):
    """The body cannot be unpacked, or not within its limits."""


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
    """Have the body of a response of `httpx` or `httpx2` unpacked here and counted while it is read.

    Args:
        response: Its head was read, its body was not.
        fail: Makes the error of a body that is too long or cannot be unpacked, of the reason.
        max_bytes: Of the unpacked body.
        check: Raises a `ValueError` when so many unpacked bytes are too many; None: `max_bytes` is the limit.
        cut_bytes: What follows them is not read; None: all is read.
        layers: How often the body may be packed.
        on_piece: Called with each piece of the unpacked body before it is read; a piece has at most `STEP_BYTES`.

    Raises:
        Exception: what `fail` makes; the body is packed in another way.
    """
    try:
        unpacker = BodyUnpacker(codings_of(response.headers.pop("content-encoding", ""), layers), max_bytes=max_bytes)
    except UnpackingError as error:
        raise fail(str(error)) from None

    def check_size(received_bytes: int) -> None:
        if received_bytes > max_bytes:
            raise UnpackingError(f"it is longer than {max_bytes} bytes, the limit of an answer")

    # A response takes streams of its own package alone.
    package = sys.modules[type(response.stream).__module__.partition(".")[0]]
    bounded = cast("Any", type("BoundedBody", (_BoundedBody, package.AsyncByteStream), {}))
    response.stream = bounded(response.stream, unpacker, check or check_size, cut_bytes, fail, on_piece=on_piece)


class _BoundedBody:
    """The body of a response, unpacked, within its limits."""

    def __init__(
        self,
        packed: Any,
        unpacker: BodyUnpacker,
        check: Callable[[int], None],
        cut_bytes: int | None,
        fail: Callable[[str], Exception],
        *,
        on_piece: Callable[[bytes], None] | None,
    ) -> None:
        self._packed = packed
        self._unpacker = unpacker
        self._check = check
        self._cut_bytes = cut_bytes
        self._fail = fail
        self._on_piece = on_piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        received_bytes = 0
        async for piece in self._packed:
            try:
                for content in self._unpacker.feed(piece):
                    received_bytes += len(content)
                    if self._cut_bytes is not None and received_bytes > self._cut_bytes:
                        return
                    self._check(received_bytes)
                    if self._on_piece is not None:
                        self._on_piece(content)
                    yield content
            except ValueError as error:
                raise self._fail(str(error)) from None

    async def aclose(self) -> None:
        """Let go of the connection."""
        await self._packed.aclose()


def codings_of(header: str, layers: int = _MOST_LAYERS) -> tuple[str, ...]:
    """Return the codings that a `Content-Encoding` names, in the order in which they were applied.

    Raises:
        UnpackingError: there is one that we do not unpack, or there are too many.
    """
    names = [name for part in header.split(",") if (name := part.strip().lower()) not in {"", "identity"}]
    if len(names) > layers:
        raise UnpackingError(f"the body is packed {len(names)} times; at most {layers} are unpacked")
    for name in names:
        if name not in _CODINGS:
            shown = ascii(name[:_SHOWN])
            raise UnpackingError(
                f"the body is packed as {shown}, which was not asked for; supported: {ACCEPTED_CODINGS}"
            )
    return tuple(_CODINGS[name] for name in names)


class BodyUnpacker:
    """Takes the bytes of one body and gives what they hold.

    Args:
        codings: As `codings_of` gave them.
        max_bytes: How much of the content is wanted; every stage before it may hold a little more.
    """

    def __init__(self, codings: Sequence[str], *, max_bytes: int) -> None:
        allowed = max_bytes + max_bytes // _SLACK_PART + _SLACK_BYTES
        self._layers = [_Layer(coding) for coding in reversed(codings)]
        #: bytes that the body as it comes, and each layer but the last, may still give
        self._left = [allowed] * len(codings)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Give what these bytes hold, in pieces of at most `STEP_BYTES`; stop asking when there is enough.

        Raises:
            UnpackingError: the bytes are damaged, or a stage before the last is larger than it may be.
        """
        for at in range(0, len(data), STEP_BYTES):
            yield from self._through(0, data[at : at + STEP_BYTES])

    def finish(self) -> None:
        """Check that the body was whole; one of no bytes at all is.

        Raises:
            UnpackingError: it ended in the middle.
        """
        if any(layer.is_open for layer in self._layers):
            raise UnpackingError("the packed body ends in the middle")

    def _through(self, number: int, data: bytes) -> Iterator[bytes]:
        """Let a piece pass the layers from that number on."""
        if number == len(self._layers):
            yield data
            return
        self._left[number] -= len(data)
        if self._left[number] < 0:
            raise UnpackingError("the packed body is larger than what it may hold")
        for piece in self._layers[number].feed(data):
            yield from self._through(number + 1, piece)


class _Layer:
    """One coding."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._decoder = zlib.decompressobj(_GZIP) if coding == "gzip" else None
        #: of a `deflate` body: kept until its form is known
        self._head = b""
        #: whether it has begun and not ended
        self.is_open = False
        self._is_over = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Give what these bytes hold, in pieces of at most `STEP_BYTES`."""
        data = self._next_member(data) if self._is_over else self._head + data
        if not data:
            return
        self.is_open = True
        if self._decoder is None:
            self._head = data
            if len(data) < 2:  # noqa: PLR2004  the header of a zlib stream
                return
            self._decoder, self._head = zlib.decompressobj(_deflate_kind(data)), b""
        while True:
            try:
                piece = self._decoder.decompress(data, STEP_BYTES)
            except zlib.error:
                raise UnpackingError(f"the body is no valid {self._coding} data") from None
            if piece:
                yield piece
            decoder = self._decoder
            data = self._next_member(decoder.unused_data) if decoder.eof else decoder.unconsumed_tail
            # a full piece may have left something inside, also where no input is left
            if not data and (self._is_over or len(piece) < STEP_BYTES):
                return

    def _next_member(self, rest: bytes) -> bytes:
        """Return what comes after an end: another member of a gzip file; anything else is padding, and dropped."""
        self._is_over, self.is_open = True, False
        if self._coding != "gzip" or not rest or not _GZIP_MAGIC.startswith(rest[:2]):
            return b""
        self._decoder = zlib.decompressobj(_GZIP)
        self._is_over, self.is_open = False, True
        return rest


def _deflate_kind(head: bytes) -> int:
    """Return the form of a `deflate` body: in a zlib stream as agreed, or bare as some servers send it."""
    is_zlib = head[0] & 0x0F == zlib.DEFLATED and (head[0] << 8 | head[1]) % 31 == 0
    return _ZLIB if is_zlib else _RAW_DEFLATE
