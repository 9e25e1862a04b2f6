"""Golden records in PostgreSQL and on Ray: read and resumed as on files in one process."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from ensemble_ray import EnsembleError, InlineRuntime
from tests.golden.cases import Case, cases_of
from tests.golden.facts import difference
from tests.golden.observing import (
    added_facts,
    observe_resumption,
    read_in_store,
    restore_files,
    resumption,
)
from tests.golden.records import read_postgres, restore_postgres
from tests.golden.store import load, load_observed
from tests.postgres_server import PostgresServer

#: The teams of the records have the older order of factories' arguments, and are not changed: their code is part of the records.
pytestmark = pytest.mark.filterwarnings("ignore:(reduce|direct)_task takes .agent:DeprecationWarning")
_BY_NAME = {f"{runtime}/{case.name}": case for runtime in ("inline", "ray") for case in cases_of(runtime)}


@contextmanager
def _restored(case: Case, postgres: PostgresServer) -> Generator[str]:
    """Restore a case in an empty database."""
    url = postgres.empty_database()
    record = load(case)
    restore_files(record)
    with postgres.connection(url) as connection:
        restore_postgres(record, connection)
    yield url


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of runs lie in the test's own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize(
    "name",
    [
        "inline/sequential-killed",
        "inline/hierarchical-killed_in_tool",
        "inline/tools-killed",
        "inline/mapping-killed",
        "inline/adaptive-killed",
        "ray/nested-killed",
        "ray/adaptive-killed",
    ],
)
def test_golden_record_in_a_database_is_read_and_resumed_alike(name: str, postgres: PostgresServer) -> None:
    """S-DUR-5, S-DUR-35: the same facts say the same, wherever they lie."""
    case = _BY_NAME[name]
    said, before = load_observed(case), load(case)
    with _restored(case, postgres) as url, postgres.connection(url) as connection:
        for command, found in read_in_store(case, url).items():
            assert (command, found) == (command, said["reading"][command])
        resumed = resumption(case, InlineRuntime(store=url))
        for part, found in resumed.items():
            assert (part, found) == (part, said["resumption"][part])
        assert added_facts(before, read_postgres(connection, case.run_id)) == said["resumption"]["added"]


@pytest.mark.parametrize(
    "name",
    ["sequential-finished", "hierarchical-finished", "tools-finished", "adaptive-finished", "parallel_errors-failed"],
)
def test_run_records_the_facts_of_its_golden_record_in_a_database(name: str, postgres: PostgresServer) -> None:
    """S-DUR-5: the records on files stand for those in databases, since both hold the same facts."""
    case = _BY_NAME[f"inline/{name}"]
    url = postgres.empty_database()
    try:
        case.make().run(case.inputs, runtime=InlineRuntime(store=url), run_id=case.run_id)
    except EnsembleError:
        assert case.end == "failed"
    with postgres.connection(url) as connection:
        assert difference(load(case), read_postgres(connection, case.run_id)) == ""


@pytest.mark.parametrize(
    "name",
    [
        "ray/sequential-killed",
        "ray/hierarchical-killed_in_tool",
        "ray/tools-killed",
        "ray/adaptive-killed",
        "inline/nested-killed",
    ],
)
def test_golden_record_is_resumed_alike_on_ray(name: str, ray_cluster: str) -> None:
    """S-DUR-35: a run of either runtime goes on on Ray, with the same result as in one process."""
    from ensemble_ray import RayRuntime  # only these tests pay for it

    case = _BY_NAME[name]
    with RayRuntime() as runtime:
        found = observe_resumption(case, runtime)
    said = load_observed(case)["resumption"]
    for part, text in said.items():
        assert (part, found[part]) == (part, text)
