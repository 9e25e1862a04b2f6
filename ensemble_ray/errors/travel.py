"""Errors across processes: pickling, and the classification of provider errors.

An unpickled error has the same class name, text, fields, notes and causes (S-ERR-31, S-ERR-33). A note reports where
user code raised it, because tracebacks cannot be pickled (S-ERR-42).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, cast
from urllib.parse import urlsplit

from ensemble_ray.errors.bodies import ErrorBody, read_error_body
from ensemble_ray.errors.texts import REMOTE, cause_chain, message_of, remote_note

_PACKAGE = "openai"
_CLASSES = frozenset({
    "OpenAIError", "APIError", "APIStatusError", "APIConnectionError", "APITimeoutError", "APIResponseValidationError",
    "BadRequestError", "AuthenticationError", "PermissionDeniedError", "NotFoundError", "ConflictError",
    "UnprocessableEntityError", "RateLimitError", "InternalServerError",
})  # fmt: skip
#: Every other call of the model will fail, too.
_REFUSALS = frozenset({"AuthenticationError", "PermissionDeniedError", "NotFoundError"})
#: Of openai and anthropic, aiohttp and urllib, Google's clients.
_STATUS_FIELDS = ("status_code", "status", "code")
_FIELDS = ("message", "status_code", "code", "param", "type", "request_id", "body")
_HEADERS = ("retry-after", "retry-after-ms", "x-request-id", "content-type")
_MOST_LINKS = 32
_MOST_BODY = 20_000  # of a response's body in a packed error


def status_of(error: BaseException) -> int | None:
    """Return None if unknown or without an answer."""
    for holder in (error, getattr(error, "response", None)):
        for field in _STATUS_FIELDS:
            value: object = getattr(holder, field, None)
            if isinstance(value, int) and value in range(100, 600):
                return int(value)
    return None


def provider_answer_of(error: BaseException) -> ErrorBody:
    """Read the error's body, else the text of an error with a status."""
    status, body = status_of(error), getattr(error, "body", None)
    if body is None:
        return ErrorBody() if status is None else read_error_body(str(error), status)
    return read_error_body(body, status)


def is_refusal(error: BaseException | None) -> bool:
    """Whether a provider refuses every call of a model: status 401, 403 or 404, or no credit (S-LLM-21).

    The causes of a callable's error do not count.
    """
    return any(
        (type(each).__name__ in _REFUSALS and type(each).__module__.partition(".")[0] == _PACKAGE)
        or provider_answer_of(each).is_out_of_credit
        for each in _causes(error)
    )


def is_out_of_credit(error: BaseException | None) -> bool:
    """The causes of a callable's error do not count."""
    return any(provider_answer_of(each).is_out_of_credit for each in _causes(error))


def interrupts_run(error: BaseException | None) -> bool:
    """Whether a run stops without a failure, and can be resumed: no credit (S-DUR-151), or no driver (S-CTX-52)."""
    return is_out_of_credit(error) or any(getattr(each, "is_deps_lost", False) for each in _causes(error))


def _causes(error: BaseException | None) -> Iterable[BaseException]:
    chain = () if error is None else (error, *cause_chain(error))
    return takewhile(lambda each: not getattr(each, "is_of_callable", False), chain)


def is_refusal_data(data: object) -> bool:
    """Return `is_refusal` for data of `error_data`."""
    depth = 0
    while isinstance(data, Mapping) and depth < _MOST_LINKS:
        link = _members(data)
        provider = _members(link.get("provider"))
        if _members(link.get("fields")).get("is_of_callable"):
            return False
        known = {**link, **provider}
        fields = _members(known.get("fields"))
        statuses = [each for name in _STATUS_FIELDS if isinstance(each := fields.get(name), int)]
        body = fields.get("body") or (known.get("text") if statuses else None)
        is_unpaid = body is not None and read_error_body(body, *statuses[:1]).is_out_of_credit
        if provider.get("class") in _REFUSALS or is_unpaid:
            return True
        data, depth = link.get("cause"), depth + 1
    return False


