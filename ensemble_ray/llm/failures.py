"""Failures of an endpoint as the provider's own errors. Package: llm; a failure comes in, an `openai` error goes out.

The classes are those of the `openai` package, so that `except openai.RateLimitError` works and the chain of causes
ends at a class of the provider's (S-ERR-31). The package is imported here, on the first failure, in a thread: it costs
a second of CPU that no healthy call should pay. Texts say what, where and what to do, and never hold a key
(S-ERR-39).
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from math import isfinite
from typing import Any, cast
from urllib.parse import unquote, unquote_plus, urlencode, urlsplit

from ensemble_ray.errors import EnsembleError, message_of
from ensemble_ray.errors.bodies import ErrorBody, read_error_body, tls_flaw
from ensemble_ray.errors.travel import status_of, told_by
from ensemble_ray.llm.protocol.wire import WireError, format_foreign, parse_json
from ensemble_ray.process.forks import threads
from ensemble_ray.text.foreign_text import one_line, whole_data

#: How a model that repeats by itself waits, s.
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 8.0
#: A server that asks such a model for more patience than this is answered with the failure instead.
_LONGEST_ASKED_DELAY_S = 120.0
#: Characters of the longest `Retry-After` that is read; a date has 29.
_LONGEST_WISH = 64
_WORTH_REPEATING = frozenset({408, 409, 429})
#: Doublings after which every delay is at its bound, whatever that is; 2.0 ** 5000 is no float.
_MOST_DOUBLINGS = 60


def is_worth_repeating(status: int) -> bool:
    """Whether that HTTP status may be another one next time (S-DUR-61)."""
    return status in _WORTH_REPEATING or 500 <= status <= 599  # noqa: PLR2004  HTTP's own classes


def backoff_s(attempt: int, *, first_s: float, longest_s: float, jitter: float) -> float:
    """Return the delay after that many attempts: doubled each time, between half of it and all of it (S-DUR-62).

    Args:
        attempt: Attempts made so far, from 1.
        first_s: The delay after the first one.
        longest_s: No delay is longer.
        jitter: In [0, 1); spreads the callers of one overloaded server.
    """
    delay_s = min(longest_s, first_s * 2.0 ** min(attempt - 1, _MOST_DOUBLINGS))
    return delay_s * (1 - 0.5 * jitter)


def patience_asked_s(retry_after: str | None, now: float) -> float | None:
    """Return the delay that a `Retry-After` asks for, s; None when there is none that can be read.

    Args:
        retry_after: The header: seconds or an HTTP date.
        now: Unix time, s, to which a date is compared.
    """
    # What is no number or date as HTTP writes them is no wish: digits of other scripts, infinity, whole pages.
    if not retry_after or len(retry_after) > _LONGEST_WISH or not retry_after.isascii():
        return None
    try:
        asked_s = float(retry_after)
    except ValueError:
        pass
    else:
        return max(0.0, asked_s) if isfinite(asked_s) else None
    try:
        at: float = parsedate_to_datetime(retry_after).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):  # a year 0, a month 13, a zone of a thousand hours
        return None
    return max(0.0, at - now)


def retry_after_in(headers: Mapping[str, str], told: ErrorBody) -> str | None:
    """Return the delay that an answer asks for, as a `Retry-After`; None where it asks for none (S-LLM-20).

    Args:
        headers: Of the answer, names in lower case.
        told: What its body means.
    """
    asked_ms = patience_asked_s(headers.get("retry-after-ms"), 0.0)
    if asked_ms is not None:
        return f"{asked_ms / 1000:g}"
    in_header = headers.get("retry-after")
    if in_header is not None or told.retry_after_s is None:
        return in_header
    return f"{told.retry_after_s:g}"


def delay_before_retry(
    status: int | None, *, attempt: int, retry_after: str | None, jitter: float, now: float
) -> float | None:
    """How long a model that repeats by itself waits, s; None when another attempt is of no use (S-SET-10).

    Args:
        status: HTTP status; None when there was no answer at all.
        attempt: Attempts made so far, from 1.
        retry_after: The answer's `Retry-After` header.
        jitter: In [0, 1).
        now: Unix time, s.
    """
    if status is not None and not is_worth_repeating(status):
        return None
    asked_s = patience_asked_s(retry_after, now)
    if asked_s is not None:
        return asked_s if asked_s <= _LONGEST_ASKED_DELAY_S else None
    return backoff_s(attempt, first_s=_FIRST_DELAY_S, longest_s=_LONGEST_DELAY_S, jitter=jitter)


_FIELD = "_ensemble_ray_arrived_at"


def mark_arrival(error: BaseException, at: float) -> None:
    """Say when the failure behind an error arrived.

    Args:
        error: The error that it became.
        at: Instant of `time.monotonic`, s.
    """
    setattr(error, _FIELD, at)


def seconds_since_arrival(error: BaseException) -> float:
    """Return how long ago the failure behind an error arrived, s; 0 where it is not known."""
    at: object = getattr(error, _FIELD, None)
    return max(0.0, time.monotonic() - at) if isinstance(at, float) else 0.0


#: Stands for a query or a fragment.
_MORE = "?..."
#: What OpenTelemetry calls who answers at a host, or below one.
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


def shown_url(url: str) -> str:
    """Return scheme, host, port and path of a URL, and `?...` where more follows (S-SEC-67).

    Of a text that is no URL, what cannot be a user or a password, or a query.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return _end_of(url)
    if not (parts.scheme and parts.netloc):
        return _end_of(url)
    # A password may hold the signs that end a host, where somebody forgot to escape them.
    path = "/..." if "@" in parts.path else parts.path
    more = _MORE if parts.query or parts.fragment else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}{more}"


