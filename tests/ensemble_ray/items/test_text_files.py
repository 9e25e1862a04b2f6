"""Items of `.jsonl` and `.csv` files."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ensemble_ray import ValidationError
from ensemble_ray.items import text_files
from ensemble_ray.items.pulling import ItemEntry, RefusedItem
from ensemble_ray.items.sources import source_of
from ensemble_ray.items.text_files import CsvFile, count_csv_rows, count_lines, csv_rows, json_lines
from tests.ensemble_ray.items.reading import entries_of

SEEDED = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
#: What a field can hold and a file give back: no half of a pair, no null.
FIELDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8)


def _file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@SEEDED
@given(values=st.lists(JSON, max_size=6), is_plain=st.booleans())
def test_values_come_back_when_written_as_lines(tmp_path: Path, values: list[object], *, is_plain: bool) -> None:
    """S-MR-120: a row is its JSON value, whatever line separators of Unicode its texts hold."""
    text = "".join(json.dumps(value, ensure_ascii=is_plain) + "\n" for value in values)
    path = _file(tmp_path, "a.jsonl", text.encode("utf-8", "surrogatepass" if is_plain else "replace"))
    expected = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    assert list(json_lines(path)) == list(enumerate(expected))


async def test_blank_lines_are_no_items(tmp_path: Path) -> None:
    """S-MR-120: nor are they counted; a byte order mark, Windows' ends of lines and a missing last one do no harm."""
    path = _file(tmp_path, "a.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n"b"\n\n[3]')
    assert await entries_of(path) == [(0, {"a": 1}), (1, "b"), (2, [3])]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": }', "not JSON: Expecting value"),
        (b"caf\xe9", "not JSON: not UTF-8 (unexpected end of data at byte 3)"),
        (b"[" * 100_000, "not JSON: nested too deeply"),
        (b"9" * 5000, "not JSON: Exceeds the limit"),
    ],
)
async def test_line_is_a_refused_item_when_it_is_no_json(tmp_path: Path, line: bytes, reason: str) -> None:
    """S-MR-125: with the file, the line and its text; the others are items, and keep their places."""
    path = _file(tmp_path, "a.jsonl", b"1\n\n" + line + b"\n2\n")
    first, refused, last = await entries_of(path)
    assert (first, last) == ((0, 1), (2, 2))
    assert isinstance(refused, RefusedItem)
    assert (refused.index, refused.text) == (1, line.decode("utf-8", "replace"))
    assert isinstance(refused.error, ValidationError)
    assert str(refused.error).startswith(f"items file '{path}', line 3: {reason}")


async def test_rows_are_dicts_by_the_header(tmp_path: Path) -> None:
    """S-MR-120: texts; an empty field is an empty text; quoted ends of lines stay; blank lines are none."""
    data = '\ufeffname,text\r\n\r\nada,"two\nlines"\r\n   \r\nbob,\r\n'.encode()
    path = _file(tmp_path, "a.csv", data)
    assert await entries_of(path) == [(0, {"name": "ada", "text": "two\nlines"}), (1, {"name": "bob", "text": ""})]


@SEEDED
@given(
    header=st.lists(FIELDS.filter(str.strip), min_size=2, max_size=4, unique=True),
    data=st.data(),
)
def test_rows_are_those_of_pythons_reader_when_written_by_its_writer(
    tmp_path: Path, header: list[str], data: st.DataObject
) -> None:
    """S-MR-120: the library's own dialect."""
    rows = data.draw(st.lists(st.lists(FIELDS, min_size=len(header), max_size=len(header)), max_size=5))
    text = io.StringIO(newline="")
    csv.writer(text).writerows([header, *rows])
    path = _file(tmp_path, "a.csv", text.getvalue().encode())
    with path.open(newline="", encoding="utf-8-sig") as file:
        expected = list(enumerate(csv.DictReader(file)))
    assert list(csv_rows(CsvFile(path, ","))) == expected


async def test_row_is_a_refused_item_when_it_has_more_or_fewer_fields_than_the_header(tmp_path: Path) -> None:
    """S-MR-125: its line is that on which it begins."""
    path = _file(tmp_path, "a.csv", b'a,b\n1,"x\ny"\n1,"2\n2",3\n7\n4,5\n')
    first, refused, short, last = await entries_of(path)
    assert (first, last) == ((0, {"a": "1", "b": "x\ny"}), (3, {"a": "4", "b": "5"}))
    assert isinstance(short, RefusedItem)
    assert (short.index, short.text) == (2, "7")
    assert str(short.error) == f"items file '{path}', line 6, column 'b': 1 field, the header has 2"
    assert isinstance(refused, RefusedItem)
    assert (refused.index, refused.text) == (1, '1,"2\n2",3')
    told = (
        f"items file '{path}', line 4, behind column 'b': 3 fields, the header has 2. A field with the delimiter in it "
    )
    assert str(refused.error) == f"{told}stands in quotes"


