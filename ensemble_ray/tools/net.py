"""HTTP for the web tools. Room: tools. In: a URL and limits; out: status, headers and at most so many bytes.

Two things live here: which addresses may not be reached (pure, a table), and one guarded exchange. The guard resolves
a host name once, judges every address it has, and connects to an address that was judged: a name that answers
differently the second time (DNS rebinding) gains nothing, since nobody asks twice. Each redirect hop is judged anew.
TLS still verifies the certificate against the host name.

Never here: a client or connection that outlives one call (tools are pickled), a proxy of the environment (it would
resolve names out of sight), a request's URL or headers in a log or in an error (they may hold keys).
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import importlib.util
import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from ensemble_ray.errors import ToolConfigurationError, message_of
from ensemble_ray.threads import threads

if TYPE_CHECKING:
    import ssl

    import httpx

__all__ = [
    "CONNECT_TIMEOUT_S",
    "Answer",
    "RequestFailedError",
    "exchange",
    "fetch",
    "refusal_of",
    "require_web",
    "resolve_public",
]

CONNECT_TIMEOUT_S = 10.0
_MAX_REDIRECTS = 10
_LAST_PORT = 65_535
#: a name, already in its ASCII form, or an address
_HOST = re.compile(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class RequestFailedError(Exception):
    """No answer came, or none was asked for; the text is fit for a model and names no key."""


# ---------------------------------------------------------------------------------------------- which addresses

#: Ranges that no tool may reach unless private hosts are allowed, each with the word the refusal uses. They are spelt
#: out, because what the standard library calls private or global changes between Python versions.
_REFUSED_RANGES: Sequence[tuple[str, str]] = (
    ("0.0.0.0/8", "unspecified"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "carrier-grade NAT"),
    ("127.0.0.0/8", "loopback"),
    ("168.63.129.16/32", "metadata"),  # a cloud's host agent, on an otherwise public address
    ("169.254.0.0/16", "link-local or metadata"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "reserved"),
    ("192.0.2.0/24", "reserved"),
    ("192.88.99.0/24", "reserved"),
    ("192.168.0.0/16", "private"),
    ("198.18.0.0/15", "reserved"),
    ("198.51.100.0/24", "reserved"),
    ("203.0.113.0/24", "reserved"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved"),
    ("::/128", "unspecified"),
    ("::1/128", "loopback"),
    ("::/96", "IPv4-compatible"),
    ("::ffff:0:0/96", "IPv4-mapped"),
    ("::ffff:0:0:0/96", "IPv4-translated"),
    ("64:ff9b::/96", "IPv4-embedding"),
    ("64:ff9b:1::/48", "IPv4-embedding"),
    ("100::/64", "reserved"),
    ("2001::/23", "reserved"),  # Teredo among them
    ("2001:db8::/32", "reserved"),
    ("2002::/16", "IPv4-embedding"),
    ("3fff::/20", "reserved"),
    ("5f00::/16", "reserved"),
    ("fc00::/7", "private"),
    ("fe80::/10", "link-local"),
    ("fec0::/10", "private"),
    ("ff00::/8", "multicast"),
)


@functools.cache
def _refused_networks() -> tuple[tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, str], ...]:
    return tuple((ipaddress.ip_network(text), word) for text, word in _REFUSED_RANGES)


def refusal_of(address: str) -> str | None:
    """Why that IP address may not be reached, in a word; None for a public one (S-BIT-44)."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "malformed"
    for network, word in _refused_networks():
        if parsed.version == network.version and parsed in network:
            return word
    return None


async def resolve_public(host: str, port: int, *, allow_private_hosts: bool) -> tuple[str, ...]:
    """The addresses of a host, each judged; connect to these and to no other.

    Raises:
        RequestFailedError: the name is unknown, or any of its addresses is refused.
    """
    try:
        found = await threads.run(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        msg = f"cannot resolve host '{host}'"
        raise RequestFailedError(msg) from error
    addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not allow_private_hosts:
        for address in addresses:
            if (word := refusal_of(address)) is not None:
                msg = f"host '{host}' is refused: {address} is a {word} address"
                raise RequestFailedError(msg)
    return addresses


# ---------------------------------------------------------------------------------------------------- exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server said."""

    status: int
    #: names in lower case
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    #: the body was longer than asked for; `body` is its beginning
    is_truncated: bool

    @property
    def is_success(self) -> bool:
        """Whether the status is one of the 2xx."""
        return self.status // 100 == 2  # noqa: PLR2004  the class of the status

    def text(self, *, default_encoding: str = "utf-8") -> str:
        """The body as text, by the charset that the server names; what does not decode becomes U+FFFD."""
        named = re.search(r"charset=[\"']?([\w.:-]+)", self.headers.get("content-type", ""), re.IGNORECASE)
        encoding = named[1] if named else default_encoding
        try:
            decoder = codecs.getincrementaldecoder(encoding)("replace")
        except LookupError:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # a character cut in two by the limit is dropped, not shown as damage
        return decoder.decode(self.body, not self.is_truncated)


async def exchange(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    body: bytes = b"",
    max_bytes: int,
    timeout_s: float,
    addresses: Sequence[str] = (),
) -> Answer:
    """One request and its answer; redirects are answers like any other.

    Args:
        method: HTTP method.
        url: Where to; http or https.
        headers: Sent as they are.
        body: Sent as it is.
        max_bytes: At most that much of the answer's body is read.
        timeout_s: For the whole exchange; connecting alone may take 10 s of it.
        addresses: Connect to the first of these that accepts; empty: wherever the host name leads.

    Raises:
        RequestFailedError: no answer came in time, or the URL is none.
    """
    await _load()
    import httpx

    try:
        async with asyncio.timeout(timeout_s):
            target = _checked_url(url)
            attempt = functools.partial(
                _attempt,
                target,
                method=method,
                headers={"host": target.netloc.decode(), **{name.lower(): value for name, value in headers.items()}},
                body=body,
                max_bytes=max_bytes,
                timeout_s=timeout_s,
            )
            *others, last = addresses or (target.raw_host.decode(),)
            for address in others:
                # nothing has been sent when no connection came about, so the next address may be tried
                with contextlib.suppress(httpx.ConnectError, httpx.ConnectTimeout):
                    return await attempt(address)
            return await attempt(last)
    except TimeoutError:
        msg = f"timed out after {timeout_s:g} s"
        raise RequestFailedError(msg) from None
    except httpx.LocalProtocolError:
        # its text quotes header values
        msg = "the request is not valid HTTP"
        raise RequestFailedError(msg) from None
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, UnicodeError) as error:
        raise RequestFailedError(_reason(error)) from None


