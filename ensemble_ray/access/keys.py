"""API keys, of which only digests are stored.

A key has 256 random bits, so a plain SHA-256 is as safe as a slow hash, which would delay each request.
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
    """One permission of a caller. None includes another."""

    #: start and cancel runs
    RUN = "run"
    READ = "read"
    REVIEW = "review"
    ADMIN = "admin"


#: Includes teams of later deployments.
ALL_TEAMS = "*"
#: People and secret scanners recognize it.
_PREFIX = "erk_"
_KEY = re.compile(r"erk_[A-Za-z0-9_-]{43}")
#: Names are prefixes of idempotency keys, with a colon.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_PERIODS_S = {"s": 1, "min": 60, "h": 3600}
_RATE = re.compile(r"([1-9][0-9]{0,8})/(s|min|h)")
_VERSION = 1
#: Each request is compared with all keys.
_MOST_KEYS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    name: str
    #: SHA-256, hexadecimal
    digest: str
    #: for its owner to recognize it
    last_four: str
    rights: frozenset[Right]
    #: None: all
    teams: frozenset[str] | None
    rate: RateLimit | None
    created_at: datetime


def new_key(
    name: str, *, rights: frozenset[Right], teams: Iterable[str], rate: RateLimit | None, created_at: datetime
) -> tuple[str, ApiKey]:
    """Return the text of a new key, and its stored part. `*` in `teams` means all."""
    if _NAME.fullmatch(name) is None:
        raise ValidationError(
            f"A key's name has up to 64 letters, digits and '.', '_', '@', '-', and begins with a letter or a digit, got: {name!r}"
        )
    if not rights:
        raise ValidationError(f"Key '{name}' has no rights. Name some of: {', '.join(Right)}")
    chosen = frozenset(each.strip() for each in teams if each.strip())
    if not chosen:
        raise ValidationError(f"Key '{name}' has no teams. Name them, or say '{ALL_TEAMS}' for all")
    text = f"{_PREFIX}{secrets.token_urlsafe(32)}"
    return text, ApiKey(
        name=name,
        digest=digest_of(text),
        last_four=text[-4:],
        rights=rights,
        teams=None if ALL_TEAMS in chosen else chosen,
        rate=rate,
        created_at=created_at,
    )


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def is_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


def parse_rights(names: Iterable[str]) -> frozenset[Right]:
    found: set[Right] = set()
    for name in names:
        try:
            found.add(Right(name.strip()))
        except ValueError:
            raise ValidationError(f"Unknown right '{name.strip()}'. Known: [{', '.join(Right)}]") from None
    return frozenset(found)


def parse_rate(text: str) -> RateLimit:
    """Return the rate of a text.

    Examples:
        >>> parse_rate("60/min").requests
        60
    """
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise ValidationError(f"A rate is a number of requests and a period: 10/s, 60/min or 1000/h, got: {text!r}")
    return RateLimit.of(int(found[1]), timedelta(seconds=_PERIODS_S[found[2]]))


def render_rate(rate: RateLimit) -> str:
    """Return a rate in the form of `parse_rate` if its period has a unit."""
    seconds = rate.period.total_seconds()
    period = next((unit for unit, each in _PERIODS_S.items() if each == seconds), f"{seconds:g}s")
    return f"{rate.requests}/{period}"


def write_document(keys: Sequence[ApiKey]) -> str:
    return json.dumps({"version": _VERSION, "keys": [_data_of(each) for each in keys]}, indent=1)


def read_document(content: str | bytes) -> list[ApiKey]:
    """Return the keys of a document; raise `ValueError` or `ValidationError` if it is damaged."""
    match json.loads(content):
        case {"version": version, "keys": [*keys]} if version == _VERSION:
            return [_key_of(each) for each in keys]
        case _:
            raise ValueError("it has no keys of this version")


def with_key(keys: Sequence[ApiKey], key: ApiKey) -> list[ApiKey]:
    if any(each.name == key.name for each in keys):
        raise ValidationError(f"There is a key '{key.name}' already: revoke it first, or choose another name")
    if len(keys) >= _MOST_KEYS:
        raise ValidationError(f"There are {len(keys)} keys, and the limit is {_MOST_KEYS}: revoke some")
    return [*keys, key]


def without_key(keys: Sequence[ApiKey], name: str, *, location: str) -> tuple[ApiKey, list[ApiKey]]:
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
    """Return a key. A missing field or a wrong type is an error, and never grants more rights."""
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
