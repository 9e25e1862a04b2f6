"""How errors cross processes: with text, fields, notes and causes. Layer: above the texts and data of errors.

In: any error. Out: one that pickles and comes out with the same class name and text (S-ERR-31, S-ERR-33). A traceback
cannot be pickled: where user code raised an error travels as a note (S-ERR-42).
"""

from __future__ import annotations

import importlib
import pickle
from typing import TYPE_CHECKING, Any, cast

from ensemble_ray.errors.provider import pack_provider_error, unpack_provider_error
from ensemble_ray.errors.texts import REMOTE, message_of, remote_note

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Chain", "Portable", "notes_of", "plain_fields", "portable", "rebuild", "stand_in"]

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
