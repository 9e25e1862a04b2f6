"""The contract of the `BodyStore` port, over the stores in memory and on disk."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from ensemble_ray.ports import BodyStore
from ensemble_ray.record.bodies import FileBodies, MemoryBodies

TEXT = "long text\nof two lines " * 100


@pytest.fixture(params=["memory", "file", "file flushed"])
def settle(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], tuple[BodyStore, Callable[[], None]]]:
    """Makes a store, and a function that lets it write what it has."""

    def make() -> tuple[BodyStore, Callable[[], None]]:
        if request.param == "memory":
            return MemoryBodies(), lambda: None
        files = FileBodies(tmp_path, "w")
        return files, files.flush if request.param == "file flushed" else lambda: None

    return make


Make = Callable[[], tuple[BodyStore, Callable[[], None]]]


def test_body_is_got_by_its_hash(settle: Make) -> None:
    """The SHA-256 of its UTF-8 form."""
    store, write = settle()
    digest = store.put(TEXT)
    write()
    assert digest == sha256(TEXT.encode()).hexdigest()
    assert store.get(digest) == TEXT


def test_same_body_has_the_same_hash(settle: Make) -> None:
    """Putting it again changes nothing."""
    store, write = settle()
    first = store.put(TEXT)
    write()
    assert store.put(TEXT) == first
    assert store.put(TEXT + "x") != first
    write()
    assert store.get(first) == TEXT


def test_key_error_is_raised_when_there_is_none(settle: Make) -> None:
    """Never another text, never an empty one."""
    store, _ = settle()
    with pytest.raises(KeyError):
        store.get("0" * 64)


@pytest.mark.parametrize("body", ["", "ÄÖ 😀", "\ud83d", "\x00\r\n\u2028", "x" * 1_000_000])
def test_any_text_comes_back_unchanged(settle: Make, body: str) -> None:
    """Empty, large, with line feeds, with half of a surrogate pair."""
    store, write = settle()
    digest = store.put(body)
    write()
    assert store.get(digest) == body


def test_file_holds_each_body_once(tmp_path: Path) -> None:
    """However often a writer puts it."""
    store = FileBodies(tmp_path, "w")
    for _ in range(3):
        store.put(TEXT)
        store.flush()
    store.close()
    assert len((tmp_path / "bodies-w.jsonl").read_bytes().splitlines()) == 1


def test_bodies_of_all_writers_are_got_when_opened_again(tmp_path: Path) -> None:
    """A reader finds what any process of the run kept."""
    digests: list[str] = []
    for writer in ("a", "b"):
        store = FileBodies(tmp_path, writer)
        digests.append(store.put(writer * 2000))
        store.close()
    assert [FileBodies(tmp_path).get(digest) for digest in digests] == ["a" * 2000, "b" * 2000]


def test_writer_keeps_its_own_copy_when_another_has_the_body(tmp_path: Path) -> None:
    """The other file may lie on another machine."""
    for writer in ("a", "b"):
        store = FileBodies(tmp_path, writer)
        store.put(TEXT)
        store.close()
    assert (tmp_path / "bodies-a.jsonl").read_bytes() == (tmp_path / "bodies-b.jsonl").read_bytes()


def test_file_is_not_made_when_nothing_was_put(tmp_path: Path) -> None:
    """Short runs have no bodies."""
    FileBodies(tmp_path, "w").close()
    assert list(tmp_path.iterdir()) == []