def flaw_of(url: str) -> str:
    """Return why no request can go to a URL, without repeating what may be secret in it; empty when one can."""
    if not url.startswith(("http://", "https://")):
        return f"must begin with http:// or https://, got: {shown_url(url)}"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "is no URL: its host or its port cannot be read. Signs such as / ? # @ in a password are written %2F %3F %23 %40"
    return "" if parts.hostname else "is no URL: it names no host"


def provider_of(url: str) -> str:
    """Return who answers at a URL: OpenTelemetry's name where it has one, else the host's; empty where there is no host.

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
    """Return the URL of a resource below a base URL, whose own query stays the query.

    Args:
        base_url: Where the protocol begins.
        path: The resource, such as `/chat/completions`.
        query: More of the query; a name that the base URL has as well takes this value.

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
    """Return the headers that carry a key: none without one, and on Azure that of its deployments too (S-LLM-27)."""
    if not key:
        return {}
    headers = {"Authorization": f"Bearer {key}"}
    return {**headers, "api-key": key} if provider_of(base_url).startswith("azure.") else headers


def secrets_of(url: str) -> set[str]:
    """Return what may be secret in a URL, as it stands there and decoded: an endpoint may repeat it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return set()
    found = {parts.password or "", parts.fragment}
    pairs = (pair.partition("=") for pair in parts.query.split("&"))
    found.update(value for name, _, value in pairs if name != "api-version")
    return found | set(map(unquote, found)) | set(map(unquote_plus, found))


def _end_of(text: str) -> str:
    for sign in "?#":
        text = text.partition(sign)[0]
    return text.rpartition("@")[2]


#: Shorter ones are placeholders such as `x`, and would tear holes into every text.
_SHORTEST_KEY = 4
#: Characters of a header that an error keeps.
_HEADER_LENGTH = 200
#: Characters of a reason that an error shows.
_REASON_LENGTH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOrigin:
    """Which call failed, as far as an error may tell."""

    #: of the resource; may hold a user and a password
    url: str = field(repr=False)
    model: str
    #: left out of every text; empty when none was sent
    key: str = field(repr=False)
    timeout_s: float

    @property
    def secrets(self) -> set[str]:
        """What no text may repeat, also where an endpoint does."""
        return {self.key, *secrets_of(self.url.removesuffix("/chat/completions"))}

    @property
    def endpoint(self) -> str:
        """The endpoint without what may be secret in a URL: user, password, query."""
        return shown_url(self.url).removesuffix("?...").removesuffix("/chat/completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailure:
    """A call that gave no answer: a status with its body, no connection, no time left, or an answer that cannot be read."""

    #: None when there was no answer at all
    status: int | None = None
    #: the HTTP status of the answer, where `status` is that of an error in the body of a success
    http_status: int | None = None
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    timed_out: bool = False
    #: the provider failed while it answered, in an answer with a status of success
    is_broken_off: bool = False
    #: why there was no answer, or what was wrong with it
    reason: str = ""
    #: the reason is the provider's own, sent with a status of success
    is_from_provider: bool = False
    #: there was no answer, and there will be none: a certificate that is not trusted
    is_lasting: bool = False
    #: what the transport raised where there was no answer
    cause: BaseException | None = None

    @property
    def told(self) -> ErrorBody:
        """What the body means."""
        return read_error_body(self.body, self.status)

    @property
    def retry_after(self) -> str | None:
        """The delay that the answer asks for."""
        return retry_after_in(self.headers, self.told)


def failure_in_success(
    status: int, body: bytes, headers: Mapping[str, str], reason: str, *, is_from_provider: bool
) -> CallFailure:
    """Return the failure of an answer with a status of success; of a provider's error with the status that it names."""
    named = read_error_body(body).status if is_from_provider else None
    return CallFailure(
        status=named or status,
        http_status=None if named is None else status,
        body=body,
        headers={name.lower(): value for name, value in headers.items()},
        reason=reason,
        is_from_provider=is_from_provider,
    )


