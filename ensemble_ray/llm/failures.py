"""Failures of model calls: errors of the `openai` package, delays before retries, and URLs of endpoints.

The package is imported in a thread on the first failure, because that takes a second of CPU. No text contains a key
(S-ERR-31, S-ERR-39).
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http import HTTPStatus
from math import isfinite
from typing import Any, cast
from urllib.parse import unquote, unquote_plus, urlencode, urlsplit

import msgspec
from msgspec import Struct

from ensemble_ray.errors import EnsembleError, message_of
from ensemble_ray.errors.bodies import CLIENT_ERROR, SERVER_ERROR, ErrorBody, read_error_body, tls_flaw
from ensemble_ray.errors.travel import provider_answer_of, status_of
from ensemble_ray.llm.protocol.wire import WireError, format_foreign, parse_json
from ensemble_ray.process.concurrency import threads
from ensemble_ray.text.foreign_text import one_line, whole_data

_TOO_MANY_REQUESTS = 429
_RETRIABLE = frozenset({408, 409, _TOO_MANY_REQUESTS})
_DELAY_HEADERS = ("retry-after", "retry-after-ms")
_LONGEST_RETRY_AFTER = 64  # characters; a date has 29
_FIRST_DELAY_S = 0.5  # delays of models with `max_retries`, s
_LONGEST_DELAY_S = 8.0
_LONGEST_REQUESTED_DELAY_S = 120.0  # the model raises the failure if the server requests a longer delay
_MOST_DOUBLINGS = 60  # 2.0 ** 5000 overflows
_ARRIVED_AT = "_ensemble_ray_arrived_at"
_SHORTEST_SECRET = 4  # shorter secrets are placeholders such as `x`
_HEADER_LENGTH = 200
_REASON_LENGTH = 500

#: No connection, a broken one, or no answer in time; by package, because names are shared.
_CONNECTION_ERRORS = {
    "builtins": frozenset({"ConnectionError", "TimeoutError"}),
    "socket": frozenset({"gaierror"}),
    "openai": frozenset({"APIConnectionError"}),
    "anthropic": frozenset({"APIConnectionError"}),
    "httpx": frozenset({"TimeoutException", "NetworkError", "RemoteProtocolError"}),
    "httpx2": frozenset({"TimeoutException", "NetworkError", "RemoteProtocolError"}),
    "httpcore": frozenset({"TimeoutException", "NetworkError", "RemoteProtocolError"}),
    "aiohttp": frozenset({"ClientConnectionError", "ClientPayloadError"}),
    "requests": frozenset({"ConnectionError", "Timeout", "ChunkedEncodingError"}),
    "urllib": frozenset({"URLError"}),
}


class ProviderFault(Struct, frozen=True, kw_only=True):
    what: str  # `HTTP 503`, `no connection`, `no answer in time`
    text: str
    status: int | None = None  # None: no answer
    retry_after: str | None = None  # in the form of `Retry-After`
    ago_s: float = 0.0  # age; the import of a package may have delayed the error
    is_bad_generation: bool = False  # the endpoint cannot parse the output of its model (S-LLM-22)

    @property
    def is_refusal_for_now(self) -> bool:
        """Whether the endpoint works and asks for fewer calls (S-DUR-64, S-DUR-65)."""
        return self.status == _TOO_MANY_REQUESTS


def fault_of(error: BaseException) -> ProviderFault | None:
    # `sys.exit` in a model has no status.
    if isinstance(error, EnsembleError) or not isinstance(error, Exception):
        return None
    status, body = status_of(error), provider_answer_of(error)
    if body.is_out_of_credit or body.is_too_long:
        return None
    if status is None or status < CLIENT_ERROR:
        status = body.status or status
    arrived_at: object = getattr(error, _ARRIVED_AT, None)
    ago_s = max(0.0, time.monotonic() - arrived_at) if isinstance(arrived_at, float) else 0.0
    if status is not None:
        if not is_retriable(status) and not body.is_bad_generation:
            return None
        return ProviderFault(
            what=f"HTTP {status}",
            text=message_of(error),
            status=status,
            retry_after=retry_after_in(_delay_headers(error), body),
            ago_s=ago_s,
            is_bad_generation=body.is_bad_generation,
        )
    classes = [(each.__module__.partition(".")[0], each.__name__) for each in type(error).__mro__]
    if tls_flaw(error) or not any(name in _CONNECTION_ERRORS.get(package, ()) for package, name in classes):
        return None
    is_late = any("Timeout" in name for _, name in classes)
    what = "no answer in time" if is_late else "no connection"
    return ProviderFault(what=what, text=message_of(error), ago_s=ago_s)


def _delay_headers(error: BaseException) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for holder in (error, getattr(error, "response", None)):
        get: object = getattr(getattr(holder, "headers", None), "get", None)
        if not callable(get):
            continue
        for name in _DELAY_HEADERS:
            # A plain dict contains one spelling only.
            value: object = get(name) or get(name.title())
            if value is not None:
                found[name] = str(value)
    return found


def is_retriable(status: int) -> bool:
    return status in _RETRIABLE or status in range(SERVER_ERROR, 600)


def backoff_s(attempt: int, *, first_s: float, longest_s: float, jitter: float) -> float:
    """Return a delay that doubles per attempt, minus up to half, by `jitter` in [0, 1) (S-DUR-62)."""
    delay_s = min(longest_s, first_s * 2.0 ** min(attempt - 1, _MOST_DOUBLINGS))
    return delay_s * (1 - 0.5 * jitter)


def patience_asked_s(retry_after: str | None, now: float) -> float | None:
    """Parse a `Retry-After` at a Unix time; None if it is invalid."""
    # Python parses more than HTTP allows: other digits, infinity, texts of any length.
    if not retry_after or len(retry_after) > _LONGEST_RETRY_AFTER or not retry_after.isascii():
        return None
    try:
        requested_s = float(retry_after)
    except ValueError:
        pass
    else:
        return max(0.0, requested_s) if isfinite(requested_s) else None
    try:
        at: float = parsedate_to_datetime(retry_after).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):  # a year 0, a month 13, a zone of a thousand hours
        return None
    return max(0.0, at - now)


def retry_after_in(headers: Mapping[str, str], body: ErrorBody) -> str | None:
    """Return the delay in the form of `Retry-After` (S-LLM-20)."""
    requested_ms = patience_asked_s(headers.get("retry-after-ms"), 0.0)
    if requested_ms is not None:
        return f"{requested_ms / 1000:g}"
    in_header = headers.get("retry-after")
    if in_header is not None or body.retry_after_s is None:
        return in_header
    return f"{body.retry_after_s:g}"


def delay_before_retry(
    status: int | None, *, attempt: int, retry_after: str | None, jitter: float, now: float
) -> float | None:
    """Return the delay for a model with `max_retries`; None if a retry cannot help (S-SET-10)."""
    if status is not None and not is_retriable(status):
        return None
    requested_s = patience_asked_s(retry_after, now)
    if requested_s is not None:
        return requested_s if requested_s <= _LONGEST_REQUESTED_DELAY_S else None
    return backoff_s(attempt, first_s=_FIRST_DELAY_S, longest_s=_LONGEST_DELAY_S, jitter=jitter)


_PROVIDERS = {
    "api.openai.com": "openai",
    "openai.azure.com": "azure.ai.openai",
    "cognitiveservices.azure.com": "azure.ai.openai",
    "services.ai.azure.com": "azure.ai.inference",
    "api.anthropic.com": "anthropic",
    "generativelanguage.googleapis.com": "gcp.gemini",
    "aiplatform.googleapis.com": "gcp.vertex_ai",
    "amazonaws.com": "aws.bedrock",
    "api.mistral.ai": "mistral_ai",
    "api.groq.com": "groq",
    "api.deepseek.com": "deepseek",
    "api.perplexity.ai": "perplexity",
    "api.x.ai": "x_ai",
    "api.cohere.ai": "cohere",
}


@lru_cache(maxsize=256)
def shown_url(url: str) -> str:
    """Remove user and query from a URL or another text (S-SEC-67)."""
    parts = None
    with suppress(ValueError):
        parts = urlsplit(url)
    if parts is None or not (parts.scheme and parts.netloc):
        return url.partition("?")[0].partition("#")[0].rpartition("@")[2]
    # An unescaped password may contain characters that end a host.
    path = "/..." if "@" in parts.path else parts.path
    more = "?..." if parts.query or parts.fragment else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}{more}"


def flaw_of(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        return f"must begin with http:// or https://, got: {shown_url(url)}"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "is no URL: its host or its port cannot be read. Signs such as / ? # @ in a password are written %2F %3F %23 %40"
    return "" if parts.hostname else "is no URL: it names no host"


@lru_cache(maxsize=256)
def provider_of(url: str) -> str:
    """Return OpenTelemetry's name of the provider, or the host, or "".

    Examples:
        >>> provider_of("https://team.openai.azure.com/openai/v1"), provider_of("http://10.0.0.7:8000/v1")
        ('azure.ai.openai', '10.0.0.7')
    """
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return ""
    known = (name for end, name in _PROVIDERS.items() if host == end or host.endswith(f".{end}"))
    return next(known, host)


def resource_url(base_url: str, path: str, query: Mapping[str, object] | None = None) -> str:
    """Return the URL of a resource below a base URL; `query` replaces parameters of the same name.

    Examples:
        >>> resource_url("https://x.openai.azure.com/openai/deployments/gpt?api-version=1", "/chat/completions")
        'https://x.openai.azure.com/openai/deployments/gpt/chat/completions?api-version=1'
    """
    place, _, found = base_url.partition("#")[0].partition("?")
    more = {name: str(value).lower() if isinstance(value, bool) else value for name, value in (query or {}).items()}
    pairs = [pair for pair in found.split("&") if pair and unquote_plus(pair.partition("=")[0]) not in more]
    whole = "&".join([*pairs, urlencode(more, doseq=True)] if more else pairs)
    return f"{place.rstrip('/')}{path}{f'?{whole}' if whole else ''}"


def key_headers(base_url: str, key: str) -> dict[str, str]:
    """Azure needs a second header (S-LLM-27)."""
    if not key:
        return {}
    headers = {"Authorization": f"Bearer {key}"}
    return {**headers, "api-key": key} if provider_of(base_url).startswith("azure.") else headers


def secrets_of(url: str) -> set[str]:
    try:
        parts = urlsplit(url)
    except ValueError:
        return set()
    found = {parts.password or "", parts.fragment}
    pairs = (pair.partition("=") for pair in parts.query.split("&"))
    found.update(value for name, _, value in pairs if name != "api-version")
    return found | set(map(unquote, found)) | set(map(unquote_plus, found))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOrigin:
    url: str = field(repr=False)  # may contain user and password
    model: str
    key: str = field(repr=False)  # removed from every text
    timeout_s: float
    path: str = "/chat/completions"  # of the protocol

    @property
    def secrets(self) -> set[str]:
        return {self.key, *secrets_of(self.url.removesuffix(self.path))}

    @property
    def endpoint(self) -> str:
        return shown_url(self.url).removesuffix("?...").removesuffix(self.path)


class CallFailure(Struct, frozen=True, kw_only=True):
    status: int | None = None  # None: no answer
    http_status: int | None = None  # the HTTP status of a successful answer with an error inside
    body: bytes = b""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    timed_out: bool = False
    is_broken_off: bool = False  # after a successful status
    reason: str = ""
    is_from_provider: bool = False  # the error was inside a successful answer
    is_lasting: bool = False  # no retry helps: a certificate is not trusted
    cause: BaseException | None = None

    @property
    def error_body(self) -> ErrorBody:
        return read_error_body(self.body, self.status)

    @property
    def retry_after(self) -> str | None:
        return retry_after_in(self.headers, self.error_body)


async def build_provider_error(failure: CallFailure, origin: CallOrigin) -> Exception:
    arrived_at = time.monotonic()
    openai = sys.modules.get("openai")
    if openai is None or getattr(openai.__spec__, "_initializing", False):  # another thread may be importing it
        openai = await threads.run(importlib.import_module, "openai")
    error = _build(openai, failure, origin)
    setattr(error, _ARRIVED_AT, arrived_at)
    if failure.status is None:
        error.__cause__ = failure.cause
    return error


def _build(openai: Any, failure: CallFailure, origin: CallOrigin) -> Exception:
    # openai 3 uses httpx2, earlier versions use httpx. Its errors need a request of that package.
    httpx = cast("Any", sys.modules.get("httpx2") or importlib.import_module("httpx"))
    request = httpx.Request("POST", f"{origin.endpoint}{origin.path}")
    text = _explain(failure, origin)
    if failure.timed_out:
        late = openai.APITimeoutError(request=request)
        late.message = text
        late.args = (text,)
        return cast("Exception", late)
    if failure.status is None:
        return cast("Exception", openai.APIConnectionError(message=text, request=request))
    raw = _remove_secrets(failure.body.decode(errors="replace"), origin)
    # A response accepts only ASCII headers.
    found = {**failure.headers, **({"retry-after": asked} if (asked := failure.retry_after) else {})}
    headers = {
        name: value[:_HEADER_LENGTH]
        for name, value in found.items()
        if name in {"retry-after", "x-request-id"} and value.isascii() and value.isprintable()
    }
    response = httpx.Response(failure.status, headers=headers, text=raw, request=request)
    body = _error_object(raw)
    if failure.status < CLIENT_ERROR:
        if failure.is_from_provider:
            return cast("Exception", openai.APIError(text, request, body=body))
        return cast("Exception", openai.APIResponseValidationError(response, body, message=text))
    fallback = "APIStatusError" if failure.status < SERVER_ERROR else "InternalServerError"
    kind = getattr(openai, _STATUS_ERRORS.get(failure.status, fallback))
    return cast("Exception", kind(text, response=response, body=body))


_STATUS_ERRORS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
}


def _error_object(text: str) -> object:
    try:
        data = whole_data(parse_json(text))
    except WireError:
        return text
    entries = cast("list[object]", data) if isinstance(data, list) else [data]  # Gemini sends a list of one
    only = entries[0] if len(entries) == 1 else data
    return cast("Mapping[str, object]", only).get("error", only) if isinstance(only, dict) else data


def _remove_secrets(text: str, origin: CallOrigin) -> str:
    for secret in sorted(origin.secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return text


def _explain(failure: CallFailure, origin: CallOrigin) -> str:
    reason = one_line(_remove_secrets(failure.reason, origin), _REASON_LENGTH)
    where = f"Endpoint {origin.endpoint}"
    if failure.timed_out:
        return (
            f"{where} gave no answer within {origin.timeout_s:g} s. Raise `timeout`, or check that the endpoint "
            "and the model are up."
        )
    if failure.is_broken_off:
        return f"{where} failed while it answered: {reason}. Try again, or ask another model."
    if failure.is_lasting:
        return f"Cannot reach endpoint {origin.endpoint}: {failure.reason}."
    if failure.status is None:
        return (
            f"Cannot reach endpoint {origin.endpoint}: {reason}. Check that it is running and that `base_url` "
            "(or OPENAI_BASE_URL) is right."
        )
    if failure.status < CLIENT_ERROR:
        return f"{where} sent an answer that cannot be used: {reason}"
    body = _remove_secrets(failure.body.decode(errors="replace"), origin)
    error = read_error_body(body, failure.status)
    words = format_foreign(error.message or body, _REASON_LENGTH)
    if error.failed_generation:
        written = format_foreign(error.failed_generation, _REASON_LENGTH)
        words = f"{words.removesuffix('.')}. The model wrote: {written}"
    status = f"HTTP {failure.http_status} with error" if failure.http_status else "HTTP"
    verdict = _verdict(failure.status, failure.error_body)
    text = f"{where} {verdict} ({status} {failure.status}){f': {words}' if words else ''}"
    return f"{text.removesuffix('.')}. {_advice(failure, origin)}".rstrip()


def _verdict(status: int, error: ErrorBody) -> str:
    if error.is_out_of_credit:
        return "has no credit or quota left for this account"
    if error.is_bad_generation:
        return "cannot parse the output of its model"
    verdicts = {
        401: "refused the key",
        403: "does not allow this",
        404: "does not know the model or the path",
        429: "refused the request for now",
    }
    return verdicts.get(status, "failed" if status >= SERVER_ERROR else "refused the request")


def _advice(failure: CallFailure, origin: CallOrigin) -> str:
    if failure.error_body.is_out_of_credit:
        return "The call is not repeated. Add credit or raise the limit at the provider, then resume the run."
    if failure.status == HTTPStatus.UNAUTHORIZED:
        sent = "A key was sent" if origin.key else "No key was sent"
        return f"{sent}; set OPENAI_API_KEY, or pass `api_key`, to one that is valid there."
    if failure.status == HTTPStatus.NOT_FOUND:
        other = "" if origin.path != "/responses" else f" Without a Responses API there, use 'openai:{origin.model}'."
        return (
            f"Check the model's name, '{origin.model}', and `base_url`: it ends where the protocol begins, often /v1."
            f"{other}"
        )
    if failure.status == _TOO_MANY_REQUESTS:
        requested = failure.retry_after
        patience = f"It asks to wait {one_line(requested, 40)} s. " if requested and requested.isascii() else ""
        return f"{patience}Set a `rate_limit`, or check the account's quota."
    return ""