async def test_row_is_a_refused_item_when_it_is_not_utf_8(tmp_path: Path) -> None:
    """S-MR-125: it alone."""
    path = _file(tmp_path, "a.csv", b"a\ncaf\xe9\nna\xc3\xafve\n")
    refused, last = await entries_of(path)
    assert isinstance(refused, RefusedItem)
    assert refused.text == "caf\ufffd"
    assert str(refused.error).startswith(
        f"items file '{path}', line 2, column 'a': not UTF-8: byte 0xe9. Save the file as"
    )
    assert last == (1, {"a": "naïve"})


async def test_field_is_read_when_it_is_a_whole_document(tmp_path: Path) -> None:
    """S-MR-120: Python's reader would refuse it as too long."""
    document = "x" * 200_000
    assert await entries_of(_file(tmp_path, "a.csv", f"a\n{document}\n".encode())) == [(0, {"a": document})]


async def test_file_is_refused_when_its_header_has_a_name_twice(tmp_path: Path) -> None:
    """S-MR-120: one of the two columns would be lost."""
    path = _file(tmp_path, "a.csv", b"a,b,a\n1,2,3\n")
    reader = source_of(path).open()
    with pytest.raises(ValidationError, match="the header cannot be read: it has the name 'a' twice"):
        await reader.next(1)
    await reader.close()


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
async def test_file_is_found_empty_when_it_has_no_rows(tmp_path: Path, name: str) -> None:
    """S-MR-122: only when it is pulled."""
    assert await entries_of(_file(tmp_path, name, b"")) == []
    assert await entries_of(_file(tmp_path, "only_header.csv", b"a,b\n")) == []


def _told(entries: list[ItemEntry]) -> list[object]:
    """What each entry is: an item, or the place and reason of a refusal."""
    return [
        str(entry.error).partition("', line ")[2].partition(". ")[0] if isinstance(entry, RefusedItem) else entry[1]
        for entry in entries
    ]


async def test_rows_below_are_items_when_a_quote_is_never_closed(tmp_path: Path) -> None:
    """S-MR-197: the row alone is refused, with the column of the quote; it must not swallow the file."""
    rows = "".join(f"{number},fine\n" for number in range(3, 200))
    path = _file(tmp_path, "a.csv", f'id,text\n1,fine\n2,"not closed\n{rows}'.encode())
    first, refused, *others = await entries_of(path)
    assert first == (0, {"id": "1", "text": "fine"})
    assert isinstance(refused, RefusedItem)
    assert refused.text == '2,"not closed'
    assert str(refused.error) == (
        f"items file '{path}', line 3, column 'text': the quote at its beginning is never closed. "
        "Close it, or write it twice inside quotes"
    )
    assert others == [(index, {"id": str(index + 1), "text": "fine"}) for index in range(2, 199)]
    assert count_csv_rows(CsvFile(path)) == 199


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ('1,"a" b\n2,c\n', ["2, column 'text': text behind its closing quote", {"id": "2", "text": "c"}]),
        ('"1" x,a\n2,c\n', ["2, column 'id': text behind its closing quote", {"id": "2", "text": "c"}]),
        # The lines of one row, whose quotes are wrong: none of them is a row of its own.
        (
            '1,"He said "hi" to\nme, twice"\n2,c\n',
            ["2, column 'text': text behind its closing quote", {"id": "2", "text": "c"}],
        ),
        # What is quoted below has both of its quotes.
        (
            '1,"a\n2,"b, c"\n',
            ["2, column 'text': the quote at its beginning is never closed", {"id": "2", "text": "b, c"}],
        ),
        ('1,c\n2,"a', [{"id": "1", "text": "c"}, "3, column 'text': the quote at its beginning is never closed"]),
        ('x"y,"z\n2,c\n', ["2, column 'text': the quote at its beginning is never closed", {"id": "2", "text": "c"}]),
        ('1,"a ""b"" c"\n2,5" x\n', [{"id": "1", "text": 'a "b" c'}, {"id": "2", "text": '5" x'}]),
    ],
)
async def test_row_is_a_refused_item_when_its_quotes_are_wrong(tmp_path: Path, rows: str, told: list[object]) -> None:
    """S-MR-197: it alone, with line and column."""
    assert _told(await entries_of(_file(tmp_path, "a.csv", f"id,text\n{rows}".encode()))) == told


