"""Error bodies of many providers: what they mean."""

from __future__ import annotations

import json

import pytest

from ensemble_ray.errors.bodies import read_error_body


def error(**members: object) -> dict[str, object]:
    """A body in the form of OpenAI."""
    return {"error": members}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (error(message="limited", code=429), 429),
        (error(message="bad gateway", code="502"), 502),
        (error(message="slow down", code="rate_limit_exceeded", type="invalid_request_error"), 429),
        (error(message="busy", type="overloaded_error"), 503),
        (error(message="oops", type="server_error", code=None), 500),
        (error(message="busy", status="UNAVAILABLE"), 503),
        ([error(code=429, status="RESOURCE_EXHAUSTED")], 429),
        ({"type": "error", "error": {"type": "rate_limit_error", "message": "limited"}}, 429),
        ({"code": 503, "message": "no capacity"}, 503),
        ({"detail": "no route"}, None),
        (error(message="code 7", code=7), None),
        (error(message="code true", code=True), None),
        ({"error": "no credit"}, None),
        ("<html>502 Bad Gateway</html>", None),
    ],
)
def test_the_status_is_read_when_a_body_names_it(body: object, status: int | None) -> None:
    """S-LLM-20: a number, a number as text, or a named code; the same from bytes and from data."""
    assert read_error_body(body).status == status
    raw = body if isinstance(body, str) else json.dumps(body)
    assert read_error_body(raw.encode()).status == status


@pytest.mark.parametrize(
    ("body", "delay_s"),
    [
        (error(message="limited", retry_after=3), 3.0),
        (error(message="limited", metadata={"retry_after_seconds": "2.5"}), 2.5),
        (error(message="limited", retry_after_ms=1500), 1.5),
        (error(message="Rate limit reached. Please try again in 1.5s. Visit https://x"), 1.5),
        (error(message="Please try again in 20ms."), 0.02),
        (error(message="Please try again in 7m26.4s."), 446.4),
        (error(message="Please retry after 26 seconds."), 26.0),
        (error(message="try again in 1 hour, 2 minutes"), 3720.0),
        (
            [
                error(
                    code=429,
                    message="Quota exceeded",
                    details=[{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "17s"}],
                )
            ],
            17.0,
        ),
        (error(message="try again in a while"), None),
        (error(message="limited", retry_after=-1), None),
        (error(message="limited", retry_after="Infinity"), None),
        (error(message="try again in 3 fortnights"), None),
    ],
)
def test_the_delay_is_read_when_a_body_asks_for_one(body: object, delay_s: float | None) -> None:
    """S-LLM-20: members of many names, Google's `RetryInfo`, and the texts of OpenAI, Groq and Azure."""
    found = read_error_body(body).retry_after_s
    assert found == (None if delay_s is None else pytest.approx(delay_s))


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (429, error(message="You exceeded your current quota", type="insufficient_quota", code="insufficient_quota")),
        (429, error(message="You exceeded your current quota, please check your plan and billing details.")),
        (400, error(message="Billing hard limit has been reached", code="billing_hard_limit_reached")),
        (400, {"error": {"type": "invalid_request_error", "message": "Your credit balance is too low to access it"}}),
        (402, error(message="Insufficient Balance")),
        (402, b""),
        (403, {"error": "Your team has used all available credits or reached its monthly spending limit."}),
        (None, error(message="This request requires more credits", code=402)),
        (200, error(message="quota", code="insufficient_credits")),
        (429, error(message="Error code: 429 - {'error': {'type': 'insufficient_quota'}}")),
    ],
)
def test_an_account_without_credit_is_recognised(status: int | None, body: object) -> None:
    """S-LLM-21: by code, by HTTP 402, and by the words of providers that have no code for it."""
    assert read_error_body(body, status).is_out_of_credit


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (429, error(message="Rate limit reached. Please try again in 1.5s", code="rate_limit_exceeded")),
        (
            429,
            [
                error(
                    status="RESOURCE_EXHAUSTED",
                    message="You exceeded your current quota, please check your plan and billing details.",
                    details=[{"retryDelay": "17s"}],
                )
            ],
        ),
        (500, error(message="the prompt says: my credit balance is too low")),
        (403, error(message="no access to this model")),
        (429, b"busy"),
    ],
)
def test_a_limit_is_no_lack_of_credit_when_waiting_helps(status: int, body: object) -> None:
    """S-LLM-21: a limit per minute that asks to come again is a rate limit, whatever else it says."""
    assert not read_error_body(body, status).is_out_of_credit


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, error(message="Failed to call a function.", code="tool_use_failed", failed_generation="<function=a{}>")),
        (400, error(message="Failed to parse tool call arguments as JSON")),
        (500, error(code=500, message="Failed to parse tool call arguments as JSON: parse error at 7")),
        (400, error(message="Failed to generate JSON", code="json_validate_failed", failed_generation='{"a": ')),
        (200, error(message="tool call validation failed: parameters for tool a did not match schema", code=400)),
    ],
)
def test_a_bad_generation_is_recognised(status: int, body: object) -> None:
    """S-LLM-22: the endpoint refuses what its own model wrote."""
    found = read_error_body(body, status)
    assert found.is_bad_generation
    assert not found.is_out_of_credit


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, error(message="messages: must end with a user message", type="invalid_request_error")),
        (429, error(message="limited", failed_generation="<function>")),
        (400, error(message="tools.0: schema is not valid", code="invalid_function_parameters")),
    ],
)
def test_a_refused_request_is_no_bad_generation(status: int, body: object) -> None:
    """S-LLM-22: what this client sent is refused again next time."""
    assert not read_error_body(body, status).is_bad_generation


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (error(message="because"), "because"),
        (
            error(message="Provider returned error", code=400, metadata={"raw": '{"error": {"message": "too long"}}'}),
            "Provider returned error: too long",
        ),
        (
            error(message="Provider returned error", metadata={"raw": "upstream is busy"}),
            "Provider returned error: upstream is busy",
        ),
        (error(message='{"error": {"message": "inner", "code": 429}}'), "inner"),
        ([error(message="of Gemini")], "of Gemini"),
        ({"detail": "of FastAPI"}, "of FastAPI"),
        ({"detail": [{"loc": ["body"], "msg": "field required"}]}, "field required"),
        ({"message": "bare"}, "bare"),
        ({"error": "a text"}, "a text"),
        ("plain text", "plain text"),
        ({"error": {"message": "same", "metadata": {"raw": "same"}}}, "same"),
        ({"choices": []}, ""),
    ],
)
def test_the_innermost_message_is_read(body: object, message: str) -> None:
    """S-LLM-23: gateways wrap the words of the provider behind them."""
    assert read_error_body(body).message == message


@pytest.mark.parametrize(
    "body",
    [
        None,
        7,
        [],
        {},
        [[[[]]]],
        {"error": {"error": {"error": {"error": {"error": {"error": {"error": {"error": {"error": 1}}}}}}}}},
        b"\xff\xfe\x00",
        "[" * 90_000,
        {"error": {"message": None, "code": {}, "type": [], "details": {"retryDelay": {}}}},
        {"error": {"message": "try again in " + "9" * 50_000 + "s"}},
    ],
)
def test_nothing_is_raised_when_a_body_is_hostile(body: object) -> None:
    """S-LLM-20: whatever a body holds."""
    found = read_error_body(body)
    assert not found.is_out_of_credit
    assert not found.is_bad_generation
