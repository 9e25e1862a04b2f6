"""Bodies of HTTP answers while they are unpacked: what they hold, what is refused, how much is looked at."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray.text.unpacking import STEP_BYTES, BodyUnpacker, UnpackingError, codings_of


def _bare(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


_PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    "identity": lambda data: data,
    "gzip": gzip.compress,
    "X-GZIP": gzip.compress,
    "deflate": zlib.compress,
    "Deflate ": _bare,
    "gzip, gzip": lambda data: gzip.compress(gzip.compress(data)),
    "deflate, gzip": lambda data: gzip.compress(zlib.compress(data)),
    "identity, gzip": gzip.compress,
}


def _unpacked(header: str, body: bytes, *, cut: int = 1000, max_bytes: int = 1_000_000) -> bytes:
    unpacker = BodyUnpacker(codings_of(header), max_bytes=max_bytes)
    pieces = [piece for at in range(0, len(body), cut) for piece in unpacker.feed(body[at : at + cut])]
    unpacker.finish()
    assert all(len(piece) <= STEP_BYTES for piece in pieces)
    return b"".join(pieces)


@pytest.mark.parametrize("header", _PACK)
@given(data=st.binary(max_size=200).map(lambda part: part * 300), cut=st.integers(1, 70_000))
def test_body_is_the_same_when_packed_and_cut_anywhere(header: str, data: bytes, cut: int) -> None:
    """S-SEC-10."""
    assert _unpacked(header, _PACK[header](data), cut=cut) == data


def test_members_are_joined_when_a_gzip_body_has_several() -> None:
    """S-SEC-10: padding after the last one is dropped."""
    body = gzip.compress(b"ab") + gzip.compress(b"") + gzip.compress(b"cd") + bytes(20)
    assert {_unpacked("gzip", body, cut=cut) for cut in (1, 7, 1000)} == {b"abcd"}


def test_body_of_no_bytes_is_whole() -> None:
    """S-SEC-10: answers without a body name a coding too."""
    assert _unpacked("gzip", b"") == b""


@pytest.mark.parametrize(
    ("header", "body", "reason"),
    [
        ("gzip", b"none", "no valid gzip data"),
        ("deflate", b"\xff\xff\xff", "no valid deflate data"),
        ("deflate", b"\x78", "ends in the middle"),
        ("gzip", gzip.compress(b"x" * 100, mtime=0)[:-1], "ends in the middle"),
    ],
)
def test_body_is_refused_when_damaged(header: str, body: bytes, reason: str) -> None:
    """S-SEC-11."""
    with pytest.raises(UnpackingError, match=reason):
        _unpacked(header, body)


@pytest.mark.parametrize("header", ["br", "gzip, br", "zstd", "gzip, gzip, gzip", "\x1b[31m"])
def test_coding_is_refused_when_it_was_not_asked_for(header: str) -> None:
    """S-SEC-11."""
    with pytest.raises(UnpackingError, match="packed"):
        codings_of(header)


def test_body_is_refused_when_a_stage_before_the_last_is_too_large() -> None:
    """S-SEC-10: empty blocks hold nothing and are work all the same."""
    empty = zlib.compress(b"")[:2] + b"\x00\x00\x00\xff\xff" * 100_000
    with pytest.raises(UnpackingError, match="larger than what it may hold"):
        _unpacked("deflate, gzip", gzip.compress(empty), max_bytes=1000)
    with pytest.raises(UnpackingError, match="larger than what it may hold"):
        _unpacked("deflate", empty, max_bytes=1000)
