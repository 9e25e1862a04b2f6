"""Which kinds of agents of a fed run live in which house. Pure: names in, names out.

Kinds come while the run goes on and go when nobody needs them. A kind that asks for isolation has a house of its own;
others have one of their own while there are few, and share beyond that. Must never happen: more houses than that for
kinds that did not ask, however many come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["GROWS_ABOVE", "KindHouses", "most_replicas"]

#: Tasks in flight above which a house whose kinds say nothing of replicas gets as many as it may (S-MR-141).
GROWS_ABOVE = 64
_OWN = "own:"
#: Processes that a house whose kinds say nothing gets at most.
_MOST_REPLICAS = 8


def most_replicas(cluster: Mapping[str, float]) -> int:
    """How many processes a house whose kinds say nothing may get on a cluster of those resources (S-MR-141)."""
    return max(1, min(_MOST_REPLICAS, int(cluster.get("CPU", 1))))


@dataclass(slots=True)
class _House:
    #: kind -> replicas that it asks for; None: it says nothing
    kinds: dict[str, int | None] = field(default_factory=dict[str, "int | None"])


class KindHouses:
    """Houses of a run's kinds."""

    def __init__(self, *, max_houses: int, most_replicas: int) -> None:
        """Make it, without houses.

        Args:
            max_houses: How many houses are begun for kinds that ask for no isolation.
            most_replicas: How many processes a house may get whose kinds say nothing.
        """
        self._max_houses = max_houses
        self._most_replicas = most_replicas
        self._houses: dict[str, _House] = {}
        self._house_of: dict[str, str] = {}

    def house_of(self, kind: str) -> str:
        """Where a kind lives.

        Raises:
            KeyError: it has not moved in.
        """
        return self._house_of[kind]

    def move_in(self, kind: str, *, isolation: str | None, replicas: int | None) -> None:
        """Give a kind a house; nothing happens where it has one."""
        if kind not in self._house_of:
            house = f"{_OWN}{kind}" if isolation == "process" else self._shared()
            self._house_of[kind] = house
            self._houses.setdefault(house, _House()).kinds[kind] = replicas

    def move_out(self, kind: str) -> str | None:
        """Nobody needs the kind; gives its house where that was its own and is empty now."""
        house = self._house_of.pop(kind, None)
        if house is None:
            return None  # no task of it ever came
        del self._houses[house].kinds[kind]
        if not house.startswith(_OWN):
            return None  # its processes serve the next kind
        del self._houses[house]
        return house

    def processes(self, house: str, *, in_flight: int) -> tuple[int, int]:
        """How many processes a house must have, and how many it would have if there is room."""
        asked = self._houses[house].kinds.values()
        must = max((replicas or 1 for replicas in asked), default=1)
        grows = None in asked and in_flight > GROWS_ABOVE
        return must, max(must, self._most_replicas) if grows else must

    def _shared(self) -> str:
        """The house with the fewest kinds; a new one while none is empty and there may be more."""
        shared = {name: len(house.kinds) for name, house in self._houses.items() if not name.startswith(_OWN)}
        emptiest = min(shared, key=shared.__getitem__, default=None)
        if emptiest is not None and (not shared[emptiest] or len(shared) >= self._max_houses):
            return emptiest
        return f"kind:{len(shared)}"
