"""Failures as the provider's errors: class, text, advice, and no key."""

from __future__ import annotations

import json
import subprocess
import sys

import openai
import pytest

from ensemble_ray.errors import portable
from ensemble_ray.llm.failures import CallFailure, CallOrigin, build_provider_error

ORIGIN = CallOrigin(url="https://user:pw@host:8443/v1/chat/completions", model="m", key="sk-very-secret", timeout_s=600)


def status(code: int, message: str = "because", **headers: str) -> CallFailure:
    """A failure with that status and a provider's error body."""
    body = json.dumps({"error": {"message": message, "code": "some_code", "type": "t"}}).encode()
    return CallFailure(status=code, body=body, headers=headers)


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        (
            status(401),
            openai.AuthenticationError,
            (
                "Endpoint https://host:8443/v1 refused the key (HTTP 401): because. A key was sent; set OPENAI_API_KEY, or "
                "pass `api_key`, to one that is valid there."
            ),
        ),
        (
            status(403),
            openai.PermissionDeniedError,
            "Endpoint https://host:8443/v1 does not allow this (HTTP 403): because.",
        ),
        (
            status(404),
            openai.NotFoundError,
            (
                "Endpoint https://host:8443/v1 does not know the model or the path (HTTP 404): because. Check the model's "
                "name, 'm', and `base_url`: it ends where the protocol begins, often /v1."
            ),
        ),
        (
            status(429, **{"retry-after": "7"}),
            openai.RateLimitError,
            (
                "Endpoint https://host:8443/v1 refused the request for now (HTTP 429): because. It asks to wait 7 s. Set a "
                "`rate_limit`, or check the account's quota."
            ),
        ),
        (
            status(400),
            openai.BadRequestError,
            "Endpoint https://host:8443/v1 refused the request (HTTP 400): because.",
        ),
        (
            status(503),
            openai.InternalServerError,
            "Endpoint https://host:8443/v1 failed (HTTP 503): because.",
        ),
        (
            CallFailure(status=418, body=b"<html>\n teapot</html>"),
            openai.APIStatusError,
            "Endpoint https://host:8443/v1 refused the request (HTTP 418): <html> teapot</html>.",
        ),
        (
            CallFailure(status=500),
            openai.InternalServerError,
            "Endpoint https://host:8443/v1 failed (HTTP 500).",
        ),
        (
            CallFailure(reason="Connection refused"),
            openai.APIConnectionError,
            (
                "Cannot reach endpoint https://host:8443/v1: Connection refused. Check that it is running and that "
                "`base_url` (or OPENAI_BASE_URL) is right."
            ),
        ),
        (
            CallFailure(timed_out=True),
            openai.APITimeoutError,
            (
                "Endpoint https://host:8443/v1 gave no answer within 600 s. Raise `timeout`, or check that the endpoint "
                "and the model are up."
            ),
        ),
        (
            CallFailure(status=200, body=b"<html>", reason="it is not JSON: <html>"),
            openai.APIResponseValidationError,
            "Endpoint https://host:8443/v1 sent an answer that cannot be used: it is not JSON: <html>",
        ),
        (
            CallFailure(status=200, body=b'{"error": "no credit"}', reason="no credit", is_from_provider=True),
            openai.APIError,
            "Endpoint https://host:8443/v1 sent an answer that cannot be used: no credit",
        ),
    ],
)
async def test_class_and_text_tell_the_failure_when_a_call_fails(
    failure: CallFailure, kind: type[Exception], text: str
) -> None:
    """S-ERR-31: the provider's own class; the text says what, where and what to do, also after a journey."""
    error = await build_provider_error(failure, ORIGIN)
    assert type(error) is kind
    assert str(error) == text
    assert getattr(error, "message", None) == text
    travelled = portable(error)
    assert (type(travelled).__name__, str(travelled)) == (kind.__name__, text)


async def test_the_key_is_blacked_out_when_the_provider_echoes_it() -> None:
    """S-ERR-39, S-CONV-22: in text and body of the error."""
    error = await build_provider_error(status(401, "Incorrect key sk-very-secret"), ORIGIN)
    assert isinstance(error, openai.AuthenticationError)
    shown = f"{error!r} {error.body!r} {error.response.text} {error.response.headers} {error.request.headers} {ORIGIN}"
    assert "Incorrect key ***" in str(error)
    assert "sk-very-secret" not in shown
    assert "pw" not in shown


async def test_the_error_says_so_when_no_key_was_sent() -> None:
    """S-ERR-39: whether a key was sent is told, never which."""
    origin = CallOrigin(url="http://h/v1/chat/completions", model="m", key="", timeout_s=1)
    assert "No key was sent" in str(await build_provider_error(status(401), origin))


async def test_details_are_there_when_the_provider_gave_them() -> None:
    """S-ERR-31: whoever knows the package finds code, request id and headers where they always are."""
    error = await build_provider_error(status(429, **{"x-request-id": "r1", "retry-after": "1"}), ORIGIN)
    assert isinstance(error, openai.RateLimitError)
    assert (error.code, error.request_id, error.response.headers["retry-after"]) == ("some_code", "r1", "1")
    assert error.__cause__ is None


async def test_the_transports_error_is_the_cause_when_nothing_answered() -> None:
    """S-ERR-31: the chain goes on to what was at the bottom."""
    cause = ConnectionRefusedError(111, "Connection refused")
    error = await build_provider_error(CallFailure(reason="Connection refused", cause=cause), ORIGIN)
    assert error.__cause__ is cause


@pytest.mark.program
def test_failures_are_told_while_the_package_of_the_errors_is_being_imported() -> None:
    """Many calls fail at once in a fresh process: half an import gives nobody an `AttributeError`."""
    code = """
import asyncio
from ensemble_ray.llm.failures import CallFailure, CallOrigin, build_provider_error

async def failed(number):
    await asyncio.sleep(number / 100)  # some of them meet the import on its way
    origin = CallOrigin(url="http://host/v1/chat/completions", model="m", key="k", timeout_s=1)
    return await build_provider_error(CallFailure(status=400, body=b"{}"), origin)

async def main():
    print(*{type(error).__name__ for error in await asyncio.gather(*map(failed, range(100)))})

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)  # noqa: S603  our own code
    assert done.stdout.split() == ["BadRequestError"]
