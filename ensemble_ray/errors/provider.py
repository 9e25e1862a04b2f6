"""Errors of model providers as plain data, and back. Package: errors; stands on `bodies` alone.

In: an error of one of the listed classes of the `openai` package. Out: data that JSON has types for; and the error again,
of the same class, with status, body and the few headers that are no secret (S-ERR-40, S-ERR-41).
Never: an import of a class that is not listed here, whatever the data says; a header or a URL part that may hold a key.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from ensemble_ray.errors.bodies import ErrorBody, read_error_body

__all__ = [
    "is_out_of_credit",
    "is_refusal",
    "is_refusal_data",
    "pack_provider_error",
    "status_of",
    "told_by",
    "unpack_provider_error",
]

_PACKAGE = "openai"
_CLASSES = frozenset({
    "OpenAIError", "APIError", "APIStatusError", "APIConnectionError", "APITimeoutError", "APIResponseValidationError",
    "BadRequestError", "AuthenticationError", "PermissionDeniedError", "NotFoundError", "ConflictError",
    "UnprocessableEntityError", "RateLimitError", "InternalServerError",
})  # fmt: skip
#: A wrong key, no right to the model, no such model: every other call of it will be refused too.
_REFUSALS = frozenset({"AuthenticationError", "PermissionDeniedError", "NotFoundError"})
#: Where packages keep an HTTP status: openai and anthropic, aiohttp and urllib, Google's clients.
_STATUS_FIELDS = ("status_code", "status", "code")
_FIELDS = ("message", "status_code", "code", "param", "type", "request_id", "body")
_HEADERS = ("retry-after", "retry-after-ms", "x-request-id", "content-type")
#: Errors of a recorded chain of causes that are looked at.
_MOST_LINKS = 32
#: Characters of an answer's body that go along; what an endpoint sends has no bound of its own.
_MOST_BODY = 20_000


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that the endpoint answered with; None when there was no answer, or none that is known."""
    for holder in (error, getattr(error, "response", None)):
        for field in _STATUS_FIELDS:
            value: object = getattr(holder, field, None)
            if isinstance(value, int) and 100 <= value <= 599:  # noqa: PLR2004  HTTP's own range
                return int(value)
    return None


def told_by(error: BaseException) -> ErrorBody:
    """Return what the answer behind an error means: by its body, else by the text of an error with a status."""
    status, body = status_of(error), getattr(error, "body", None)
    if body is None:
        return ErrorBody() if status is None else read_error_body(str(error), status)
    return read_error_body(body, status)


def is_refusal(error: BaseException | None) -> bool:
    """Return whether a provider refused a call as it would refuse every other call of that model.

    A status of 401, 403 or 404, or an account without credit (S-LLM-21). The causes of an error of a callable do not count.
    """
    return any(
        (type(each).__name__ in _REFUSALS and type(each).__module__.partition(".")[0] == _PACKAGE)
        or told_by(each).is_out_of_credit
        for each in _causes(error)
    )


def is_out_of_credit(error: BaseException | None) -> bool:
    """Return whether a provider refused a call because the account has no credit; a callable's causes do not count."""
    return any(told_by(each).is_out_of_credit for each in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Return an error and its causes, as far as they are not of a callable."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen and not getattr(error, "is_of_callable", False):
        yield error
        seen.add(id(error))
        error = error.__cause__


def is_refusal_data(data: object) -> bool:
    """Return `is_refusal` of an error that the record has, by its data (`error_data`)."""
    depth = 0
    while isinstance(data, Mapping) and depth < _MOST_LINKS:
        link = cast("Mapping[str, object]", data)
        provider = link.get("provider")
        found = cast("Mapping[str, object]", provider) if isinstance(provider, Mapping) else {}
        fields = link.get("fields")
        if isinstance(fields, Mapping) and cast("Mapping[str, object]", fields).get("is_of_callable"):
            return False
        if found.get("class") in _REFUSALS or _is_out_of_credit({**link, **found}):
            return True
        data, depth = link.get("cause"), depth + 1
    return False


def _is_out_of_credit(link: Mapping[str, object]) -> bool:
    """Return whether an error of the record is that of an account without credit."""
    fields = link.get("fields")
    known = cast("Mapping[str, object]", fields) if isinstance(fields, Mapping) else {}
    statuses = [each for name in _STATUS_FIELDS if isinstance(each := known.get(name), int)]
    body = known.get("body") or (link.get("text") if statuses else None)
    return body is not None and read_error_body(body, *statuses[:1]).is_out_of_credit


def pack_provider_error(error: BaseException) -> dict[str, Any] | None:
    """Return the error as JSON-able data, or None for an error of any other class."""
    kind = type(error)
    if kind.__name__ not in _CLASSES or kind.__module__.partition(".")[0] != _PACKAGE:
        return None
    fields = vars(error)
    data: dict[str, Any] = {"class": kind.__name__, "text": str(error)}
    data["fields"] = {name: _plain(fields[name]) for name in _FIELDS if name in fields}
    response, request = fields.get("response"), fields.get("request")
    if response is not None:
        data["response"] = {
            "status": response.status_code,
            "headers": {name: response.headers[name] for name in _HEADERS if name in response.headers},
            "text": _text_of(response),
        }
    if request is not None:
        data["request"] = {"method": str(request.method), "url": _public(str(request.url))}
    return data


def unpack_provider_error(data: Mapping[str, Any]) -> Exception | None:
    """Return the error behind the data, or None where its class is not listed, or the package is not here."""
    name, text = data.get("class"), data.get("text")
    if name not in _CLASSES or not isinstance(text, str):
        return None
    try:
        package = importlib.import_module(_PACKAGE)
        error = cast("Exception", getattr(package, name).__new__(getattr(package, name)))
        error.args = (text,)  # no constructor runs: their arguments differ from version to version
        fields = cast("Mapping[str, Any]", data.get("fields") or {})
        vars(error).update({field: fields[field] for field in _FIELDS if field in fields})
        _restore_answer(error, data)
    except Exception:  # noqa: BLE001  a package that is missing or has changed, or damaged data: a stand-in will do
        return None
    return error


def _restore_answer(error: Exception, data: Mapping[str, Any]) -> None:
    """Give the error its request, and the response where there was one."""
    asked, answered = data.get("request"), data.get("response")
    # openai 3 speaks httpx2, earlier ones httpx.
    httpx = cast("Any", sys.modules.get("httpx2") or importlib.import_module("httpx"))
    request = None if asked is None else httpx.Request(asked["method"], asked["url"])
    if request is not None:
        vars(error)["request"] = request
    if answered is not None:
        response = {"headers": answered["headers"], "text": answered["text"], "request": request}
        vars(error)["response"] = httpx.Response(answered["status"], **response)


def _plain(value: object) -> object:
    """Return the value as JSON has it, and of bounded size."""
    text = json.dumps(value, default=str)
    return json.loads(text) if len(text) <= _MOST_BODY else text[:_MOST_BODY]


def _text_of(response: Any) -> str:
    with contextlib.suppress(Exception):  # a stream that nobody has read has no text
        return str(response.text)[:_MOST_BODY]
    return ""


def _public(url: str) -> str:
    """Return the URL without user, password and query, which may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
