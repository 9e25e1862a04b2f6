"""Quotas of keys: how many runs, tokens and how much money the runs that a key starts on one day may use. Pure.

A run is charged to the day on which it was accepted, so a day's total cannot exceed its quota because of a run that continues
the next day. Until its end a run reserves its budget.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from decimal import Decimal
from enum import StrEnum

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.errors import EnsembleError, ValidationError
from ensemble_ray.values.metrics import NOTHING, Amount

#: Kinds of documents: the usage of a key on a day, named `KEY/YYYY-MM-DD`, and the charge of an open run, named by its id.
USAGE, CHARGE = "usage", "charge"
#: Days of usage in the ledger.
KEPT_DAYS = 31
#: Digits of money behind the point, as in `Amount`.
_DIGITS = 8
_UNITS = 10**_DIGITS
_SUFFIXES = {"": 1, "k": 1000, "M": 1_000_000, "G": 1_000_000_000}
_QUOTA = re.compile(r"(runs|tokens|cost)=(?:(none)|([0-9]{1,15}(?:\.[0-9]{1,8})?)([kMG]?)/day)")
#: Delay of a retry when open runs have reserved the rest, s.
_RESERVED_S = 10
#: With at most this part of a quota free, a run without a budget reserves all of it, else half.
_SMALL_PART = 10


class Quantity(StrEnum):
    """A quantity that a quota limits."""

    RUNS = "runs"
    TOKENS = "tokens"
    COST = "cost"


class Quotas(Struct, frozen=True, kw_only=True):
    """Limits of one key for one day. None: no limit."""

    runs: int | None = None
    #: input and output together
    tokens: int | None = None
    #: money as a multiple of 10**-8
    cost: int | None = None

    def limit(self, quantity: Quantity) -> int | None:
        return {Quantity.RUNS: self.runs, Quantity.TOKENS: self.tokens, Quantity.COST: self.cost}[quantity]

    @property
    def limited(self) -> Sequence[Quantity]:
        return [each for each in Quantity if self.limit(each) is not None]


NO_QUOTAS = Quotas()


class Account(Struct, frozen=True, kw_only=True):
    """The name and the quotas of a key. It never contains the key itself."""

    name: str
    quotas: Quotas = NO_QUOTAS


class DayUsage(Struct, frozen=True, kw_only=True):
    runs: int = 0
    tokens: int = 0
    #: as in `Quotas`
    cost: int = 0

    def amount(self, quantity: Quantity) -> int:
        return {Quantity.RUNS: self.runs, Quantity.TOKENS: self.tokens, Quantity.COST: self.cost}[quantity]


class Allowance(Struct, frozen=True, kw_only=True):
    """The most that one run may use. None: no limit."""

    tokens: int | None = None
    cost: int | None = None


UNLIMITED = Allowance()


class Charge(Struct, frozen=True, kw_only=True):
    """Key, day and reservation of an open run."""

    key: str
    day: str
    tokens: int | None = None
    cost: int | None = None

    @property
    def allowance(self) -> Allowance:
        return Allowance(tokens=self.tokens, cost=self.cost)


class Exceeded(Struct, frozen=True, kw_only=True):
    """A key may not start a run now."""

    key: str
    quantity: Quantity
    limit: int
    used: int
    reserved: int
    #: delay, s
    retry_after_s: int

    def __str__(self) -> str:
        shown = {name: show_amount(self.quantity, getattr(self, name)) for name in ("limit", "used", "reserved")}
        if self.used >= self.limit:
            return (
                f"Key '{self.key}' has used up its quota of {self.quantity}: {shown['used']} of {shown['limit']} per day. "
                f"What to do: wait {self.retry_after_s} s until the day ends, or ask the operator for a larger quota"
            )
        return (
            f"Key '{self.key}' has no {self.quantity} left for another run at the moment: of {shown['limit']} per day, "
            f"{shown['used']} are used and open runs reserve {shown['reserved']}. What to do: wait until one ends, or start "
            f"runs with a smaller max_{self.quantity}"
        )


class Standing(Struct, frozen=True, kw_only=True):
    """The quotas of a key, and the usage and reservations of its runs of one day."""

    key: str
    day: str
    resets_at: datetime
    quotas: Quotas
    used: DayUsage
    reserved: Amount = NOTHING

    def reserved_of(self, quantity: Quantity) -> int:
        reserved = self.reserved
        return {Quantity.RUNS: 0, Quantity.TOKENS: reserved.tokens, Quantity.COST: reserved.cost}[quantity]

    def remaining(self, quantity: Quantity) -> int | None:
        """Return the free part of a quota; None: no limit."""
        limit = self.quotas.limit(quantity)
        return None if limit is None else max(0, limit - self.used.amount(quantity) - self.reserved_of(quantity))

    def headers(self, now: datetime) -> Sequence[tuple[str, str]]:
        """Return the headers of an answer to this key; empty without quotas (S-QUO-30)."""
        found: list[tuple[str, str]] = []
        for each in self.quotas.limited:
            found.append((f"x-quota-limit-{each}", show_amount(each, self.quotas.limit(each) or 0)))
            found.append((f"x-quota-remaining-{each}", show_amount(each, self.remaining(each) or 0)))
        reset_s = max(0, math.ceil((self.resets_at - now).total_seconds()))
        return [*found, ("x-quota-reset", str(reset_s))] if found else found


#: All headers of `Standing.headers`.
HEADERS = (
    *(f"x-quota-{kind}-{each}" for kind in ("limit", "remaining") for each in Quantity),
    "x-quota-reset",
)


def parse_quotas(texts: Iterable[str], base: Quotas = NO_QUOTAS) -> Quotas:
    """Return quotas with the changes of texts such as `runs=100/day`, `tokens=1.5M/day`, `cost=5/day` and `runs=none`.

    Examples:
        >>> parse_quotas(["runs=100/day", "tokens=1.5M/day"])
        Quotas(runs=100, tokens=1500000, cost=None)
    """
    changes: dict[str, int | None] = {}
    for text in texts:
        found = _QUOTA.fullmatch(text.strip())
        if found is None:
            raise ValidationError(
                f"A quota is runs=100/day, tokens=1M/day or cost=5/day, or none in place of the number and day, got: {text!r}"
            )
        name, is_none, number, suffix = found.groups()
        if name in changes:
            raise ValidationError(f"The quota of {name} is set twice: {text!r}")
        units = _UNITS if name == Quantity.COST else 1
        amount = None if is_none else Decimal(number) * _SUFFIXES[suffix] * units
        if amount is not None and (amount < 1 or amount != int(amount)):
            what = "must be above 0" if amount < 1 else "must be a whole number"
            raise ValidationError(f"The quota of {name} {what}, got: {text!r}")
        changes[name] = None if amount is None else int(amount)
    return replace(base, **changes)


def render_quotas(quotas: Quotas) -> Sequence[str]:
    """Return the texts of `parse_quotas`."""
    return [f"{each}={show_amount(each, quotas.limit(each) or 0)}/day" for each in quotas.limited]


def show_amount(quantity: Quantity, amount: int) -> str:
    """Return an amount as decimal text.

    Examples:
        >>> show_amount(Quantity.COST, 250_000_000), show_amount(Quantity.TOKENS, 1000)
        ('2.5', '1000')
    """
    if quantity is not Quantity.COST:
        return str(amount)
    whole, part = divmod(abs(amount), _UNITS)
    digits = f"{part:0{_DIGITS}d}".rstrip("0")
    return f"{'-' if amount < 0 else ''}{whole}{'.' if digits else ''}{digits}"


def quotas_to_data(quotas: Quotas) -> dict[str, object]:
    """Return the form in which a key is stored."""
    cost = quotas.cost
    return {
        "runs": quotas.runs,
        "tokens": quotas.tokens,
        "cost": None if cost is None else show_amount(Quantity.COST, cost),
    }


def quotas_of_data(data: object) -> Quotas:
    """Return stored quotas. A missing field or a wrong type is an error, and never a wider quota."""
    match data:
        case {"runs": int() | None as runs, "tokens": int() | None as tokens, "cost": str() | None as cost}:
            given = {"runs": runs, "tokens": tokens, "cost": cost}
            return parse_quotas([f"{name}={value}/day" for name, value in given.items() if value is not None])
        case _:
            raise ValueError("quotas lack a field")


#: A document: its kind, its name, and its text; None deletes it.
Change = tuple[str, str, str | None]


class UsageBook:
    """Usage of all keys of an endpoint, and the charges of their open runs.

    The owner writes the `changes` of a run in the transaction that stores its start or its end, and calls `confirm` when that
    succeeded. Writes must have the order of the calls. A charge applies once: it is applied when an open run ends, and each
    later write of that key and day closes the run, too.
    """

    def __init__(self, zone: tzinfo = UTC) -> None:
        self._zone = zone
        #: by key, then by day
        self._used: dict[str, dict[str, DayUsage]] = {}
        #: by key and day
        self._reserved: dict[tuple[str, str], Amount] = {}
        self._open: dict[str, Charge] = {}
        #: ended, but not known to be stored
        self._charged: dict[str, Charge] = {}

    def load(self, usage: Mapping[str, str], charges: Mapping[str, str]) -> None:
        """Use the documents of an earlier process, by name."""
        try:
            for name, text in usage.items():
                key, _, day = name.rpartition("/")
                self._used.setdefault(key, {})[day] = msgspec.json.decode(text, type=DayUsage)
            for run_id, text in charges.items():
                self._reserve(run_id, msgspec.json.decode(text, type=Charge))
        except msgspec.MsgspecError as error:
            raise EnsembleError(
                f"The usage of the keys in the endpoint's ledger is damaged: {error}. Restore the ledger from a backup"
            ) from error

    def begin(
        self, account: Account, run_id: str, wanted: Allowance, *, at: float, is_priced: bool = True
    ) -> Allowance | Exceeded:
        """Count a new run at the instant `at`, Unix time, s. Return its allowance, or the reason of a refusal.

        `wanted` are the own limits of the run. Without prices of its models (`is_priced`) it reserves no money.
        """
        standing = self.standing(account, at=at)
        for each in account.quotas.limited:
            if not standing.remaining(each):
                return self._exceeded(standing, each, at)
        day, quotas = standing.day, account.quotas
        charge = Charge(
            key=account.name,
            day=day,
            tokens=_reservation(quotas.tokens, standing.remaining(Quantity.TOKENS), wanted.tokens),
            cost=_reservation(quotas.cost, standing.remaining(Quantity.COST), wanted.cost) if is_priced else None,
        )
        self._used.setdefault(account.name, {})[day] = replace(standing.used, runs=standing.used.runs + 1)
        self._reserve(run_id, charge)
        return charge.allowance

    def abandon(self, run_id: str) -> None:
        """Undo `begin`: the start of the run was not stored."""
        charge = self._release(run_id)
        if charge is not None:
            used = self._used[charge.key][charge.day]
            self._used[charge.key][charge.day] = replace(used, runs=used.runs - 1)

    def end(self, run_id: str, spent: Amount) -> str:
        """Charge an ended run, once. Return the name of its key; empty: the run has no key, or was charged."""
        charge = self._release(run_id)
        if charge is None:
            return ""
        days = self._used.setdefault(charge.key, {})
        used = days.get(charge.day, DayUsage())
        days[charge.day] = replace(used, tokens=used.tokens + spent.tokens, cost=used.cost + spent.cost)
        self._charged[run_id] = charge
        return charge.key

    def charge_of(self, run_id: str) -> Charge | None:
        """Return the charge of an open run; None: it has no key, or was charged."""
        return self._open.get(run_id)

    def changes(self, run_id: str) -> Sequence[Change]:
        """Return the documents to write with the start or the end of a run."""
        charge = self._open.get(run_id) or self._charged.get(run_id)
        if charge is None:
            return ()
        key, day = charge.key, charge.day
        found: list[Change] = [(USAGE, f"{key}/{day}", _encode(self._used[key][day]))]
        found += [(CHARGE, each, None) for each, of in self._charged.items() if (of.key, of.day) == (key, day)]
        found += [(CHARGE, run_id, _encode(charge))] if run_id in self._open else []
        return [*found, *((USAGE, f"{key}/{old}", None) for old in self._old_days(key, day))]

    def confirm(self, changes: Iterable[Change]) -> None:
        """Note that changes were stored."""
        for kind, name, text in changes:
            if text is not None:
                continue
            if kind == CHARGE:
                self._charged.pop(name, None)
            else:
                key, _, day = name.rpartition("/")
                self._used.get(key, {}).pop(day, None)

    def standing(self, account: Account, *, at: float) -> Standing:
        now = datetime.fromtimestamp(at, self._zone)
        place = account.name, now.date().isoformat()
        return Standing(
            key=account.name,
            day=place[1],
            resets_at=datetime.combine(now.date() + timedelta(days=1), time(), self._zone).astimezone(UTC),
            quotas=account.quotas,
            used=self._used.get(place[0], {}).get(place[1], DayUsage()),
            reserved=self._reserved.get(place, NOTHING),
        )

    def _exceeded(self, standing: Standing, quantity: Quantity, at: float) -> Exceeded:
        limit, used = standing.quotas.limit(quantity) or 0, standing.used.amount(quantity)
        reset_s = max(1, math.ceil(standing.resets_at.timestamp() - at))
        return Exceeded(
            key=standing.key,
            quantity=quantity,
            limit=limit,
            used=used,
            reserved=standing.reserved_of(quantity),
            retry_after_s=reset_s if used >= limit else min(_RESERVED_S, reset_s),
        )

    def _reserve(self, run_id: str, charge: Charge) -> None:
        place = charge.key, charge.day
        self._open[run_id] = charge
        self._reserved[place] = self._reserved.get(place, NOTHING) + Amount(charge.tokens or 0, charge.cost or 0)

    def _release(self, run_id: str) -> Charge | None:
        charge = self._open.pop(run_id, None)
        if charge is not None:
            place = charge.key, charge.day
            left = self._reserved[place] - Amount(charge.tokens or 0, charge.cost or 0)
            self._reserved[place] = left
            if left == NOTHING:
                del self._reserved[place]
        return charge

    def _old_days(self, key: str, day: str) -> Sequence[str]:
        first = (date.fromisoformat(day) - timedelta(days=KEPT_DAYS - 1)).isoformat()
        old = sorted(each for each in self._used[key] if each < first)
        if not old:
            return ()
        needed = {each.day for runs in (self._open, self._charged) for each in runs.values() if each.key == key}
        return [each for each in old if each not in needed]


def _reservation(limit: int | None, free: int | None, wanted: int | None) -> int | None:
    """Return the reservation of a run; None: there is no quota (S-QUO-13)."""
    if limit is None or free is None:
        return None
    if wanted is not None:
        return min(wanted, free)
    return free if free * _SMALL_PART <= limit else -(-free // 2)


def _encode(value: Struct) -> str:
    return msgspec.json.encode(value).decode()
