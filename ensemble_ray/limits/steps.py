"""Stimuli and instructions of the bucket machine. Package: limits. Values only.

They are the messages of the limiter too: holders send stimuli, and waiters are answered with instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Dismiss",
    "Expire",
    "Grant",
    "HolderGone",
    "Instruction",
    "Recall",
    "Refunded",
    "Requested",
    "Returned",
    "Stimulus",
    "Ticked",
    "Used",
    "WaiterCancelled",
    "WakeAt",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """Somebody asks for a permit."""

    #: unique over all holders; also the name of the lease, should it become one
    waiter: str
    #: process on whose behalf the waiter asks
    holder: str
    #: how long a permit is wanted
    timeout_s: float
    #: permits the holder could use within a lease's life, its own one included
    want: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WaiterCancelled:
    """A waiter left the queue."""

    waiter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refunded:
    """A granted permit was not used, because its waiter had left by then."""

    permits: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """A holder's report on a lease. `used` counts from the lease's beginning, so reports may be lost or swapped."""

    lease: str
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A holder is done with a lease; `used` as in `Used`."""

    lease: str
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderGone:
    """A holder is dead, or holds nothing any more."""

    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time has passed."""


Stimulus = Requested | WaiterCancelled | Refunded | Used | Returned | HolderGone | Ticked


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Give a waiter its permits; more than one make a lease named like the waiter, whose first permit is used."""

    waiter: str
    permits: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Expire:
    """Tell a waiter that its deadline came first."""

    waiter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss:
    """A waiter is out of the queue without an answer: it left, or its holder is gone."""

    waiter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Tell a lease's holder to stop using it; said once per lease, also when it ended by itself."""

    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Say `Ticked` at that instant; the head of the queue is the one to keep the watch."""

    at: float
    waiter: str


Instruction = Grant | Expire | Dismiss | Recall | WakeAt
