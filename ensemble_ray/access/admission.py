"""Admission: whether a request is let in, and as whom. Pure: it is told the keys and the time.

Rules:
1. Which requests need a key is the operator's choice. `auto`: all, once a key was made; before, all but those that came by loopback
   from this machine itself (S-SRV-152).
2. A key that is sent is compared with all keys, in a time that does not depend on them (S-SRV-151).
3. A key with a rate has so many requests in a period, up to all of them at once after a quiet time (S-SRV-158).
Never: a request that is let in because something could not be read.
"""

from __future__ import annotations

import hmac
import ipaddress
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from ensemble_ray.access.keys import ApiKey
from ensemble_ray.llm.limits.machines import Grant, Requested, TokenBucket

_WAITER = "request"


class KeyPolicy(StrEnum):
    """Which requests need a key."""

    AUTO = "auto"
    REQUIRED = "required"
    #: none: something before the endpoint knows the callers
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knock:
    """What decides about a request."""

    #: of the key that it brings; None: it brings none
    digest: str | None
    #: whether it came by loopback, from this machine itself
    is_local: bool
    #: False: it was let in and counted before, and is looked at again
    is_counted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The request is let in."""

    #: None: nobody asked who it is
    key: ApiKey | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """The request is not let in."""

    #: which key it was; empty: none that is known
    name: str = ""
    #: whether it brought a key
    has_key: bool = False
    #: whether there is any key that would open
    is_openable: bool = True
    #: after how long it would be let in, s; None: not by waiting
    retry_after_s: int | None = None


class Admission:
    """Decides about the requests of one endpoint."""

    def __init__(self, policy: KeyPolicy = KeyPolicy.AUTO) -> None:
        self._policy = policy
        #: None: none was ever made
        self._keys: Sequence[ApiKey] | None = None
        #: by digest, since a key of the same name may be another one later
        self._buckets: dict[str, TokenBucket] = {}

    def use(self, keys: Sequence[ApiKey] | None) -> None:
        """Take these keys in place of those before; None: none was ever made."""
        self._keys = keys
        known = {each.digest: each for each in keys or ()}
        self._buckets = {digest: bucket for digest, bucket in self._buckets.items() if digest in known}

    def decide(self, knock: Knock, *, at: float) -> Admitted | Denied:
        """Decide about a request.

        Args:
            knock: The request.
            at: Now, s, of any origin.
        """
        if not self._needs_key(knock):
            return Admitted(key=None)
        found = None if knock.digest is None else self._find(knock.digest)
        if found is None:
            return Denied(has_key=knock.digest is not None, is_openable=bool(self._keys))
        if knock.is_counted and (wait_s := self._wait_s(found, at)) is not None:
            return Denied(name=found.name, has_key=True, retry_after_s=wait_s)
        return Admitted(key=found)

    def _needs_key(self, knock: Knock) -> bool:
        match self._policy:
            case KeyPolicy.NONE:
                return False
            case KeyPolicy.REQUIRED:
                return True
            case KeyPolicy.AUTO:
                return self._keys is not None or not knock.is_local

    def _find(self, digest: str) -> ApiKey | None:
        """Return the key of that digest; all are compared, whichever it is."""
        sent, found = digest.encode(), None
        for each in self._keys or ():
            if hmac.compare_digest(each.digest.encode(), sent):
                found = each
        return found

    def _wait_s(self, key: ApiKey, at: float) -> int | None:
        """Take one of a key's requests; return how long to wait where there is none, s."""
        if key.rate is None:
            return None
        period_s = key.rate.period.total_seconds()
        bucket = self._buckets.get(key.digest)
        if bucket is None:
            # As if it had been made a period ago, so that all its requests are there.
            bucket = TokenBucket(requests=key.rate.requests, period_s=period_s, at=at - period_s)
            self._buckets[key.digest] = bucket
        done = bucket.handle(Requested(waiter=_WAITER, holder=key.name, timeout_s=0.0), at=at)
        if any(isinstance(each, Grant) for each in done):
            return None
        return max(1, math.ceil(period_s / key.rate.requests))


_ANY = "*"
_LOCAL = "localhost"
#: What a page of this machine calls itself: nothing before the name, nothing behind the port (S-WEB-71).
_LOCAL_ORIGIN = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)


def headers_of(scope: Mapping[str, Any], name: bytes) -> list[str]:
    """Return the values of a request's headers of a name."""
    headers = cast("Iterable[tuple[bytes, bytes]]", scope["headers"])
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]


def own_address(scope: Mapping[str, Any]) -> str:
    """Return where the connection arrived, as the server says; no client can choose it."""
    server = scope.get("server")
    return str(server[0]).lower() if server else ""


def host_name(header: str) -> str | None:
    """Return the name or address of a Host header, without its port; None when it has another form."""
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
    """Whether requests for a host are served.

    Args:
        host: A name or an address in lower case.
        allowed: Names that the operator gave.
        own_address: The address at which the connection arrived.
    """
    if host == own_address or is_loopback(host):
        return True
    return any(
        name in {_ANY, host} or (name.startswith("*.") and host.endswith(name.removeprefix(_ANY))) for name in allowed
    )


def is_loopback(host: str) -> bool:
    """Return whether a name or an address, with or without brackets, can only be this machine's."""
    name = host.lower()
    name = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    return name == _LOCAL or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def is_local_origin(origins: Sequence[str]) -> bool:
    """Return whether a request says, once, that a page of this machine sent it.

    Args:
        origins: The values of its `Origin` headers.

    Example:
        >>> is_local_origin(["http://LOCALHOST:7329"]), is_local_origin(["http://localhost.evil.com"]), is_local_origin([])
        (True, False, False)
    """
    return len(origins) == 1 and _LOCAL_ORIGIN.fullmatch(origins[0]) is not None


def is_allowed_origin(scope: Mapping[str, Any], allowed: Collection[str] = ()) -> bool:
    """Return whether a request may change something, as far as its `Origin` says.

    Programs send none. A page may be of this machine, of the server that it asks, or of an allowed origin. What a proxy adds
    (`X-Forwarded-...`) does not count. The request's `Host` has been checked before.

    Args:
        scope: The request.
        allowed: Origins such as `https://team.example.org`, or `*`.
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
