"""Errors of model providers as data: of their class again, without what may be secret."""

from __future__ import annotations

import json
import pickle
import sys
from typing import Any

import httpx
import openai
import pytest

from ensemble_ray import AgentExecutionError
from ensemble_ray.errors import portable
from ensemble_ray.errors.travel import (
    ErrorChain,
    is_refusal,
    is_refusal_data,
    pack_provider_error,
    unpack_provider_error,
)
from ensemble_ray.values.error_data import error_data, error_from

SECRET = "sk-very-secret-0123456789"  # noqa: S105  a key that opens nothing


def own_httpx() -> Any:
    """The package that the errors of the installed `openai` speak."""
    return sys.modules.get("httpx2") or httpx


def refused(status: int = 429, body: object = None) -> openai.APIStatusError:
    """An error as the package's own client raises it: its request holds the key."""
    http = own_httpx()
    headers = {"authorization": f"Bearer {SECRET}"}
    request = http.Request("POST", f"https://me:{SECRET}@host:8443/v1/chat/completions?key={SECRET}", headers=headers)
    told = {"retry-after": "3", "x-request-id": "r-1", "set-cookie": SECRET}
    response = http.Response(status, headers=told, json={"error": body}, request=request)
    kind = {401: openai.AuthenticationError, 429: openai.RateLimitError}[status]
    return kind("slow down", response=response, body=body or {"message": "slow down", "code": "busy"})


def trip(error: BaseException, how: str) -> BaseException:
    """The error after a way to another process, or through a record."""
    if how == "record":
        return error_from(json.loads(json.dumps(error_data(error))))
    if how == "portable":
        return pickle.loads(pickle.dumps(portable(error)))  # noqa: S301  our own bytes
    return pickle.loads(pickle.dumps(ErrorChain(error)))  # noqa: S301  our own bytes


@pytest.mark.parametrize("how", ["process", "record"])
def test_status_error_is_of_its_class_again(how: str) -> None:
    """S-ERR-40, S-ERR-41: also below an error of ours, where `except` finds it."""
    error = AgentExecutionError("Agent 'Writer': slow down")
    error.__cause__ = refused()
    cause = trip(error, how).__cause__
    assert type(cause) is openai.RateLimitError
    assert (str(cause), cause.message, cause.status_code) == ("slow down", "slow down", 429)
    assert (cause.code, cause.request_id, cause.body) == ("busy", "r-1", {"message": "slow down", "code": "busy"})
    assert (cause.response.status_code, cause.response.headers["retry-after"]) == (429, "3")
    assert str(cause.request.url) == "https://host:8443/v1/chat/completions"


@pytest.mark.parametrize("how", ["process", "record", "portable"])
def test_nothing_secret_goes_along(how: str) -> None:
    """S-ERR-40, S-ERR-39: neither in the data nor in what comes of it."""
    assert SECRET not in json.dumps(pack_provider_error(refused(401)))
    back = trip(refused(401), how)
    assert (type(back).__name__, vars(back)["status_code"]) == ("AuthenticationError", 401)
    shown = [repr(vars(back))]
    if isinstance(back, openai.AuthenticationError):  # pickled alone it is a stand-in
        shown += [repr(each) for each in (back.request.headers, back.request.url, back.response.headers)]
    assert SECRET not in " ".join(shown)


def test_errors_without_an_answer_are_of_their_class_again() -> None:
    """S-ERR-40: no connection, no time."""
    request = own_httpx().Request("POST", "http://host/v1")
    for error in (openai.APIConnectionError(message="gone", request=request), openai.APITimeoutError(request)):
        back = trip(error, "process")
        assert type(back) is type(error)
        assert (str(back), str(back.request.url)) == (str(error), "http://host/v1")
    assert isinstance(back, openai.APIConnectionError)


def test_large_body_is_bounded() -> None:
    """S-ERR-40: an endpoint may send a page."""
    data = pack_provider_error(refused(429, {"message": "x" * 1_000_000}))
    assert len(json.dumps(data)) < 50_000


@pytest.mark.parametrize(
    "data",
    [
        {"class": "os.system", "text": "echo"},
        {"class": "OpenAI", "text": "a client, no error"},
        {"class": "__loader__", "text": "x"},
        {"class": "RateLimitError", "text": 3},
        {"class": "RateLimitError", "text": "x", "response": {"status": "many"}},
        {},
    ],
)
def test_only_listed_classes_are_made(data: dict[str, object]) -> None:
    """S-ERR-41: whatever a record says; damaged data gives nothing."""
    assert unpack_provider_error(data) is None


def test_missing_package_gives_a_stand_in_with_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-ERR-31: a process without the package still has name, text and status."""
    data = pickle.dumps(ErrorChain(refused()))
    monkeypatch.setitem(sys.modules, "openai", None)
    back = pickle.loads(data)  # noqa: S301  our own bytes
    assert (type(back).__name__, str(back), back.status_code) == ("RateLimitError", "slow down", 429)
    assert not isinstance(back, openai.RateLimitError)


def test_class_of_the_same_name_is_another() -> None:
    """S-ERR-41: of a user's own package."""
    assert pack_provider_error(type("RateLimitError", (Exception,), {})("x")) is None


class ForeignError(Exception):
    """Of a package that this library does not know."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.code = status


@pytest.mark.parametrize("cause", [ForeignError("Payment Required", 402), refused(401)])
def test_a_provider_that_a_callable_asked_refuses_no_model_call(cause: BaseException) -> None:
    """S-MR-155: below the error of a guardrail, in the process and in its record."""
    outer = AgentExecutionError("Agent 'Writer': guardrail 'check' raised")
    outer.is_of_callable = True
    outer.__cause__ = cause
    travelled = pickle.loads(pickle.dumps(ErrorChain(outer)))  # noqa: S301  our own bytes
    assert not is_refusal(travelled)
    assert not is_refusal_data(json.loads(json.dumps(error_data(travelled))))


@pytest.mark.parametrize(
    ("error", "is_expected"),
    [
        (refused(401), True),
        (refused(429, {"message": "You exceeded your current quota", "code": "insufficient_quota"}), True),
        (ForeignError("429 RESOURCE_EXHAUSTED insufficient_quota", 429), True),
        (ForeignError("Your credit balance is too low", 400), True),
        (refused(429), False),
        (ForeignError("my tool has insufficient credits"), False),
        (ValueError("credit balance is too low"), False),
    ],
)
def test_a_refusal_of_every_call_is_known_in_the_process_and_in_its_record(
    error: BaseException, *, is_expected: bool
) -> None:
    """S-MR-155, S-LLM-21: below an error of ours, and by the data of the record."""
    outer = AgentExecutionError("Agent 'Writer': refused")
    outer.__cause__ = error
    assert is_refusal(outer) is is_expected
    assert is_refusal_data(json.loads(json.dumps(error_data(outer)))) is is_expected
