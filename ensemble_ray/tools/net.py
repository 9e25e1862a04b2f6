"""HTTP for the web tools. Room: tools. In: a URL and limits; out: status, headers and at most so many bytes.

The guard resolves a host name once, judges every address it has, and connects to an address that was judged: a name
that answers differently the second time (DNS rebinding) gains nothing, since nobody asks twice. Each redirect hop is
judged anew. TLS still verifies the certificate against the host name.

An answer is read as it comes, and its body unpacked here, so that every limit counts while it is read: of its head, of
its packed and unpacked bytes, of the pieces it comes in, of its time.

Never here: a client or connection that outlives one call (tools are pickled), a proxy of the environment (it would
resolve names out of sight), a request's URL or headers in a log or in an error (they may hold keys).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from ensemble_ray.errors import ToolConfigurationError, message_of
from ensemble_ray.process.threads import threads
from ensemble_ray.tools.addresses import refusal_of
from ensemble_ray.tools.charsets import decode
from ensemble_ray.tools.unpacking import ACCEPTED_CODINGS, Unpacker, UnpackingError, codings_of

if TYPE_CHECKING:
    import ssl

    import httpx

__all__ = [
    "CONNECT_TIMEOUT_S",
    "Answer",
    "RequestFailedError",
    "exchange",
    "fetch",
    "require_web",
    "resolve_public",
]

CONNECT_TIMEOUT_S = 10.0
_MAX_REDIRECTS = 10
_LAST_PORT = 65_535
#: a name, already in its ASCII form, or an address
_HOST = re.compile(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHARSET = re.compile(r"charset=[\"']?([\w.:-]{1,64})", re.IGNORECASE)
#: Largest head of an answer, and its most fields; the transport reads no more than 100 KB of one.
_MAX_HEAD_BYTES, _MAX_HEAD_FIELDS = 65_536, 500
#: Pieces that a body may come in: each costs far more than its bytes, and a server may send every byte alone.
_MAX_PIECES = 100_000
#: Longest text of a failure; it may quote what a server or a model wrote.
_LONGEST_REASON = 300


class RequestFailedError(Exception):
    """No answer came, or none was asked for; the text is fit for a model and names no key."""


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
        """Return the body as text, by the charset that the server names; not on the event loop, it may be long.

        Only charsets of a short list are used (`charsets.CHARSETS`), any other name means UTF-8; what does not decode
        becomes U+FFFD. A character that the limit cuts in two is dropped.
        """
        named = _CHARSET.search(self.headers.get("content-type", ""))
        return decode(self.body, named[1] if named else default_encoding, is_truncated=self.is_truncated)


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
        headers: Sent as they are; without an `Accept-Encoding` of their own, gzip and deflate are asked for.
        body: Sent as it is.
        max_bytes: At most that much of the answer's body is read, counted unpacked.
        timeout_s: For the whole exchange; connecting alone may take 10 s of it.
        addresses: Connect to the first of these that accepts; empty: wherever the host name leads.

    Raises:
        RequestFailedError: no answer came in time, it cannot be unpacked or exceeds a limit, or the URL is none.
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
                headers={
                    "host": target.netloc.decode(),
                    "accept-encoding": ACCEPTED_CODINGS,
                    **{name.lower(): value for name, value in headers.items()},
                },
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
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, UnpackingError, OSError, UnicodeError) as error:
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
            answered = _checked_head(response)
            read = await _read_body(response, answered, max_bytes=max_bytes)
        finally:
            await response.aclose()
    return Answer(
        status=response.status_code,
        headers=answered,
        body=bytes(read[:max_bytes]),
        is_truncated=len(read) > max_bytes,
    )


def _checked_head(response: httpx.Response) -> dict[str, str]:
    """Return the answer's header fields, names in lower case.

    Raises:
        RequestFailedError: there are too many, or they are too long.
    """
    fields = response.headers.raw
    if len(fields) > _MAX_HEAD_FIELDS or sum(len(name) + len(value) for name, value in fields) > _MAX_HEAD_BYTES:
        msg = f"the answer has more than {_MAX_HEAD_FIELDS} header fields, or more than {_MAX_HEAD_BYTES} bytes of them"
        raise RequestFailedError(msg)
    return {name.lower(): value for name, value in response.headers.items()}


async def _read_body(response: httpx.Response, headers: Mapping[str, str], *, max_bytes: int) -> bytearray:
    """Return the unpacked body, up to one piece more than is wanted.

    Others have their turn after each small piece, and the time limit may strike there.

    Raises:
        RequestFailedError: it comes in too many pieces.
        UnpackingError: it cannot be unpacked, or not within its limits.
    """
    unpacker = Unpacker(codings_of(headers.get("content-encoding", "")), max_bytes=max_bytes)
    read = bytearray()
    count = 0
    async for chunk in response.aiter_raw():
        count += 1
        if count > _MAX_PIECES:
            msg = f"the answer comes in more than {_MAX_PIECES} pieces"
            raise RequestFailedError(msg)
        await asyncio.sleep(0)
        for piece in unpacker.feed(chunk):
            read += piece
            if len(read) > max_bytes:
                return read
            await asyncio.sleep(0)
    unpacker.finish()
    return read


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

    text = "timed out" if isinstance(error, httpx.TimeoutException) else message_of(error)
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


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
