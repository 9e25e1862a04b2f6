"""HttpAgentTool offline: its arguments and the request it would send. Exchanges: tests/contracts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pydantic import SecretStr

from ensemble_ray import HttpAgentTool
from tests.ensemble_ray.tools.builtin.travel import travelled


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": None},
        {"description": None},
        {"url": " "},
        {"url": None},
        {"method": ""},
        {"timeout": 0},
        {"timeout": timedelta(0)},
        {"max_response_bytes": -1},
        {"headers": {"a b": "x"}},
        {"headers": {"X-Key": "secret\r\nX-Evil: 1"}},
        {"headers": {"X-Key": "sécret"}},
    ],
)
def test_tool_is_refused_when_an_argument_is_wrong(wrong: dict[str, Any]) -> None:
    """S-BIT-70, S-CONV-13: and the reason does not quote a header's value."""
    with pytest.raises(ValueError, match=r"^HttpAgentTool ") as caught:
        HttpAgentTool(**({"name": "api", "description": "", "url": "http://x/"} | wrong))
    assert "secret" not in str(caught.value)
    assert "sécret" not in str(caught.value)
    with pytest.raises(ValueError, match="name"):
        HttpAgentTool.get()


@pytest.mark.parametrize(
    ("url", "text", "sent_to"),
    [
        ("http://x/a", "a b&c=d/é", "http://x/a?input=a%20b%26c%3Dd%2F%C3%A9"),
        ("http://x/a?k=v", "1", "http://x/a?k=v&input=1"),
        ("http://x/a?", "1", "http://x/a?input=1"),
        ("http://x/a#part", "1", "http://x/a?input=1#part"),
        ("http://x/a", "", "http://x/a?input="),
    ],
)
def test_input_is_a_query_parameter_when_the_method_is_get(url: str, text: str, sent_to: str) -> None:
    """S-BIT-71."""
    assert HttpAgentTool.get("api", "d", url)._request(text) == (sent_to, {}, b"")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"a": 1}', "application/json"),
        ("42", "application/json"),
        ("{a: 1}", "text/plain; charset=UTF-8"),
        ("NaN", "text/plain; charset=UTF-8"),
        ("", "text/plain; charset=UTF-8"),
        ("grüße", "text/plain; charset=UTF-8"),
    ],
)
def test_content_type_follows_the_body_when_none_is_set(text: str, kind: str) -> None:
    """S-BIT-71."""
    for tool in (HttpAgentTool.post("api", "d", "http://x/"), HttpAgentTool("api", "d", "http://x/", method="put")):
        assert tool._request(text) == ("http://x/", {"content-type": kind}, text.encode())


def test_content_type_is_the_users_when_set_in_any_case() -> None:
    """S-BIT-71."""
    tool = HttpAgentTool("api", "d", "http://x/", headers={"cOnTeNt-TyPe": "text/csv"})
    assert tool._request("{}")[1] == {"content-type": "text/csv"}


def test_header_values_are_hidden_when_the_tool_is_shown() -> None:
    """S-BIT-70: and they still travel."""
    tool = HttpAgentTool("api", "d", "http://x/", headers={"Authorization": "Bearer s3cret", "X": SecretStr("s3cret")})
    copy = travelled(tool)
    assert "s3cret" not in repr(copy) + str(vars(copy))
    assert copy._request("")[1]["authorization"] == "Bearer s3cret"


def test_outer_limit_comes_after_the_own_when_the_tool_is_made() -> None:
    """S-BIT-70, S-SET-34."""
    assert HttpAgentTool.post("api", "d", "http://x/").timeout > 30  # type: ignore[operator]