def remove_secrets(text: str, *secrets: str) -> str:
    """Return the text with key and other secrets blacked out, should a provider have echoed them."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***") if len(secret) >= _SHORTEST_KEY else text
    return text


async def build_provider_error(failure: CallFailure, origin: CallOrigin) -> Exception:
    """Return the `openai` error for a failure, its cause set; the caller raises it."""
    arrived_at = time.monotonic()  # answers that come while the package is imported are later ones
    openai = await _sdk()
    error = _build(openai, failure, origin)
    mark_arrival(error, arrived_at)
    if failure.status is None:
        error.__cause__ = failure.cause
    return error


async def _sdk() -> Any:
    """Return the package, imported whole: while a thread imports it, it is among the modules without half of its names."""
    found = sys.modules.get("openai")
    is_whole = found is not None and not getattr(found.__spec__, "_initializing", False)
    return found if is_whole else await threads.run(importlib.import_module, "openai")  # it waits for that thread


def _build(openai: Any, failure: CallFailure, origin: CallOrigin) -> Exception:
    # openai 3 speaks httpx2, earlier ones httpx; its errors want a request of that package, here one without headers.
    httpx = cast("Any", sys.modules.get("httpx2") or importlib.import_module("httpx"))
    request = httpx.Request("POST", f"{origin.endpoint}/chat/completions")
    text = explanation(failure, origin)
    if failure.timed_out:
        late = openai.APITimeoutError(request=request)
        late.message = text
        late.args = (text,)
        return cast("Exception", late)
    if failure.status is None:
        return cast("Exception", openai.APIConnectionError(message=text, request=request))
    raw = remove_secrets(failure.body.decode(errors="replace"), *origin.secrets)
    # Headers are ASCII; what else an endpoint writes there cannot be built into a response again.
    found = {**failure.headers, **({"retry-after": asked} if (asked := failure.retry_after) else {})}
    headers = {
        name: value[:_HEADER_LENGTH]
        for name, value in found.items()
        if name in {"retry-after", "x-request-id"} and value.isascii() and value.isprintable()
    }
    response = httpx.Response(failure.status, headers=headers, text=raw, request=request)
    body = _error_object(raw)
    if failure.status < 400:  # noqa: PLR2004  HTTP's own classes
        if failure.is_from_provider:
            return cast("Exception", openai.APIError(text, request, body=body))
        return cast("Exception", openai.APIResponseValidationError(response, body, message=text))
    return cast("Exception", _status_class(openai, failure.status)(text, response=response, body=body))


def _status_class(openai: Any, status: int) -> Any:
    names = {
        400: "BadRequestError",
        401: "AuthenticationError",
        403: "PermissionDeniedError",
        404: "NotFoundError",
        409: "ConflictError",
        422: "UnprocessableEntityError",
        429: "RateLimitError",
    }
    fallback = "InternalServerError" if status >= 500 else "APIStatusError"  # noqa: PLR2004  HTTP's own classes
    return getattr(openai, names.get(status, fallback))


def explanation(failure: CallFailure, origin: CallOrigin) -> str:
    """Say what happened, where, and what to do about it."""
    where = f"Endpoint {origin.endpoint}"
    if failure.timed_out:
        return (
            f"{where} gave no answer within {origin.timeout_s:g} s. Raise `timeout`, or check that the endpoint "
            "and the model are up."
        )
    if failure.is_broken_off:
        return f"{where} failed while it answered: {_reason(failure, origin)}. Try again, or ask another model."
    if failure.is_lasting:
        return f"Cannot reach endpoint {origin.endpoint}: {failure.reason}."
    if failure.status is None:
        return (
            f"Cannot reach endpoint {origin.endpoint}: {_reason(failure, origin)}. Check that it is running and that `base_url` "
            "(or OPENAI_BASE_URL) is right."
        )
    if failure.status < 400:  # noqa: PLR2004  HTTP's own classes
        return f"{where} sent an answer that cannot be used: {_reason(failure, origin)}"
    said, told = _provider_text(failure, origin), failure.told
    status = f"HTTP {failure.http_status} with error" if failure.http_status else "HTTP"
    text = f"{where} {_verdict(failure.status, told)} ({status} {failure.status}){f': {said}' if said else ''}"
    return f"{text.removesuffix('.')}. {_advice(failure, origin)}".rstrip()


def _reason(failure: CallFailure, origin: CallOrigin) -> str:
    return one_line(remove_secrets(failure.reason, *origin.secrets), _REASON_LENGTH)


def _verdict(status: int, told: ErrorBody) -> str:
    if told.is_out_of_credit:
        return "has no credit or quota left for this account"
    if told.is_bad_generation:
        return "cannot read what its model wrote"
    verdicts = {
        401: "refused the key",
        403: "does not allow this",
        404: "does not know the model or the path",
        429: "refused the request for now",
    }
    return verdicts.get(status, "failed" if status >= 500 else "refused the request")  # noqa: PLR2004  as above


def _advice(failure: CallFailure, origin: CallOrigin) -> str:
    if failure.told.is_out_of_credit:
        return "The call is not repeated. Add credit or raise the limit at the provider, then resume the run."
    if failure.status == 401:  # noqa: PLR2004  HTTP's own number
        sent = "A key was sent" if origin.key else "No key was sent"
        return f"{sent}; set OPENAI_API_KEY, or pass `api_key`, to one that is valid there."
    if failure.status == 404:  # noqa: PLR2004  as above
        return (
            f"Check the model's name, '{origin.model}', and `base_url`: it ends where the protocol begins, often /v1."
        )
    if failure.status == 429:  # noqa: PLR2004  as above
        asked = failure.retry_after
        patience = f"It asks to wait {one_line(asked, 40)} s. " if asked and asked.isascii() else ""
        return f"{patience}Set a `rate_limit`, or check the account's quota."
    return ""


def _provider_text(failure: CallFailure, origin: CallOrigin) -> str:
    """Return the provider's own words, from its error object or all it sent; secrets go before it is cut."""
    text = remove_secrets(failure.body.decode(errors="replace"), *origin.secrets)
    told = read_error_body(text, failure.status)
    said = format_foreign(told.message or text, _REASON_LENGTH)
    if not told.failed_generation:
        return said
    return f"{said.removesuffix('.')}. The model wrote: {format_foreign(told.failed_generation, _REASON_LENGTH)}"


