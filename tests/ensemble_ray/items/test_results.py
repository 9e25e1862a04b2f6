"""Rows of outputs, whole and one per item, through kills and resumes."""

import fcntl
import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from pydantic import BaseModel

from ensemble_ray import IllegalStateError, ItemResult, RecordError, TaskMetrics, TaskOutput, ValidationError
from ensemble_ray.items import tables
from ensemble_ray.items.line_file import LineFile, index_of_line
from ensemble_ray.items.results import ResultsFile, RowColumns
from ensemble_ray.items.tables import pack_lines
from ensemble_ray.values.value import utc_of
from tests.ensemble_ray.items.reading import entries_of

KINDS = pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])


class Report(BaseModel):
    """A parsed output."""

    title: str


@dataclass
class Row:
    """An item that JSON cannot carry and that has a form in it."""

    name: str


class Opaque:
    """An item that has none."""

    def __str__(self) -> str:
        return "opaque"


def _result(index: int, item: object = "i", raw: str = "raw", parsed: object = None) -> ItemResult:
    output = TaskOutput(
        raw=raw,
        task_description="d",
        agent_role="Reader",
        completed_at=utc_of(1),
        duration=timedelta(seconds=1.5),
        parsed_output=parsed,
        metrics=TaskMetrics(input_tokens=3, output_tokens=4, incomplete_answers=1),
    )
    return ItemResult(index=index, item=item, output=output)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _names(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()]


async def _write(path: Path, *results: ItemResult, is_resumed: bool = False) -> None:
    file = await ResultsFile.open(path, is_resumed=is_resumed)
    await file.write(results)
    await file.close()


async def _indices(path: Path) -> list[object]:
    if path.suffix == ".jsonl":
        return [row["index"] for row in _rows(path)]
    rows = cast("list[tuple[int, dict[str, object]]]", await entries_of(path))
    return [row["index"] for _, row in rows]


async def test_row_tells_what_an_item_gave(tmp_path: Path) -> None:
    """S-MR-130: its fields, and what stands where JSON has nothing; folders are made."""
    path = tmp_path / "new" / "out.jsonl"
    await _write(
        path,
        _result(7, {"a": ["ü", 1.5]}, "räw", Report(title="t")),
        _result(0, Row("r")),
        _result(1, Opaque()),
        _result(2, [float("nan"), Opaque()], "half \ud83d"),
    )
    first, *rest = _rows(path)
    assert first == {
        "index": 7,
        "item": {"a": ["ü", 1.5]},
        "raw": "räw",
        "parsed": {"title": "t"},
        "agent_role": "Reader",
        "input_tokens": 3,
        "output_tokens": 4,
        "incomplete_answers": 1,
        "duration": 1.5,
    }
    assert next(iter(first)) == "index"
    assert [(row["item"], row["parsed"]) for row in rest] == [
        ({"name": "r"}, None),
        ("opaque", None),
        (["NaN", "opaque"], None),
    ]
    assert rest[2]["raw"] == "half \ud83d"


async def test_parquet_file_has_the_same_rows(tmp_path: Path) -> None:
    """S-MR-130, S-MR-205: items and parsed outputs as JSON text, as a column has one type; nothing else is left in the folder."""
    path = tmp_path / "out.parquet"
    await _write(path, _result(3, {"a": 1}, "half \ud83d", Report(title="t")), _result(1, "text"))
    assert await entries_of(path) == [
        (
            0,
            {
                "index": 3,
                "item": '{"a": 1}',
                "raw": "half \ufffd",
                "parsed": '{"title": "t"}',
                "agent_role": "Reader",
                "input_tokens": 3,
                "output_tokens": 4,
                "incomplete_answers": 1,
                "duration": 1.5,
            },
        ),
        (
            1,
            {
                "index": 1,
                "item": '"text"',
                "raw": "raw",
                "parsed": None,
                "agent_role": "Reader",
                "input_tokens": 3,
                "output_tokens": 4,
                "incomplete_answers": 1,
                "duration": 1.5,
            },
        ),
    ]
    assert _names(tmp_path) == ["out.parquet"]


