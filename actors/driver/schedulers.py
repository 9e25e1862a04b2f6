"""Schedulers: those of a cluster that a program's runs are spread over (S-CLU-60).

In: how many the program wants, and in which namespace. Out: the one that has a run. They outlive their drivers, and another program may want another
number: a run that is recorded is found by its record whoever has it, one that is not is asked for (S-CLU-62).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from ensemble_ray.actors import spawn
from ensemble_ray.actors.driver.cluster import check_version
from ensemble_ray.actors.scheduler.scheduler import SchedulerActor
from ensemble_ray.errors import RunExistsError, ValidationError
from ensemble_ray.plan.shards import shard_of
from ensemble_ray.process.threads import threads

__all__ = ["Schedulers", "check_namespace"]

#: Names that stand in names of actors, of files and in logs.
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_namespace(name: str) -> str:
    """Return the name of a namespace; empty: the one without a name.

    Raises:
        ValidationError: it is none.
    """
    if name and not _NAMESPACE.fullmatch(name):
        raise ValidationError(
            f"A namespace has up to 64 letters, digits and '.', '_', '-', and begins with a letter or digit; got: {name[:80]!r}"
        )
    return name


class Schedulers:
    """The schedulers of one program, in the cluster that it is connected to."""

    def __init__(self, handles: Sequence[Any], namespace: str = "") -> None:
        """Make it of the handles of all of them, in the order of their numbers."""
        self._handles = handles
        self._namespace = namespace

    @classmethod
    async def connect(cls, shards: int, namespace: str) -> Schedulers:
        """Return the first schedulers of a namespace, as many; those that are not there are started.

        Raises:
            ValidationError: one of them is of another version than this process.
        """
        handles = [await threads.run(spawn.scheduler, SchedulerActor, number, namespace) for number in range(shards)]
        await asyncio.gather(*map(check_version, handles))
        return cls(handles, namespace)

    def of(self, run_id: str) -> Any:
        """Return the scheduler of a run."""
        return self._handles[shard_of(run_id, len(self._handles))]

    async def check_unrecorded(self, run_id: str) -> None:
        """Refuse a run that no record tells of, where a scheduler has one of that id that another number led to.

        Raises:
            RunExistsError: that one is running.
        """
        own = spawn.scheduler_name(shard_of(run_id, len(self._handles)), self._namespace)
        known = await threads.run(spawn.existing_schedulers, self._namespace)
        others = [each for name, each in known.items() if name != own]
        if any(await asyncio.gather(*(each.is_running.remote(run_id) for each in others))):
            raise RunExistsError(f"Run '{run_id}' is running: wait for its end, or choose another run_id")

    async def evict_idle(self) -> None:
        """End the agent processes that are kept for the next run."""
        await asyncio.gather(*(each.evict_idle.remote() for each in self._handles))
