"""How errors cross processes: with text, fields, notes and causes.

In: any error. Out: one that pickles and comes out with the same class name and text (S-ERR-31, S-ERR-33). A traceback
cannot be pickled: where user code raised an error travels as a note (S-ERR-42).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pickle
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from ensemble_ray.errors.bodies import ErrorBody, read_error_body
from ensemble_ray.errors.texts import REMOTE, message_of, remote_note

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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


#: What a stand-in has of the error that it stands for, so that code which asks by shape finds it.
_KEPT = ("status_code", "status", "code", "request_id", "body")


def _class_of_stand_in(name: str) -> type[Exception]:
    """Return an exception class of that name whose instances pickle; it stands for one that does not."""

    def reduce(self: Exception) -> tuple[object, ...]:
        return (stand_in, (name, str(self)), dict(vars(self)))

    return type(name, (Exception,), {"__reduce__": reduce, "__doc__": f"Stands for a {name} of another process."})


def stand_in(name: str, text: str, fields: Mapping[str, object] | None = None) -> Exception:
    """Return an error of that class name and text, in place of one that cannot be had here."""
    error = _class_of_stand_in(name)(text)
    vars(error).update(fields or {})
    return error


def plain_fields(error: BaseException) -> dict[str, object]:
    """Return the fields of a provider's error that are plain values: its status, for example."""
    kept = {name: vars(error)[name] for name in _KEPT if name in vars(error)}
    return {name: value for name, value in kept.items() if isinstance(value, str | int | float)}


def notes_of(error: BaseException) -> tuple[str, ...]:
    """Return the notes of an error, its traceback in user code among them, unless another process told it already."""
    notes = tuple(each for each in getattr(error, "__notes__", ()) if isinstance(each, str))
    note = "" if any(each.startswith(REMOTE) for each in notes) else remote_note(error)
    return (*notes, note) if note else notes


def portable(error: BaseException) -> BaseException:
    """Return the error itself if it travels unchanged, else one of the same class name and text that pickles.

    A foreign error keeps class and causes in more cases where it is pickled as `Chain(error)`.

    Source: S-ERR-31, S-ERR-42.
    """
    is_plain = _travels(error, pickle.dumps) is not None or _travels(error, _dumps_by_value) is not None
    if is_plain and (isinstance(error, Portable) or (error.__cause__ is None and not remote_note(error))):
        return error
    links = _links(error)
    if not is_plain:
        links[0] = (links[0][0], stand_in, type(error).__name__, message_of(error), plain_fields(error))
    return _join(links)


#: Longest chain of causes that travels; what lies deeper is dropped.
_MAX_CHAIN = 32


def _links(error: BaseException) -> list[tuple[Any, ...]]:
    """Return the chain of causes as data, one link per error; pickling would lose the causes of foreign errors."""
    links: list[tuple[Any, ...]] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen and len(links) < _MAX_CHAIN:
        seen.add(id(at))
        link = (rebuild, type(at), at.args, _fields_of(at)) if isinstance(at, Portable) else _foreign_link(at)
        links.append((notes_of(at), *link))
        at = at.__cause__
    return links


def _fields_of(error: Portable) -> dict[str, object]:
    """Return the fields of one of our errors; its notes travel beside them."""
    return {name: value for name, value in error.state().items() if name != "__notes__"}


def _foreign_link(error: BaseException) -> tuple[object, ...]:
    """Return data of an error that is not ours: as it is, by value, without its constructor, else as a stand-in."""
    described = (type(error).__name__, message_of(error), plain_fields(error))
    provider = pack_provider_error(error)
    if provider is not None:
        return (_provider_or_stand_in, provider, *described)
    for dumps in (pickle.dumps, _dumps_by_value, _dumps_fields):
        data = _travels(error, dumps)
        if data is not None:
            return (_loaded_or_stand_in, data, *described)
    return (stand_in, *described)


def _loaded_or_stand_in(data: bytes, name: str, text: str, fields: Mapping[str, object]) -> BaseException:
    """Return the error, or its stand-in where its class cannot be had, as that of a package only the sender has."""
    try:
        return cast("BaseException", pickle.loads(data))  # noqa: S301  bytes of our own cluster
    except Exception:  # noqa: BLE001  whatever loading raised, what went wrong must still be told
        return stand_in(name, text, fields)


def _provider_or_stand_in(
    data: Mapping[str, object], name: str, text: str, fields: Mapping[str, object]
) -> BaseException:
    """Return the provider's error, or its stand-in where its package cannot be had."""
    return unpack_provider_error(data) or stand_in(name, text, fields)


def _travels(error: BaseException, dumps: Callable[[Any], bytes]) -> bytes | None:
    """Return the pickled error if it comes out with its class name and text, else None."""
    try:
        data = dumps(error)
        copy = pickle.loads(data)  # noqa: S301  our own bytes, made one line up
    except Exception:  # noqa: BLE001  any failure here means one thing: it does not travel this way
        return None
    return data if type(copy).__name__ == type(error).__name__ and str(copy) == str(error) else None


def _dumps_by_value(error: object) -> bytes:
    """For classes that only this process can import, such as those of a script."""
    cloudpickle = importlib.import_module("cloudpickle")  # untyped, and only needed where plain pickling failed
    return cast("bytes", cloudpickle.dumps(error))


def _dumps_fields(error: BaseException) -> bytes:
    """For classes whose constructor does not take what `args` holds: class, arguments and fields, as with ours."""
    fields = {name: value for name, value in vars(error).items() if name != "__notes__"}
    return _dumps_by_value(_Rebuilt(type(error), error.args, fields))


class _Rebuilt:
    """An error on its way that comes out without its constructor being called."""

    def __init__(self, cls: type[BaseException], args: tuple[object, ...], fields: Mapping[str, object]) -> None:
        self._parts = (cls, args, fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return (rebuild, self._parts)


def _join(links: Sequence[tuple[Any, ...]]) -> BaseException:
    """Put the chain of causes together again and return its first error."""
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
    """Return an error as it was; its constructor does not run again."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class Chain:
    """An error on its way through a pickle; it comes out as the error, with its causes."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return (_join, (_links(self._error),))


class Portable(Exception):  # noqa: N818  a mixin of behaviour, never raised as such
    """Pickles with text, fields, notes and causes; no constructor runs again on the other side."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_join, (_links(self),))

    def state(self) -> dict[str, object]:
        """Return the fields, in a form that pickles."""
        return dict(self.__dict__)
