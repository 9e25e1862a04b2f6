"""Stores of reflections: one contract, all adapters."""

from __future__ import annotations

import multiprocessing
import pickle
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ray import (
    EnsembleError,
    InMemoryReflectionStore,
    MemoryEntry,
    ReflectionStore,
    SqliteMemory,
    SqliteReflectionStore,
    TaskReflection,
    ValidationError,
)

Make: TypeAlias = Callable[[Path], ReflectionStore]
ADAPTERS: list[Make] = [
    lambda _: InMemoryReflectionStore(),
    lambda directory: SqliteReflectionStore(directory / "notes.db"),
]
_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5).filter(lambda key: key.strip() != "")
_REFLECTIONS = st.builds(
    TaskReflection,
    refined_description=_TEXTS,
    refined_expected_output=_TEXTS,
    observations=st.lists(_TEXTS, max_size=3),
    suggestions=st.lists(_TEXTS, max_size=3),
    run_count=st.integers(1, 2**40),
)


def notes(text: str = "Better", run_count: int = 1) -> TaskReflection:
    """A reflection."""
    return TaskReflection(refined_description=text, refined_expected_output="x", run_count=run_count)


@pytest.fixture(params=ADAPTERS, ids=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ReflectionStore]:
    """One of each."""
    made = request.param(tmp_path)
    yield made
    if isinstance(made, SqliteReflectionStore):
        made.close()


@pytest.mark.parametrize("make", ADAPTERS, ids=["memory", "sqlite"])
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(_KEYS, _REFLECTIONS), max_size=8))
def test_the_newest_reflection_of_a_key_is_kept(make: Make, stored: list[tuple[str, TaskReflection]]) -> None:
    """S-REFL-5: `store` replaces, `retrieve` gives what is there, or None; whatever the texts are."""
    with TemporaryDirectory() as directory:
        kept = make(Path(directory))
        model: dict[str, TaskReflection] = {}
        for key, reflection in stored:
            assert kept.retrieve(key) == model.get(key)
            kept.store(key, reflection)
            model[key] = reflection
        assert {key: kept.retrieve(key) for key in model} == model
        if isinstance(kept, SqliteReflectionStore):
            assert kept.reflections() == model
            kept.close()


def test_an_adapter_has_the_shape(store: ReflectionStore) -> None:
    """S-REFL-5."""
    assert isinstance(store, ReflectionStore)
    assert store.retrieve("nothing") is None


@pytest.mark.parametrize("key", ["", " ", None])
def test_a_blank_key_is_refused(store: ReflectionStore, key: str) -> None:
    """S-REFL-40: by all."""
    with pytest.raises(ValidationError, match=r"^reflection key must not be None or blank$"):
        store.store(key, notes())
    with pytest.raises(ValidationError, match=r"^reflection key must not be None or blank$"):
        store.retrieve(key)
    with pytest.raises(ValidationError, match=r"^reflection must be a TaskReflection, got: NoneType$"):
        store.store("key", None)  # type: ignore[arg-type]  what is refused


def test_threads_share_a_store(store: ReflectionStore) -> None:
    """S-REFL-17: several at a time, nothing is lost and nothing is mixed."""

    def use(number: int) -> bool:
        store.store(f"key-{number % 8}", notes(str(number), number + 1))
        found = store.retrieve(f"key-{number % 8}")
        return found is not None and found.refined_description == str(found.run_count - 1)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(200)))
    assert all(store.retrieve(f"key-{number}") is not None for number in range(8))


def _fill(path: str, first: int, count: int) -> None:
    store = SqliteReflectionStore(path)
    for number in range(first, first + count):
        store.store(f"key-{number}", notes(str(number)))
        store.store("shared", notes(str(number)))


def test_processes_share_a_file(tmp_path: Path) -> None:
    """S-REFL-30: nothing of any of them is lost."""
    path = str(tmp_path / "notes.db")
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_fill, args=(path, first, 25)) for first in (0, 25, 50)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    kept = SqliteReflectionStore(path).reflections()
    assert len(kept) == 76
    assert {int(each.refined_description) for key, each in kept.items() if key != "shared"} == set(range(75))


def test_a_file_outlives_its_store_and_is_its_owners_alone(tmp_path: Path) -> None:
    """S-REFL-30: another one reads it; it pickles as its path."""
    path = tmp_path / "deep" / "notes.db"
    first = SqliteReflectionStore(path)
    first.store("key", notes())
    first.close()
    second = cloudpickle.loads(cloudpickle.dumps(SqliteReflectionStore(path)))
    assert (second.path, second.retrieve("key")) == (path, first.retrieve("key"))
    assert path.stat().st_mode & 0o077 == 0
    assert repr(second) == f"SqliteReflectionStore({str(path)!r})"


def test_one_file_has_memory_and_reflections(tmp_path: Path) -> None:
    """S-REFL-30: whichever of them made it."""
    for name, memory_first in (("a.db", True), ("b.db", False)):
        memory, reflections = SqliteMemory(tmp_path / name), SqliteReflectionStore(tmp_path / name)
        steps = [lambda m=memory: m.store("s", MemoryEntry(content="c")), lambda r=reflections: r.store("k", notes())]
        for step in steps if memory_first else reversed(steps):
            step()
        assert memory.scopes() == {"s": 1}
        assert reflections.retrieve("k") is not None


def test_what_is_removed_is_gone(tmp_path: Path) -> None:
    """S-REFL-30: it is overwritten, too."""
    store = SqliteReflectionStore(tmp_path / "notes.db")
    store.store("key", notes("a secret of Ann"))
    store.remove("key")
    assert (store.retrieve("key"), store.reflections()) == (None, {})
    store.close()
    assert all(b"a secret of Ann" not in file.read_bytes() for file in tmp_path.iterdir())


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    """S-REFL-30: and nothing in it is changed."""
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as other:
        other.execute("create table things (name text)")
    before = path.read_bytes()
    with pytest.raises(EnsembleError, match="it is a database of something else"):
        SqliteReflectionStore(path).store("key", notes())
    assert path.read_bytes() == before


def test_memory_of_this_process_stays_here() -> None:
    """S-REFL-31: a copy elsewhere would not be what its owner reads."""
    with pytest.raises(TypeError, match="InMemoryReflectionStore lives in the process that made it"):
        pickle.dumps(InMemoryReflectionStore())
