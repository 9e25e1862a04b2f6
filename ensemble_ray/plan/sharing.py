"""Which process a run shares with other runs of its program. Package: plan. Pure.

A process costs about a second of start-up and 60 MB, a run in a process that is there a thousandth of that. Rules:
1. A run takes a process that no run has, before it shares one; that is the pool's business.
2. It gets a new one, while there are fewer than `most`: runs that are few work on all processors, and what blocks one of them holds
   up no other.
3. Beyond, it joins the one that has least to do of those with fewer than 64 runs; where there is none, it gets a new one.
   So no run waits for a process, and there is one for every 64 runs, not one for each.
4. It never gets a process twice: its groups work side by side, and what ends one is not to end the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["MOST_RUNS", "SharedProcess", "choose_shared"]

#: How many runs a process has at most.
MOST_RUNS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedProcess:
    """What the choice needs to know of a process."""

    name: str
    #: ids of the runs that have it
    runs: frozenset[str]
    #: tasks that it is at work on, of all of them
    tasks: int

    @property
    def load(self) -> int:
        """What it has to do: a run that has no task now is about to have one."""
        return len(self.runs) + self.tasks


def choose_shared(run_id: str, processes: Iterable[SharedProcess], *, most: int) -> str | None:
    """Return the name of the process that a run joins; None: it gets a new one.

    Args:
        run_id: The run.
        processes: Those that it may share: of its program, of the type it needs.
        most: How many of them there are before the run joins one.
    """
    known = list(processes)
    if len(known) < most:
        return None
    open_ = [each for each in known if run_id not in each.runs and len(each.runs) < MOST_RUNS]
    return min(open_, key=lambda each: each.load).name if open_ else None
