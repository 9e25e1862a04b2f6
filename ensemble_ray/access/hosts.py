"""Which host and which page a request is from, as its headers say. Package: access. Pure.

In: headers. Out: names, and whether they are served. A page of another site can make a browser send requests to this machine:
under that site's name, which then leads here (DNS rebinding: the `Host` says it), or openly (the `Origin` says it).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

__all__ = [
    "headers_of",
    "host_name",
    "is_allowed_origin",
    "is_local_origin",
    "is_loopback",
    "is_served_host",
    "own_address",
]

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
