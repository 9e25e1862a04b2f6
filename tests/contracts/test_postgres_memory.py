"""Memory in a PostgreSQL database: who makes the tables, lost servers, what is told, and the command line over it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from ensemble_ray import EnsembleError, EvictionPolicy, MemoryEntry, PostgresMemory, ValidationError
from ensemble_ray.memory import postgres as database_module
from tests.command_line import Call, calling, work_in
from tests.contracts.memory_adapters import without_pgvector
from tests.ensemble_ray.memory.doubles import WordsModel
from tests.postgres_server import PostgresServer


def contents(memory: PostgresMemory, scope: str = "a") -> list[str]:
    """All contents of a scope."""
    return [entry.content for entry in memory.retrieve(scope, "money", 100)]


def column_type(postgres: PostgresServer, url: str) -> str:
    """What the vectors are."""
    with postgres.connection(url) as connection:
        found = connection.execute(
            "SELECT udt_name FROM information_schema.columns WHERE table_schema = 'ensemble_ray_memory'"
            " AND table_name = 'entries' AND column_name = 'vector'"
        ).fetchone()
    assert found is not None
    return str(found[0])


def test_the_server_searches_where_it_has_pgvector(postgres: PostgresServer, url: str) -> None:
    """S-MEM-141: no vector travels to the process that asks."""
    memory = PostgresMemory(url, embedding_model=WordsModel())
    memory.store("a", MemoryEntry(content="refund"))
    assert contents(memory) == ["refund"]
    assert column_type(postgres, url) == "vector"


def test_the_server_searches_when_pgvector_is_in_a_schema_of_any_name(postgres: PostgresServer, url: str) -> None:
    """S-MEM-141: `main` is the schema of our own tables in statements for both databases."""
    with postgres.connection(url) as connection:
        connection.execute("DROP EXTENSION IF EXISTS vector CASCADE")
        connection.execute('CREATE SCHEMA "main"')
        connection.execute('CREATE EXTENSION vector SCHEMA "main"')
    memory = PostgresMemory(url)
    memory.store("a", MemoryEntry(content="refund"))
    memory = PostgresMemory(url, embedding_model=WordsModel())
    memory.store("a", MemoryEntry(content="price"))
    assert sorted(contents(memory)) == ["price", "refund"]
    assert column_type(postgres, url) == "vector"
    memory.close()
    postgres.end_backends(url)
    with postgres.connection(url) as connection:
        connection.execute('DROP SCHEMA "main" CASCADE')  # the next test uses the same database


def test_tables_stay_as_they_were_made(postgres: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-MEM-141: a server that gets the extension later goes on with bytes."""
    with monkeypatch.context() as patch:
        without_pgvector(patch)
        PostgresMemory(url, embedding_model=WordsModel()).store("a", MemoryEntry(content="refund"))
    memory = PostgresMemory(url, embedding_model=WordsModel())
    memory.store("a", MemoryEntry(content="price"))
    assert sorted(contents(memory)) == ["price", "refund"]
    assert column_type(postgres, url) == "bytea"


@pytest.fixture
def modest(postgres: PostgresServer) -> Iterator[str]:
    """The URL of a new database, of a user who may make schemas in it, and no extension that is not trusted."""
    url = postgres.new_database()
    name = url.partition("@/")[2].partition("?")[0]
    with postgres.connection(url) as connection:
        connection.execute("CREATE ROLE modest LOGIN")
        connection.execute(sql.SQL("REVOKE CREATE ON DATABASE {} FROM PUBLIC").format(sql.Identifier(name)))
        connection.execute("CREATE SCHEMA ensemble_ray_memory AUTHORIZATION modest")
    yield url.replace("postgres:secret-of-tests", "modest:secret-of-tests")
    postgres.end_backends(url)
    with postgres.connection() as connection:
        connection.execute(sql.SQL("DROP DATABASE {}").format(sql.Identifier(name)))
        connection.execute("DROP ROLE modest")


def test_who_may_not_create_the_extension_gets_bytes(postgres: PostgresServer, modest: str) -> None:
    """S-MEM-141: nor is the right to make schemas needed where the schema is there."""
    memory = PostgresMemory(modest, embedding_model=WordsModel())
    memory.store("a", MemoryEntry(content="refund"))
    assert contents(memory) == ["refund"]
    assert column_type(postgres, modest) == "bytea"
    memory.close()


def test_a_lost_connection_is_made_anew(postgres: PostgresServer, url: str) -> None:
    """S-MEM-143: reading and writing go on; an entry with an id is there once."""
    memory = PostgresMemory(url)
    memory.store("a", MemoryEntry(content="one"))
    postgres.end_backends(url)
    assert contents(memory) == ["one"]
    postgres.end_backends(url)
    memory.store("a", MemoryEntry(content="two", entry_id="run/task#0/0/memory"))
    postgres.end_backends(url)
    memory.store("a", MemoryEntry(content="three"))
    postgres.end_backends(url)
    memory.entities.put("Ann", "fact")
    postgres.end_backends(url)
    memory.evict("a", EvictionPolicy.keep_last_entries(1))
    assert contents(memory) == ["three"]


_ENDING = """
CREATE FUNCTION ensemble_ray_memory.end_session() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_terminate_backend(pg_backend_pid());
    RETURN NEW;
END $$;
CREATE TRIGGER ending BEFORE INSERT ON ensemble_ray_memory.entries FOR EACH ROW
WHEN (NEW.entry LIKE '%two%') EXECUTE FUNCTION ensemble_ray_memory.end_session();
"""


def test_an_entry_without_an_id_is_not_stored_twice(postgres: PostgresServer, url: str) -> None:
    """S-MEM-143: whether a server that was lost while it stored it has it, nobody knows."""
    memory = PostgresMemory(url)
    memory.store("a", MemoryEntry(content="one"))
    with postgres.connection(url) as connection:
        connection.execute(_ENDING.encode())
    with pytest.raises(EnsembleError, match=r"^Cannot use the memory in postgresql:///"):
        memory.store("a", MemoryEntry(content="two"))
    memory.store("a", MemoryEntry(content="three"))
    assert contents(memory) == ["one", "three"]


def test_a_server_that_cannot_be_reached_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-MEM-143, S-MEM-140: with its place and without its password."""
    monkeypatch.setattr(database_module.MemoryDatabase, "PATIENCE_S", 0.0)
    memory = PostgresMemory("postgresql://me:secret@127.0.0.1:1/team")
    with pytest.raises(
        EnsembleError, match=r"memory in postgresql://127.0.0.1:1/team.*Check that the server runs"
    ) as told:
        memory.store("a", MemoryEntry(content="x"))
    assert "secret" not in str(told.value)
    assert "secret" not in repr(memory)


def test_a_url_that_is_none_is_refused_without_repeating_it() -> None:
    """S-MEM-140."""
    with pytest.raises(ValidationError, match="write postgresql://") as told:
        PostgresMemory("host=db password='sec")
    assert "sec" not in str(told.value)


def test_a_later_version_is_refused(postgres: PostgresServer, url: str) -> None:
    """S-MEM-140: nothing in it is changed."""
    PostgresMemory(url).store("a", MemoryEntry(content="x"))
    with postgres.connection(url) as connection:
        connection.execute("UPDATE ensemble_ray_memory.version SET version = 99")
    with pytest.raises(EnsembleError, match="later version of ensemble_ray"):
        PostgresMemory(url).retrieve("a", None, 1)


def test_records_and_memory_share_a_database(postgres: PostgresServer, url: str) -> None:
    """S-MEM-140: the tables of memory are in a schema of their own."""
    PostgresMemory(url).store("a", MemoryEntry(content="x"))
    with postgres.connection(url) as connection:
        found = connection.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'ensemble_ray'").fetchone()
    assert found == (0,)


def test_many_threads_use_few_connections(postgres: PostgresServer, url: str) -> None:
    """S-MEM-144, S-MEM-68: four at most."""
    memory = PostgresMemory(url)
    start = threading.Barrier(12)

    def work() -> None:
        start.wait(timeout=60)
        for number in range(10):
            memory.store("a", MemoryEntry(content=f"{number}"))
            memory.retrieve("a", None, 5)

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.scopes() == {"a": 120}
    with postgres.connection(url) as connection:
        found = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchone()
    assert found is not None
    assert 1 <= found[0] <= 4


def test_a_forked_child_has_connections_of_its_own(url: str) -> None:
    """S-MEM-117: the parent's go on."""
    memory = PostgresMemory(url)
    memory.store("a", MemoryEntry(content="parent"))
    child = os.fork()
    if not child:
        try:
            memory.store("a", MemoryEntry(content="child"))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert contents(memory) == ["parent", "child"]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """Calls a command with these arguments."""
    for _ in work_in(tmp_path, monkeypatch):
        yield calling(capsys)


def test_commands_look_into_a_database(url: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-MEM-146: by an option or by the environment; what is not there is not made."""
    missing = call("memory", "ls", "--store", url)
    assert missing.code == 2
    assert "There is no memory in postgresql:///" in missing.said
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'ensemble_ray_memory'").fetchall() == []
    memory = PostgresMemory(url)
    memory.store("letters", MemoryEntry(content="Ann wants her refund"))
    memory.store("sea", MemoryEntry(content="High tide"))
    memory.entities.put("Ann", "prefers short answers")
    assert call("memory", "ls", "--store", url).printed.splitlines() == [
        "letters     1 entry",
        "sea         1 entry",
        "(entities)  1 fact",
    ]
    monkeypatch.setenv("ENSEMBLE_RAY_MEMORY", url)
    assert json.loads(call("memory", "ls", "--json").printed)["place"] == memory.location
    assert [each["content"] for each in json.loads(call("memory", "show", "sea", "--json").printed)] == ["High tide"]
    found = json.loads(call("memory", "search", "ann", "--json").printed)
    assert [each["content"] for each in found["entries"]] == ["Ann wants her refund"]
    assert found["entities"] == {"Ann": "prefers short answers"}
    assert call("memory", "clear", "letters", "--yes").printed == "Deleted 1 entry of scope 'letters'\n"
    assert call("memory", "clear", "--entities", "--yes").printed == "Deleted 1 fact about entities\n"
    assert (memory.scopes(), memory.entities.is_empty()) == ({"sea": 1}, True)
    assert "Name one of --file and --store" in call("memory", "ls", "--store", url, "--file", "memory.db").said
