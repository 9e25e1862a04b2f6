"""Bytes of the web as text, by the charset that a server or a page names. Package: tools. Pure.

In: bytes, and a name that a stranger chose. Out: text. Only charsets of a short list are used: some of Python's codecs
take time in proportion to the square of their input (`punycode`), run something else than text (`idna`, `rot13`) or
read bytes as what they do not look like (`utf-7`). Every other name means UTF-8, with U+FFFD for what is none.
"""

from __future__ import annotations

import codecs
from encodings import normalize_encoding
from encodings.aliases import aliases

__all__ = ["CHARSETS", "codec_of", "decode"]

#: Python's names of the codecs that are used; each is linear.
CHARSETS = frozenset(
    {
        *("utf_8", "utf_8_sig", "utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le", "ascii"),
        *("latin_1", "iso8859_2", "iso8859_3", "iso8859_4", "iso8859_5", "iso8859_6", "iso8859_7", "iso8859_8"),
        *("iso8859_9", "iso8859_10", "iso8859_11", "iso8859_13", "iso8859_14", "iso8859_15", "iso8859_16"),
        *("cp1250", "cp1251", "cp1252", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258"),
        *("cp437", "cp850", "cp866", "cp874", "tis_620", "koi8_r", "koi8_u", "mac_roman", "mac_cyrillic"),
        *("shift_jis", "cp932", "euc_jp", "iso2022_jp", "gb2312", "gbk", "gb18030", "big5", "big5hkscs"),
        *("cp949", "euc_kr", "johab"),
    }
)
#: Names of the web that Python does not know.
_OF_THE_WEB = {
    "x_sjis": "shift_jis",
    "x_gbk": "gbk",
    "x_euc_jp": "euc_jp",
    "x_x_big5": "big5",
    "windows_31j": "cp932",
    "windows_949": "cp949",
    "windows_874": "cp874",
    "unicode_1_1_utf_8": "utf_8",
}
#: Codecs that refuse a text without a byte order mark when they read it in pieces, with their marks.
_MARKED = {"utf_16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf_32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)}
_LONGEST_NAME = 40
_FALLBACK = "utf_8"
#: Characters are made in pieces: what converts bytes holds every other thread meanwhile.
_STEP_BYTES = 65_536


def codec_of(name: str) -> str:
    """Return the codec that is used for a charset's name: one of `CHARSETS`, UTF-8 for any other name.

    Examples:
        >>> codec_of("ISO-8859-1"), codec_of("punycode")
        ('latin_1', 'utf_8')
    """
    if len(name) > _LONGEST_NAME or not name.isascii():
        return _FALLBACK
    plain = normalize_encoding(name).lower()
    found = _OF_THE_WEB.get(plain) or aliases.get(plain, plain)
    return found if found in CHARSETS else _FALLBACK


def decode(data: bytes, charset: str, *, is_truncated: bool = False) -> str:
    """Return bytes as text; what does not decode becomes U+FFFD.

    Args:
        data: The bytes.
        charset: A charset's name, from wherever it came; an unknown or unwanted one means UTF-8.
        is_truncated: A character that the end cuts in two is dropped, and not shown as damage.
    """
    codec = codec_of(charset)
    if codec in _MARKED and not data.startswith(_MARKED[codec]):
        codec = f"{codec}_le"  # as browsers do
    decoder = codecs.getincrementaldecoder(codec)("replace")
    pieces = [decoder.decode(data[at : at + _STEP_BYTES]) for at in range(0, len(data), _STEP_BYTES)]
    if not is_truncated:
        pieces.append(decoder.decode(b"", True))  # noqa: FBT003  codecs takes it by position
    return "".join(pieces)
