"""Reads error bodies of providers, and describes failures of TLS. It accepts any content of a body."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite
from typing import cast

from msgspec import Struct

CLIENT_ERROR, SERVER_ERROR = 400, 500  # first statuses of HTTP's classes
_STATUS_OF_CODE = {
    **dict.fromkeys(("invalid_request_error", "invalid_argument", "context_length_exceeded", "invalid_prompt"), 400),
    **dict.fromkeys(("invalid_api_key", "authentication_error", "unauthenticated", "unauthorized"), 401),
    **dict.fromkeys(("permission_error", "permission_denied", "forbidden"), 403),
    **dict.fromkeys(("not_found_error", "not_found", "model_not_found"), 404),
    **dict.fromkeys(("rate_limit_exceeded", "rate_limit_error", "rate_limited", "rate_limit_reached"), 429),
    **dict.fromkeys(("too_many_requests", "resource_exhausted", "throttling", "throttlingexception"), 429),
    **dict.fromkeys(("server_error", "internal_server_error", "internal_error", "internal", "api_error"), 500),
    **dict.fromkeys(("upstream_error", "bad_gateway", "provider_error"), 502),
    **dict.fromkeys(("overloaded_error", "overloaded", "engine_overloaded", "server_overloaded"), 503),
    **dict.fromkeys(("service_unavailable", "unavailable", "model_overloaded", "serviceunavailable"), 503),
    **dict.fromkeys(("timeout", "timeout_error", "gateway_timeout", "deadline_exceeded"), 504),
}
_OUT_OF_CREDIT_CODES = frozenset({
    "insufficient_quota", "insufficient_credits", "insufficient_balance", "insufficient_funds", "billing_error",
    "billing_hard_limit_reached", "billing_not_active", "billing_limit_reached", "credit_limit_exceeded",
    "credits_exhausted", "payment_required",
})  # fmt: skip
#: Messages of providers without such a code.
_OUT_OF_CREDIT = re.compile(
    r"insufficient_quota|insufficient (?:account )?(?:balance|credits?)|credit balance is too low"
    r"|requires more credits|you(?: have| are|'ve|'re) (?:run )?out of credits|used all available credits|does ?n[o']t have any credits"
    r"|exceeded your current quota, please check your plan|billing (?:hard )?limit has been reached"
    r"|reached (?:your|its) (?:monthly )?spending limit"
)
#: Messages of these other codes may quote the prompt, or name another limit.
_OTHER_CAUSE = re.compile(r"policy|policies|filter|safety|moderation|flagged|prompt|context_length|rate_limit")
_BAD_GENERATION_CODES = frozenset({"tool_use_failed", "json_validate_failed", "output_parse_failed"})
#: An endpoint could not read a tool call of the model.
_BAD_GENERATION = re.compile(
    r"failed to parse tool call|failed to call a function|tool call validation failed|tool_use_failed|json_validate_failed"
)
#: The request is longer than the model's context.
_TOO_LONG_CODES = frozenset({
    "context_length_exceeded", "context_window_exceeded", "exceed_context_size_error", "request_too_large",
    "string_above_max_length", "prompt_too_long",
})  # fmt: skip
_TOO_LONG = re.compile(
    r"(?:maximum|max) (?:context|model) len|exceeds? [^.]{0,60}context|context (?:length|window|size)[^.]{0,60}(?:exceed|only)"
    r"|(?:prompt|input) is too long|exceeds? the maximum number of (?:input )?tokens|too many (?:input )?tokens"
)
#: `try again in 6m0.5s`, `retry after 26 seconds`
_DELAY = re.compile(r"(?:try again|retry) (?:in|after):? ((?:\d{1,9}(?:\.\d{1,9})? ?[a-z]{1,12}[ ,]{0,2}){1,4})")
_SPAN = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([a-z]{1,12})")
#: By unit, or by its first three letters.
_UNITS_S = {
    "ms": 0.001, "mil": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "hou": 3600.0,
    "d": 86_400.0, "day": 86_400.0,
}  # fmt: skip
#: Members with a delay, and the unit in seconds.
_DELAYS_S = {
    "retry_after": 1.0, "retryafter": 1.0, "retry_after_seconds": 1.0, "retrydelay": 1.0, "retry_after_ms": 0.001,
}  # fmt: skip
_STATUS_MEMBERS = ("code", "status", "status_code", "http_status")  # OpenRouter and Google use the first
#: Members with the error, of a provider behind a gateway, too.
_INNER_MEMBERS = ("error", "errors", "metadata", "raw", "message", "detail", "details", "innererror")
_MESSAGE_MEMBERS = ("message", "detail", "msg", "error", "raw", "error_description")
_PAYMENT_REQUIRED = 402
_MAYBE_OUT_OF_CREDIT = frozenset({None, 400, 402, 403, 429})  # other messages may quote the prompt
_TOO_LARGE = 413
_MAYBE_TOO_LONG = frozenset({None, 400, 422, 500})  # other messages may quote the prompt
_MAYBE_BAD_GENERATION = frozenset({None, 400, 422, 500})  # llama.cpp answers 500, others 400 or 422
_MOST_PARTS = 50
_DEEPEST = 8
_LONGEST_BODY = 100_000
_LONGEST_TEXT = 2_000


class ErrorBody(Struct, frozen=True, kw_only=True):
    status: int | None = None  # HTTP status in the body, as a number or a code
    message: str = ""  # the message of a provider behind a gateway is last
    retry_after_s: float | None = None
    failed_generation: str = ""  # text of the model that the endpoint could not read
    is_out_of_credit: bool = False  # every attempt fails until a person pays
    is_bad_generation: bool = False  # another attempt may succeed
    is_too_long: bool = False  # the request does not fit the model's context


def read_error_body(body: object, status: int | None = None) -> ErrorBody:
    parts = list(islice(_parts(body, _DEEPEST), _MOST_PARTS))
    objects = [part for part in parts if isinstance(part, Mapping)]
    named_codes = (each.get(name) for each in objects for name in ("code", "type", "status", "reason"))
    codes = {code[:_LONGEST_TEXT].strip().lower() for code in named_codes if isinstance(code, str)}
    texts = list(dict.fromkeys(_texts(parts)))
    said = " ".join(texts).lower().replace("\u2019", "'")
    named = _named_status(objects, codes)
    seen = named if status is None or status < CLIENT_ERROR else status
    generations = (each.get("failed_generation") for each in objects)
    generation = next((each for each in generations if isinstance(each, str) and each.strip()), "")
    delay_s = _delay_in_members(objects)
    delay_s = _delay_in_text(said) if delay_s is None else delay_s
    is_bad = seen in _MAYBE_BAD_GENERATION and bool(
        codes & _BAD_GENERATION_CODES or generation or _BAD_GENERATION.search(said)
    )
    has_other_cause = any(_OTHER_CAUSE.search(code) for code in codes)
    # Gemini has the same message for a limit per minute, and adds a delay.
    is_in_text = (
        delay_s is None
        and seen in _MAYBE_OUT_OF_CREDIT
        and not has_other_cause
        and _OUT_OF_CREDIT.search(said) is not None
    )
    is_out_of_credit = bool(codes & _OUT_OF_CREDIT_CODES) or seen == _PAYMENT_REQUIRED or is_in_text
    if named is None:
        named = 400 if is_bad else 429 if is_out_of_credit else None
    return ErrorBody(
        status=named,
        message=": ".join(texts),
        retry_after_s=delay_s,
        failed_generation=generation[:_LONGEST_TEXT],
        is_out_of_credit=is_out_of_credit and not is_bad,
        is_bad_generation=is_bad,
        is_too_long=not is_bad
        and (
            bool(codes & _TOO_LONG_CODES)
            or seen == _TOO_LARGE
            or (seen in _MAYBE_TOO_LONG and _TOO_LONG.search(said) is not None)
        ),
    )


def _parts(value: object, depth: int) -> Iterator[Mapping[str, object] | str]:
    """Yield objects and texts, from the outermost inwards."""
    found = _decoded(value)
    if isinstance(found, str):
        yield found
    elif depth and isinstance(found, Mapping):
        entry = cast("Mapping[str, object]", found)
        yield entry
        inner = [_decoded(entry.get(name)) for name in _INNER_MEMBERS]
        for each in inner:
            yield from _parts(each, depth - 1) if not isinstance(each, str) else ()
    elif depth and isinstance(found, list):
        for each in cast("Sequence[object]", found)[:_MOST_PARTS]:
            yield from _parts(each, depth - 1) if isinstance(each, Mapping) else ()


def _decoded(value: object) -> object:
    """Parse a text with an object or a list; return any other value unchanged."""
    text = value[:_LONGEST_BODY].decode(errors="replace") if isinstance(value, bytes) else value
    if not isinstance(text, str) or text.lstrip()[:1] not in {"{", "["} or len(text) > _LONGEST_BODY:
        return text
    try:
        return cast("object", json.loads(text))
    except (ValueError, RecursionError):
        return text


def _texts(parts: Iterable[Mapping[str, object] | str]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, str):
            found = part
        else:
            texts = (_decoded(part.get(name)) for name in _MESSAGE_MEMBERS)
            found = next((each for each in texts if isinstance(each, str) and each.strip()), "")
        text = " ".join(found[: 4 * _LONGEST_TEXT].split())[:_LONGEST_TEXT]
        if text:
            yield text


def _named_status(objects: Sequence[Mapping[str, object]], codes: Iterable[str]) -> int | None:
    for entry in objects:
        for name in _STATUS_MEMBERS:
            value = entry.get(name)
            if isinstance(value, str) and re.fullmatch(r"[45][0-9]{2}", value):
                return int(value)
            if isinstance(value, int) and value in range(CLIENT_ERROR, 600):
                return int(value)
    known = sorted(_STATUS_OF_CODE[code] for code in codes if code in _STATUS_OF_CODE)
    # A general code may accompany a more specific one.
    return max(known, key=lambda status: status not in {400, 500}, default=None)


def _delay_in_members(objects: Sequence[Mapping[str, object]]) -> float | None:
    for name, value in (member for entry in objects for member in entry.items()):
        unit_s = _DELAYS_S.get(name.lower().replace("-", "_"))
        if unit_s is None or isinstance(value, bool):
            continue
        if isinstance(value, str):
            number = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)s?", value.strip())
            if number is not None:
                return float(number[1]) * unit_s
        elif isinstance(value, int | float) and 0 <= value < 10**9 and isfinite(value):
            return float(value) * unit_s
    return None


def _delay_in_text(said: str) -> float | None:
    asked = _DELAY.search(said)
    if asked is None:
        return None
    total_s = 0.0
    for number, unit in _SPAN.findall(asked[1]):
        unit_s = _UNITS_S.get(unit) or _UNITS_S.get(unit[:3])
        if unit_s is None:
            return total_s or None
        total_s += float(number) * unit_s
    return total_s


_TRUST = (
    "To trust it, set SSL_CERT_FILE to a PEM file with the certificate of its authority (of itself, where it is "
    "self-signed) before the program starts"
)
_NOT_TLS = "it does not speak TLS at this port. Use http:// in the URL, or the port of HTTPS"
#: By OpenSSL's number.
_CERTIFICATES = {
    9: "its certificate is not valid yet. Check the clock of this machine",
    10: "its certificate has expired. Its owner must renew it; check the clock of this machine, too",
    18: f"its certificate is self-signed. {_TRUST}",
    19: f"its certificate is of an authority that this machine does not trust. {_TRUST}",
    20: f"its certificate is of an authority that this machine does not know. {_TRUST}",
    21: f"its certificate is of an authority that this machine does not know. {_TRUST}",
    23: "its certificate is revoked. Ask its owner",
    62: "its certificate is for another host. Use the host name of the certificate in the URL",
    64: "its certificate is for another host. Use the host name of the certificate in the URL",
}
#: Other permanent failures of a handshake, by OpenSSL's reason.
_HANDSHAKES = {
    **dict.fromkeys(("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE"), _NOT_TLS),
    **dict.fromkeys(
        ("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "SSLV3_ALERT_HANDSHAKE_FAILURE"),
        "it has no version or cipher of TLS in common with this machine",
    ),
    **dict.fromkeys(
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "TLSV1_ALERT_UNKNOWN_CA", "SSLV3_ALERT_BAD_CERTIFICATE"),
        "it wants a certificate of this client, which has none that it takes",
    ),
}
#: Attributes with the error below: of aiohttp, urllib, urllib3 and Python.
_BELOW = ("certificate_error", "os_error", "reason", "__cause__", "__context__")
_MOST_LINKS = 32


def tls_flaw(error: BaseException | None) -> str:
    """Return the problem with a certificate or a port, and advice; "" for any other error."""
    ssl = sys.modules.get("ssl")
    if ssl is None:
        return ""
    for each in _chain(error):
        if isinstance(each, ssl.SSLError):
            code, text = getattr(each, "verify_code", None), str(getattr(each, "verify_message", "") or "")
            if isinstance(code, int) and text:
                known = _CERTIFICATES.get(code, f"its certificate cannot be verified. {_TRUST}")
                return f"{known} ({text.rstrip('.')})"
            reason = str(getattr(each, "reason", ""))
            if reason in _HANDSHAKES:
                return f"{_HANDSHAKES[reason]} ({reason})"
    return ""


def _chain(error: object) -> Iterator[BaseException]:
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _MOST_LINKS:
        each = waiting.pop(0)
        if not isinstance(each, BaseException) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [getattr(each, name, None) for name in _BELOW]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions
