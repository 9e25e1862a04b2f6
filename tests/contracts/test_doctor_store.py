"""`ensemble-ray doctor` at a real database: can runs be recorded there, and what to do where not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict

import pytest
from psycopg import sql

from ensemble_ray.cli.commands.doctor import Finding, check_store
from ensemble_ray.record.postgres.store import PostgresStore
from tests.postgres_server import PostgresServer

from .web_server import closed_port

SECRET = "secret-of-tests"  # noqa: S105  nobody asks for it


@pytest.fixture
def url(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty database that the environment names."""
    found = postgres.empty_database()
    monkeypatch.setenv("ENSEMBLE_RAY_STORE", found)
    return found


@pytest.fixture
def stranger(postgres: PostgresServer, url: str) -> Iterator[str]:
    """The URL of that database for a user without rights."""
    with postgres.connection(url) as connection:
        connection.execute("CREATE ROLE stranger LOGIN PASSWORD 'secret-of-tests'")
    yield url.replace("//postgres:", "//stranger:")
    with postgres.connection(url) as connection:
        connection.execute("DROP OWNED BY stranger")
        connection.execute("DROP ROLE stranger")


def _found() -> Finding:
    (finding,) = check_store()
    assert SECRET not in str(asdict(finding))
    return finding


def test_nothing_is_looked_at_when_no_store_is_named() -> None:
    """S-SEC-68: runs are recorded in files then."""
    assert list(check_store()) == []


async def _record(url: str) -> None:
    owned = await PostgresStore(url).begin("one")
    await owned.journal.close()


def test_a_database_that_can_be_used_is_fine(url: str, postgres: PostgresServer) -> None:
    """S-SEC-68: before its first run, which makes the tables, and after it; looking makes nothing."""
    import asyncio

    finding = _found()
    assert (finding.state, finding.advice) == ("ok", "")
    assert finding.detail.endswith("answers, the first run makes its tables")
    with postgres.connection(url) as connection:
        assert connection.execute("SELECT to_regnamespace('ensemble_ray')").fetchone() == (None,)
    asyncio.run(_record(url))
    assert _found().detail.endswith("answers, 1 run")


def test_missing_rights_are_told(
    url: str, stranger: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-SEC-68: to make the tables, and to write to them."""
    import asyncio

    monkeypatch.setenv("ENSEMBLE_RAY_STORE", stranger)
    finding = _found()
    assert finding.state == "failed"
    assert "may not create the schema 'ensemble_ray'" in finding.detail
    asyncio.run(_record(url))
    with postgres.connection(url) as connection:
        connection.execute("GRANT USAGE ON SCHEMA ensemble_ray TO stranger")
        connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA ensemble_ray TO stranger")
    finding = _found()
    assert finding.state == "failed"
    assert "may not write to the tables" in finding.detail


def test_a_database_that_only_reads_is_told(url: str, postgres: PostgresServer) -> None:
    """S-SEC-68: such as a replica."""
    with postgres.connection(url) as connection:
        name = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name))
    assert "use the URL of the primary" in _found().detail


@pytest.mark.parametrize(
    ("store", "told"),
    [
        (f"postgresql://me:{SECRET}@[host/db", "USER:PASSWORD@HOST:PORT/DATABASE"),
        (f"mysql://me:{SECRET}@host/db", "Unknown store 'mysql://...'"),
        (f"me:{SECRET}@host/db", "Unknown store: use a postgresql:// URL"),
    ],
)
def test_a_url_that_is_none_is_told_without_its_password(
    monkeypatch: pytest.MonkeyPatch, store: str, told: str
) -> None:
    """S-SEC-68, S-DUR-5: and what to do."""
    monkeypatch.setenv("ENSEMBLE_RAY_STORE", store)
    finding = _found()
    assert finding.state == "failed"
    assert told in finding.detail
    assert "ENSEMBLE_RAY_STORE" in finding.advice


def test_a_server_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-68: where it was looked for."""
    with closed_port() as port:
        monkeypatch.setenv("ENSEMBLE_RAY_STORE", f"postgresql://me:{SECRET}@127.0.0.1:{port}/records")
        finding = _found()
    assert finding.state == "failed"
    assert f"postgresql://127.0.0.1:{port}/records" in finding.detail


def test_the_missing_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-68: with the command that installs it."""
    monkeypatch.setenv("ENSEMBLE_RAY_STORE", f"postgresql://me:{SECRET}@host/db")
    monkeypatch.setitem(sys.modules, "psycopg", None)
    assert "pip install 'ensemble-ray[postgres]'" in _found().detail
