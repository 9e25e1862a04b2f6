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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ensemble_ray.errors.bodies import ErrorBody, read_error_body
from ensemble_ray.llm.endpoint_urls import secrets_of, shown_url
from ensemble_ray.llm.protocol.arrival import mark_arrival
from ensemble_ray.llm.protocol.wire import WireError, format_foreign, parse_json
from ensemble_ray.llm.retry import retry_after_in
from ensemble_ray.process.threads import threads
from ensemble_ray.text.foreign_text import one_line, whole_data

__all__ = ["CallFailure", "CallOrigin", "build_provider_error", "failure_in_success", "remove_secrets"]


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
