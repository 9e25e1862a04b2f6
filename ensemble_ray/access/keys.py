"""Keys of callers: made, written down, recognised. Pure, but for the randomness of a new one.

In: what an operator chose. Out: a key, which is shown once, and what is kept of it. Never: anything kept from which a key could be
told. A key has 256 random bits, so nobody finds it by trying, and a plain SHA-256 of it is as good as a slow hash of a password,
which would only slow down each request.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from ensemble_ray.errors import ValidationError
from ensemble_ray.values.value import RateLimit


class Right(StrEnum):
    """One thing that a caller may do; none of them includes another."""

    #: begin runs and cancel them
    RUN = "run"
    #: see teams and runs
    READ = "read"
    #: decide at gates
    REVIEW = "review"
    ADMIN = "admin"


#: Stands for every team, those of later deployments included.
ALL_TEAMS = "*"
#: By it scanners for secrets, and people, know what they have found.
_PREFIX = "erk_"
_RANDOM_BYTES = 32
_KEY = re.compile(r"erk_[A-Za-z0-9_-]{43}")
#: Names stand in logs, and before the idempotency keys of their callers, hence no colon.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_LAST = 4
_PERIODS_S = {"s": 1, "min": 60, "h": 3600}
_RATE = re.compile(r"([1-9][0-9]{0,8})/(s|min|h)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """What is kept of a key."""

    name: str
    #: SHA-256 of the key, in hexadecimal digits
    digest: str
    #: its last four characters, by which its owner knows it
    last_four: str
    rights: frozenset[Right]
    #: names of the teams that it may use; None: all
    teams: frozenset[str] | None
    #: requests; None: as many as come
    rate: RateLimit | None
    created_at: datetime


def new_key(
    name: str, *, rights: frozenset[Right], teams: Iterable[str], rate: RateLimit | None, created_at: datetime
) -> tuple[str, ApiKey]:
    """Return a new key, and what is kept of it.

    Args:
        name: Whose it is.
        rights: What it may do.
        teams: Which teams it may use; `*`: all.
        rate: How many requests; None: as many as come.
        created_at: When it is made.

    Raises:
        ValidationError: the name is none, or no right or no team is given.
    """
    if _NAME.fullmatch(name) is None:
        raise ValidationError(
            f"A key's name has up to 64 letters, digits and '.', '_', '@', '-', and begins with a letter or a digit, got: {name!r}"
        )
    if not rights:
        raise ValidationError(f"Key '{name}' has no rights. Name some of: {', '.join(Right)}")
    chosen = frozenset(each.strip() for each in teams if each.strip())
    if not chosen:
        raise ValidationError(f"Key '{name}' has no teams. Name them, or say '{ALL_TEAMS}' for all")
    text = f"{_PREFIX}{secrets.token_urlsafe(_RANDOM_BYTES)}"
    return text, ApiKey(
        name=name,
        digest=digest_of(text),
        last_four=text[-_LAST:],
        rights=rights,
        teams=None if ALL_TEAMS in chosen else chosen,
        rate=rate,
        created_at=created_at,
    )


def digest_of(key: str) -> str:
    """Return by what a key is recognised."""
    return hashlib.sha256(key.encode()).hexdigest()


def is_key(text: str) -> bool:
    """Return whether a text has the form of a key."""
    return _KEY.fullmatch(text) is not None


def parse_rights(names: Iterable[str]) -> frozenset[Right]:
    """Return the rights of these names.

    Raises:
        ValidationError: one of them is none.
    """
    found: set[Right] = set()
    for name in names:
        try:
            found.add(Right(name.strip()))
        except ValueError:
            raise ValidationError(f"Unknown right '{name.strip()}'. Known: [{', '.join(Right)}]") from None
    return frozenset(found)


def parse_rate(text: str) -> RateLimit:
    """Return the rate of a text such as `60/min`.

    Raises:
        ValidationError: it is none.

    Examples:
        >>> parse_rate("60/min").requests
        60
    """
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise ValidationError(f"A rate is a number of requests and a period: 10/s, 60/min or 1000/h, got: {text!r}")
    return RateLimit.of(int(found[1]), timedelta(seconds=_PERIODS_S[found[2]]))


def render_rate(rate: RateLimit) -> str:
    """Return a rate as `parse_rate` reads it."""
    seconds = rate.period.total_seconds()
    return next(
        (f"{rate.requests}/{unit}" for unit, each in _PERIODS_S.items() if each == seconds),
        f"{rate.requests}/{seconds:g}s",
    )


_VERSION = 1
#: Keys of one document; each is compared with what a request brings.
_MOST_KEYS = 1000


def write_document(keys: Sequence[ApiKey]) -> str:
    """Return the document of keys."""
    return json.dumps({"version": _VERSION, "keys": [_data_of(each) for each in keys]}, indent=1)


def read_document(content: str | bytes) -> list[ApiKey]:
    """Return the keys of a document, in its order.

    Raises:
        ValueError: it is damaged; also a ValidationError of a part of it.
    """
    match json.loads(content):
        case {"version": version, "keys": [*keys]} if version == _VERSION:
            return [_key_of(each) for each in keys]
        case _:
            raise ValueError("it has no keys of this version")


def with_key(keys: Sequence[ApiKey], key: ApiKey) -> list[ApiKey]:
    """Return the keys with one more.

    Raises:
        ValidationError: there is one of that name, or there are too many.
    """
    if any(each.name == key.name for each in keys):
        raise ValidationError(f"There is a key '{key.name}' already: revoke it first, or choose another name")
    if len(keys) >= _MOST_KEYS:
        raise ValidationError(f"There are {len(keys)} keys, and no more than {_MOST_KEYS} are kept: revoke some")
    return [*keys, key]


def without_key(keys: Sequence[ApiKey], name: str, *, location: str) -> tuple[ApiKey, list[ApiKey]]:
    """Return a key, and the keys without it.

    Raises:
        ValidationError: there is none of that name.
    """
    gone = next((each for each in keys if each.name == name), None)
    if gone is None:
        known = ", ".join(each.name for each in keys)
        raise ValidationError(f"There is no key '{name}' in {location}. Known: [{known}]")
    return gone, [each for each in keys if each.name != name]


def _data_of(key: ApiKey) -> dict[str, object]:
    rate = None if key.rate is None else {"requests": key.rate.requests, "period_s": key.rate.period.total_seconds()}
    return {
        "name": key.name,
        "sha256": key.digest,
        "last_four": key.last_four,
        "rights": sorted(key.rights),
        "teams": None if key.teams is None else sorted(key.teams),
        "rate": rate,
        "created_at": key.created_at.isoformat(),
    }


def _key_of(data: object) -> ApiKey:
    """Return a key; a field that is missing or of another type is an error, never a wider right."""
    match data:
        case {
            "name": str(name),
            "sha256": str(digest),
            "last_four": str(last_four),
            "rights": [*rights],
            "teams": None | [*_] as teams,
            "rate": None | {"requests": int(), "period_s": float()} as rate,
            "created_at": str(created_at),
        } if len(digest) == 64:  # noqa: PLR2004  hexadecimal digits of SHA-256
            return ApiKey(
                name=name,
                digest=digest,
                last_four=last_four,
                rights=frozenset(Right(str(each)) for each in rights),
                teams=None if teams is None else frozenset(str(each) for each in teams),
                rate=None if rate is None else RateLimit.of(rate["requests"], rate["period_s"]),
                created_at=datetime.fromisoformat(created_at),
            )
        case _:
            raise ValueError("a key lacks a field")
