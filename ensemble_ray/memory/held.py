"""Objects of the user's process that tools reach from wherever their agents live (S-MEM-69, S-MEM-114). Package: memory.

A `HeldObject` that is pickled becomes a way back to the object, never a copy of it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast
from weakref import WeakValueDictionary

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.ports.services import services
from ensemble_ray.process.threads import call_user
from ensemble_ray.values.ids import new_object_id

__all__ = ["HELD_SERVICE", "HeldObject", "answer_held", "has_held_objects"]

#: Name of the driver's service.
HELD_SERVICE = "held_object"
#: What may be called from another process.
_METHODS = frozenset({"store", "retrieve", "get"})
_held: WeakValueDictionary[str, HeldObject] = WeakValueDictionary()


class HeldObject:
    """An object of this process, or the way to one of another."""

    def __init__(self, thing: object) -> None:
        self._id = new_object_id()
        self._thing = thing
        self._process_id = os.getpid()
        _held[self._id] = self

    @property
    def is_here(self) -> bool:
        """Whether the object lives in this process."""
        return self._process_id == os.getpid()

    @property
    def thing(self) -> Any:
        """The object itself, in its own process; None elsewhere."""
        return self._thing if self.is_here else None

    async def call(self, method: str, *arguments: object) -> object:
        """Call a method of the object where it lives; what it raises is raised here.

        Raises:
            IllegalStateError: its process cannot be reached from here.
        """
        if self.is_here:
            return await call_user(
                cast("Callable[..., object | Awaitable[object]]", getattr(self._thing, method)), *arguments
            )
        here = services()
        if here is None or here.driver is None:
            raise IllegalStateError(
                "The memory of a tool lives in another process, which cannot be reached outside its run"
            )
        payload = {"id": self._id, "method": method, "body": pickle.dumps(arguments)}
        return await here.driver.ask(HELD_SERVICE, payload)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_find, (self._id, self._process_id))

    @classmethod
    def find(cls, held_id: str, process_id: int) -> HeldObject:
        """Return the object that was pickled: itself at home, the way to it elsewhere."""
        found = _held.get(held_id)
        if found is not None and found.is_here:
            return found
        away = object.__new__(cls)
        away._id, away._thing, away._process_id = held_id, None, process_id
        return away


def _find(held_id: str, process_id: int) -> HeldObject:
    """Return what a pickle stands for; a function of a module travels by its name alone."""
    return HeldObject.find(held_id, process_id)


def has_held_objects() -> bool:
    """Return whether tools of this process may be reached from others; a runtime then has to listen for their calls."""
    return any(each.is_here for each in list(_held.values()))


async def answer_held(payload: Mapping[str, object]) -> object:
    """Do what a tool in another process asks of an object of this one.

    Raises:
        IllegalStateError: the object is gone, or has no such method.
    """
    found, method = _held.get(str(payload["id"])), str(payload["method"])
    if found is None or not found.is_here or method not in _METHODS:
        raise IllegalStateError(
            "The memory of a tool is gone: its owner has let go of it; keep a reference for as long as the run lasts"
        )
    arguments = cast("tuple[object, ...]", pickle.loads(cast("bytes", payload["body"])))  # noqa: S301  our own cluster
    return await found.call(method, *arguments)
