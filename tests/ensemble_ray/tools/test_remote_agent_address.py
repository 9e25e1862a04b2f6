"""Where a remote agent is, and where its card may send requests."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Value

from ensemble_ray import RemoteAgent, ValidationError
from ensemble_ray.tools import A2ATool
from ensemble_ray.tools.a2a.client import AgentAddress, plain_value


@pytest.mark.parametrize(
    ("url", "named", "hosts", "is_allowed"),
    [
        ("https://a.example/a2a/t", "https://a.example/rpc", (), True),
        ("https://a.example", "https://a.example:443/rpc", (), True),
        ("http://a.example:80", "http://a.example/rpc", (), True),
        ("https://a.example", "https://b.example/rpc", (), False),
        ("https://a.example", "https://a.example.evil/rpc", (), False),
        ("https://a.example", "https://a.example@b.example/rpc", (), False),
        ("https://a.example", "https://a.example:8443/rpc", (), False),
        ("https://a.example", "http://a.example/rpc", (), False),
        ("https://a.example", "http://b.example/rpc", ("b.example",), False),
        ("https://a.example", "https://b.example/rpc", ("b.example",), True),
        ("http://a.example", "http://10.0.0.1:81/rpc", ("10.0.0.1:81",), True),
        ("http://a.example", "http://10.0.0.1:82/rpc", ("10.0.0.1:81",), False),
        ("http://a.example", "file:///etc/passwd", (), False),
        ("http://a.example", "http://a.example:port/rpc", (), False),
    ],
)
def test_requests_go_to_hosts_that_were_named(url: str, named: str, hosts: tuple[str, ...], is_allowed: bool) -> None:  # noqa: FBT001  a case
    """S-INT-81: whatever the card says."""
    assert AgentAddress.of(url, hosts=hosts).allows(named) is is_allowed


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("", "must be 'https://HOST/PATH'"),
        ("ftp://a.example", "must be 'https://HOST/PATH'"),
        ("https://ann:secret@a.example", "without a name or password"),
        ("ftp://ann:secret@a.example", "got: 'a.example'"),
        ("https://a.example?key=secret", "without a query or fragment"),
        ("https://a.example:port", "must be 'https://HOST/PATH'"),
        ("https://[::1", "must be 'https://HOST/PATH'"),
    ],
)
def test_a_url_that_is_wrong_is_refused_without_its_secret(url: str, text: str) -> None:
    """S-INT-80."""
    with pytest.raises(ValidationError, match=text) as found:
        AgentAddress.of(url)
    assert "secret" not in str(found.value)


def test_headers_are_checked_and_not_shown() -> None:
    """S-INT-81."""
    address = AgentAddress.of("https://a.example/x/.well-known/agent-card.json", headers={"Authorization": "secret"})
    assert "secret" not in repr(address)
    assert (address.url, address.name) == ("https://a.example/x", "x")
    for headers in ({"a b": "x"}, {"a": "x\r\ny"}, {"a": "ä"}):
        with pytest.raises(ValidationError, match="header") as found:
            AgentAddress.of("https://a.example", headers=headers)
        assert "ä" not in str(found.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"url": 5}, "url must be 'https://HOST/PATH', under which its card is found, got: int"),
        ({"url": None}, "url must be .* got: NoneType"),
        ({"headers": {"A": 5}}, "header 'A' must be a text, got: int"),
        ({"headers": {5: "x"}}, "header name must be a text, got: int"),
        ({"headers": "x"}, "headers must be a mapping of texts, got: str"),
        ({"hosts": 5}, "hosts must be a list of texts, got: int"),
        ({"hosts": [5]}, "hosts must be a list of texts, got one of int"),
    ],
)
def test_values_of_other_types_are_refused(arguments: dict[str, Any], text: str) -> None:
    """S-INT-80: an agent and a tool say what is wrong."""
    values: dict[str, Any] = {"url": "https://a.example", **arguments}
    with pytest.raises(ValidationError, match=text):
        RemoteAgent(**values)
    with pytest.raises(ValidationError, match=text):
        A2ATool(**values)


@pytest.mark.parametrize(("number", "plain"), [(2.0, 2), (2.5, 2.5), (2.0**53, 2**53), (1e300, 1e300)])
def test_whole_numbers_stay_such_as_far_as_they_are_exact(number: float, plain: float) -> None:
    """S-INT-72, S-INT-82."""
    found = plain_value(ParseDict({"of": [number]}, Value()))
    assert found == {"of": [plain]}
    assert [type(each) for each in found["of"]] == [type(plain)]  # type: ignore[union-attr, call-overload, index]


def test_a_number_that_is_none_of_json_is_an_answer_that_cannot_be_read() -> None:
    """S-INT-82: and no data."""
    with pytest.raises(ValueError, match="Infinity"):
        plain_value(Value(number_value=float("inf")))
