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
from ensemble_ray.items.pulling import RefusedItem
from ensemble_ray.items.sources import source_of
from ensemble_ray.items.text_files import csv_rows, json_lines
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
    assert list(csv_rows(path)) == expected


async def test_row_is_a_refused_item_when_it_has_more_or_fewer_fields_than_the_header(tmp_path: Path) -> None:
    """S-MR-125: its line is that on which it begins."""
    path = _file(tmp_path, "a.csv", b'a,b\n1,"x\ny"\n1,"2\n2",3\n7\n4,5\n')
    first, refused, short, last = await entries_of(path)
    assert (first, last) == ((0, {"a": "1", "b": "x\ny"}), (3, {"a": "4", "b": "5"}))
    assert isinstance(short, RefusedItem)
    assert (short.index, short.text) == (2, "7")
    assert str(short.error) == f"items file '{path}', line 6: 1 field, the header has 2"
    assert isinstance(refused, RefusedItem)
    assert (refused.index, refused.text) == (1, '1,"2\n2",3')
    assert str(refused.error) == f"items file '{path}', line 4: 3 fields, the header has 2"


async def test_row_is_a_refused_item_when_it_is_not_utf_8(tmp_path: Path) -> None:
    """S-MR-125: it alone."""
    path = _file(tmp_path, "a.csv", b"a\ncaf\xe9\nna\xc3\xafve\n")
    refused, last = await entries_of(path)
    assert isinstance(refused, RefusedItem)
    assert (refused.text, str(refused.error)) == ("caf\ufffd", f"items file '{path}', line 2: not UTF-8")
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