def _error_object(text: str) -> object:
    """Return the error in a body as the SDK shows it: the inner object of `{"error": ...}`, else all of it."""
    try:
        data = whole_data(parse_json(text))
    except WireError:
        return text
    entries = cast("list[object]", data) if isinstance(data, list) else [data]  # Gemini sends a list of one
    only = entries[0] if len(entries) == 1 else data
    return cast("Mapping[str, object]", only).get("error", only) if isinstance(only, dict) else data


_TOO_MANY_REQUESTS = 429
_DELAY_HEADERS = ("retry-after", "retry-after-ms")
#: Classes of errors that mean no connection, a broken one, or no answer in time; by package, since names are shared.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderFault:
    """A failure of the provider that another attempt may not meet again (S-DUR-61)."""

    #: in a few words: `HTTP 503`, `no connection`, `no answer in time`
    what: str
    #: the error's own text
    text: str
    #: None when there was no answer at all
    status: int | None = None
    #: the delay that the answer asks for
    retry_after: str | None = None
    #: how long ago it arrived, s: naming it may have waited for a package to be imported
    ago_s: float = 0.0
    #: the endpoint works, but cannot parse the output of its model (S-LLM-22)
    is_bad_generation: bool = False

    @property
    def is_refusal_for_now(self) -> bool:
        """Whether the endpoint is well and only asks for fewer calls (S-DUR-64, S-DUR-65)."""
        return self.status == _TOO_MANY_REQUESTS


