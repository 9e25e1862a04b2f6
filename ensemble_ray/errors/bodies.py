"""What a provider's error body means: its status, the delay that it asks for, its innermost message. Package: errors; pure.

In: the body of an error as bytes, text or decoded JSON, of any provider. Out: an `ErrorBody`. Imports nothing of ours.
Never: an exception because of what a body holds.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from typing import cast

#: The statuses that named codes stand for; the names are in lower case.
_STATUS_OF_CODE = {
    **dict.fromkeys(("invalid_request_error", "invalid_argument", "context_length_exceeded"), 400),
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
#: What providers without such a code write.
_OUT_OF_CREDIT = re.compile(
    r"insufficient_quota|insufficient (?:account )?(?:balance|credits?)|credit balance is too low"
    r"|requires more credits|you(?: have| are|'ve|'re) (?:run )?out of credits|used all available credits|does ?n[o']t have any credits"
    r"|exceeded your current quota, please check your plan|billing (?:hard )?limit has been reached"
    r"|reached (?:your|its) (?:monthly )?spending limit"
)
#: Parts of codes of refusals whose texts may quote the prompt, or name another limit.
_OTHER_CAUSE = re.compile(r"policy|policies|filter|safety|moderation|flagged|prompt|context_length|rate_limit")
_BAD_GENERATION_CODES = frozenset({"tool_use_failed", "json_validate_failed", "output_parse_failed"})
#: How endpoints name a tool call of the model that they cannot read.
_BAD_GENERATION = re.compile(
    r"failed to parse tool call|failed to call a function|tool call validation failed|tool_use_failed|json_validate_failed"
)
#: `try again in 6m0.5s`, `retry after 26 seconds`
_DELAY = re.compile(r"(?:try again|retry) (?:in|after):? ((?:\d{1,9}(?:\.\d{1,9})? ?[a-z]{1,12}[ ,]{0,2}){1,4})")
_SPAN = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([a-z]{1,12})")
#: By the unit, or its first three letters.
_UNITS_S = {
    "ms": 0.001, "mil": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "hou": 3600.0,
    "d": 86_400.0, "day": 86_400.0,
}  # fmt: skip
#: Members that hold a delay, and its unit in seconds.
_DELAYS_S = {
    "retry_after": 1.0, "retryafter": 1.0, "retry_after_seconds": 1.0, "retrydelay": 1.0, "retry_after_ms": 0.001,
}  # fmt: skip
#: Members that hold the status as a number; the first is OpenRouter's and Google's.
_STATUS_MEMBERS = ("code", "status", "status_code", "http_status")
#: Members that hold the error itself, or the error of the provider behind a gateway.
_INNER_MEMBERS = ("error", "errors", "metadata", "raw", "message", "detail", "details", "innererror")
_MESSAGE_MEMBERS = ("message", "detail", "msg", "error", "raw", "error_description")
_PAYMENT_REQUIRED = 402
#: Refusals whose text is searched for a lack of credit; texts of other ones may quote the prompt.
_MAYBE_OUT_OF_CREDIT = frozenset({None, 400, 402, 403, 429})
#: llama.cpp answers 500, others 400 or 422.
_MAYBE_BAD_GENERATION = frozenset({None, 400, 422, 500})
#: Objects of a body that are read, and how deep they are nested in each other.
_MOST_PARTS = 50
_DEEPEST = 8
_LONGEST_BODY = 100_000
_LONGEST_TEXT = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """What is known of an error by its body."""

    #: the HTTP status that it names, as a number or by a code; None: it names none
    status: int | None = None
    #: the provider's own words, those of the provider behind a gateway last; empty: there are none
    message: str = ""
    #: the delay that it asks for, s
    retry_after_s: float | None = None
    #: what the model wrote, where the endpoint could not read it
    failed_generation: str = ""
    #: the account has no credit or quota: no attempt succeeds before a person pays
    is_out_of_credit: bool = False
    #: the endpoint refused what its own model wrote, such as a malformed tool call: another attempt may succeed
    is_bad_generation: bool = False


def read_error_body(body: object, status: int | None = None) -> ErrorBody:
    """Return what an error body means.

    Args:
        body: Bytes, text, or decoded JSON: the whole body or the object under `error`.
        status: The HTTP status that it came with; None: there is none that says something.
    """
    parts = list(islice(_parts(body, _DEEPEST), _MOST_PARTS))
    objects = [part for part in parts if isinstance(part, Mapping)]
    codes = {code for each in objects for code in _codes(each)}
    texts = list(dict.fromkeys(_texts(parts)))
    said = " ".join(texts).lower().replace("\u2019", "'")
    named = _named_status(objects, codes)
    seen = named if status is None or status < 400 else status  # noqa: PLR2004  HTTP's own classes
    generations = (each.get("failed_generation") for each in objects)
    generation = next((each for each in generations if isinstance(each, str) and each.strip()), "")
    delay_s = _delay_s(objects, said)
    is_bad = seen in _MAYBE_BAD_GENERATION and bool(
        codes & _BAD_GENERATION_CODES or generation or _BAD_GENERATION.search(said)
    )
    has_other_cause = any(_OTHER_CAUSE.search(code) for code in codes)
    # Gemini uses the same words for a limit per minute, and adds a delay.
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
    )


def _parts(value: object, depth: int) -> Iterator[Mapping[str, object] | str]:
    """Yield the objects and texts of an error, each before those that it holds."""
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
    """Return the object or list that a text is as JSON; anything else as it is."""
    text = value[:_LONGEST_BODY].decode(errors="replace") if isinstance(value, bytes) else value
    if not isinstance(text, str) or text.lstrip()[:1] not in {"{", "["} or len(text) > _LONGEST_BODY:
        return text
    try:
        return cast("object", json.loads(text))
    except (ValueError, RecursionError):
        return text


def _codes(entry: Mapping[str, object]) -> Iterator[str]:
    for name in ("code", "type", "status", "reason"):
        code = entry.get(name)
        if isinstance(code, str):
            yield code[:_LONGEST_TEXT].strip().lower()


def _texts(parts: Iterable[Mapping[str, object] | str]) -> Iterator[str]:
    """Yield the messages of an error, the outermost first."""
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
    """Return the status that an error names: a number where there is one, else what its codes stand for."""
    for entry in objects:
        for name in _STATUS_MEMBERS:
            value = entry.get(name)
            if isinstance(value, str) and re.fullmatch(r"[45][0-9]{2}", value):
                return int(value)
            if isinstance(value, int) and 400 <= value <= 599:  # noqa: PLR2004  HTTP's own classes
                return int(value)
    known = sorted(_STATUS_OF_CODE[code] for code in codes if code in _STATUS_OF_CODE)
    # A general type may stand beside a code that says more.
    return max(known, key=lambda status: status not in {400, 500}, default=None)


def _delay_s(objects: Sequence[Mapping[str, object]], said: str) -> float | None:
    for entry in objects:
        for name, value in entry.items():
            unit_s = _DELAYS_S.get(name.lower().replace("-", "_"))
            found = None if unit_s is None else _number(value)
            if unit_s is not None and found is not None:
                return found * unit_s
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


def _number(value: object) -> float | None:
    """Return a number of JSON, or one in a text such as `17s`."""
    if isinstance(value, str):
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)s?", value.strip())
        return None if found is None else float(found[1])
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < 10**9 and isfinite(value) else None


_TRUST = (
    "To trust it, set SSL_CERT_FILE to a PEM file with the certificate of its authority (of itself, where it is "
    "self-signed) before the program starts"
)
_NOT_TLS = "it does not speak TLS at this port. Use http:// in the URL, or the port of HTTPS"
#: What is wrong with a certificate, by the number of OpenSSL, and what to do.
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
#: Other failures of a handshake that last, by the reason that OpenSSL names.
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
#: Where errors hold the one below: aiohttp, urllib, urllib3.
_BELOW = ("certificate_error", "os_error", "reason", "__cause__", "__context__")
_MOST_LINKS = 32


def tls_flaw(error: BaseException | None) -> str:
    """Return what is wrong with a certificate or a port, and what to do; empty where it is anything else.

    Args:
        error: What a client of HTTP raised; the errors below it are searched, too.
    """
    ssl = sys.modules.get("ssl")
    if ssl is None:  # so it is no error of TLS
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
    """Yield an error and those below it, each once."""
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
