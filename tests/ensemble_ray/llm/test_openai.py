"""`OpenAIChatModel` as a value: what it takes, refuses, shows and carries. Its calls are in tests/contracts."""

from __future__ import annotations

import logging
import pickle
import re
from datetime import timedelta

import pytest
from pydantic import SecretStr

from ensemble_ray import ChatMessage, ChatModel, OpenAIChatModel, StreamingChatModel, ValidationError

KEY = "sk-very-secret"


def test_it_chats_and_streams_when_asked_by_the_ports() -> None:
    """S-CONV-22, S-CONV-23: it implements both protocols."""
    model = OpenAIChatModel("m")
    assert isinstance(model, ChatModel)
    assert isinstance(model, StreamingChatModel)


def test_the_key_is_not_shown_when_the_model_is() -> None:
    """S-CONV-22: the key never shows in a `repr`, wherever it was put."""
    model = OpenAIChatModel(
        "m",
        base_url=f"https://user:{KEY}@host/v1",
        api_key=KEY,
        client_options={"api_key": KEY, "organization": KEY},
        temperature=0.5,
        extra_headers={"X-Key": KEY},
        extra_body={"key": KEY},
    )
    assert repr(model) == "OpenAIChatModel('m', base_url='https://host/v1', temperature=0.5)"
    assert KEY not in repr(vars(OpenAIChatModel("m", api_key=KEY)))


def test_an_equal_model_arrives_when_pickled() -> None:
    """S-CONV-22: picklable; S-SET-10, S-OUT-47: with all it was given."""
    model = OpenAIChatModel(
        "m",
        base_url="http://h/v1",
        api_key=SecretStr(KEY),
        timeout=timedelta(seconds=5),
        max_retries=2,
        structured_outputs=False,
        temperature=0,
    )
    copy = pickle.loads(pickle.dumps(model))  # noqa: S301  our own bytes
    assert copy == model
    assert hash(copy) == hash(model)
    assert copy.request_options == {"temperature": 0}
    assert repr(copy) == "OpenAIChatModel('m', base_url='http://h/v1', structured_outputs=False, temperature=0)"
    assert copy != OpenAIChatModel("m", base_url="http://h/v1")
    assert model != "m"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: OpenAIChatModel(" "), "OpenAIChatModel model must not be blank"),
        (
            lambda: OpenAIChatModel("m", base_url="localhost:8000"),
            "OpenAIChatModel base_url must begin with http:// or https://, got: localhost:8000",
        ),
        (lambda: OpenAIChatModel("m", timeout=0), "OpenAIChatModel timeout must be > 0, got: 0"),
        (lambda: OpenAIChatModel("m", timeout="9"), "OpenAIChatModel timeout must be > 0, got: 9"),  # type: ignore[arg-type]  # a user may
        (
            lambda: OpenAIChatModel("m", structured_outputs={"choice": ["a"]}),  # type: ignore[arg-type]  another's option
            (
                "OpenAIChatModel structured_outputs must be True, False or None, got: {'choice': ['a']}. "
                "An endpoint's own option of that name goes through extra_body"
            ),
        ),
        (
            lambda: OpenAIChatModel("m", structured_outputs=True, response_format={"type": "text"}),
            "OpenAIChatModel: structured_outputs=True and a response_format of your own exclude each other",
        ),
        (lambda: OpenAIChatModel("m", max_retries=-1), "OpenAIChatModel max_retries must be >= 0, got: -1"),
        (
            lambda: OpenAIChatModel("m", tools=[]),
            "OpenAIChatModel: 'tools' is set by the library and cannot be a request option",
        ),
        (
            lambda: OpenAIChatModel("m", response_format=object),
            "OpenAIChatModel: request option 'response_format' must be JSON, got: type",
        ),
    ],
)
def test_a_value_is_refused_at_construction_when_it_cannot_work(make: object, text: str) -> None:
    """S-SET-10, S-CONV-12: our ValidationError, before any call."""
    assert callable(make)
    with pytest.raises(ValidationError) as caught:
        make()
    assert str(caught.value) == text


def test_the_environment_is_read_when_a_call_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-CONV-22: nothing of the environment is fixed at construction, so that a pickled model uses that of its host."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    model = OpenAIChatModel("m")
    assert model.base_url == "https://api.openai.com/v1"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere/v1")
    assert model.base_url == "http://elsewhere/v1"
    assert OpenAIChatModel("m", base_url="http://mine/v1").base_url == "http://mine/v1"
    monkeypatch.setenv("OPENAI_BASE_URL", "elsewhere")
    with pytest.raises(ValidationError, match=r"OPENAI_BASE_URL must begin with http:// or https://"):
        _ = model.base_url


async def test_the_error_says_what_to_set_when_there_is_no_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S-SET-10, S-CONV-22: no key and nowhere else to go: told before anything is sent."""
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.DEBUG), pytest.raises(ValidationError, match=r"Set OPENAI_API_KEY or pass api_key"):
        await OpenAIChatModel("m").chat([ChatMessage("user", "hello")])


def test_an_endpoint_is_named_by_url_model_and_a_fingerprint_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S-SET-36, S-DUR-64: never by the key, nor by a password in the URL; another key is another endpoint."""
    model = OpenAIChatModel("m", base_url="http://user:secret@h:8/v1/", api_key=KEY)
    assert re.fullmatch(r"http://h:8/v1 m key [0-9a-f]{8}", model.endpoint_id)
    assert model.endpoint_id == OpenAIChatModel("m", base_url="http://h:8/v1", api_key=KEY, temperature=1).endpoint_id
    assert model.endpoint_id != OpenAIChatModel("m", base_url="http://h:8/v1", api_key=KEY + "2").endpoint_id
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert OpenAIChatModel("m", base_url="http://h:8/v1").endpoint_id == "http://h:8/v1 m"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere/v1")
    assert OpenAIChatModel("m").endpoint_id == "http://elsewhere/v1 m"
