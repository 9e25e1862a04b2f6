"""Keys as a text: what a file or a database keeps of them. Package: access. Pure.

In: keys. Out: a JSON document of a version, and the same keys again. Never: a wider right from a document that is damaged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime

from ensemble_ray.access.keys import ApiKey
from ensemble_ray.access.rights import Right
from ensemble_ray.errors import ValidationError
from ensemble_ray.values.rate_limit import RateLimit

__all__ = ["read_document", "with_key", "without_key", "write_document"]

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
