"""The batches of a run, folded from its facts and shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray import RunState
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import BatchMember
from ensemble_ray.record.batches import RecordedBatches, members_of
from ensemble_ray.record.following import EventProjection
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.record.view.map_reduce import MapReduceView
from ensemble_ray.studio.views.run_view import RunView

from .facts_of_dynamic_runs import begun as dynamic
from .facts_of_runs import RUN, fact


def step(batch: str, state: str, at: float = 101.0, **fields: object) -> Fact:
    return fact("batch", "run", at, batch=batch, state=state, **fields)


def folded(facts: Sequence[Fact]) -> RecordedBatches:
    batches = RecordedBatches()
    batches.apply_all(facts)
    return batches


PLANNED = step("a", "planned", items=[[0, 9, 0], [3, 3, 1]], total=11, model="m", endpoint="http://m/v1")


def test_steps_of_a_batch_are_joined() -> None:
    """S-BAT-10: each fact has what is new."""
    batches = folded([
        PLANNED,
        step("a", "uploaded", 102.0, file="file-1"),
        step("a", "submitted", 103.0, provider_batch="batch-1", status="validating"),
        step("a", "submitted", 104.0, status="in_progress", answered=4),
        step("b", "planned", 105.0, items=[[20, 20, 0]], total=1),
    ])  # fmt: skip
    (first, second) = batches
    assert (first.planned_at, first.changed_at, first.state, first.is_open) == (101.0, 104.0, "submitted", True)
    assert (first.file, first.provider_batch, first.status) == ("file-1", "batch-1", "in_progress")
    assert (first.total, first.answered, first.model) == (11, 4, "m")
    assert (second.total, len(batches)) == (1, 2)


@pytest.mark.parametrize(("state", "is_open"), [("cancelled", True), ("collected", False), ("void", False)])
def test_closed_batch_needs_no_answer(state: str, is_open: bool) -> None:  # noqa: FBT001
    """S-BAT-50, S-BAT-51: a cancelled one may have answers."""
    (batch,) = folded([PLANNED, step("a", state)])
    assert batch.is_open is is_open


def test_map_is_found_in_its_newest_batch() -> None:
    """S-BAT-11: maps of a void batch are in another one."""
    batches = folded([PLANNED, step("a", "void"), step("b", "planned", items=[[2, 4, 0]], total=3)])
    found = {name: batches.find(name) for name in ("map-1#0", "map-3#0", "map-3#1", "map-3#2", "map-10#0")}
    assert {name: each and each.batch for name, each in found.items()} == {
        "map-1#0": "a", "map-3#0": "b", "map-3#1": "a", "map-3#2": None, "map-10#0": None,
    }  # fmt: skip
    assert batches.find("reduce-1-0#0") is None
    assert batches.find("direct#0") is None


@given(st.sets(st.tuples(st.integers(0, 40), st.integers(0, 2))))
def test_members_are_those_that_were_added(places: set[tuple[int, int]]) -> None:
    """S-BAT-10: in ranges, whichever maps a batch has."""
    instances = {f"map-{index}#{occurrence}" for index, occurrence in places}
    members = members_of(instances)
    (batch,) = folded([step("a", "planned", items=[list(each) for each in members], total=len(places))])
    assert set(batch.instances()) == instances
    found = {(i, o) for i in range(42) for o in range(4) if batch.contains(i, o)}
    assert found == places


def test_consecutive_maps_are_one_range() -> None:
    """S-BAT-10: 50,000 maps need one row."""
    assert members_of(f"map-{index}#0" for index in range(50_000)) == (BatchMember(0, 49_999, 0),)


def test_trace_and_messages_show_batches() -> None:
    """S-BAT-42."""
    facts = [
        dynamic(),
        PLANNED,
        step("a", "submitted", 103.0, provider_batch="batch-1", status="in_progress", answered=4),
    ]
    view = MapReduceView(RUN)
    view.apply(facts)
    (row,) = [row for row in view.rows() if row.kind == "batch"]
    assert (row.title, row.details) == ("batch batch-1", ("in_progress", "4 of 11 requests answered"))
    assert [each["answered"] for each in view.data()["batches"]] == [4]  # type: ignore[attr-defined]  a list
    projection = EventProjection(RUN)
    messages = [each for one in facts for each in projection.apply(one) if each.type == "batch_progress"]
    assert [(each.data["state"], each.data["answered"], each.data["total"]) for each in messages] == [
        ("planned", 0, 11), ("submitted", 4, 11),
    ]  # fmt: skip


async def test_studio_shows_batches(tmp_path: Path) -> None:
    """S-BAT-42: how many of their requests are answered."""
    store = SqliteStore(tmp_path)
    run = await store.begin(RUN)
    await run.journal.append([dynamic(), PLANNED, step("a", "submitted", status="in_progress", answered=4)])
    await run.close(RunState.INTERRUPTED)
    view = RunView(RUN)
    view.apply(await store.facts(RUN))
    summary = await store.summary(RUN)
    assert summary is not None
    (batch,) = view.detail(summary, at=0.0, can_decide=False).batches
    assert (batch.batch, batch.state, batch.status, batch.answered, batch.total) == (
        "a",
        "submitted",
        "in_progress",
        4,
        11,
    )