def test_parquet_file_stays_whole_when_two_processes_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-MR-130: a process that was frozen, and lost the run to another one, goes on while that one writes the file."""
    path, lines = tmp_path / "out.parquet", tmp_path / "lines"
    lines.write_text("".join(f'{{"index": {index}, "raw": "{index:0500}"}}\n' for index in range(100)))
    groups, has_opened, goes_on = tables._groups, threading.Event(), threading.Event()
    stray = threading.Thread(target=pack_lines, args=(lines, path, ("raw",), None), name="stray")

    def in_turn(lines: Path, types: Mapping[str, str]) -> Iterator[list[dict[str, object]]]:
        (rows,) = groups(lines, types)
        if threading.current_thread() is stray:
            has_opened.set()
            assert goes_on.wait(30)
            yield rows
        else:
            yield rows[:50]
            stray.start()
            assert has_opened.wait(30)
            yield rows[50:]

    monkeypatch.setattr(tables, "_groups", in_turn)
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)  # the stray one may fail
    pack_lines(lines, path, ("raw",), None)
    written = [row["index"] for row in parquet.read_table(path).to_pylist()]
    goes_on.set()
    stray.join(30)
    assert written == [row["index"] for row in parquet.read_table(path).to_pylist()] == list(range(100))
    assert _names(tmp_path) == ["out.parquet"]


@KINDS
async def test_file_is_complete_when_nothing_was_written(tmp_path: Path, name: str) -> None:
    """S-MR-130: a run whose items all failed has a file without rows."""
    await _write(tmp_path / name)
    assert await _indices(tmp_path / name) == []


async def test_items_without_an_output_have_no_row(tmp_path: Path) -> None:
    """S-MR-130: one row per map output."""
    await _write(tmp_path / "out.jsonl", ItemResult(index=0, item="a"), _result(1))
    assert await _indices(tmp_path / "out.jsonl") == [1]


@KINDS
async def test_item_has_one_row_when_its_run_is_resumed(tmp_path: Path, name: str) -> None:
    """S-MR-130: after a run that ended, and after one that was killed before the file was complete."""
    path = tmp_path / name
    await _write(path, _result(0), _result(2))
    killed = await ResultsFile.open(path, is_resumed=True)
    await killed.write([_result(1), _result(1), _result(0)])
    assert [index in killed for index in range(4)] == [True, True, True, False]
    resumed = await ResultsFile.open(path, is_resumed=True)
    await resumed.write([_result(1), _result(3), _result(2)])
    await resumed.close()
    assert await _indices(path) == [0, 2, 1, 3]


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
async def test_torn_line_is_written_again_when_a_run_is_resumed(tmp_path: Path, data: st.DataObject) -> None:
    """S-MR-130: a kill may cut the file anywhere; whole rows stay, the torn one goes, none is doubled."""
    path = tmp_path / "out.jsonl"
    path.unlink(missing_ok=True)
    results = [_result(index, data.draw(st.text(max_size=5))) for index in range(4)]
    await _write(path, *results)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    await _write(path, *results, is_resumed=True)
    assert path.read_bytes() == whole


async def test_long_torn_line_is_cut_off(tmp_path: Path) -> None:
    """S-MR-130: however long it is."""
    path = tmp_path / "out.jsonl"
    await _write(path, _result(0))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"index": 1, "item": "' + b"x" * 200_000)
    await _write(path, is_resumed=True)
    assert path.read_bytes() == whole


@KINDS
async def test_new_run_is_refused_when_the_file_has_rows(tmp_path: Path, name: str) -> None:
    """S-MR-130: rows of an earlier run are neither lost nor mixed with others."""
    path = tmp_path / name
    await _write(path, _result(0), _result(1))
    with pytest.raises(ValidationError) as refused:
        await ResultsFile.open(path, is_resumed=False)
    assert str(refused.value) == f"results file '{path}' exists and has 2 rows: choose another path, or remove it"


async def test_new_run_is_refused_when_an_unfinished_one_has_rows(tmp_path: Path) -> None:
    """S-MR-130: a parquet file is not there yet, its rows are."""
    path = tmp_path / "out.parquet"
    killed = await ResultsFile.open(path, is_resumed=False)
    await killed.write([_result(0)])
    with pytest.raises(ValidationError, match=r"has 1 rows of a run that has not ended, in '.*out.parquet.rows.jsonl'"):
        await ResultsFile.open(path, is_resumed=False)


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
async def test_resume_is_refused_when_the_file_is_something_else(tmp_path: Path, name: str) -> None:
    """S-MR-130: what cannot be read says which line it is."""
    path = tmp_path / name
    path.write_bytes(b"something else\n")
    with pytest.raises(ValidationError, match=r"a line that is no row: 'something else|is no parquet file"):
        await ResultsFile.open(path, is_resumed=True)


async def test_file_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    """S-MR-130: the path and the reason."""
    (tmp_path / "out.jsonl").mkdir()
    with pytest.raises(RecordError, match=r"results file '.*out.jsonl' cannot be written: .*Is a directory") as refused:
        await ResultsFile.open(tmp_path / "out.jsonl", is_resumed=True)
    assert refused.value.path == str(tmp_path / "out.jsonl")


async def test_closed_file_takes_no_rows(tmp_path: Path) -> None:
    """S-MR-130: closing it twice does no harm; a row that would be lost is refused."""
    file = await ResultsFile.open(tmp_path / "out.parquet", is_resumed=False)
    await file.close()
    await file.close()
    with pytest.raises(IllegalStateError, match=r"results file '.*' is closed"):
        await file.write([_result(0)])


async def test_rows_stay_when_the_parquet_file_cannot_be_written(tmp_path: Path) -> None:
    """S-MR-130: nothing that was written is lost; the next attempt goes on with it."""
    path = tmp_path / "out.parquet"
    file = await ResultsFile.open(path, is_resumed=False)
    await file.write([_result(0)])
    path.mkdir()
    with pytest.raises(RecordError, match=r"out.parquet' cannot be written: .*; its rows are in '.*rows.jsonl'"):
        await file.close()
    path.rmdir()
    await _write(path, _result(1), is_resumed=True)
    assert await _indices(path) == [0, 1]


async def test_no_row_is_torn_when_the_disk_is_full(tmp_path: Path) -> None:
    """S-MR-130: a line is written whole or not at all, and can be written later."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "out.jsonl"
    file = await ResultsFile.open(path, is_resumed=False)
    await file.write([_result(0)])
    whole = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, hard))
    try:
        with pytest.raises(RecordError, match=r"cannot be written: .*File too large"):
            await file.write([_result(1)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_bytes() == whole
    await file.write([_result(1)])
    await file.close()
    assert await _indices(path) == [0, 1]


async def test_rows_are_written_in_groups_when_there_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-MR-130: a run of any size makes its parquet file piece by piece."""
    monkeypatch.setattr("ensemble_ray.items.tables._GROUP_ROWS", 100)
    path = tmp_path / "out.parquet"
    many = [_result(index) for index in range(201)]
    await _write(path, *many)
    assert await _indices(path) == list(range(201))
    groups = parquet.read_metadata(path)
    assert [groups.row_group(number).num_rows for number in range(groups.num_row_groups)] == [100, 100, 1]


@KINDS
async def test_an_item_has_one_row_when_who_had_the_run_before_wakes(tmp_path: Path, name: str) -> None:
    """S-MR-130: a process that was frozen appends beside the one that goes on with the run, and takes nothing from it."""
    path = tmp_path / name
    frozen = await ResultsFile.open(path, is_resumed=False)
    await frozen.write([_result(0)])
    heir = await ResultsFile.open(path, is_resumed=True)
    await heir.write([_result(1)])
    await frozen.write([_result(1), _result(2)])
    await frozen.close(is_complete=False)
    await heir.write([_result(2), _result(3)])
    await heir.close()
    assert await _indices(path) == [0, 1, 2, 3]


def test_a_file_that_another_process_holds_is_told_of(tmp_path: Path) -> None:
    """S-MR-130: one that was frozen in the middle of a write; nothing waits for it for ever."""
    path = tmp_path / "out.jsonl"
    with path.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RecordError, match=r"another process has held its lock .* Is it stopped\?"):
            LineFile(path, "results file", index_of_line, patience_s=0.0)


# Chosen columns.

LABELLED = {"id": "a-1", "text": "Low tide", "title": "of the item", "place": {"city": "Brest"}}


async def _chosen(
    path: Path, *results: ItemResult, key: str | None = None, columns: Sequence[str] | None = None
) -> None:
    file = await ResultsFile.open(path, is_resumed=True, columns=RowColumns(chosen=columns, key=key))
    await file.write(results)
    await file.close()


@pytest.mark.parametrize(
    ("key", "columns", "row"),
    [
        (None, ["id", "title", "raw"], {"id": "a-1", "title": "t", "raw": "raw"}),
        (None, ["item.title", "place.city", "parsed.title"], {"item.title": "of the item", "place.city": "Brest", "parsed.title": "t"}),
        ("id", ["index", "title", "id"], {"id": "a-1", "title": "t"}),
        ("title", ["agent_role"], {"title": "of the item", "agent_role": "Reader"}),
    ],
)  # fmt: skip
async def test_rows_have_the_chosen_columns(
    key: str | None, columns: list[str], row: dict[str, object], tmp_path: Path
) -> None:
    """S-MR-216 to S-MR-218: parts of a row before fields of the answer, and these before fields of the item."""
    path = tmp_path / "out.jsonl"
    await _chosen(path, _result(3, LABELLED, parsed=Report(title="t")), key=key, columns=columns)
    (found,) = _rows(path)
    assert found == {"index": 3, **row}
    assert list(found) == ["index", *row]


async def test_key_takes_the_place_of_the_item(tmp_path: Path) -> None:
    """S-MR-218: all the rest of a row stays."""
    path = tmp_path / "out.jsonl"
    await _chosen(path, _result(3, LABELLED), key="id")
    assert list(_rows(path)[0]) == [
        "index", "id", "raw", "parsed", "agent_role", "input_tokens", "output_tokens",
        "incomplete_answers", "duration",
    ]  # fmt: skip


async def test_column_that_is_nowhere_is_null_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S-MR-217: what there is is named; a field that is None is there."""
    path = tmp_path / "out.jsonl"
    results = [_result(index, {"id": None, "name": "n"}) for index in range(3)]
    await _chosen(path, *results, columns=["id", "lable"])
    assert [(row["id"], row["lable"]) for row in _rows(path)] == [(None, None)] * 3
    (line,) = caplog.messages
    assert line.startswith(
        "results file: item 0 has no column 'lable', so its row has null there. Known: [index, item,"
    )
    assert line.endswith("duration, id, name]")


async def test_items_and_answers_without_fields_have_rows(tmp_path: Path) -> None:
    """S-MR-217: texts, and items that JSON cannot carry."""
    path = tmp_path / "out.jsonl"
    await _chosen(path, _result(0, "tea"), _result(1, Row("r")), columns=["item", "name"])
    assert [(row["item"], row["name"]) for row in _rows(path)] == [("tea", None), ({"name": "r"}, "r")]


async def test_parquet_file_has_the_types_of_chosen_columns(tmp_path: Path) -> None:
    """S-MR-219: also where the run goes on after its end; what is of several types is JSON."""
    path = tmp_path / "out.parquet"
    columns = ["id", "count", "share", "good", "mixed", "none", "raw"]

    def result(index: int, **fields: object) -> ItemResult:
        return _result(index, {"id": f"a-{index}", "count": index, "good": True, "none": None, **fields})

    await _chosen(path, result(0, share=1, mixed="text"), result(1, share=0.5, mixed=[1]), columns=columns)
    rows = cast("list[tuple[int, dict[str, object]]]", await entries_of(path))
    first = {
        "index": 0,
        "id": "a-0",
        "count": 0,
        "share": 1.0,
        "good": True,
        "mixed": '"text"',
        "none": None,
        "raw": "raw",
    }
    assert rows[0][1] == first
    assert rows[1][1]["mixed"] == "[1]"
    await _chosen(path, result(2, share=0, mixed=None), columns=columns)
    rows = cast("list[tuple[int, dict[str, object]]]", await entries_of(path))
    assert rows[0][1] == first
    assert [row["mixed"] for _, row in rows] == ['"text"', "[1]", None]


@pytest.mark.parametrize("key", ["item", "raw", "parsed", "agent_role", "input_tokens", "duration"])
@pytest.mark.parametrize("value", ["text", '"quoted"', 7, {"a": 1}])
async def test_key_has_the_type_of_its_values_in_a_parquet_file(key: str, value: object, tmp_path: Path) -> None:
    """S-MR-219: also where a part of each row has the name of the key, and where the run goes on after its end."""
    path = tmp_path / "out.parquet"
    for index in range(2):
        await _chosen(path, _result(index, {key: value}), key=key)
    rows = cast("list[tuple[int, dict[str, object]]]", await entries_of(path))
    assert [row[key] for _, row in rows] == [json.dumps(value) if isinstance(value, dict) else value] * 2


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([1, 2**63 - 1], [1, 2**63 - 1]),
        ([1, 2**63], ["1", str(2**63)]),
        ([-(2**63) - 1], [str(-(2**63) - 1)]),
        ([0.5, 2**53], [0.5, 2.0**53]),
        ([0.5, 2**53 + 1], ["0.5", str(2**53 + 1)]),
    ],
)
async def test_numbers_stay_whole_in_a_parquet_file(values: list[object], found: list[object], tmp_path: Path) -> None:
    """S-MR-219: those that no number of the file can hold are JSON text."""
    path = tmp_path / "out.parquet"
    await _chosen(path, *(_result(index, {"id": value}) for index, value in enumerate(values)), columns=["id"])
    rows = cast("list[tuple[int, dict[str, object]]]", await entries_of(path))
    assert [row["id"] for _, row in rows] == found


async def test_rows_stay_when_a_number_is_too_large_for_its_column(tmp_path: Path) -> None:
    """S-MR-130: the error names the file with the rows, and no file in part is left."""
    path = tmp_path / "out.parquet"
    result = _result(0)
    assert result.output is not None
    metrics = TaskMetrics(input_tokens=2**63)
    with pytest.raises(RecordError, match=r"cannot be written: .*; its rows are in '.*\.rows\.jsonl'"):
        await _write(path, ItemResult(index=0, item="i", output=result.output.replace(metrics=metrics)))
    assert _names(tmp_path) == ["out.parquet.rows.jsonl"]
