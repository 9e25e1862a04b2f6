"""Which addresses the web tools may not reach. Package: tools. In: an IP address; out: why it is refused. Pure, a table."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Sequence

__all__ = ["refusal_of"]

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
