"""Ask the process that hosts a run's callables. Package: actors.

In: a question. Out: its answer. A process that dies when it is asked is replaced, and the next one is asked: only questions
that may be asked twice are asked so.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import ray.exceptions

if TYPE_CHECKING:
    from ensemble_ray.actors.scheduler.process_groups import ProcessGroups
    from ensemble_ray.actors.scheduler.processes import Lease

__all__ = ["ask_host"]

Answer = TypeVar("Answer")


async def ask_host(
    groups: ProcessGroups, ask: Callable[[Lease], Awaitable[Answer]], *, most_lost: int | None = None
) -> Answer:
    """Ask the process of the run's callables; one that dies is replaced, and asked again.

    Args:
        groups: The processes of the run.
        ask: Ask a process once.
        most_lost: How many may die of the question; None: as many as are replaced.

    Raises:
        RayError: the last one died, too.
    """
    for lost in itertools.count(1):
        host = groups.host_callables()
        try:
            return await ask(host)
        except ray.exceptions.RayError as error:
            groups.lose(host, error)
            if lost == most_lost or groups.callables is host:  # it was replaced too often
                raise
    raise AssertionError("unreachable")
