"""Decisions about requests to an endpoint: keys, rates, hosts and origins. Keys and time are arguments."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import math
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.access.quotas import NO_QUOTAS, Quotas, quotas_of_data, quotas_to_data
from ensemble_ray.errors import ValidationError
from ensemble_ray.llm.limits.bucket import Grant, Requested, TokenBucket
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
#: Version 2 has quotas and roles. It is written only if a key has some, since earlier releases would ignore them.
_VERSIONS = (1, 2)
_LONGEST_ROLE, _MOST_ROLES = 100, 100
#: Each request is compared with all keys.
_MOST_KEYS = 1000


class ApiKey(Struct, frozen=True, kw_only=True):
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
    quotas: Quotas = NO_QUOTAS
    #: of reviews that it may decide; any text
    roles: frozenset[str] = frozenset()

    @property
    def is_limited(self) -> bool:
        return self.quotas != NO_QUOTAS or bool(self.roles)


def new_key(
    name: str,
    *,
    rights: frozenset[Right],
    teams: Iterable[str],
    rate: RateLimit | None,
    created_at: datetime,
    quotas: Quotas = NO_QUOTAS,
    roles: frozenset[str] = frozenset(),
) -> tuple[str, ApiKey]:
    """Return the text of a new key, and its stored part. `*` in `teams` means all."""
    if _NAME.fullmatch(name) is None:
        raise ValidationError(
            f"A key's name has up to 64 letters, digits and '.', '_', '@', '-', and begins with a letter or a digit, got: {name!r}"
        )
    text = f"{_PREFIX}{secrets.token_urlsafe(32)}"
    key = ApiKey(
        name=name,
        digest=digest_of(text),
        last_four=text[-4:],
        rights=frozenset(),
        teams=frozenset(),
        rate=rate,
        created_at=created_at,
        quotas=quotas,
        roles=roles,
    )
    return text, changed_key(key, rights=rights, teams=teams)


def changed_key(key: ApiKey, *, rights: frozenset[Right] | None = None, teams: Iterable[str] | None = None) -> ApiKey:
    """Return a key with other rights and teams; None keeps them. `*` in `teams` means all."""
    if rights is not None:
        if not rights:
            raise ValidationError(f"Key '{key.name}' has no rights. Name some of: {', '.join(Right)}")
        key = replace(key, rights=rights)
    if teams is not None:
        chosen = frozenset(each.strip() for each in teams if each.strip())
        if not chosen:
            raise ValidationError(f"Key '{key.name}' has no teams. Name them, or say '{ALL_TEAMS}' for all")
        key = replace(key, teams=None if ALL_TEAMS in chosen else chosen)
    return key


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


def parse_roles(names: Iterable[str]) -> frozenset[str]:
    """Return roles without surrounding blanks; an empty text is none."""
    found = frozenset(each.strip() for each in names if each.strip())
    if any(len(each) > _LONGEST_ROLE or not each.isprintable() for each in found) or len(found) > _MOST_ROLES:
        raise ValidationError(
            f"A key has up to {_MOST_ROLES} roles of up to {_LONGEST_ROLE} printable characters, got: {sorted(found)!r:.300}"
        )
    return found


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
    has_limits = any(each.is_limited for each in keys)
    data = [_data_of(each) | (_limits_of(each) if has_limits else {}) for each in keys]
    return json.dumps({"version": _VERSIONS[has_limits], "keys": data}, indent=1)


def read_document(content: str | bytes) -> list[ApiKey]:
    """Return the keys of a document; raise `ValueError` or `ValidationError` if it is damaged."""
    match json.loads(content):
        case {"version": int(version), "keys": [*keys]} if version in _VERSIONS:
            return [_key_of(each, has_limits=version > 1) for each in keys]
        case _:
            raise ValueError("it has no keys of this version")


def with_key(keys: Sequence[ApiKey], key: ApiKey) -> list[ApiKey]:
    if any(each.name == key.name for each in keys):
        raise ValidationError(f"There is a key '{key.name}' already: revoke it first, or choose another name")
    if len(keys) >= _MOST_KEYS:
        raise ValidationError(f"There are {len(keys)} keys, and the limit is {_MOST_KEYS}: revoke some")
    return [*keys, key]


def with_change(
    keys: Sequence[ApiKey], name: str, change: Callable[[ApiKey], ApiKey], *, location: str
) -> tuple[ApiKey, list[ApiKey]]:
    """Return a changed key, and all keys in their order."""
    old, _ = without_key(keys, name, location=location)
    new = change(old)
    return new, [new if each.name == name else each for each in keys]


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


def _limits_of(key: ApiKey) -> dict[str, object]:
    return {"quotas": quotas_to_data(key.quotas), "roles": sorted(key.roles)}


def _key_of(data: object, *, has_limits: bool) -> ApiKey:
    """Return a key. A missing field or a wrong type is an error, and never grants more rights."""
    key = _unlimited_key_of(data)
    match data:
        case {"quotas": quotas, "roles": [*roles]} if has_limits:
            return replace(key, quotas=quotas_of_data(quotas), roles=parse_roles(map(str, roles)))
        case {"quotas": _} | {"roles": _}:
            raise ValueError("quotas and roles belong to version 2, together")
        case _ if has_limits:
            raise ValueError("a key lacks its quotas or roles")
        case _:
            return key


def _unlimited_key_of(data: object) -> ApiKey:
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


_ANY = "*"
#: S-WEB-71
_LOCAL_ORIGIN = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)


class KeyPolicy(StrEnum):
    """Which requests need a key (S-SRV-152)."""

    #: all, once a key exists; before that, all but local requests by loopback
    AUTO = "auto"
    REQUIRED = "required"
    #: a proxy in front authenticates the callers
    NONE = "none"


class Credentials(Struct, frozen=True, kw_only=True):
    digest: str | None
    #: by loopback
    is_local: bool
    #: False: it was counted before
    is_counted: bool = True


class Admitted(Struct, frozen=True, kw_only=True):
    #: it needs no key
    key: ApiKey | None


class Denied(Struct, frozen=True, kw_only=True):
    name: str = ""
    has_key: bool = False
    #: any key exists
    is_openable: bool = True
    #: delay, s; None: waiting does not help
    retry_after_s: int | None = None


class Admission:
    def __init__(self, policy: KeyPolicy = KeyPolicy.AUTO) -> None:
        self._policy = policy
        #: None: there was never a key
        self._keys: Sequence[ApiKey] | None = None
        #: another key may get the same name
        self._buckets: dict[str, TokenBucket] = {}

    def use(self, keys: Sequence[ApiKey] | None) -> None:
        """Replace the keys; None: no key was ever created."""
        self._keys = keys
        known = {each.digest for each in keys or ()}
        self._buckets = {digest: bucket for digest, bucket in self._buckets.items() if digest in known}

    def decide(self, credentials: Credentials, *, at: float) -> Admitted | Denied:
        """Decide about a request of any origin at the instant `at`, s."""
        is_open = self._keys is None and credentials.is_local
        if self._policy is KeyPolicy.NONE or (self._policy is KeyPolicy.AUTO and is_open):
            return Admitted(key=None)
        sent, found = (credentials.digest or "").encode(), None
        for each in self._keys or ():  # the time does not depend on the keys (S-SRV-151)
            if sent and hmac.compare_digest(each.digest.encode(), sent):
                found = each
        if found is None:
            return Denied(has_key=credentials.digest is not None, is_openable=bool(self._keys))
        if credentials.is_counted and (wait_s := self._wait_s(found, at)) is not None:
            return Denied(name=found.name, has_key=True, retry_after_s=wait_s)
        return Admitted(key=found)

    def _wait_s(self, key: ApiKey, at: float) -> int | None:
        """Use one request of a key's rate, or return the waiting time, s (S-SRV-158)."""
        if key.rate is None:
            return None
        period_s = key.rate.period.total_seconds()
        bucket = self._buckets.get(key.digest)
        if bucket is None:
            # One period old, so that it is full.
            bucket = TokenBucket(requests=key.rate.requests, period_s=period_s, at=at - period_s)
            self._buckets[key.digest] = bucket
        done = bucket.handle(Requested(waiter="request", holder=key.name, timeout_s=0.0), at=at)
        if any(isinstance(each, Grant) for each in done):
            return None
        return max(1, math.ceil(period_s / key.rate.requests))


