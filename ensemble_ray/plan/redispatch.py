"""Which process has which order of a run, and what follows when one of them dies. Package: plan. Pure.

Rules:
1. A report counts if it is of the newest dispatch of its order; each order is reported once (S-PAR-12).
2. The orders of a process that died are handed out again, each under a higher epoch, if the run is recorded: what it did
   is found there, and what it may still write is refused (S-DUR-31, S-DUR-16).
3. An order is hopeless after three deaths, since it may well be what kills the processes; without a record after the
   first, since all would be done again; and when somebody wants it to end. It is reported by whoever keeps this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ensemble_ray.values.epochs import REDISPATCH_STEP

__all__ = ["MOST_DEATHS", "AfterDeath", "DispatchTable"]

#: An order whose process died so often is not handed out again.
MOST_DEATHS = 3


@dataclass(frozen=True, slots=True)
class AfterDeath:
    """What follows from the death of a process."""

    #: orders to hand out again, under the epoch that the table has for them now
    to_retry: Sequence[str]
    #: orders that are given up; `abandon` says which of them to report
    hopeless: Sequence[str]


@dataclass(slots=True)
class _Dispatch:
    process: str
    epoch: int
    #: how many processes died with it
    deaths: int = 0
    #: whether somebody wants it to end
    is_stopped: bool = False
    #: whether it is about to be reported in place of its process
    is_abandoned: bool = False


@dataclass(slots=True)
class DispatchTable:
    """Orders that were handed out and are not reported, by instance; processes are names."""

    #: whether an order whose process died can go on elsewhere
    is_recorded: bool
    _dispatches: dict[str, _Dispatch] = field(default_factory=dict[str, _Dispatch])
    #: process -> what it is at work on
    _busy: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    def __len__(self) -> int:
        return len(self._dispatches)

    def hand_out(self, instance: str, epoch: int, process: str) -> None:
        """Note that a process has that order now; it may have been with another before."""
        held = self._dispatches.get(instance)
        if held is None:
            self._dispatches[instance] = _Dispatch(process, epoch)
        else:
            self._busy.get(held.process, set()).discard(instance)
            held.process, held.epoch = process, epoch
        self._busy.setdefault(process, set()).add(instance)

    def epoch_of(self, instance: str) -> int | None:
        """Return the epoch of an order's newest dispatch; None where it was reported."""
        held = self._dispatches.get(instance)
        return None if held is None else held.epoch

    def process_of(self, instance: str) -> str | None:
        """Return which process has an order; None where it was reported."""
        held = self._dispatches.get(instance)
        return None if held is None else held.process

    def deaths_of(self, instance: str) -> int:
        """Return how many processes died with an order."""
        held = self._dispatches.get(instance)
        return 0 if held is None else held.deaths

    def is_stopped(self, instance: str) -> bool:
        """Return whether somebody wants that order to end."""
        held = self._dispatches.get(instance)
        return held is not None and held.is_stopped

    def load(self, process: str) -> int:
        """Return how many orders a process is at work on."""
        return len(self._busy.get(process, ()))

    def orders_of(self, process: str, *, most: int | None = None) -> list[str]:
        """Return the orders that a process is at work on; where `most` is given, so many of them."""
        return list(islice(self._busy.get(process, ()), most))

    def stop(self, instances: Iterable[str]) -> dict[str, list[str]]:
        """Note that these orders are to end; return those that are at work, by process."""
        found: dict[str, list[str]] = {}
        for instance in instances:
            held = self._dispatches.get(instance)
            if held is not None:
                held.is_stopped = True
                found.setdefault(held.process, []).append(instance)
        return found

    def stuck(self, instances: Iterable[str] | None = None) -> list[str]:
        """Return the processes that still hold orders which were to end.

        Args:
            instances: Which orders; None: all that were to end.
        """
        names = self._dispatches if instances is None else instances
        held = (self._dispatches[name] for name in names if self.is_stopped(name))
        return list(dict.fromkeys(dispatch.process for dispatch in held))

    def report(self, instance: str, epoch: int) -> bool:
        """Return whether a report counts; then the order is forgotten."""
        held = self._dispatches.get(instance)
        if held is None or held.epoch != epoch:
            return False  # of a process that lost the order to another
        self._busy.get(held.process, set()).discard(instance)
        del self._dispatches[instance]
        return True

    def lose(self, process: str) -> AfterDeath:
        """Return what follows from the death of a process. Deaths that are heard of again find nothing."""
        self._busy.pop(process, None)
        to_retry: list[str] = []
        hopeless: list[str] = []
        for instance, held in self._dispatches.items():
            if held.process != process or held.is_abandoned:
                continue
            held.deaths += 1
            if not self.is_recorded or held.deaths >= MOST_DEATHS or held.is_stopped:
                hopeless.append(instance)
            else:
                held.epoch += REDISPATCH_STEP
                to_retry.append(instance)
        return AfterDeath(to_retry, hopeless)

    def abandon(self, process: str, instances: Iterable[str]) -> list[str]:
        """Return those orders of a process that are to be reported in its place; each is returned once."""
        abandoned: list[str] = []
        for instance in instances:
            held = self._dispatches.get(instance)
            if held is not None and held.process == process and not held.is_abandoned:
                held.is_abandoned = True
                abandoned.append(instance)
        self._busy.get(process, set()).difference_update(abandoned)
        return abandoned

    def forget_process(self, process: str) -> None:
        """Forget a process that has no orders any more."""
        self._busy.pop(process, None)
