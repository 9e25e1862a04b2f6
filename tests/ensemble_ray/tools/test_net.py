"""Which addresses the web tools may reach: a table."""

from __future__ import annotations

import pytest

from ensemble_ray.tools.web.net import RequestFailedError, exchange, fetch, refusal_of


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("127.0.0.1", "loopback"),
        ("127.8.9.10", "loopback"),
        ("::1", "loopback"),
        ("10.1.2.3", "private"),
        ("172.16.0.1", "private"),
        ("172.31.255.255", "private"),
        ("192.168.1.1", "private"),
        ("fd00:ec2::254", "private"),
        ("fec0::1", "private"),
        ("169.254.169.254", "link-local or metadata"),
        ("168.63.129.16", "metadata"),
        ("fe80::1", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("100.64.0.1", "carrier-grade NAT"),
        ("100.100.100.200", "carrier-grade NAT"),
        ("224.0.0.1", "multicast"),
        ("ff02::1", "multicast"),
        ("0.0.0.0", "unspecified"),  # noqa: S104  an address that is refused
        ("0.1.2.3", "unspecified"),
        ("::", "unspecified"),
        ("::ffff:127.0.0.1", "IPv4-mapped"),
        ("::ffff:8.8.8.8", "IPv4-mapped"),
        ("::127.0.0.1", "IPv4-compatible"),
        ("64:ff9b::7f00:1", "IPv4-embedding"),
        ("2002:7f00:1::", "IPv4-embedding"),
        ("2001:0:1::", "reserved"),
        ("192.0.0.192", "reserved"),
        ("198.18.0.1", "reserved"),
        ("203.0.113.7", "reserved"),
        ("255.255.255.255", "reserved"),
        ("2001:db8::1", "reserved"),
        ("not an address", "malformed"),
    ],
)
def test_address_is_refused_when_it_is_not_public(address: str, word: str) -> None:
    """S-BIT-44."""
    assert refusal_of(address) == word


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "172.15.0.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "2a00:1450::1"]
)
def test_address_is_allowed_when_it_is_public(address: str) -> None:
    """S-BIT-44."""
    assert refusal_of(address) is None


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://example.org/a", "gopher://x/", "//example.org/", "no url", "http://", "http:///a"],
)
async def test_url_is_refused_when_it_is_not_of_the_web(url: str) -> None:
    """S-BIT-44."""
    with pytest.raises(RequestFailedError):
        await fetch(url, headers={}, max_bytes=1, timeout_s=1, allow_private_hosts=True)
    with pytest.raises(RequestFailedError):
        await exchange("GET", url, headers={}, max_bytes=1, timeout_s=1)


@pytest.mark.parametrize(
    "url",
    ["http://[::1", "http://a:99999/", "http://exa mple.org/", "http://x/\x00", "http://[::1%25eth0]/", "http://a[b/"],
)
async def test_url_is_refused_when_it_is_malformed(url: str) -> None:
    """S-BIT-40: bad input is told, never a crash."""
    with pytest.raises(RequestFailedError):
        await fetch(url, headers={}, max_bytes=1, timeout_s=1, allow_private_hosts=False)
