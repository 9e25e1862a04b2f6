"""Rows of runs, and the list of runs: its order, filters, counts, groups and pages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ensemble_ray.errors import RecordError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.stores import GatesOfRun, RecordedRun
from ensemble_ray.studio.http_server import StudioRefusal
from ensemble_ray.studio.reading import RunListing, RunSearch
from ensemble_ray.studio.schemas import RunList
from ensemble_ray.studio.views.run_view import RunTotals
from ensemble_ray.values.outputs import RunState
from tests.ensemble_ray.record.facts_of_runs import begun, fact, model, node

from .stored_runs import numbered

_BEGIN = datetime(2026, 11, 1, tzinfo=UTC)


@dataclass
class ListedStore:
    """A store with given facts. Counts the records that are read."""

    facts: dict[str, list[Fact]] = field(default_factory=dict)
    states: dict[str, RunState] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    reads: list[str] = field(default_factory=list)

    def add(self, run_id: str, *facts: Fact, state: RunState = RunState.COMPLETED, **header: Any) -> None:
        """Add a newer run."""
        self.facts[run_id] = numbered([*begun(node("a", "Read Ray"), **header), *facts])
        self.states[run_id] = state

    async def runs(self) -> list[RecordedRun]:
        """Return the runs, newest first."""
        return [
            RecordedRun(
                run_id=name,
                created_at=_BEGIN + timedelta(hours=number),
                origin="",
                state=self.states[name],
                location="here",
                owner="process 7 on host" if self.states[name].is_active else "",
            )
            for number, name in reversed(list(enumerate(self.facts)))
        ]

    async def read(
        self,
        run_id: str,
        *,
        after: int = 0,
        kinds: Collection[str] | None = None,
        has_data: bool = True,
        is_partial: bool = False,
    ) -> AsyncGenerator[Sequence[Fact]]:
        """Yield the facts of a run after a position."""
        del has_data, is_partial
        self.reads.append(run_id)
        if run_id in self.damaged:
            raise RecordError("its record is damaged")
        yield [each for each in self.facts[run_id] if each.seq > after and (kinds is None or each.kind in kinds)]

    async def summary(self, run_id: str) -> RecordedRun | None:
        """Return a run."""
        return next((each for each in await self.runs() if each.run_id == run_id), None)

    async def facts_of(self, run_id: str, instance: str) -> list[Fact]:
        """Return no facts: lists do not need them."""
        raise NotImplementedError

    async def read_content(self, run_id: str, sha256: str) -> bytes | None:
        """Return no content: lists do not need it."""
        raise NotImplementedError

    async def gates(self) -> list[GatesOfRun]:
        """Return no gates: lists do not need them."""
        raise NotImplementedError


def end(at: float, state: str = "completed", **data: object) -> Fact:
    """The end of a run."""
    reason = {"failed": "error", "completed": "completed"}.get(state, state)
    return fact("end", "run", at, state=state, exit_reason=reason, **data)


def error(kind: str, message: str) -> list[dict[str, Any]]:
    """The recorded errors of a run with one."""
    return [{"key": "a", "error_type": kind, "message": message}]


@pytest.fixture
def store() -> ListedStore:
    """Five runs of two teams: the oldest is `first`, the newest `last`."""
    made = ListedStore()
    made.add("first", end(130), name="Writers", tags={"for": "docs"})
    made.add(
        "slow",
        *(model("a#0", turn, 110.0) for turn in range(3)),
        end(900),
        name="Writers",
        inputs={"topic": "tides", "words": "a\nb"},
    )
    made.add(
        "lost",
        end(105, "failed", errors=error("RateLimited", "HTTP 429 after 12.5 s, request 4f3a91b2")),
        state=RunState.FAILED,
        name="Readers",
        tags={"for": "docs", "urgent": ""},
    )
    made.add(
        "wrong",
        model("a#0", 0, 110.0),
        end(120, "failed", errors=error("RateLimited", "HTTP 429 after 7.25 s, request 99ab31ce")),
        state=RunState.FAILED,
        name="Readers",
    )
    made.add("last", state=RunState.RUNNING, name="Writers")
    return made


async def page(store: ListedStore | RunListing, *, cursor: str = "", limit: int = 50, **search: Any) -> RunList:
    """Return one page of runs."""
    listing = store if isinstance(store, RunListing) else RunListing(store)
    return await listing.page(RunSearch(**search), lambda _: True, cursor=cursor, limit=limit)


def ids(found: RunList) -> list[str]:
    """The ids of the runs of a page."""
    return [row.run_id for row in found.runs]


async def test_a_page_in_the_order_of_time_reads_only_its_own_records(store: ListedStore) -> None:
    """S-STU-4, S-STU-232: also with filters and counts of states and times."""
    found = await page(store, limit=2)
    assert (ids(found), sorted(store.reads)) == (["last", "wrong"], ["last", "wrong"])
    assert found.counts == {"running": 1, "failed": 2, "completed": 2}
    store.reads.clear()
    since = (_BEGIN + timedelta(hours=1)).timestamp()
    found = await page(store, statuses=frozenset({"failed"}), since=since, until=since + 7200)
    assert (ids(found), store.reads, found.unread) == (["lost"], ["lost"], 0)
    assert found.counts == {"failed": 1, "completed": 1}
    assert ids(await page(store, is_descending=False, limit=1)) == ["first"]


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("duration", ["slow", "first", "wrong", "lost", "last"]),
        ("tokens", ["slow", "wrong", "last", "lost", "first"]),
        ("name", ["last", "slow", "first", "wrong", "lost"]),
        ("state", ["wrong", "lost", "slow", "first", "last"]),
        ("attempts", ["last", "wrong", "lost", "slow", "first"]),
    ],
)
async def test_runs_are_sorted_and_each_is_on_one_page(store: ListedStore, sort: str, order: list[str]) -> None:
    """S-STU-231: by values of records too; runs without the value are last, equal ones newest first."""
    listing = RunListing(store)
    for limit in (1, 2, 5):
        pages, cursor = list[list[str]](), ""
        while len(pages) < 9:
            found = await page(listing, sort=sort, limit=limit, cursor=cursor)
            pages.append(ids(found))
            if found.next_cursor is None:
                break
            cursor = found.next_cursor
        assert [each for some in pages for each in some] == order
        assert [len(some) for some in pages[:-1]] == [limit] * (len(pages) - 1)
    ascending = await page(listing, sort=sort, is_descending=False)
    assert set(ids(ascending)) == set(order)
    if sort in {"duration", "tokens"}:
        assert ids(ascending)[0] == order[{"duration": 3, "tokens": 1}[sort]]


async def test_a_cursor_of_another_order_is_refused(store: ListedStore) -> None:
    """S-STU-231."""
    found = await page(store, limit=1)
    assert found.next_cursor is not None
    for cursor in (found.next_cursor, "x", "[]", "{}", '["tokens", "many", 1, "last"]'):
        with pytest.raises(StudioRefusal, match="Invalid cursor"):
            await page(store, sort="tokens", cursor=cursor)


async def test_pages_keep_their_place_when_runs_appear_and_vanish(store: ListedStore) -> None:
    """S-STU-2, S-STU-231: the run of a cursor may be deleted meanwhile."""
    listing = RunListing(store)
    found = await page(listing, sort="duration", limit=2)
    assert ids(found) == ["slow", "first"]
    del store.facts["first"]
    store.add("new", end(3000), name="Writers")
    listing.evict("first")
    assert ids(await page(listing, sort="duration", limit=2, cursor=found.next_cursor or "")) == ["wrong", "lost"]
    assert ids(await page(listing, sort="duration", limit=1)) == ["new"]


async def test_records_are_read_a_part_at_a_time(store: ListedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-STU-3, S-STU-231: each request reads some and tells how many are left; then nothing is read again."""
    monkeypatch.setattr("ensemble_ray.studio.reading._READ_A_PAGE", 2)
    listing = RunListing(store)
    left = [(await page(listing, sort="duration", limit=1)).unread for _ in range(2)]
    assert (left, len(set(store.reads))) == ([3, 1], 4)
    found = await page(listing, sort="duration")
    assert found.counts == {"running": 1, "failed": 2, "completed": 2}
    assert (found.unread, ids(found)[0]) == (0, "slow")
    store.reads.clear()
    await page(listing, sort="duration")
    assert set(store.reads) == {"last"}  # it is active


