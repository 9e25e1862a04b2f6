"""All readers of a record agree on what happened, wherever the record ends.

The readers: the trace, the events of a follower, Studio's steps, and the row of Studio's list. Each golden record is cut after each fact.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.record.fold import RunFold
from ensemble_ray.record.following.projection import EventProjection
from ensemble_ray.record.resume.run_head import RunHead
from ensemble_ray.studio.views.steps import StepsView
from ensemble_ray.studio.views.totals import RunTotals
from tests.golden.cases import RUNTIMES, Case, cases_of
from tests.golden.records import Record
from tests.golden.store import load

_CASES = [case for runtime in RUNTIMES for case in cases_of(runtime)]


@dataclass(frozen=True)
class Seen:
    """What one reader says of a run."""

    tokens: int
    #: instances of tasks, without work that was delegated
    completed: frozenset[str]
    failed: frozenset[str]


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


def _follow(facts: Sequence[Fact]) -> Iterator[Seen]:
    projection = EventProjection(facts[0].run)
    ends: dict[str, set[str]] = {"task_completed": set(), "task_failed": set()}
    for fact in facts:
        for message in projection.apply(fact):
            if message.type in ends:
                ends[message.type].add(str(message.data["instance"]))
        tokens = projection.unrecorded_end("interrupted", fact.at).data["total_tokens"]
        assert isinstance(tokens, int)
        yield Seen(tokens, frozenset(ends["task_completed"]), frozenset(ends["task_failed"]))


def _step(facts: Sequence[Fact]) -> Iterator[Seen]:
    view = StepsView()
    for fact in facts:
        view.apply(fact)
        tasks = {
            name: state for name, state in view.states.items() if not view.is_unit(state) and state.kind != "delegation"
        }
        yield Seen(
            sum(state.total_tokens or 0 for state in view.states.values()),
            frozenset(name for name, state in tasks.items() if state.status == "completed"),
            frozenset(name for name, state in tasks.items() if state.status == "failed"),
        )


def _trace(facts: Sequence[Fact]) -> Iterator[Seen]:
    fold = RunFold()
    for fact in facts:
        fold.apply(fact)
        yield Seen(
            max(0, fold.trace().metrics.total_tokens),
            frozenset(name for name, each in fold.tasks.items() if each.output is not None),
            frozenset(name for name, each in fold.tasks.items() if each.has_failed),
        )


@pytest.mark.parametrize("case", _CASES, ids=lambda case: f"{case.runtime}/{case.name}")
def test_readers_agree_wherever_the_record_ends(case: Case) -> None:
    """S-MET-38: on tokens, and on the tasks that completed and failed."""
    facts = _facts(load(case))
    readers = {"events": [*_follow(facts)], "steps": [*_step(facts)]}
    if not RunHead(facts).is_dynamic:
        readers["trace"] = [*_trace(facts)]
        projection = EventProjection(facts[0].run)
        for fact in facts:
            projection.apply(fact)
        called = projection.unrecorded_end("interrupted", 0).data["total_tool_calls"]
        assert called == RunFold(facts).trace().metrics.total_tool_calls
    totals = RunTotals()
    for position, fact in enumerate(facts):
        totals.apply(fact)
        seen = {name: each[position] for name, each in readers.items()}
        assert len(set(seen.values())) == 1, (fact.seq, fact.kind, fact.name, seen)
        assert (totals.tokens or 0) == seen["events"].tokens, (fact.seq, fact.kind, fact.name)
