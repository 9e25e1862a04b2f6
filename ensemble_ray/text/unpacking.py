"""Decompress the body of an HTTP response while it is read, within limits.

A kilobyte may expand to gigabytes, so every stage has the limit. Memory holds one piece of `STEP_BYTES` per stage.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

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
