"""Which agents live in which house. Room: plan. Pure.

An agent is an id; a house is where it lives: an actor process that costs about a second of start-up and 60 MB. Rules:
1. An agent gets houses of its own while fewer than `max_own` exist; `isolation="process"` gets its own beyond that,
   `"shared"` and synthesized agents never ask for one.
2. All others live by kind: agents with the same tools and model share a house, role and prompts travel with the task.
3. Kinds beyond the cap share houses in turn, so no task ever waits for a house.
4. A house runs as many processes as its agent declares `replicas`; for a shared house, the most any of them declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["HousePlan", "Lodger", "assign_houses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lodger:
    """What housing needs to know of an agent."""

    key: str
    #: the same for agents that may share a process
    kind: str
    isolation: str | None = None
    replicas: int = 1
    is_synthesized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HousePlan:
    """Houses and who lives where."""

    #: agent key -> house
    house_of: Mapping[str, str]
    #: house -> number of processes
    replicas: Mapping[str, int]


def assign_houses(lodgers: Sequence[Lodger], *, max_own: int) -> HousePlan:
    """Give every agent a house."""
    house_of: dict[str, str] = {}
    replicas: dict[str, int] = {}
    kinds: dict[str, str] = {}
    own = sum(lodger.isolation == "process" for lodger in lodgers)
    for lodger in lodgers:
        wants_own = lodger.isolation == "process"
        if not wants_own and lodger.isolation != "shared" and not lodger.is_synthesized and own < max_own:
            wants_own = True
            own += 1
        if wants_own:
            house = f"own:{lodger.key}"
        elif lodger.kind in kinds:
            house = kinds[lodger.kind]
        else:
            house = kinds[lodger.kind] = f"kind:{len(kinds) % max_own}"
        house_of[lodger.key] = house
        replicas[house] = max(replicas.get(house, 1), lodger.replicas)
    return HousePlan(house_of=house_of, replicas=replicas)
