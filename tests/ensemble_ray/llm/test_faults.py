"""Whose fault a failed model call was."""

from __future__ import annotations

import email.message
import socket
import urllib.error

import aiohttp
import openai
import pytest

from ensemble_ray import IllegalStateError, RateLimit, RateLimitTimeoutError, ValidationError
from ensemble_ray.errors.travel import status_of
from ensemble_ray.llm.failures import CallFailure, CallOrigin, build_provider_error, fault_of

ORIGIN = CallOrigin(url="http://h/v1/chat/completions", model="m", key="", timeout_s=9)


async def of_openai(failure: CallFailure) -> Exception:
    """The error that the adapter raises."""
    return await build_provider_error(failure, ORIGIN)


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 529, 599])
async def test_it_is_the_providers_fault_when_the_status_says_so(status: int) -> None:
    """S-DUR-61: 408, 409, 429 and every 5xx."""
    error = await of_openai(CallFailure(status=status, headers={"retry-after": "7"}))
    fault = fault_of(error)
    assert fault is not None
    assert (fault.what, fault.status, fault.retry_after) == (f"HTTP {status}", status, "7")
    assert fault.text == str(error)
    assert fault.is_refusal_for_now == (status == 429)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_it_is_nobodys_fault_but_ours_when_the_request_is_refused(status: int) -> None:
    """S-DUR-61: never another 4xx."""
    error = await of_openai(CallFailure(status=status))
    assert fault_of(error) is None
    assert status_of(error) == status


async def test_it_is_no_fault_when_the_answer_cannot_be_read() -> None:
    """S-DUR-61: never an answer that cannot be read, nor one in which the provider tells an error."""
    assert fault_of(await of_openai(CallFailure(status=200, body=b"<html>", reason="no JSON"))) is None
    assert fault_of(await of_openai(CallFailure(status=200, reason="overloaded", is_from_provider=True))) is None


async def test_it_is_the_providers_fault_when_there_is_no_answer() -> None:
    """S-DUR-61: no connection, and a timeout."""
    lost, late = (
        fault_of(await of_openai(CallFailure(reason="gone"))),
        fault_of(await of_openai(CallFailure(timed_out=True))),
    )
    assert lost is not None
    assert late is not None
    assert (lost.what, lost.status) == ("no connection", None)
    assert (late.what, late.status) == ("no answer in time", None)


class ToldError(Exception):
    """Of any package; it holds the decoded body of a stream's error, and the status of the stream."""

    def __init__(self, body: object, status: int | None = 200) -> None:
        super().__init__("told in a stream")
        self.body = body
        self.status_code = status


@pytest.mark.parametrize(
    ("body", "status", "retry_after"),
    [
        ({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}, 503, None),
        ({"message": "limited, try again in 2s", "code": 429}, 429, "2"),
        ({"error": {"code": "502", "message": "upstream", "metadata": {"retry_after": 4}}}, 502, "4"),
    ],
)
def test_it_is_the_providers_fault_when_a_body_says_so(body: object, status: int, retry_after: str | None) -> None:
    """S-LLM-20: the status of a stream that began well says nothing."""
    for error in (ToldError(body), ToldError(body, None)):
        fault = fault_of(error)
        assert fault is not None
        assert (fault.status, fault.retry_after) == (status, retry_after)


class StatusError(Exception):
    """Of another package; it has its answer's headers in a plain dict."""

    def __init__(self, code: object) -> None:
        super().__init__("busy")
        self.code = code
        self.headers = {"Retry-After": 3}


class NetworkError(Exception):
    """Of a user's own module."""


class TimeoutException(Exception):  # noqa: N818  as above
    """The base class of that package's timeouts."""


TimeoutException.__module__ = "httpx"


class ReadTimeout(TimeoutException):
    """A timeout of that package."""


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (ConnectionResetError("reset"), "no connection"),
        (BrokenPipeError("broken"), "no connection"),
        (TimeoutError("late"), "no answer in time"),
        (socket.gaierror("no such host"), "no connection"),
        (aiohttp.ServerDisconnectedError(), "no connection"),
        (aiohttp.ClientPayloadError("cut"), "no connection"),
        (aiohttp.ServerTimeoutError(), "no answer in time"),
        (ReadTimeout("late"), "no answer in time"),
        (urllib.error.URLError("refused"), "no connection"),
        (urllib.error.HTTPError("http://h", 503, "busy", email.message.Message(), None), "HTTP 503"),
        (StatusError(503), "HTTP 503"),
    ],
)
def test_faults_are_recognised_when_another_package_raised_them(error: Exception, what: str) -> None:
    """S-DUR-61: any model's errors, by their shape."""
    fault = fault_of(error)
    assert fault is not None
    assert fault.what == what


def test_the_wish_for_patience_is_found_when_headers_are_a_plain_dict() -> None:
    """S-DUR-62: under either spelling."""
    fault = fault_of(StatusError(429))
    assert fault is not None
    assert fault.retry_after == "3"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a mistake"),
        KeyError("code"),
        OSError(28, "No space left on device"),
        NetworkError("a class of that name, of no known package"),
        StatusError("rate_limit_exceeded"),
        StatusError(7),
        StatusError(True),  # noqa: FBT003  what a sloppy package might keep there
        urllib.error.HTTPError("http://h", 404, "gone", email.message.Message(), None),
        SystemExit(500),
        ValidationError("no key"),
        IllegalStateError("the server did not start"),
        RateLimitTimeoutError(RateLimit.per_second(1), RateLimit.per_second(1).period),
        openai.OpenAIError("set a key"),
    ],
)
def test_it_is_no_fault_when_another_attempt_cannot_mend_it(error: BaseException) -> None:
    """S-DUR-61: never an error of user code, and none that says that something is set up wrongly."""
    assert fault_of(error) is None