async def fetch(
    url: str, *, headers: Mapping[str, str], max_bytes: int, timeout_s: float, allow_private_hosts: bool
) -> Answer:
    """GET a page, following redirects, every hop judged (S-BIT-43, S-BIT-44).

    Raises:
        RequestFailedError: a hop is refused or fails, there are too many, or time is up.
    """
    await _load()
    import httpx

    here = url
    try:
        async with asyncio.timeout(timeout_s):
            for _ in range(_MAX_REDIRECTS + 1):
                target = _checked_url(here)
                addresses = await resolve_public(
                    target.raw_host.decode(), _port_of(target), allow_private_hosts=allow_private_hosts
                )
                answer = await exchange(
                    "GET", here, headers=headers, max_bytes=max_bytes, timeout_s=timeout_s, addresses=addresses
                )
                location = answer.headers.get("location")
                if answer.status not in _REDIRECTS or location is None:
                    return answer
                here = str(target.join(location).copy_with(fragment=None))
    except TimeoutError:
        msg = f"timed out after {timeout_s:g} s"
        raise RequestFailedError(msg) from None
    except (httpx.InvalidURL, UnicodeError) as error:
        raise RequestFailedError(_reason(error)) from None
    msg = f"more than {_MAX_REDIRECTS} redirects"
    raise RequestFailedError(msg)


async def _attempt(
    target: httpx.URL,
    connect_to: str,
    *,
    method: str,
    headers: Mapping[str, str],
    body: bytes,
    max_bytes: int,
    timeout_s: float,
) -> Answer:
    """Send the request to that address and read the answer.

    The transport is used without a client over it: a client logs every URL, and a URL may hold a key.
    """
    import httpx

    request = httpx.Request(
        method,
        target.copy_with(host=connect_to, userinfo=b"", fragment=None),
        headers=headers,
        content=body,
        extensions={
            # the certificate is verified against the name, not the address
            "sni_hostname": target.raw_host.decode(),
            "timeout": {"connect": CONNECT_TIMEOUT_S, "read": timeout_s, "write": timeout_s, "pool": timeout_s},
        },
    )
    async with httpx.AsyncHTTPTransport(verify=_tls()) as transport:
        response = await transport.handle_async_request(request)
        try:
            read = bytearray()
            async for chunk in response.aiter_bytes():
                read += chunk
                if len(read) > max_bytes:
                    break
        finally:
            await response.aclose()
    return Answer(
        status=response.status_code,
        headers={name.lower(): value for name, value in response.headers.items()},
        body=bytes(read[:max_bytes]),
        is_truncated=len(read) > max_bytes,
    )


def _checked_url(url: str) -> httpx.URL:
    import httpx

    target = httpx.URL(url.strip())
    if target.scheme not in {"http", "https"}:
        msg = f"only http and https are supported, got: '{target.scheme or url}'"
        raise RequestFailedError(msg)
    if not _HOST.fullmatch(target.raw_host.decode()):
        msg = "the URL names no host" if not target.host else "the URL's host is malformed"
        raise RequestFailedError(msg)
    if not 0 < _port_of(target) <= _LAST_PORT:
        msg = f"there is no port {target.port}"
        raise RequestFailedError(msg)
    return target


def _port_of(target: httpx.URL) -> int:
    return (443 if target.scheme == "https" else 80) if target.port is None else target.port


def _reason(error: Exception) -> str:
    """Why it failed; a time-out of the transport's own has no text."""
    import httpx

    return "timed out" if isinstance(error, httpx.TimeoutException) else message_of(error)


async def _load() -> None:
    """Have the library and its certificates at hand; the first time takes long enough to be worth a thread."""
    require_web()
    await threads.run(_tls)


@functools.cache
def _tls() -> ssl.SSLContext:
    """One context for the process: loading the certificate authorities takes longer than a request."""
    import httpx

    return httpx.create_ssl_context()


# --------------------------------------------------------------------------------------------- the optional extra


def require_web(module: str = "httpx") -> None:
    """Make sure that a library of the extra `web` is there.

    Raises:
        ToolConfigurationError: it is not; the text says how to install it.
    """
    if importlib.util.find_spec(module) is None:
        _raise_missing(module)


def _raise_missing(module: str) -> NoReturn:
    msg = f"This tool needs '{module}', which is not installed: pip install 'ensemble-ray[web]'"
    raise ToolConfigurationError(msg)
