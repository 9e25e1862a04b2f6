"""Text of bytes by the name of a charset."""

from __future__ import annotations

import codecs

import pytest

from ensemble_ray.tools.web.net import CHARSETS, codec_of, decode


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        *(("UTF-8", "utf_8"), ("utf8", "utf_8"), ("ISO-8859-1", "latin_1"), ("iso_8859-15", "iso8859_15")),
        *(("windows-1252", "cp1252"), ("Shift_JIS", "shift_jis"), ("x-sjis", "shift_jis"), ("windows-31j", "cp932")),
        *(("GB2312", "gb2312"), ("EUC-KR", "euc_kr"), ("koi8-r", "koi8_r"), ("us-ascii", "ascii"), ("Big5", "big5")),
        *(("punycode", "utf_8"), ("utf-7", "utf_8"), ("idna", "utf_8"), ("klingon", "utf_8"), ("", "utf_8")),
        *(("x" * 1000, "utf_8"), ("utf-8\u00fc", "utf_8"), ("../utf_8", "utf_8"), ("unicode_escape", "utf_8")),
    ],
)
def test_codec_is_one_of_the_list_whatever_the_name(name: str, codec: str) -> None:
    """S-SEC-13."""
    assert codec_of(name) == codec


def test_every_codec_of_the_list_decodes() -> None:
    """S-SEC-13: each is one that Python has, and makes text."""
    for charset in CHARSETS:
        assert decode("ab".encode(charset), charset).removeprefix("\ufeff") == "ab"


@pytest.mark.parametrize("charset", ["utf-16", "utf-32"])
def test_text_is_decoded_when_it_has_no_byte_order_mark(charset: str) -> None:
    """S-SEC-13: the low byte first, as browsers do; with a mark, as it says."""
    assert decode("gr\u00fcn".encode(f"{charset}-le"), charset) == "gr\u00fcn"
    mark = codecs.BOM_UTF16_BE if charset == "utf-16" else codecs.BOM_UTF32_BE
    assert decode(mark + "gr\u00fcn".encode(f"{charset}-be"), charset) == "gr\u00fcn"


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 131_073])
def test_character_is_whole_when_a_step_ends_in_it(size: int) -> None:
    """S-SEC-12: decoding in steps shows nowhere."""
    text = "a" + "\u00fc" * size
    assert decode(text.encode(), "utf-8") == text
    assert decode(text.encode()[:-1], "utf-8", is_truncated=True) == text[:-1]
    assert decode(text.encode()[:-1], "utf-8") == text[:-1] + "\ufffd"
