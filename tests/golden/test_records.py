"""Golden records are read, traced, forked and resumed as by the version that made them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.golden.cases import RUNTIMES, Case, cases_of
from tests.golden.observing import goes_on, observe_reading, observe_resumption
from tests.golden.records import read_sqlite, restore_sqlite
from tests.golden.store import load, load_observed, path_of

#: The teams of the records have the older order of factories' arguments, and are not changed: their code is part of the records.
pytestmark = pytest.mark.filterwarnings("ignore:(reduce|direct)_task takes .agent:DeprecationWarning")
_CASES = [case for runtime in RUNTIMES for case in cases_of(runtime)]
_GOING_ON = [case for case in _CASES if goes_on(case)]


def _id(case: Case) -> str:
    return f"{case.runtime}/{case.name}"


def _assert_same(found: dict[str, Any], said: dict[str, Any]) -> None:
    """Compare part by part, so that a difference is short."""
    for name, text in said.items():
        assert (name, found.get(name)) == (name, text)
    assert set(found) == set(said)


def test_every_record_is_of_a_case() -> None:
    """None lies there unused."""
    there = {path for case in _CASES for path in (path_of(case), path_of(case).with_suffix(".said.json"))}
    assert there == set(path_of(_CASES[0]).parents[1].glob("*/*.json*"))


@pytest.mark.parametrize("case", _CASES, ids=_id)
def test_golden_record_is_restored_whole(case: Case, tmp_path: Any) -> None:
    """S-DUR-7: what is read back with plain SQL is what stands in the file."""
    record = load(case)
    restore_sqlite(record, tmp_path)
    found = read_sqlite(tmp_path, record.run_id)
    assert (found.facts, found.bodies, found.epochs, found.counts) == (
        record.facts,
        record.bodies,
        record.epochs,
        record.counts,
    )


@pytest.mark.parametrize("case", _CASES, ids=_id)
def test_golden_record_is_read_and_forked_alike(case: Case) -> None:
    """S-DUR-7, S-DUR-54: lists, traces, what a fork from each task would use, the output of a run that is over."""
    _assert_same(observe_reading(case), load_observed(case)["reading"])


@pytest.mark.parametrize("case", _GOING_ON, ids=_id)
def test_golden_record_is_resumed_alike(case: Case) -> None:
    """S-DUR-35: the output, what is asked for it, and the facts that are added."""
    _assert_same(observe_resumption(case), load_observed(case)["resumption"])
