"""Where an agent of the A2A protocol is, and how it is reached. Package: tools. Pure.

The URL is the developer's own. Whatever a card says, requests and their headers go to the hosts that the developer named, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import SplitResult, unquote, urlsplit

from ensemble_ray.errors import ValidationError
from ensemble_ray.text.header_values import header_flaw, header_name_flaw

__all__ = ["IDEMPOTENT_MESSAGES", "AgentAddress"]

#: Extension of a card whose agent takes a message that is sent again for the same task (S-INT-77).
IDEMPOTENT_MESSAGES = "urn:ensemble-ray:a2a:idempotent-messages"

_FORM = "'https://HOST/PATH', under which its card is found"
_WELL_KNOWN = "/.well-known/"
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAddress:
    """One agent: where its card is, and what is sent with every request."""

    url: str
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    #: `HOST` or `HOST:PORT` that the card may name besides the one of the URL
    hosts: frozenset[str] = frozenset()
    #: longest time until a connection stands, s
    connect_timeout_s: float = 10.0

    @classmethod
    def of(
        cls,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        hosts: Collection[str] = (),
        connect_timeout_s: float = 10.0,
    ) -> AgentAddress:
        """Read an address.

        Raises:
            ValidationError: it is no URL, has a password in it, a header is malformed, or a value has another type.
        """
        _check_types(url, headers, hosts)
        parts = _split(url)
        if parts is None:
            raise ValidationError(f"RemoteAgent url must be {_FORM}, got: {url.rpartition('@')[2]!r}")
        if parts.username is not None or parts.password is not None:
            raise ValidationError("RemoteAgent url must be without a name or password: give them in headers")
        if parts.query or parts.fragment:
            raise ValidationError("RemoteAgent url must be without a query or fragment: give keys in headers")
        for name, value in (headers or {}).items():
            if header_name_flaw(name):
                raise ValidationError(f"RemoteAgent header name is not valid: {name!r}")
            if flaw := header_flaw(value.strip()):
                raise ValidationError(f"RemoteAgent header '{name}' {flaw}")
        return cls(
            url=url.partition(_WELL_KNOWN)[0].rstrip("/"),
            headers=tuple((name, value.strip()) for name, value in (headers or {}).items()),
            hosts=frozenset([hosts] if isinstance(hosts, str) else hosts),
            connect_timeout_s=connect_timeout_s,
        )

    @property
    def name(self) -> str:
        """What it is called by its URL: the last part of the path, else the host."""
        parts = urlsplit(self.url)
        return unquote(parts.path.rstrip("/").rpartition("/")[2]) or parts.hostname or self.url

    def allows(self, url: str) -> bool:
        """Return whether requests may be sent to a URL that the card names."""
        found, own = _split(url), urlsplit(self.url)
        if found is None or (own.scheme == "https" and found.scheme != "https"):
            return False
        if (found.scheme, _host(found)) == (own.scheme, _host(own)):
            return True
        return bool({found.hostname or "", found.netloc} & self.hosts)


def _check_types(url: object, headers: object, hosts: object) -> None:
    """Refuse values of other types; those of headers are not shown.

    Raises:
        ValidationError: there is one.
    """
    if not isinstance(url, str):
        raise ValidationError(f"RemoteAgent url must be {_FORM}, got: {type(url).__name__}")
    if headers is not None and not isinstance(headers, Mapping):
        raise ValidationError(f"RemoteAgent headers must be a mapping of texts, got: {type(headers).__name__}")
    for name, value in cast("Mapping[object, object]", headers or {}).items():
        if not isinstance(name, str):
            raise ValidationError(f"RemoteAgent header name must be a text, got: {type(name).__name__}")
        if not isinstance(value, str):
            raise ValidationError(f"RemoteAgent header '{name}' must be a text, got: {type(value).__name__}")
    if not isinstance(hosts, Collection) or isinstance(hosts, bytes):
        raise ValidationError(f"RemoteAgent hosts must be a list of texts, got: {type(hosts).__name__}")
    for host in cast("Collection[object]", hosts):
        if not isinstance(host, str):
            raise ValidationError(f"RemoteAgent hosts must be a list of texts, got one of {type(host).__name__}")


def _split(url: str) -> SplitResult | None:
    """Return the parts of a URL; None: it is none of HTTP."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in _PORTS and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return None
    return parts if is_whole else None


def _host(parts: SplitResult) -> tuple[str | None, int | None]:
    return parts.hostname, parts.port or _PORTS.get(parts.scheme)
