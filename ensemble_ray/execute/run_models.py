"""RunModels: the models that a run's tasks can be told to ask in place of their agents' own. Package: execute.

In: models by name, as objects where the run began and as bytes elsewhere. Out: the model of a name, loaded when it is first asked for. A
process that only passes them on, as a scheduler does, loads none.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from ensemble_ray.errors import ValidationError, message_of

if TYPE_CHECKING:
    from ensemble_ray.ports import ChatModel

__all__ = ["RunModels"]

_NONE: Mapping[str, bytes] = {}


class RunModels:
    """Models by name."""

    __slots__ = ("_bodies", "_loaded")

    def __init__(self, models: Mapping[str, ChatModel] | None = None, *, bodies: Mapping[str, bytes] = _NONE) -> None:
        """Make them of objects, or of what `packed` made of these."""
        self._loaded: dict[str, ChatModel] = dict(models or {})
        self._bodies = dict(bodies)

    @property
    def names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(sorted(self._loaded.keys() | self._bodies.keys()))

    @property
    def bodies(self) -> Mapping[str, bytes]:
        """Those that are packed, by name."""
        return self._bodies

    def get(self, name: str) -> ChatModel:
        """Return the model of that name.

        Raises:
            ValidationError: there is none, or it cannot be loaded in this process.
        """
        if name not in self._loaded:
            if name not in self._bodies:
                raise ValidationError(f"The run has no model '{name}'. Known: [{', '.join(self.names)}]")
            try:
                self._loaded[name] = cast("ChatModel", pickle.loads(self._bodies[name]))  # noqa: S301  bytes of our own driver
            except Exception as error:
                raise ValidationError(
                    f"Model '{name}' cannot be loaded in a worker process: {message_of(error)}. Install the module it comes "
                    "from on every node, or use runtime='inline'"
                ) from error
        return self._loaded[name]

    def pack(self, dump: Callable[[object, str], bytes]) -> RunModels:
        """Return them as they travel.

        Args:
            dump: Returns the bytes of a model; its second argument is what its user calls it.

        Raises:
            ValidationError: one of them cannot travel.
        """
        fresh = {
            name: dump(model, f"Model '{name}'") for name, model in self._loaded.items() if name not in self._bodies
        }
        return RunModels(bodies={**self._bodies, **fresh})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunModels) and self.names == other.names and self._bodies == other._bodies

    __hash__ = None  # type: ignore[assignment]  # what is loaded comes later

    def __reduce__(self) -> tuple[Callable[[Mapping[str, bytes]], RunModels], tuple[Mapping[str, bytes]]]:
        if unpacked := self._loaded.keys() - self._bodies.keys():
            raise TypeError(f"models travel as bytes alone, and these are not packed: {sorted(unpacked)}")
        return _of_bodies, (self._bodies,)


def _of_bodies(bodies: Mapping[str, bytes]) -> RunModels:
    return RunModels(bodies=bodies)
