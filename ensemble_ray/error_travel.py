"""How errors cross processes: with text, fields and causes. Floor: lowest but for texts.

In: any error. Out: one that pickles and comes out with the same class name and text (S-ERR-31, S-ERR-33).
"""

from __future__ import annotations

import importlib
import pickle
from typing import TYPE_CHECKING, Any, cast

from ensemble_ray.foreign_text import whole_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Chain", "Portable", "message_of", "portable", "rebuild", "stand_in"]


def message_of(error: BaseException) -> str:
    """The text of an error, or its class name where the text is empty (S-ENG-61)."""
    return whole_text(str(error)) or type(error).__name__


def _class_of_stand_in(name: str) -> type[Exception]:
    """An exception class of that name whose instances pickle; it stands for one that does not."""

    def reduce(self: Exception) -> tuple[object, ...]:
        return (stand_in, (name, str(self)))

    return type(name, (Exception,), {"__reduce__": reduce, "__doc__": f"Stands for a {name} of another process."})


def stand_in(name: str, text: str) -> Exception:
    """An error of that class name and text, in place of one that cannot be had here."""
    return _class_of_stand_in(name)(text)


def portable(error: BaseException) -> BaseException:
    """The error itself if it travels unchanged, else a stand-in of the same class name and text.

    Source: S-ERR-31. The chain of causes is kept in both cases.
    """
    if _travels(error, pickle.dumps) is not None or _travels(error, _dumps_by_value) is not None:
        return error
    return _join(_links(error))


#: Longest chain of causes that travels; what lies deeper is dropped.
_MAX_CHAIN = 32


def _links(error: BaseException) -> list[tuple[object, ...]]:
    """The chain of causes as data, one link per error; pickling alone would lose the causes of foreign errors."""
    links: list[tuple[object, ...]] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen and len(links) < _MAX_CHAIN:
        seen.add(id(at))
        links.append((rebuild, type(at), at.args, at.state()) if isinstance(at, Portable) else _foreign_link(at))
        at = at.__cause__
    return links


def _foreign_link(error: BaseException) -> tuple[object, ...]:
    """An error that is not ours: as it is, else by value, else as a stand-in."""
    data = _travels(error, pickle.dumps) or _travels(error, _dumps_by_value)
    told = (type(error).__name__, message_of(error))
    return (stand_in, *told) if data is None else (_loaded_or_stand_in, data, *told)


def _loaded_or_stand_in(data: bytes, name: str, text: str) -> BaseException:
    """The error, or its stand-in where its class cannot be had, such as that of a package only the sender has."""
    try:
        return cast("BaseException", pickle.loads(data))  # noqa: S301  bytes of our own cluster
    except Exception:  # noqa: BLE001  whatever loading raised, what went wrong must still be told
        return stand_in(name, text)


def _travels(error: BaseException, dumps: Callable[[object], bytes]) -> bytes | None:
    """The pickled error if it comes out with its class name and text, else None."""
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


def _join(links: Sequence[tuple[object, ...]]) -> BaseException:
    """The chain of causes again; gives its first error."""
    cause: BaseException | None = None
    for make, *args in reversed(links):
        error = cast("Callable[..., BaseException]", make)(*args)
        error.__cause__ = cause
        cause = error
    return cast("BaseException", cause)


def rebuild(cls: type[BaseException], args: tuple[object, ...], state: Mapping[str, object]) -> BaseException:
    """One of our errors as it was; its constructor does not run again."""
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
    """Pickles with text, fields and causes; no constructor runs again on the other side."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_join, (_links(self),))

    def state(self) -> dict[str, object]:
        """The fields, in a form that pickles."""
        return dict(self.__dict__)
