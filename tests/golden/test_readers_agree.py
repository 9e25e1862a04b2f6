"""All readers of a golden record agree on what happened, wherever the record ends."""

from __future__ import annotations

import json

import pytest

from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from tests.golden.cases import RUNTIMES, Case, cases_of
from tests.golden.records import Record
from tests.golden.store import load
from tests.readers import differences

_CASES = [case for runtime in RUNTIMES for case in cases_of(runtime)]


def _facts(record: Record) -> list[Fact]:
    def with_body(data: dict[str, object]) -> object:
        """Return a text that is stored apart in the place of its hash."""
        return record.bodies[str(data["$body"])] if set(data) == {"$body"} else data

    return [
        read_fact(
            run=record.run_id,
            kind=kind,
            name=name,
            at=at,
            epoch=epoch,
            data=json.loads(json.dumps(data), object_hook=with_body),
            seq=seq,
        )
        for seq, kind, name, _, at, epoch, data in record.facts
    ]


@pytest.mark.parametrize("case", _CASES, ids=lambda case: f"{case.runtime}/{case.name}")
def test_readers_agree_wherever_the_record_ends(case: Case) -> None:
    """S-MET-38, S-MET-39: on tokens, calls, costs, times, states, outputs and errors."""
    assert [*differences(_facts(load(case)))] == []
