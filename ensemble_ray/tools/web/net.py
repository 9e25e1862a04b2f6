"""HTTP requests of the web tools, with limits and without access to private addresses.

The connection uses a checked address, also after a redirect, so that a second DNS answer has no effect. All limits apply while
the body is read and unpacked.
"""

from __future__ import annotations

import asyncio
import codecs
import functools
import ipaddress
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from encodings import normalize_encoding
from encodings.aliases import aliases
from urllib.parse import quote, urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from ensemble_ray.errors import message_of
from ensemble_ray.errors.bodies import tls_flaw
from ensemble_ray.process.concurrency import threads
from ensemble_ray.text.unpacking import ACCEPTED_CODINGS, BodyUnpacker, UnpackingError, codings_of

CONNECT_TIMEOUT_S = 10.0
_MAX_REDIRECTS = 10
_HOST = re.compile(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+")  # ASCII form, or an address
_URL_SAFE = "%!#$&'()*+,/:;=?@[]~"  # not escaped in path and query
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHARSET = re.compile(r"charset=[\"']?([\w.:-]{1,64})", re.IGNORECASE)
_MAX_HEAD_BYTES, _MAX_HEAD_FIELDS = 65_536, 500
#: each piece costs far more than its bytes
_MAX_PIECES = 100_000
_LONGEST_REASON = 300


class RequestFailedError(Exception):
    """The text is for a model and contains no key."""


class AddressRefusedError(RequestFailedError):
    """The host has an address that is not public. The text names the address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebAnswer:
    status: int
    headers: Mapping[str, str] = field(repr=False)  # names in lower case
    body: bytes = field(repr=False)
    is_truncated: bool

    @property
    def is_success(self) -> bool:
        return self.status // 100 == 2  # noqa: PLR2004  the class of the status

    def text(self, *, default_encoding: str = "utf-8") -> str:
        """Decode the body by the charset of the headers. Call it in a thread."""
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
    allow_private_hosts: bool = True,
) -> WebAnswer:
    """Send one request without following redirects and read the unpacked body up to `max_bytes`."""
    await threads.run(_tls)  # slow for the first time
    try:
        async with asyncio.timeout(timeout_s):
            target = checked_url(url)
            name = target.raw_host or ""
            addresses = await _resolve(name, target.port or 0, allow_private_hosts=allow_private_hosts)
            sent = {
                "host": target.raw_authority,
                "accept-encoding": ACCEPTED_CODINGS,
                **{name.lower(): value for name, value in headers.items()},
            }
            if name.replace(".", "").isdigit() or ":" in name:
                # aiohttp does not resolve an address in an unusual form
                target = target.with_host(addresses[0]["host"])
            async with (
                aiohttp.ClientSession(  # one per request: tools are pickled
                    connector=aiohttp.TCPConnector(
                        resolver=_CheckedAddresses(addresses), use_dns_cache=False, ssl=_tls()
                    ),
                    cookie_jar=aiohttp.DummyCookieJar(),
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                    auto_decompress=False,
                    skip_auto_headers=("Accept", "Content-Type", "User-Agent"),
                    max_line_size=_MAX_HEAD_BYTES,
                    max_field_size=_MAX_HEAD_BYTES,
                    max_headers=_MAX_HEAD_FIELDS,
                ) as session,  # without the environment's proxies, which would resolve names unchecked
                session.request(
                    method, target, headers=sent, data=body or None, server_hostname=name, allow_redirects=False
                ) as response,
            ):
                fields = response.raw_headers
                head_bytes = sum(len(name) + len(value) for name, value in fields)
                if len(fields) > _MAX_HEAD_FIELDS or head_bytes > _MAX_HEAD_BYTES:
                    raise RequestFailedError(
                        f"the answer has more than {_MAX_HEAD_FIELDS} header fields, or more than {_MAX_HEAD_BYTES} bytes of them"
                    )
                answered = {name.lower(): ", ".join(response.headers.getall(name)) for name in response.headers}
                read = await _read_body(response, answered, max_bytes=max_bytes)
    except aiohttp.ConnectionTimeoutError:
        raise RequestFailedError("timed out") from None
    except TimeoutError:
        raise RequestFailedError(f"timed out after {timeout_s:g} s") from None
    except (aiohttp.ClientError, UnpackingError, OSError, ValueError) as error:
        raise RequestFailedError(_reason(error)) from None
    return WebAnswer(
        status=response.status, headers=answered, body=bytes(read[:max_bytes]), is_truncated=len(read) > max_bytes
    )


async def fetch(
    url: str, *, headers: Mapping[str, str], max_bytes: int, timeout_s: float, allow_private_hosts: bool
) -> WebAnswer:
    here = url.strip()
    try:
        async with asyncio.timeout(timeout_s):
            for _ in range(_MAX_REDIRECTS + 1):
                answer = await exchange(
                    "GET",
                    here,
                    headers=headers,
                    max_bytes=max_bytes,
                    timeout_s=timeout_s,
                    allow_private_hosts=allow_private_hosts,
                )
                location = answer.headers.get("location")
                if answer.status not in _REDIRECTS or location is None:
                    return answer
                here = urljoin(here, location)
    except TimeoutError:
        raise RequestFailedError(f"timed out after {timeout_s:g} s") from None
    except ValueError as error:
        raise RequestFailedError(_reason(error)) from None
    raise RequestFailedError(f"more than {_MAX_REDIRECTS} redirects")


def checked_url(url: str) -> URL:
    """Return a URL as it is sent: ASCII host, escaped path and query, no user, no fragment."""
    parts = urlsplit(url.strip())
    if _CONTROL.search(url.strip()):
        raise RequestFailedError("the URL holds a control character")
    if parts.scheme not in {"http", "https"}:
        raise RequestFailedError(f"only http and https are supported, got: '{parts.scheme or url}'")
    if not parts.hostname:
        raise RequestFailedError("the URL names no host")
    if parts.port == 0:
        raise RequestFailedError("there is no port 0")
    named = URL.build(scheme=parts.scheme, host=parts.hostname, port=parts.port)
    if not _HOST.fullmatch(named.raw_host or ""):
        raise RequestFailedError("the URL's host is malformed")
    path, query = (
        quote(_STRAY_PERCENT.sub("%25", part), safe=_URL_SAFE, errors="surrogateescape")  # as headers are decoded
        for part in (parts.path, parts.query)
    )
    return URL(f"{named.scheme}://{named.raw_authority}{path or '/'}{'?' if query else ''}{query}", encoded=True)


async def _resolve(host: str, port: int, *, allow_private_hosts: bool) -> Sequence[ResolveResult]:
    try:
        found = await threads.run(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RequestFailedError(f"cannot resolve host '{host}'") from error
    addresses = {
        str(address[0]): ResolveResult(
            hostname=host, host=str(address[0]), port=port, family=family, proto=proto, flags=socket.AI_NUMERICHOST
        )
        for family, _, proto, _, address in reversed(found)
    }
    if not allow_private_hosts:
        for address in addresses:
            if (word := refusal_of(address)) is not None:
                raise AddressRefusedError(f"host '{host}' is refused: {address} is a {word} address")
    return tuple(reversed(addresses.values()))


class _CheckedAddresses(AbstractResolver):
    def __init__(self, addresses: Sequence[ResolveResult]) -> None:
        self._addresses = list(addresses)

    async def resolve(
        self,
        host: str,  # noqa: ARG002  the library's signature
        port: int = 0,  # noqa: ARG002
        family: socket.AddressFamily = socket.AF_UNSPEC,  # noqa: ARG002
    ) -> list[ResolveResult]:
        return self._addresses

    async def close(self) -> None:
        pass


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _read_body(response: aiohttp.ClientResponse, headers: Mapping[str, str], *, max_bytes: int) -> bytearray:
    """Return the unpacked body, at most one piece above the limit."""
    unpacker = BodyUnpacker(codings_of(headers.get("content-encoding", "")), max_bytes=max_bytes)
    read = bytearray()
    count = 0
    if response.content.at_eof():  # chunks of an empty body, which aiohttp shares between answers, would never end
        return read
    async for chunk, _ in response.content.iter_chunks():
        count += 1
        if count > _MAX_PIECES:
            raise RequestFailedError(f"the answer comes in more than {_MAX_PIECES} pieces")
        await asyncio.sleep(0)
        for piece in unpacker.feed(chunk):
            read += piece
            if len(read) > max_bytes:
                return read
            await asyncio.sleep(0)
    unpacker.finish()
    return read


def _reason(error: Exception) -> str:
    """Return the text without URL and headers, which may contain keys."""
    if isinstance(error, aiohttp.ClientResponseError):
        return "the answer is not valid HTTP, or its head is too long"
    if isinstance(error, aiohttp.InvalidURL):
        return "the request is not valid HTTP"
    if flaw := tls_flaw(error):
        return flaw
    text = message_of(error)
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


#: refused unless private hosts are allowed; the standard library's meaning of private changes between Python versions
_REFUSED_RANGES = {
    "unspecified": ["0.0.0.0/8", "::/128"],
    "loopback": ["127.0.0.0/8", "::1/128"],
    "private": ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10"],
    "carrier-grade NAT": ["100.64.0.0/10"],
    "metadata": ["168.63.129.16/32"],  # a cloud's host agent, on an otherwise public address
    "link-local or metadata": ["169.254.0.0/16"],
    "reserved": [
        *["192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"],
        *["240.0.0.0/4", "100::/64", "2001::/23", "2001:db8::/32", "3fff::/20", "5f00::/16"],
    ],
    "multicast": ["224.0.0.0/4", "ff00::/8"],
    "IPv4-compatible": ["::/96"],
    "IPv4-mapped": ["::ffff:0:0/96"],
    "IPv4-translated": ["::ffff:0:0:0/96"],
    "IPv4-embedding": ["64:ff9b::/96", "64:ff9b:1::/48", "2002::/16"],
    "link-local": ["fe80::/10"],
}


@functools.cache
def _refused_networks() -> tuple[tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, str], ...]:
    return tuple((ipaddress.ip_network(text), word) for word, texts in _REFUSED_RANGES.items() for text in texts)


def refusal_of(address: str) -> str | None:
    """Return the reason to refuse an IP address, or None (S-BIT-44)."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "malformed"
    for network, word in _refused_networks():
        if parsed.version == network.version and parsed in network:
            return word
    return None


#: Python's names; each codec takes linear time
CHARSETS = frozenset(
    {
        *("utf_8", "utf_8_sig", "utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le", "ascii"),
        *("latin_1", "iso8859_2", "iso8859_3", "iso8859_4", "iso8859_5", "iso8859_6", "iso8859_7", "iso8859_8"),
        *("iso8859_9", "iso8859_10", "iso8859_11", "iso8859_13", "iso8859_14", "iso8859_15", "iso8859_16"),
        *("cp1250", "cp1251", "cp1252", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258"),
        *("cp437", "cp850", "cp866", "cp874", "tis_620", "koi8_r", "koi8_u", "mac_roman", "mac_cyrillic"),
        *("shift_jis", "cp932", "euc_jp", "iso2022_jp", "gb2312", "gbk", "gb18030", "big5", "big5hkscs"),
        *("cp949", "euc_kr", "johab"),
    }
)
#: unknown to Python
_WEB_NAMES = {
    "x_sjis": "shift_jis",
    "x_gbk": "gbk",
    "x_euc_jp": "euc_jp",
    "x_x_big5": "big5",
    "windows_31j": "cp932",
    "windows_949": "cp949",
    "windows_874": "cp874",
    "unicode_1_1_utf_8": "utf_8",
}
#: their incremental decoders require one of these byte order marks
_MARKED = {"utf_16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf_32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)}
_LONGEST_CHARSET = 40
_FALLBACK = "utf_8"
_STEP_BYTES = 65_536  # a decoder blocks every other thread


def codec_of(name: str) -> str:
    """Return the codec of a charset's name, or UTF-8.

    Examples:
        >>> codec_of("ISO-8859-1"), codec_of("punycode")
        ('latin_1', 'utf_8')
    """
    if len(name) > _LONGEST_CHARSET or not name.isascii():
        return _FALLBACK
    plain = normalize_encoding(name).lower()
    found = _WEB_NAMES.get(plain) or aliases.get(plain, plain)
    return found if found in CHARSETS else _FALLBACK


def decode(data: bytes, charset: str, *, is_truncated: bool = False) -> str:
    """Decode bytes; invalid ones become U+FFFD. If `is_truncated`, a character that the end cuts in two is dropped."""
    codec = codec_of(charset)
    if codec in _MARKED and not data.startswith(_MARKED[codec]):
        codec = f"{codec}_le"  # as browsers do
    decoder = codecs.getincrementaldecoder(codec)("replace")
    pieces = [decoder.decode(data[at : at + _STEP_BYTES]) for at in range(0, len(data), _STEP_BYTES)]
    if not is_truncated:
        pieces.append(decoder.decode(b"", True))  # noqa: FBT003  codecs takes it by position
    return "".join(pieces)
