"""Failed items in a file, and as a source."""

import json
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import DeadLetters, FailedItem, ValidationError
from ensemble_ray.items.results import DeadLetterFile
from ensemble_ray.items.sources import source_of
from tests.ensemble_ray.items.reading import entries_of


class Opaque:
    """An item that JSON cannot carry."""

    def __str__(self) -> str:
        return "opaque"


def _failed(index: int, item: object = "i") -> FailedItem:
    return FailedItem(index=index, item=item, error_type="ValueError", message="no", attempts=2)


async def _write(path: Path, run_id: str, *failed: FailedItem, is_resumed: bool = False) -> None:
    file = await DeadLetterFile.open(path, run_id=run_id, is_resumed=is_resumed)
    await file.write(failed)
    await file.close()


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_line_tells_why_an_item_failed(tmp_path: Path) -> None:
    """S-MR-151: its fields; an item that JSON cannot carry is its text, and says so."""
    path = tmp_path / "new" / "dead.jsonl"
    await _write(path, "run-1", _failed(5, {"a": [1]}), _failed(2, {"a": Opaque()}), _failed(3, Opaque()))
    first, second, third = _lines(path)
    told = {"error_type": "ValueError", "message": "no", "attempts": 2, "run_id": "run-1"}
    assert first == {"index": 5, "item": {"a": [1]}, **told}
    assert second["item"].startswith("{'a': <")
    assert third == {"index": 3, "item": "opaque", **told, "is_text": True}


async def test_line_has_the_last_answer_when_that_could_not_be_parsed(tmp_path: Path) -> None:
    """S-MR-204: the whole text; the message has its beginning."""
    path = tmp_path / "dead.jsonl"
    await _write(path, "run-1", _failed(5).replace(raw="half \n an"), _failed(6))
    assert [line.get("raw") for line in _lines(path)] == ["half \n an", None]


async def test_item_has_one_line_when_its_run_is_resumed(tmp_path: Path) -> None:
    """S-MR-151: at most one per run; lines of others, and lines that are none of ours, do not count."""
    path = tmp_path / "dead.jsonl"
    await _write(path, "räd", _failed(0), _failed(1, "half \ud83d"), _failed(0))
    with path.open("ab") as file:
        file.write(b'a note\n{"index": 7, "item": ')
    await _write(path, "other", _failed(0), _failed(2))
    await _write(path, "räd", _failed(1), _failed(2), _failed(0), is_resumed=True)
    lines = [json.loads(line) for line in path.read_text().splitlines() if line != "a note"]
    assert [(line["run_id"], line["index"]) for line in lines] == [
        ("räd", 0),
        ("räd", 1),
        ("other", 0),
        ("other", 2),
        ("räd", 2),
    ]


async def test_items_have_their_first_indices_when_they_are_a_source(tmp_path: Path) -> None:
    """S-MR-126: each once, in the file's order, those that are texts as texts."""
    path = tmp_path / "dead.jsonl"
    await _write(path, "run-1", _failed(9, {"a": 1}), _failed(2, Opaque()), _failed(4))
    await _write(path, "run-2", _failed(2, "other"), _failed(0, None))
    source = source_of(DeadLetters(path))
    assert source.identity == {"kind": "dead_letters", "path": str(path)}
    assert await entries_of(DeadLetters(str(path))) == [(9, {"a": 1}), (2, "opaque"), (4, "i"), (0, None)]


async def test_run_may_write_into_the_file_that_it_reads(tmp_path: Path) -> None:
    """S-MR-126, S-MR-153: items that fail again are not items a second time."""
    path = tmp_path / "dead.jsonl"
    await _write(path, "run-1", _failed(3), _failed(1))
    reader = source_of(DeadLetters(path)).open()
    first = await reader.next(1)
    await _write(path, "run-2", _failed(3))
    second, third = await reader.next(1), await reader.next(1)
    assert [*first.items, *second.items, *third.items] == [(3, "i"), (1, "i")]
    assert third.is_exhausted
    await reader.close()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: not JSON: Expecting property name"),
        ('{"index": 1}', "line 2: no dead letter: it needs 'index' and 'item'"),
        ('{"index": -1, "item": 1}', "line 2: no dead letter"),
        ('{"index": true, "item": 1}', "line 2: no dead letter"),
        ("[1]", "line 2: no dead letter"),
    ],
)
async def test_line_is_refused_when_it_is_no_dead_letter(tmp_path: Path, line: str, told: str) -> None:
    """S-MR-126: a source that is broken ends the run, with file and line; blank lines are nothing."""
    path = tmp_path / "dead.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(ValidationError) as refused:
        await entries_of(DeadLetters(path))
    assert told in str(refused.value)
    assert str(path) in str(refused.value)


async def test_an_item_has_one_letter_when_who_had_the_run_before_wakes(tmp_path: Path) -> None:
    """S-MR-151: a process that was frozen appends beside the one that goes on with the run."""
    path = tmp_path / "failed.jsonl"
    frozen = await DeadLetterFile.open(path, run_id="r", is_resumed=False)
    heir = await DeadLetterFile.open(path, run_id="r", is_resumed=True)
    other = await DeadLetterFile.open(path, run_id="other", is_resumed=False)
    await other.write([_failed(7)])
    await heir.write([_failed(7)])
    await frozen.write([_failed(7), _failed(8)])
    await heir.write([_failed(8)])
    for each in (frozen, heir, other):
        await each.close()
    letters = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(each["run_id"], each["index"]) for each in letters] == [("other", 7), ("r", 7), ("r", 8)]
