"""The arithmetic of quotas: what runs reserve and are charged, days, and what a killed process leaves."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray.access.quotas import (
    CHARGE,
    HEADERS,
    KEPT_DAYS,
    USAGE,
    Account,
    Allowance,
    Change,
    Exceeded,
    Quantity,
    Quotas,
    UsageBook,
    parse_quotas,
    quotas_of_data,
    quotas_to_data,
    render_quotas,
    show_amount,
)
from ensemble_ray.errors import EnsembleError, ValidationError
from ensemble_ray.values.metrics import NOTHING, Amount

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
DAY = "2026-11-30"
UNLIMITED = Allowance()


def ann(*quotas: str) -> Account:
    """The account of a key with quotas."""
    return Account(name="ann", quotas=parse_quotas(quotas))


class Stored:
    """The documents of a ledger."""

    def __init__(self) -> None:
        self.texts: dict[str, dict[str, str]] = {USAGE: {}, CHARGE: {}}

    def write(self, changes: Iterable[Change]) -> None:
        for kind, name, text in changes:
            if text is None:
                self.texts[kind].pop(name, None)
            else:
                self.texts[kind][name] = text

    def book(self) -> UsageBook:
        """The book of the process that comes after a kill."""
        book = UsageBook()
        book.load(self.texts[USAGE], self.texts[CHARGE])
        return book


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], Quotas()),
        (["runs=100/day"], Quotas(runs=100)),
        (["tokens=1M/day", "cost=5/day"], Quotas(tokens=1_000_000, cost=500_000_000)),
        (["tokens=1.5k/day"], Quotas(tokens=1500)),
        (["cost=0.00000001/day"], Quotas(cost=1)),
    ],
    ids=str,
)
def test_quotas_are_read_when_they_have_the_form(texts: list[str], expected: Quotas) -> None:
    """S-QUO-1."""
    found = parse_quotas(texts)
    assert found == expected
    assert parse_quotas(render_quotas(found)) == found
    assert quotas_of_data(quotas_to_data(found)) == found


@pytest.mark.parametrize(
    "text",
    ["", "runs", "runs=0/day", "runs=-1/day", "runs=1.5/day", "runs=1/h", "runs=1", "tokens=M/day", "tokens=1m/day",
     "cost=0.000000001/day", "cost=nan/day", "runs=none/day", "Runs=1/day", "runs=1/day,tokens=1/day", "runs=" + "9" * 20],
)  # fmt: skip
def test_a_quota_is_refused_when_it_has_another_form(text: str) -> None:
    """S-QUO-1."""
    with pytest.raises(ValidationError, match="quota"):
        parse_quotas([text])


def test_a_quota_is_refused_when_it_is_set_twice() -> None:
    """S-QUO-1."""
    with pytest.raises(ValidationError, match="twice"):
        parse_quotas(["runs=1/day", "runs=2/day"])


def test_only_the_named_quota_changes_when_a_key_is_set() -> None:
    """S-QUO-2."""
    base = parse_quotas(["runs=1/day", "tokens=1k/day"])
    assert parse_quotas(["runs=none", "cost=5/day"], base) == Quotas(tokens=1000, cost=500_000_000)


@pytest.mark.parametrize(
    "data", [None, {}, {"runs": 1, "tokens": None}, {"runs": "1", "tokens": None, "cost": None},
             {"runs": True, "tokens": None, "cost": None}, {"runs": 0, "tokens": None, "cost": None}]
)  # fmt: skip
def test_stored_quotas_are_an_error_when_a_field_is_missing_or_wrong(data: object) -> None:
    """S-QUO-3: never a wider quota."""
    with pytest.raises((ValueError, ValidationError)):
        quotas_of_data(data)


def test_a_run_is_refused_when_a_quota_is_used_up() -> None:
    """S-QUO-11: with the time until the day ends; another key and the next day are free."""
    book, account = UsageBook(), ann("runs=2/day")
    assert [book.begin(account, run, UNLIMITED, at=NOON) for run in "ab"] == [UNLIMITED, UNLIMITED]
    refused = book.begin(account, "c", UNLIMITED, at=NOON)
    assert isinstance(refused, Exceeded)
    assert (refused.quantity, refused.used, refused.retry_after_s) == (Quantity.RUNS, 2, 12 * 3600)
    assert "Key 'ann' has used up its quota of runs: 2 of 2 per day" in str(refused)
    other = Account(name="ben", quotas=account.quotas)
    assert book.begin(other, "d", UNLIMITED, at=NOON) == UNLIMITED
    assert book.begin(account, "e", UNLIMITED, at=NOON + 12 * 3600) == UNLIMITED


def test_a_run_is_refused_soon_again_when_open_runs_reserve_the_rest() -> None:
    """S-QUO-11, S-QUO-13."""
    book, account = UsageBook(), ann("tokens=1000/day")
    assert book.begin(account, "a", Allowance(tokens=5000), at=NOON) == Allowance(tokens=1000)
    refused = book.begin(account, "b", UNLIMITED, at=NOON)
    assert isinstance(refused, Exceeded)
    assert (refused.used, refused.reserved, refused.retry_after_s) == (0, 1000, 10)
    assert "open runs reserve 1000" in str(refused)
    book.end("a", Amount(10, 0))
    assert book.begin(account, "b", Allowance(tokens=5000), at=NOON) == Allowance(tokens=990)


def test_a_run_reserves_half_of_the_rest_when_it_has_no_budget() -> None:
    """S-QUO-13: and all of it when little is left."""
    book, account = UsageBook(), ann("tokens=1000/day", "cost=1/day")
    found = [book.begin(account, run, UNLIMITED, at=NOON) for run in "abcd"]
    assert [each.tokens for each in found if isinstance(each, Allowance)] == [500, 250, 125, 63]
    assert [each.cost for each in found if isinstance(each, Allowance)] == [
        50_000_000,
        25_000_000,
        12_500_000,
        6_250_000,
    ]
    assert book.begin(account, "e", Allowance(tokens=1, cost=1), at=NOON) == Allowance(tokens=1, cost=1)
    last = book.begin(account, "f", UNLIMITED, at=NOON)
    assert last == Allowance(tokens=61, cost=6_249_999)
    assert isinstance(book.begin(account, "g", UNLIMITED, at=NOON), Exceeded)


def test_no_money_is_reserved_when_a_team_has_no_prices() -> None:
    """S-QUO-15: money that is known counts nevertheless."""
    book, account = UsageBook(), ann("cost=1/day")
    assert book.begin(account, "a", UNLIMITED, at=NOON, is_priced=False) == UNLIMITED
    book.end("a", Amount(0, 100_000_000))
    assert isinstance(book.begin(account, "b", UNLIMITED, at=NOON, is_priced=False), Exceeded)


def test_runs_are_counted_when_a_key_has_no_quotas() -> None:
    """S-QUO-23: a quota that is set later applies to the whole day."""
    book = UsageBook()
    assert book.begin(ann(), "a", Allowance(tokens=7), at=NOON) == UNLIMITED
    book.end("a", Amount(100, 5))
    standing = book.standing(ann("tokens=100/day"), at=NOON)
    assert (standing.used.runs, standing.used.tokens, standing.used.cost) == (1, 100, 5)
    assert isinstance(book.begin(ann("tokens=100/day"), "b", UNLIMITED, at=NOON), Exceeded)


def test_a_run_is_charged_to_its_first_day_when_it_ends_on_the_next() -> None:
    """S-QUO-10."""
    book, account = UsageBook(), ann("tokens=1000/day")
    book.begin(account, "a", Allowance(tokens=600), at=NOON)
    tomorrow = NOON + 24 * 3600
    assert book.standing(account, at=tomorrow).remaining(Quantity.TOKENS) == 1000
    book.end("a", Amount(600, 0))
    assert book.standing(account, at=tomorrow).remaining(Quantity.TOKENS) == 1000
    assert book.standing(account, at=NOON).remaining(Quantity.TOKENS) == 400


@pytest.mark.parametrize(
    ("zone", "at", "day", "hours"),
    [
        ("UTC", "2026-11-30T23:59:59+00:00", "2026-11-30", 1 / 3600),
        ("Europe/Berlin", "2026-11-30T22:30:00+00:00", "2026-11-30", 0.5),
        ("Europe/Berlin", "2026-11-30T23:30:00+00:00", "2026-12-01", 23.5),
        ("Europe/Berlin", "2026-10-24T22:00:00+00:00", "2026-10-25", 25),  # summer time ends
        ("Europe/Berlin", "2027-03-27T23:00:00+00:00", "2027-03-28", 23),
    ],
)
def test_a_day_ends_at_midnight_of_its_zone(zone: str, at: str, day: str, hours: float) -> None:
    """S-QUO-10: a day in which the clock changes is shorter or longer."""
    now = datetime.fromisoformat(at)
    standing = UsageBook(ZoneInfo(zone)).standing(ann("runs=1/day"), at=now.timestamp())
    assert standing.day == day
    assert standing.resets_at - now == timedelta(hours=hours)


def test_a_run_is_charged_once_when_its_end_comes_twice() -> None:
    """S-QUO-21."""
    book, account = UsageBook(), ann("tokens=1000/day")
    book.begin(account, "a", UNLIMITED, at=NOON)
    assert [book.end("a", Amount(10, 1)), book.end("a", Amount(10, 1))] == ["ann", ""]
    assert book.standing(account, at=NOON).used.tokens == 10
    assert book.end("never", Amount(10, 1)) == ""


def test_a_run_does_not_count_when_its_start_is_not_stored() -> None:
    """S-QUO-12."""
    book, account = UsageBook(), ann("runs=1/day", "tokens=10/day")
    book.begin(account, "a", UNLIMITED, at=NOON)
    book.abandon("a")
    assert book.changes("a") == ()
    assert book.begin(account, "b", UNLIMITED, at=NOON) == Allowance(tokens=5)


def test_names_do_not_collide_when_they_begin_alike() -> None:
    """S-QUO-22: a name has no slash."""
    book = UsageBook()
    for name in ("ann", "ann.b", "an"):
        book.begin(Account(name=name), name, UNLIMITED, at=NOON)
        assert [each[1] for each in book.changes(name)] == [f"{name}/{DAY}", name]


def test_old_days_are_dropped_when_a_new_one_is_written() -> None:
    """S-QUO-22: except one with an open run."""
    book, stored, account = UsageBook(), Stored(), ann()
    for day in range(KEPT_DAYS + 3):
        run = f"run-{day}"
        book.begin(account, run, UNLIMITED, at=NOON + day * 86400)
        if day:
            book.end(run, NOTHING)
        changes = book.changes(run)
        stored.write(changes)
        book.confirm(changes)
    days = sorted(stored.texts[USAGE])
    assert (len(days), days[0]) == (KEPT_DAYS + 1, f"ann/{DAY}")
    assert list(stored.texts[CHARGE]) == ["run-0"]


@pytest.mark.parametrize("kind", [USAGE, CHARGE])
def test_a_damaged_document_is_an_error(kind: str) -> None:
    """S-QUO-22."""
    texts = {USAGE: {}, CHARGE: {}} | {kind: {f"ann/{DAY}": '{"runs": "x"}'}}
    with pytest.raises(EnsembleError, match="usage of the keys"):
        UsageBook().load(texts[USAGE], texts[CHARGE])


def test_headers_tell_limit_rest_and_reset() -> None:
    """S-QUO-30."""
    book, account = UsageBook(), ann("runs=3/day", "cost=2.5/day")
    now = datetime.fromtimestamp(NOON, UTC)
    book.begin(account, "a", Allowance(cost=50_000_000), at=NOON)
    headers = dict(book.standing(account, at=NOON).headers(now))
    assert headers == {
        "x-quota-limit-runs": "3",
        "x-quota-remaining-runs": "2",
        "x-quota-limit-cost": "2.5",
        "x-quota-remaining-cost": "2",
        "x-quota-reset": "43200",
    }
    assert headers.keys() <= set(HEADERS)
    assert book.standing(ann(), at=NOON).headers(now) == []


@given(st.integers(-(10**12), 10**12))
def test_money_is_shown_exactly(units: int) -> None:
    """S-QUO-1."""
    from decimal import Decimal

    assert Decimal(show_amount(Quantity.COST, units)) * 10**8 == units


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 9), st.one_of(st.none(), st.integers(1, 400))),
        st.tuples(st.just("end"), st.integers(0, 9), st.integers(0, 100)),
        st.tuples(st.just("kill"), st.just(0), st.just(0)),
        st.tuples(st.just("lost"), st.integers(0, 9), st.integers(0, 100)),
        st.tuples(st.just("sleep"), st.integers(0, 30), st.just(0)),
    ),
    max_size=40,
)


@given(_STEPS, st.integers(1, 1000))
def test_a_day_never_exceeds_its_quota_and_no_charge_is_lost_or_doubled(
    steps: list[tuple[str, int, int | None]], limit: int
) -> None:
    """S-QUO-13, S-QUO-14, S-QUO-21: whatever runs start and end, and whenever the process is killed.

    `lost`: an end is written, but the answer is lost; the process is killed or repeats it later.
    """
    stored, account, at = Stored(), Account(name="ann", quotas=Quotas(tokens=limit)), NOON
    book = stored.book()
    started: dict[int, tuple[str, int]] = {}  # open runs: their day, and the most that they may use
    expected: dict[str, list[int]] = {}
    for step, number, amount in steps:
        run = str(number)
        if step == "begin" and number not in started:
            wanted = Allowance(tokens=amount)
            found = book.begin(account, run, wanted, at=at)
            if isinstance(found, Allowance):
                assert found.tokens is not None
                assert 0 < found.tokens <= min(limit, amount or limit)
                day = datetime.fromtimestamp(at, UTC).date().isoformat()
                started[number] = day, found.tokens
                expected.setdefault(day, [0, 0])[0] += 1
                changes = book.changes(run)
                stored.write(changes)
                book.confirm(changes)
        elif step in {"end", "lost"} and number in started:
            day, most = started.pop(number)
            spent = most * (amount or 0) // 100
            expected[day][1] += spent
            book.end(run, Amount(spent, 0))
            changes = book.changes(run)
            stored.write(changes)
            if step == "end":
                book.confirm(changes)
        elif step == "kill":
            book = stored.book()
            for open_run in map(str, started):
                assert book.charge_of(open_run) is not None
        elif step == "sleep":
            at += number * 3600
    again = stored.book()
    for day, (runs, tokens) in expected.items():
        used = again.standing(account, at=datetime.fromisoformat(f"{day}T12:00+00:00").timestamp()).used
        assert (used.runs, used.tokens) == (runs, tokens)
        assert tokens <= limit
    assert sorted(stored.texts[CHARGE]) == sorted(map(str, started))


def test_a_charge_applies_once_when_the_process_dies_between_two_writes() -> None:
    """S-QUO-21: another run's start stores the charge before the end is stored; then the process is killed."""
    book, stored, account = UsageBook(), Stored(), ann("tokens=1000/day")
    book.begin(account, "a", Allowance(tokens=10), at=NOON)
    stored.write(book.changes("a"))
    book.end("a", Amount(10, 0))  # its end cannot be written
    book.begin(account, "b", Allowance(tokens=10), at=NOON)
    stored.write(book.changes("b"))
    again = stored.book()
    assert again.end("a", Amount(10, 0)) == ""
    assert again.standing(account, at=NOON).used.tokens == 10