def headers_of(scope: Mapping[str, Any], name: bytes) -> list[str]:
    headers = cast("Iterable[tuple[bytes, bytes]]", scope["headers"])
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]


def own_address(scope: Mapping[str, Any]) -> str:
    """Return the address of the connection, which no client can choose."""
    server = scope.get("server")
    return str(server[0]).lower() if server else ""


def host_name(header: str) -> str | None:
    """Return the name in a Host header, without its port; None if it is malformed."""
    text = header.strip().lower()
    if text.startswith("["):
        address, bracket, port = text[1:].partition("]")
        name = address if bracket and _is_address(address) else ""
        port = port.removeprefix(":") if port.startswith(":") else port and "x"
    else:
        name, _, port = text.partition(":")
    if not name or (port and not (port.isascii() and port.isdigit())):
        return None
    return name.removesuffix(".")


def is_served_host(host: str, allowed: Sequence[str], own_address: str) -> bool:
    """Whether requests for a host are served. `allowed` may contain `*.example.org` and `*`."""
    if host == own_address or is_loopback(host):
        return True
    ends = tuple(name.removeprefix(_ANY) for name in allowed if name.startswith("*."))
    return _ANY in allowed or host in allowed or host.endswith(ends)


def is_loopback(host: str) -> bool:
    """Whether a name or an address, with or without brackets, is always this machine's."""
    name = host.lower()
    name = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def is_local_origin(origins: Sequence[str]) -> bool:
    """Whether a page of this machine sent the request.

    Example:
        >>> is_local_origin(["http://LOCALHOST:7329"]), is_local_origin(["http://localhost.evil.com"]), is_local_origin([])
        (True, False, False)
    """
    return len(origins) == 1 and _LOCAL_ORIGIN.fullmatch(origins[0]) is not None


def is_allowed_origin(scope: Mapping[str, Any], allowed: Collection[str] = ()) -> bool:
    """Whether a request may change state, by its `Origin` header. The caller has checked `Host`.

    Programs send none. A page may be from this machine, from the called server, or from an allowed origin.
    """
    origins = headers_of(scope, b"origin")
    if not origins or is_local_origin(origins) or _ANY in allowed:
        return True
    hosts = headers_of(scope, b"host")
    own = {f"{scheme}://{host.lower()}" for host in hosts[:1] for scheme in ("http", "https")}
    return len(origins) == 1 and (origins[0] in allowed or origins[0].lower() in own)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
