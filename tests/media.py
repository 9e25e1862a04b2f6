"""Small files of several kinds, which readers of these kinds accept."""

from __future__ import annotations

import struct
import zlib

__all__ = ["JPEG", "PNG", "SVG", "WAV", "make_png", "make_wav"]


def make_png(colour: tuple[int, int, int] = (200, 30, 30), *, side: int = 4) -> bytes:
    """Return a square picture of one colour."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = (b"\0" + bytes(colour) * side) * side
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def make_wav(*, samples: int = 800) -> bytes:
    """Return silence, at 8,000 samples a second."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, 8000, 8000, 1, 8)
    data = struct.pack("<4sI", b"data", samples) + b"\x80" * samples
    return struct.pack("<4sI4s", b"RIFF", 4 + len(form) + len(data), b"WAVE") + form + data


PNG = make_png()
WAV = make_wav()
JPEG = b"\xff\xd8\xff\xe0 of a photo, its first bytes alone"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><script>window.pwned = 1</script></svg>'