def _members(value: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def is_provider_error(error: BaseException) -> bool:
    """Whether an error is one of the `openai` package."""
    return any(cls.__name__ in _CLASSES and cls.__module__.partition(".")[0] == _PACKAGE for cls in type(error).__mro__)


def pack_provider_error(error: BaseException) -> dict[str, Any] | None:
    """Return JSON-able data; None for other classes."""
    kind = type(error)
    if kind.__name__ not in _CLASSES or kind.__module__.partition(".")[0] != _PACKAGE:
        return None
    fields = vars(error)
    data: dict[str, Any] = {"class": kind.__name__, "text": str(error), "fields": {}}
    for name in [name for name in _FIELDS if name in fields]:
        encoded = json.dumps(fields[name], default=str)
        data["fields"][name] = json.loads(encoded) if len(encoded) <= _MOST_BODY else encoded[:_MOST_BODY]
    response, request = fields.get("response"), fields.get("request")
    if response is not None:
        text = ""
        with contextlib.suppress(Exception):  # an unread stream has no text
            text = str(response.text)[:_MOST_BODY]
        data["response"] = {
            "status": response.status_code,
            "headers": {name: response.headers[name] for name in _HEADERS if name in response.headers},
            "text": text,
        }
    if request is not None:
        parts = urlsplit(str(request.url))  # user, password and query may be secret
        url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        data["request"] = {"method": str(request.method), "url": url}
    return data


def unpack_provider_error(data: Mapping[str, Any]) -> Exception | None:
    """Return None if the class is not listed, or its package is missing."""
    name, text = data.get("class"), data.get("text")
    if name not in _CLASSES or not isinstance(text, str):
        return None
    try:
        package = importlib.import_module(_PACKAGE)
        error = cast("Exception", getattr(package, name).__new__(getattr(package, name)))
        error.args = (text,)  # no constructor runs: its arguments differ between versions
        fields = cast("Mapping[str, Any]", data.get("fields") or {})
        vars(error).update({field: fields[field] for field in _FIELDS if field in fields})
        _restore_answer(error, data)
    except Exception:  # noqa: BLE001  the package is missing or has changed, or the data is damaged
        return None
    return error


def _restore_answer(error: Exception, data: Mapping[str, Any]) -> None:
    asked, answered = data.get("request"), data.get("response")
    # openai 3 uses httpx2, earlier versions httpx.
    httpx = cast("Any", sys.modules.get("httpx2") or importlib.import_module("httpx"))
    request = None if asked is None else httpx.Request(asked["method"], asked["url"])
    if request is not None:
        vars(error)["request"] = request
    if answered is not None:
        response = {"headers": answered["headers"], "text": answered["text"], "request": request}
        vars(error)["response"] = httpx.Response(answered["status"], **response)


#: Code may check these fields instead of the class.
_STAND_IN_FIELDS = ("status_code", "status", "code", "request_id", "body")


def stand_in(name: str, text: str, fields: Mapping[str, object] | None = None) -> Exception:

    def reduce(self: Exception) -> tuple[object, ...]:
        return (stand_in, (name, str(self)), dict(vars(self)))

    kind = type(name, (Exception,), {"__reduce__": reduce, "__doc__": f"Stands for a {name} of another process."})
    error = cast("Exception", kind(text))
    vars(error).update(fields or {})
    return error


def plain_fields(error: BaseException) -> dict[str, object]:
    fields = {name: vars(error).get(name) for name in _STAND_IN_FIELDS}
    return {name: value for name, value in fields.items() if isinstance(value, str | int | float)}


def notes_of(error: BaseException) -> tuple[str, ...]:
    """Return the error's notes, and one with its traceback in user code, unless another process added one."""
    notes = tuple(each for each in getattr(error, "__notes__", ()) if isinstance(each, str))
    note = "" if any(each.startswith(REMOTE) for each in notes) else remote_note(error)
    return (*notes, note) if note else notes


def portable(error: BaseException) -> BaseException:
    """Return the error itself if pickling preserves it, else a picklable one with the same class name and text.

    A foreign error keeps its class and its causes in more cases if you pickle it as `ErrorChain(error)`.
    """
    is_plain = _travels(error, pickle.dumps) is not None or _travels(error, _dumps_by_value) is not None
    if is_plain and (isinstance(error, PicklableError) or (error.__cause__ is None and not remote_note(error))):
        return error
    links = _links(error)
    if not is_plain:
        links[0] = (links[0][0], stand_in, type(error).__name__, message_of(error), plain_fields(error))
    return _join(links)


_MAX_CHAIN = 32


def _links(error: BaseException) -> list[tuple[Any, ...]]:
    """Return one link per error; pickle itself loses the causes of foreign errors."""
    links: list[tuple[Any, ...]] = []
    for at in [error, *cause_chain(error)][:_MAX_CHAIN]:
        if isinstance(at, PicklableError):
            fields = {name: value for name, value in at.state().items() if name != "__notes__"}
            link: tuple[object, ...] = (rebuild, type(at), at.args, fields)
        else:
            link = _foreign_link(at)
        links.append((notes_of(at), *link))
    return links


def _foreign_link(error: BaseException) -> tuple[object, ...]:
    """Pickle by reference, by value, without its constructor, or as a stand-in."""
    described = (type(error).__name__, message_of(error), plain_fields(error))
    provider = pack_provider_error(error)
    if provider is not None:
        return (_provider_or_stand_in, provider, *described)
    ways: tuple[Callable[[Any], bytes], ...] = (
        pickle.dumps,
        _dumps_by_value,
        lambda each: _dumps_by_value(_Rebuilt(each)),
    )
    for dumps in ways:
        data = _travels(error, dumps)
        if data is not None:
            return (_loaded_or_stand_in, data, *described)
    return (stand_in, *described)


def _loaded_or_stand_in(data: bytes, name: str, text: str, fields: Mapping[str, object]) -> BaseException:
    """Return the stand-in if this process cannot import the class."""
    try:
        return cast("BaseException", pickle.loads(data))  # noqa: S301  bytes of our own cluster
    except Exception:  # noqa: BLE001  the original error must be reported in any case
        return stand_in(name, text, fields)


def _provider_or_stand_in(
    data: Mapping[str, object], name: str, text: str, fields: Mapping[str, object]
) -> BaseException:
    return unpack_provider_error(data) or stand_in(name, text, fields)


def _travels(error: BaseException, dumps: Callable[[Any], bytes]) -> bytes | None:
    try:
        data = dumps(error)
        copy = pickle.loads(data)  # noqa: S301  own bytes
    except Exception:  # noqa: BLE001  it cannot be pickled this way
        return None
    return data if type(copy).__name__ == type(error).__name__ and str(copy) == str(error) else None


def _dumps_by_value(error: object) -> bytes:
    """Pickle classes that only this process can import."""
    cloudpickle = importlib.import_module("cloudpickle")  # untyped, and rarely needed
    return cast("bytes", cloudpickle.dumps(error))


class _Rebuilt:
    """Unpickles as the error without a call of its constructor, which may not accept `args`."""

    def __init__(self, error: BaseException) -> None:
        fields = {name: value for name, value in vars(error).items() if name != "__notes__"}
        self._parts = (type(error), error.args, fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return (rebuild, self._parts)


def _join(links: Sequence[tuple[Any, ...]]) -> BaseException:
    cause: BaseException | None = None
    for notes, make, *args in reversed(links):
        error = cast("Callable[..., BaseException]", make)(*args)
        present = getattr(error, "__notes__", ())
        for note in [each for each in notes if each not in present]:
            error.add_note(note)
        error.__cause__ = cause
        cause = error
    return cast("BaseException", cause)


def rebuild(cls: type[BaseException], args: tuple[object, ...], state: Mapping[str, object]) -> BaseException:
    """Create the error without a call of its constructor."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ErrorChain:
    """Unpickles as the error, with its causes."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return (_join, (_links(self._error),))


class PicklableError(Exception):
    """Pickles with text, fields, notes and causes. Unpickling calls no constructor."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_join, (_links(self),))

    def state(self) -> dict[str, object]:
        return dict(self.__dict__)
