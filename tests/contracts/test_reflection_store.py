"""Stores of reflections: one contract, all adapters."""

from __future__ import annotations

import multiprocessing
import pickle
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import cloudpickle
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ensemble_ray import (
    EnsembleError,
    InMemoryReflectionStore,
    MemoryEntry,
    PostgresMemory,
    PostgresReflectionStore,
    ReflectionStore,
    SqliteMemory,
    SqliteReflectionStore,
    TaskReflection,
    ValidationError,
)
from tests.postgres_server import PostgresServer

Make: TypeAlias = Callable[[], ReflectionStore]
_LASTING = ["sqlite", pytest.param("postgres", marks=pytest.mark.program)]
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


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes stores of one kind: those that last all have the same place."""
    made: list[ReflectionStore] = []

    def making() -> ReflectionStore:
        match request.param:
            case "sqlite":
                made.append(SqliteReflectionStore(tmp_path / "notes.db"))
            case "postgres":
                made.append(PostgresReflectionStore(url))
            case _:
                made.append(InMemoryReflectionStore())
        return made[-1]

    url = request.getfixturevalue("postgres").empty_database() if request.param == "postgres" else ""
    yield making
    for each in made:
        if isinstance(each, SqliteReflectionStore | PostgresReflectionStore):
            each.close()


@pytest.fixture
def store(make: Make) -> ReflectionStore:
    """An empty one of each."""
    return make()


each = pytest.mark.parametrize("make", ["memory", *_LASTING], indirect=True)
each_that_lasts = pytest.mark.parametrize("make", _LASTING, indirect=True)


@each
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stored=st.lists(st.tuples(_KEYS, _REFLECTIONS), max_size=8))
def test_the_newest_reflection_of_a_key_is_kept(
    store: ReflectionStore, stored: list[tuple[str, TaskReflection]]
) -> None:
    """S-REFL-5: `store` replaces, `retrieve` gives what is there, or None; whatever the texts are."""
    model: dict[str, TaskReflection] = {}
    lasting = store if isinstance(store, SqliteReflectionStore | PostgresReflectionStore) else None
    for key in lasting.reflections() if lasting is not None else ():  # of an earlier example
        lasting.remove(key)
    for key, reflection in stored:
        if lasting is not None:
            assert lasting.retrieve(key) == model.get(key)
        store.store(key, reflection)
        model[key] = reflection
    assert {key: store.retrieve(key) for key in model} == model
    if lasting is not None:
        assert lasting.reflections() == model


@each
def test_an_adapter_has_the_shape(store: ReflectionStore) -> None:
    """S-REFL-5."""
    assert isinstance(store, ReflectionStore)
    assert store.retrieve("nothing") is None


@each
@pytest.mark.parametrize("key", ["", " ", None])
def test_a_blank_key_is_refused(store: ReflectionStore, key: str) -> None:
    """S-REFL-40: by all."""
    with pytest.raises(ValidationError, match=r"^reflection key must not be None or blank$"):
        store.store(key, notes())
    with pytest.raises(ValidationError, match=r"^reflection key must not be None or blank$"):
        store.retrieve(key)
    with pytest.raises(ValidationError, match=r"^reflection must be a TaskReflection, got: NoneType$"):
        store.store("key", None)  # type: ignore[arg-type]  what is refused


@each
def test_threads_share_a_store(store: ReflectionStore) -> None:
    """S-REFL-17: several at a time, nothing is lost and nothing is mixed."""

    def use(number: int) -> bool:
        store.store(f"key-{number % 8}", notes(str(number), number + 1))
        found = store.retrieve(f"key-{number % 8}")
        return found is not None and found.refined_description == str(found.run_count - 1)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(200)))
    assert all(store.retrieve(f"key-{number}") is not None for number in range(8))


@each_that_lasts
def test_another_store_of_the_place_has_them_and_they_can_be_removed(make: Make) -> None:
    """S-REFL-30, S-REFL-42: also one that was made of a pickle."""
    first, second = make(), make()
    assert isinstance(first, SqliteReflectionStore | PostgresReflectionStore)
    assert isinstance(second, SqliteReflectionStore | PostgresReflectionStore)
    assert second.reflections() == {}
    first.store("key", notes("1"))
    first.store("other", notes("2"))
    copied = cloudpickle.loads(cloudpickle.dumps(first))
    assert copied.retrieve("key") == second.retrieve("key") == notes_of(first, "key")
    second.remove("key")
    assert (first.retrieve("key"), list(first.reflections())) == (None, ["other"])
    copied.close()


def notes_of(store: ReflectionStore, key: str) -> TaskReflection:
    """What is known of a key."""
    found = store.retrieve(key)
    assert found is not None
    return found


def _fill(store: ReflectionStore, first: int, count: int) -> None:
    for number in range(first, first + count):
        store.store(f"key-{number}", notes(str(number)))
        store.store("shared", notes(str(number)))


@each_that_lasts
def test_processes_share_a_place(make: Make) -> None:
    """S-REFL-30, S-REFL-42: nothing of any of them is lost, whoever makes the tables."""
    store, starting = make(), multiprocessing.get_context("forkserver")
    starting.set_forkserver_preload([__name__])  # what they all need is imported once
    processes = [starting.Process(target=_fill, args=(store, first, 25)) for first in (0, 25, 50)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert isinstance(store, SqliteReflectionStore | PostgresReflectionStore)
    kept = store.reflections()
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


@pytest.mark.program
def test_one_database_has_memory_and_reflections(postgres: PostgresServer, url: str) -> None:
    """S-REFL-42: tables that a memory made before get the one of reflections; the right to make tables is needed once."""
    memory, reflections = PostgresMemory(url), PostgresReflectionStore(url)
    memory.store("s", MemoryEntry(content="c"))
    reflections.store("k", notes())
    assert memory.scopes() == {"s": 1}
    with postgres.connection(url) as connection:
        connection.execute("CREATE ROLE reader LOGIN")
        try:
            connection.execute("GRANT USAGE ON SCHEMA ensemble_ray_memory TO reader")
            connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA ensemble_ray_memory TO reader")
            reader = PostgresReflectionStore(url.replace("postgres:secret-of-tests", "reader:secret-of-tests"))
            assert reader.retrieve("k") == reflections.retrieve("k")
            with pytest.raises(EnsembleError, match=r"^Cannot use the memory in postgresql:///"):
                reader.store("k", notes())
            reader.close()
        finally:
            connection.execute("DROP OWNED BY reader")
            connection.execute("DROP ROLE reader")


@pytest.mark.program
def test_a_server_that_was_away_is_found_again(postgres: PostgresServer, url: str) -> None:
    """S-REFL-42, S-MEM-143."""
    store = PostgresReflectionStore(url)
    store.store("k", notes("1"))
    postgres.end_backends(url)
    store.store("k", notes("2"))
    postgres.end_backends(url)
    assert notes_of(store, "k") == notes_of(PostgresReflectionStore(url), "k")


def test_a_database_is_shown_without_its_password() -> None:
    """S-REFL-42."""
    store = PostgresReflectionStore("postgresql://me:secret@db:5433/team")
    assert (store.location, repr(store)) == (
        "postgresql://db:5433/team",
        "PostgresReflectionStore('postgresql://db:5433/team')",
    )
    with pytest.raises(ValidationError, match="write postgresql://") as refused:
        PostgresReflectionStore("host=db password='sec")
    assert "sec" not in str(refused.value)