async def test_a_filter_by_contents_counts_what_was_read(store: ListedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-STU-3, S-STU-232: pages continue behind the records that are read, so that each run is on one page."""
    monkeypatch.setattr("ensemble_ray.studio.reading._READ_A_PAGE", 2)
    listing = RunListing(store)
    found = await page(listing, tag="for")
    assert (ids(found), found.unread, found.counts) == ([], 3, {})
    found = await page(listing, tag="for", cursor=found.next_cursor or "")
    assert (ids(found), found.counts) == (["lost"], {"failed": 1})
    found = await page(listing, tag="for", cursor=found.next_cursor or "")
    assert (ids(found), found.unread, found.next_cursor) == (["first"], 0, None)
    assert found.counts == {"failed": 1, "completed": 1}


async def test_a_damaged_record_does_not_delay_the_others(store: ListedStore) -> None:
    """S-STU-6: it is listed with its error, also in an order by its contents."""
    store.damaged.add("slow")
    listing = RunListing(store)
    found = await page(listing, sort="duration")
    assert (found.unread, ids(found)) == (0, ["first", "wrong", "lost", "last", "slow"])
    assert found.runs[-1].summary == "its record is damaged"
    store.damaged.clear()
    assert (await page(listing)).runs[-2].duration_ms == 800_000


async def test_runs_are_grouped(store: ListedStore) -> None:
    """S-STU-233: by team, tag or error; the largest group first, runs without the value last; a group has its runs."""
    listing = RunListing(store)
    found = await page(listing, group="team")
    assert [(each.key, dict(each.statuses)) for each in found.groups] == [
        ("Writers", {"completed": 2, "running": 1}),
        ("Readers", {"failed": 2}),
    ]
    assert (ids(found), found.counts) == ([], {"running": 1, "failed": 2, "completed": 2})
    found = await page(listing, group="tag")
    assert [(each.key, sum(each.statuses.values())) for each in found.groups] == [
        ("for:docs", 2),
        ("urgent", 1),
        ("", 3),
    ]
    found = await page(listing, group="error", statuses=frozenset({"failed"}))
    (kind,) = found.groups
    assert (kind.key, kind.statuses) == ("RateLimited: HTTP 429 after … s, request …", {"failed": 2})
    assert kind.latest_at == round((_BEGIN + timedelta(hours=3)).timestamp() * 1000)
    one = await page(listing, group="error", within=kind.key, limit=1)
    two = await page(listing, group="error", within=kind.key, cursor=one.next_cursor or "")
    assert (ids(one), ids(two), two.next_cursor) == (["wrong"], ["lost"], None)
    assert ids(await page(listing, group="error", within="")) == ["last", "slow", "first"]


async def test_search_finds_inputs_and_errors(store: ListedStore) -> None:
    """S-STU-3: where no run has the words in its id."""
    listing = RunListing(store)
    assert ids(await page(listing, text="TIDES")) == ["slow"]
    assert ids(await page(listing, text="ratelimited 429")) == ["wrong", "lost"]


@pytest.mark.parametrize(
    ("header", "subject"),
    [
        ({"inputs": {"topic": "tides", "words": "one\ntwo"}}, "topic: tides · words: one"),
        ({"inputs": {}}, "Read Ray"),
        ({"inputs": {}, "items": {"kind": "list", "count": 2000}}, "2,000 items"),
        ({"inputs": {}, "items": {"kind": "csv", "path": "/data/reviews.csv"}}, "items of reviews.csv"),
        ({"inputs": {}, "items": {"kind": "iterable"}}, ""),
    ],
)
def test_a_row_says_what_its_run_is_about(store: ListedStore, header: dict[str, Any], subject: str) -> None:
    """S-STU-230: its inputs, else its items, else its first task."""
    store.add("one", **header)
    totals = RunTotals()
    for each in store.facts["one"]:
        totals.apply(each)
    assert totals.subject == subject


async def test_a_row_has_the_error_of_its_run(store: ListedStore) -> None:
    """S-STU-230: class and message; a failed run without one has that of its first failed task, a completed run none."""
    lost = fact("task_failed", "a#0", 101, error_type="KeyError", message="'x'\nmore")
    store.add("silent", lost, end(105, "failed"), state=RunState.FAILED)
    store.add("partly", lost, end(105, errors=error("KeyError", "an item failed")))
    rows = {row.run_id: row for row in (await page(store)).runs}
    assert rows["lost"].failure == "RateLimited: HTTP 429 after 12.5 s, request 4f3a91b2"
    wrapped = error("AgentExecutionError", "Agent 'A': no key (ValueError)")
    wrapped[0]["causes"] = [{"error_type": "ValueError", "message": "no key"}]
    store.add("wrapped", end(105, "failed", errors=wrapped), state=RunState.FAILED)
    assert (await page(store, limit=1)).runs[0].failure == "ValueError: no key"
    assert (rows["silent"].failure, rows["partly"].failure, rows["last"].failure) == ("KeyError: 'x'", "", "")


async def test_tokens_that_no_provider_counted_are_estimated(store: ListedStore) -> None:
    """S-STU-5: as in the budget, apart from counted ones."""
    answer = model("a#0", 0, 101)
    uncounted = fact(
        "model", answer.name, 101, **{**answer.data.to_data(), "input_tokens": -1, "estimated_tokens": [4, 2]}
    )
    store.add("guessed", uncounted, end(105))
    guessed, *_, slow, first = (await page(store)).runs
    assert (guessed.tokens, guessed.estimated_tokens) == (None, 24)
    assert (slow.tokens, slow.estimated_tokens, first.tokens, first.estimated_tokens) == (360, None, None, None)


async def test_attempts_are_the_starts_of_a_run(store: ListedStore) -> None:
    """S-STU-5."""
    store.add("again", fact("resume", "run", 102), end(105))
    assert [row.attempts for row in (await page(store, limit=2)).runs] == [2, 1]
