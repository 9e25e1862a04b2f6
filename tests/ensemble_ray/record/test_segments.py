"""How the segments of several writers become one record."""

import json
from pathlib import Path

import pytest

from ensemble_ray.errors import RecordError
from ensemble_ray.record.runs import RunDirectory, read_facts

RUN = "run-1"


def _segment(home: Path, writer: str, *lines: tuple[float, str], torn: bytes = b"", version: int = 1) -> Path:
    directory = RunDirectory(home, RUN).path
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"facts-{writer}.jsonl"
    header = json.dumps({"format": version, "run": RUN, "writer": writer})
    facts = [json.dumps({"kind": "model", "name": name, "at": at, "epoch": 0, "data": {}}) for at, name in lines]
    path.write_bytes("".join(f"{line}\n" for line in (header, *facts)).encode() + torn)
    return path


def _names(home: Path) -> list[str]:
    return [fact.name for fact in read_facts(RUN, home)]


def test_facts_are_merged_by_time_then_writer_then_line(tmp_path: Path) -> None:
    """Every reader sees the same order."""
    _segment(tmp_path, "b", (1, "b1"), (2, "b2"), (2, "b3"))
    _segment(tmp_path, "a", (1, "a1"), (2, "a2"), (3, "a3"))
    assert _names(tmp_path) == ["a1", "b1", "a2", "b2", "b3", "a3"]
    assert [fact.seq for fact in read_facts(RUN, tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_writers_facts_keep_their_order_when_its_clock_was_set_back(tmp_path: Path) -> None:
    """An effect never comes before the stimulus that caused it."""
    _segment(tmp_path, "a", (10, "a1"), (5, "a2"), (11, "a3"))
    _segment(tmp_path, "b", (10.5, "b1"))
    assert _names(tmp_path) == ["a1", "a2", "b1", "a3"]


@pytest.mark.parametrize("torn", [b'{"kind":"model","na', b"\xff", b'{"kind":"model"}'])
def test_last_line_is_passed_over_when_it_is_torn(tmp_path: Path, torn: bytes) -> None:
    """A writer that was killed leaves half a line."""
    _segment(tmp_path, "a", (1, "a1"), torn=torn)
    _segment(tmp_path, "b", (2, "b1"))
    assert _names(tmp_path) == ["a1", "b1"]


def test_segment_is_empty_when_its_first_line_is_torn(tmp_path: Path) -> None:
    """It was killed as it began."""
    path = _segment(tmp_path, "a")
    path.write_bytes(b'{"format"')
    _segment(tmp_path, "b", (2, "b1"))
    assert _names(tmp_path) == ["b1"]


def test_damaged_line_is_named(tmp_path: Path) -> None:
    """Not passed over: a record must not lie by leaving something out."""
    path = _segment(tmp_path, "a", (1, "a1"), torn=b"garbage\n")
    with pytest.raises(RecordError, match=r"line 3 of .*facts-a\.jsonl cannot be read") as caught:
        read_facts(RUN, tmp_path)
    assert caught.value.path == str(path)


def test_newer_format_is_refused(tmp_path: Path) -> None:
    """With what to do about it."""
    _segment(tmp_path, "a", (1, "a1"), version=2)
    with pytest.raises(RecordError, match="is of format 2, this version reads up to 1: update ensemble-ray"):
        read_facts(RUN, tmp_path)


def test_file_without_header_is_refused(tmp_path: Path) -> None:
    """It is none of ours."""
    _segment(tmp_path, "a").write_bytes(b'{"kind":"model","name":"a","at":1,"epoch":0,"data":{}}\n')
    with pytest.raises(RecordError, match=r"line 1 of .* \(the first line must name the format\)"):
        read_facts(RUN, tmp_path)


def test_missing_body_is_told_in_its_place(tmp_path: Path) -> None:
    """A record without one of its bodies still shows the rest."""
    path = _segment(tmp_path, "a")
    line = {"kind": "model", "name": "a#0/0/model", "at": 1, "epoch": 0, "data": {"text": {"$body": "ab" * 32}}}
    path.write_bytes(path.read_bytes() + json.dumps(line).encode() + b"\n")
    assert read_facts(RUN, tmp_path)[0].data == {"text": f"[text {'ab' * 32} is missing from the record]"}
