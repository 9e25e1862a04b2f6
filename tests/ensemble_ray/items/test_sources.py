"""What may be given as items, and what is said of everything else."""

import os
from collections import OrderedDict, UserDict
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from ensemble_ray import DeadLetters, TaskMetrics, ValidationError
from ensemble_ray.items.sources import NO_ITEMS, source_of
from tests.ensemble_ray.items.reading import entries_of, read_all


class Dataset:
    """Has rows as a Ray Dataset has them; its own iteration is refused there too."""

    def __iter__(self) -> Iterator[object]:
        raise TypeError("not iterable")

    def iter_rows(self) -> Iterator[dict[str, int]]:
        return iter([{"a": 1}, {"a": 2}])


class OldSequence:
    """Iterable by its positions alone."""

    def __getitem__(self, index: int) -> str:
        return "ab"[index]


class Countdown:
    """Can be iterated over any number of times."""

    def __iter__(self) -> Iterator[int]:
        return iter((3, 2, 1))


class Ticks:
    """The same, asynchronously."""

    async def __aiter__(self) -> AsyncIterator[str]:
        for tick in ("a", "b"):
            yield tick


@pytest.mark.parametrize("items", [None, [], (), range(0)])
def test_items_are_refused_when_there_are_none(items: object) -> None:
    """S-MR-10: None and an empty sequence, at construction."""
    with pytest.raises(ValidationError) as refused:
        source_of(items)
    assert str(refused.value) == NO_ITEMS == "items must not be None or empty"


@pytest.mark.parametrize(
    "items", [["a", "b"], ("a", "b"), {"a": 1, "b": 2}.keys(), iter(["a", "b"]), OldSequence(), Ticks()]
)
async def test_items_come_with_their_positions_when_iterated_over(items: object) -> None:
    """S-MR-120: a sequence, any other iterable, an async iterable."""
    assert await entries_of(items) == [(0, "a"), (1, "b")]


async def test_rows_are_items_when_a_dataset_is_given() -> None:
    """S-MR-120: a Ray Dataset, known by its rows, gives a dict for each, in every run."""
    source = source_of(Dataset())
    assert source.identity == {"kind": "dataset"}
    assert await entries_of(Dataset()) == [(0, {"a": 1}), (1, {"a": 2})]


def test_sequence_is_mapped_at_construction_when_it_is_one() -> None:
    """S-MR-6, S-MR-120: static mode maps lists, tuples and other sequences at once, nothing else."""
    assert source_of([1, 2]).is_list
    assert source_of(range(3)).count == 3
    assert not source_of(iter([1])).is_list
    assert source_of(iter([1])).count is None


async def test_source_keeps_its_items_when_the_list_changes_later() -> None:
    """S-CONV-5: the caller's list is copied."""
    given: list[object] = ["a"]
    source = source_of(given)
    given.append("b")
    assert (source.count, list(source.items)) == (1, ["a"])


@pytest.mark.parametrize("text", ["hello", "items.txt", "x" * 500])
def test_text_is_refused_when_it_is_no_path(text: str) -> None:
    """S-MR-120: a text is a path that ends in one of three ways, or a mistake."""
    with pytest.raises(ValidationError) as refused:
        source_of(text)
    told = str(refused.value)
    assert told.startswith(f"items is the text '{text[:80]}")
    assert told.endswith("': pass a list of items, a folder, or a path that ends in .jsonl, .csv or .parquet")
    assert len(told) < 200


@pytest.mark.parametrize(
    ("items", "told"), [(b"abc", "items is bytes: pass"), (7, "items is of type int, which has no")]
)
def test_items_are_refused_when_nothing_can_be_iterated_over(items: object, told: str) -> None:
    """S-MR-120: what has no items says so."""
    with pytest.raises(ValidationError, match=told):
        source_of(items)


@pytest.mark.parametrize("items", [{"a": 1}, OrderedDict(a=1), MappingProxyType({"a": 1}), UserDict(a=1)])
def test_items_are_refused_when_they_are_one_mapping(items: Mapping[str, int]) -> None:
    """S-MR-202: its keys are not the items that somebody means; what to give is said."""
    with pytest.raises(
        ValidationError, match=rf"^items is {type(items).__name__}: pass a list .* \[mapping\], .* list\("
    ):
        source_of(items)


def test_items_are_refused_when_they_are_one_model() -> None:
    """S-MR-202: pydantic's models give their fields when they are iterated over."""
    with pytest.raises(ValidationError, match=r"^items is TaskMetrics: .* For one item pass a list with it"):
        source_of(TaskMetrics())


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.csv", "gone.parquet"])
def test_file_is_refused_when_it_is_not_there(tmp_path: Path, name: str) -> None:
    """S-MR-120: the path and the reason, at construction."""
    path = tmp_path / name
    for given in (str(path), path):
        with pytest.raises(ValidationError) as refused:
            source_of(given)
        assert str(refused.value) == f"items file '{path}' cannot be read: No such file or directory"
    with pytest.raises(ValidationError, match=r"dead letters '.*' cannot be read: No such file"):
        source_of(DeadLetters(path))


def test_file_is_refused_when_it_is_none(tmp_path: Path) -> None:
    """S-MR-120: a folder, and a pipe, which to open would wait for ever."""
    (tmp_path / "folder.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("folder.csv", "pipe.jsonl"):
        with pytest.raises(ValidationError, match=f"{name}' cannot be read: it is no file"):
            source_of(tmp_path / name)


async def test_file_is_the_same_when_the_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-MR-120: a path is taken from where the source was made; its ending may be written in capitals."""
    (tmp_path / "a.JSONL").write_text("1\n")
    monkeypatch.chdir(tmp_path)
    source = source_of("a.JSONL")
    monkeypatch.chdir("/")
    assert source.identity == {"kind": "jsonl", "path": str(tmp_path / "a.JSONL")}
    assert await read_all(source.open()) == [(0, 1)]


async def test_iterator_is_refused_when_an_earlier_run_consumed_it() -> None:
    """S-MR-124: generators, synchronous or not, can be run over once; what makes iterators anew, any number of times."""

    async def ticks() -> AsyncIterator[int]:
        yield 1

    for one_shot in (iter([1]), (each for each in [1]), ticks()):
        source = source_of(one_shot)
        assert source.is_one_shot
        await source.open().close()
        with pytest.raises(ValidationError, match=r"^items is an iterator that an earlier run has consumed"):
            source.open()
    for several in ([1], Countdown(), Ticks(), Dataset()):
        source = source_of(several)
        await source.open().close()
        assert await read_all(source.open())


async def test_source_is_found_empty_when_first_pulled() -> None:
    """S-MR-122: what is no sequence tells only then."""
    assert await entries_of(iter(())) == []