async def test_row_is_a_refused_item_when_it_has_more_characters_than_a_row_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-MR-197: behind a quote that is not closed no more of a file is held than that."""
    monkeypatch.setattr(text_files, "_ROW_LIMIT", 100)
    path = _file(tmp_path, "a.csv", b'id,text\n1,"a\n' + b"2,b\n" * 1000)
    told = _told(await entries_of(path, 100))
    assert told == ["2, column 'text': the quote at its beginning is never closed", *[{"id": "2", "text": "b"}] * 1000]


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ('id;text\n1;a,b\n2;"x;y"\n', [{"id": "1", "text": "a,b"}, {"id": "2", "text": "x;y"}]),
        ("id\ttext\n1\ta,b\n\t\n", [{"id": "1", "text": "a,b"}, {"id": "", "text": ""}]),
        ("id|text\n1|a,b\n", [{"id": "1", "text": "a,b"}]),
        ('\nid,"a;b;c"\n1,x;y\n', [{"id": "1", "a;b;c": "x;y"}]),
        ("text\na;b, c\n", ["2, behind column 'text': 2 fields, the header has 1"]),
        # The rows decide between two.
        ("id;price, EUR\n1;2,50\n2;3\n", [{"id": "1", "price, EUR": "2,50"}, {"id": "2", "price, EUR": "3"}]),
        ("id,first;second\n1,a;b\n2,c\n", [{"id": "1", "first;second": "a;b"}, {"id": "2", "first;second": "c"}]),
    ],
)
async def test_delimiter_is_found_in_the_header(tmp_path: Path, text: str, items: list[object]) -> None:
    """S-MR-198: comma, semicolon, tab or bar, outside of quotes; where it has several, the one that all rows have as often."""
    assert _told(await entries_of(_file(tmp_path, "a.csv", text.encode()))) == items


@pytest.mark.parametrize("rows", ["1;2,3\n", "1,2\n3;4\n", "1\n2\n"])
async def test_file_is_refused_when_its_delimiter_is_not_certain(tmp_path: Path, rows: str) -> None:
    """S-MR-198: a guess would be silent; the delimiter that is named is not looked for."""
    path = _file(tmp_path, "a.csv", f"id;price,note\n{rows}".encode())
    with pytest.raises(
        ValidationError, match=r"line 1: the header has ',' and ';', .* CsvFile\(path, delimiter=\.\.\.\)"
    ):
        await entries_of(path)
    assert await entries_of(CsvFile(path, ";"))


async def test_delimiter_is_found_when_the_rows_looked_at_end_in_the_middle_of_one(tmp_path: Path) -> None:
    """S-MR-198: a row of several lines that is cut there counts as none."""
    text = "id,a;b\n" + "1,x\n" * 19 + '2,"y\n\n\nz"\n'
    assert len(await entries_of(_file(tmp_path, "a.csv", text.encode()))) == 20


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
async def test_file_is_read_when_it_has_a_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    """S-MR-199: spreadsheets save such files."""
    csv_path = _file(tmp_path, "a.csv", 'n\tt\n1\t"ä\n😀"\n'.encode(encoding))
    assert await entries_of(csv_path) == [(0, {"n": "1", "t": "ä\n😀"})]
    lines = _file(tmp_path, "a.jsonl", '{"a": "ä\u2028"}\n\n"😀"\n'.encode(encoding))
    assert await entries_of(lines) == [(0, {"a": "ä\u2028"}), (1, "😀")]
    assert count_lines(lines) == 2


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16-le", "utf-16-be", "shift_jis", "utf-16"])
async def test_file_is_read_when_its_encoding_is_named(tmp_path: Path, encoding: str) -> None:
    """S-MR-199: by any name that Python knows; the ending of the file's name does not matter then."""
    text = "n,t\n1,ソ\n" if encoding == "shift_jis" else "n,é\n1,ü\n"
    path = _file(tmp_path, "a.txt", text.encode(encoding))
    (name, value) = text.replace("\n", ",").split(",")[1:4:2]
    assert await entries_of(CsvFile(path, encoding=encoding)) == [(0, {"n": "1", name: value})]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (
            "né,t\n1,a\n".encode("latin-1"),
            "the header cannot be read, column 1: not UTF-8: byte 0xe9. Save the file as UTF-8",
        ),
        ("n,t\n1,a\n".encode("utf-16-le"), "the header cannot be read: it has null characters, as UTF-16 has"),
        ("n,t\n1,a\n".encode("utf-16-be"), "the header cannot be read: it has null characters, as UTF-16 has"),
        (b'n,"t\n1,a\n', "the header cannot be read, column 2: the quote at its beginning is never closed"),
        (b'n,"t" x\n1,a\n', "the header cannot be read, column 2: text behind its closing quote"),
    ],
)
async def test_file_is_refused_when_its_header_cannot_be_read(tmp_path: Path, data: bytes, told: str) -> None:
    """S-MR-199: before any row, with the column."""
    path = _file(tmp_path, "a.csv", data)
    with pytest.raises(ValidationError) as refused:
        await entries_of(path)
    assert str(refused.value).startswith(f"items file '{path}': {told}")


