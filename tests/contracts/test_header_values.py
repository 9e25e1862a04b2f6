"""Keys and headers as people copy them: blanks around them go, what no header can carry is refused by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from pydantic import SecretStr

from ensemble_ray import ChatMessage, HttpAgentTool, OpenAIChatModel, OpenAIEmbeddingModel, RemoteAgent, ValidationError
from ensemble_ray.testing import ModelServer
from ensemble_ray.text.foreign_text import header_flaw
from ensemble_ray.tools.mcp.address import ServerAddress

HELLO = [ChatMessage("user", "hello")]
SECRET = "sk-very-secret"  # noqa: S105  a key that opens nothing
#: Between two halves of a key, and how it is named.
FLAWS = [
    ("\n", "a line break"),
    ("\r\n", "a line break"),
    ("\x00", "U+0000"),
    ("\u201c", "U+201C"),
    ("\u200b", "U+200B"),
]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key of whoever runs the tests."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.parametrize("way", [None, {"max_retries": 0}], ids=["lean", "client"])
@pytest.mark.parametrize("given", [f"{SECRET}\n", f" \t{SECRET}\r\n", f"\u00a0{SECRET}\u2003"])
async def test_blanks_around_a_key_are_not_sent(
    given: str, way: dict[str, object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-LLM-32: as an argument, as a secret, among the client's options and in the environment."""
    with ModelServer("hi", api_key=SECRET) as server:
        for key in (given, SecretStr(given)):
            model = OpenAIChatModel("m", base_url=server.base_url, api_key=key, client_options=way)
            assert pickle.loads(pickle.dumps(model)) == model  # noqa: S301  our own bytes
            assert (await model.chat(HELLO)).text == "hi"
        monkeypatch.setenv("OPENAI_API_KEY", given)
        assert (await OpenAIChatModel("m", base_url=server.base_url, client_options=way).chat(HELLO)).text == "hi"


@pytest.mark.parametrize(("inside", "named"), FLAWS)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda key: OpenAIChatModel("m", api_key=key), "OpenAIChatModel api_key"),
        (lambda key: OpenAIEmbeddingModel("m", api_key=SecretStr(key)), "OpenAIEmbeddingModel api_key"),
        (lambda key: OpenAIChatModel("m", extra_headers={"X-Key": key}), "OpenAIChatModel extra_headers: 'X-Key'"),
        (
            lambda key: ServerAddress.of(
                "https://h/mcp", env={}, headers={"X-Key": key}, cwd=None, connect_timeout_s=1, max_samples=0
            ),
            "MCP headers: 'X-Key'",
        ),
        (lambda key: RemoteAgent("https://h", headers={"X-Key": key}), "RemoteAgent header 'X-Key'"),
        (lambda key: HttpAgentTool("n", "d", "https://h", headers={"X-Key": key}), "HttpAgentTool header 'X-Key'"),
    ],
)
def test_what_no_header_can_carry_is_refused_by_name(
    make: Callable[[str], object], name: str, inside: str, named: str
) -> None:
    """S-LLM-32, S-LLM-33: where it is written, and never shown."""
    with pytest.raises((ValidationError, ValueError)) as caught:
        make(f"{SECRET}{inside}{SECRET}")
    text = str(caught.value)
    assert text.startswith(name)
    assert named in text
    assert SECRET not in text


@pytest.mark.parametrize(("inside", "named"), FLAWS[:1] + FLAWS[3:])
async def test_a_key_of_the_environment_is_refused_by_the_name_of_its_variable(
    inside: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-LLM-32: when a call is made, since it may change until then."""
    model = OpenAIChatModel("m")
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}{inside}{SECRET}")
    with pytest.raises(ValidationError, match="The environment variable OPENAI_API_KEY holds") as caught:
        await model.chat(HELLO)
    assert named in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_header_without_a_name_is_refused() -> None:
    """S-LLM-33: nor with a value that is no text."""
    with pytest.raises(ValidationError, match="extra_headers: 'X Key' is no name of a header"):
        OpenAIChatModel("m", extra_headers={"X Key": "v"})
    with pytest.raises(ValidationError, match="extra_headers: 'X-Key' must be a text, got: int"):
        OpenAIChatModel("m", extra_headers={"X-Key": 7})


@pytest.mark.parametrize("value", ["", "Bearer sk-1_2.3/4+5=", "a\tb", "~"])
def test_ordinary_values_have_no_flaw(value: str) -> None:
    """S-LLM-33: all of printable ASCII."""
    assert header_flaw(value) == ""