def fault_of(error: BaseException) -> ProviderFault | None:
    """Return the provider's fault in a failed model call; None when another attempt would be of no use.

    Args:
        error: What the model raised, whichever model it is.
    """
    # Ours say what is wrong, and none of them is of a provider; `sys.exit` in a model has no status either.
    if isinstance(error, EnsembleError) or not isinstance(error, Exception):
        return None
    status, told = status_of(error), told_by(error)
    if told.is_out_of_credit:
        return None
    if status is None or status < 400:  # noqa: PLR2004  HTTP's own classes
        status = told.status or status
    if status is not None:
        if not is_worth_repeating(status) and not told.is_bad_generation:
            return None
        return ProviderFault(
            what=f"HTTP {status}",
            text=message_of(error),
            status=status,
            retry_after=retry_after_in(_headers(error), told),
            ago_s=seconds_since_arrival(error),
            is_bad_generation=told.is_bad_generation,
        )
    names = _names(error)
    if tls_flaw(error):
        return None
    if not any(name in _CONNECTION_ERRORS.get(package, ()) for package, name in names):
        return None
    is_late = any("Timeout" in name for _, name in names)
    what = "no answer in time" if is_late else "no connection"
    return ProviderFault(what=what, text=message_of(error), ago_s=seconds_since_arrival(error))


def _headers(error: BaseException) -> Mapping[str, str]:
    """Return the headers that say how long to wait, names in lower case."""
    found: dict[str, str] = {}
    for holder in (error, getattr(error, "response", None)):
        get: object = getattr(getattr(holder, "headers", None), "get", None)
        for name in _DELAY_HEADERS if callable(get) else ():
            # Plain dicts know a header under one spelling only.
            value: object = cast("Callable[[str], object]", get)(name) or cast("Callable[[str], object]", get)(
                name.title()
            )
            if value is not None:
                found[name] = str(value)
    return found


def _names(error: BaseException) -> list[tuple[str, str]]:
    """(package, name) of the error's class and of all its bases."""
    return [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__]