async def test_row_is_a_refused_item_when_its_bytes_are_none_of_the_encoding(tmp_path: Path) -> None:
    """S-MR-199: it alone, in encodings other than UTF-8 too."""
    path = _file(tmp_path, "a.csv", "n,t\n1,a\n".encode("utf-16") + b"\x32\x00,\x00\x00\xd8\n\x003\x00,\x00b\x00")
    first, refused, last = await entries_of(path)
    assert (first, last) == ((0, {"n": "1", "t": "a"}), (2, {"n": "3", "t": "b"}))
    assert isinstance(refused, RefusedItem)
    assert "line 3, column 't': not UTF-16: byte 0x00" in str(refused.error)
    path = _file(tmp_path, "b.csv", b"n\na\n\x81\xff\n")
    assert [
        str(each.error)
        for each in await entries_of(CsvFile(path, encoding="shift_jis"))
        if isinstance(each, RefusedItem)
    ]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (
            '{"a": 1}\n'.encode("utf-16-le"),
            "line 1: not UTF-8: it has null characters, as UTF-16 has. Save the file as UTF-8",
        ),
        ('{"a": 1}\n'.encode("utf-32-be"), "line 1: not UTF-8: it has null characters"),
    ],
)
async def test_file_of_lines_is_refused_when_it_is_utf_16_without_a_mark(
    tmp_path: Path, data: bytes, told: str
) -> None:
    """S-MR-199: no line of it could be read."""
    with pytest.raises(ValidationError, match=told):
        await entries_of(_file(tmp_path, "a.jsonl", data))


async def test_line_is_a_refused_item_when_it_is_cut_in_utf_16(tmp_path: Path) -> None:
    """S-MR-199: half of a character is at the end."""
    path = _file(tmp_path, "a.jsonl", '1\n"a'.encode("utf-16") + b"\x00")
    first, refused = await entries_of(path)
    assert first == (0, 1)
    assert isinstance(refused, RefusedItem)
    assert "line 2: not JSON: not UTF-8" in str(refused.error)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"delimiter": ";;"}, "delimiter must be one character, got: ';;'"),
        ({"delimiter": ""}, "delimiter must be one character, got: ''"),
        ({"delimiter": '"'}, "delimiter must be one character, got: '\"'"),
        ({"encoding": "utf-9"}, "there is no encoding 'utf-9'. Use a name that Python knows, such as"),
        ({"encoding": "base64"}, "there is no encoding 'base64'"),
    ],
)
def test_csv_file_is_refused_when_it_can_be_read_with_no_such_option(
    tmp_path: Path, options: dict[str, str], told: str
) -> None:
    """S-MR-198, S-MR-199: at construction."""
    path = _file(tmp_path, "a.csv", b"a\n1\n")
    with pytest.raises(ValidationError) as refused:
        source_of(CsvFile(path, **options))
    assert str(refused.value).startswith(f"items file '{path}': {told}")


async def test_file_is_refused_when_its_mark_says_another_encoding(tmp_path: Path) -> None:
    """S-MR-199: one of the two is wrong, and each letter with it."""
    path = _file(tmp_path, "a.csv", "a\nä\n".encode("utf-8-sig"))
    with pytest.raises(ValidationError, match=r"its byte order mark says UTF-8, and the encoding is 'latin-1'\. Leave"):
        await entries_of(CsvFile(path, encoding="latin-1"))
    assert await entries_of(CsvFile(path, encoding="utf8")) == [(0, {"a": "ä"})]
