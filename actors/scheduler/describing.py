"""What a scheduler says of its processes (S-CLU-100, S-CLU-101).

In: the pool, which knows what each process was handed. Out: a description of bounded size. Each process is asked what it has begun, and
has a moment for the answer. Never: work while nobody asks, or a second question to a process that has not answered the first one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ensemble_ray.actors.scheduler.processes import AgentProcess, ProcessPool
from ensemble_ray.values.descriptions import (
    MOST_PROCESSES,
    MOST_TASKS,
    ActorState,
    ProcessDescription,
    load_actor,
)

__all__ = ["ProcessSurvey", "merge_description"]

#: How long processes may take to answer, s.
_ANSWER_S = 1.5
#: Runs of one process that are told of.
_MOST_RUNS = 64


class ProcessSurvey:
    """Describes the processes of a pool."""

    def __init__(self, pool: ProcessPool) -> None:
        self._pool = pool
        #: questions that were not answered yet, by the process's name
        self._asked: dict[str, asyncio.Task[ProcessDescription | None]] = {}

    async def describe(self) -> tuple[list[ProcessDescription], int]:
        """Return the processes, those with most to do first, and how many are left out."""
        living = sorted(self._pool.living, key=lambda each: (-_load(each), each.name))
        chosen = living[:MOST_PROCESSES]
        answers = await self._ask([each for each in chosen if _has_begun(each)])
        described = [self._merge(each, answers) for each in chosen if each.is_alive]
        return described, len(living) - len(chosen)

    async def _ask(self, processes: Sequence[AgentProcess]) -> Mapping[str, ProcessDescription]:
        """Return what those processes say that answer in time."""
        names = {each.name for each in processes}
        self._asked = {name: asked for name, asked in self._asked.items() if name in names}
        for process in processes:
            if process.name not in self._asked:
                self._asked[process.name] = asyncio.get_running_loop().create_task(_answer_of(process))
        asked = dict(self._asked)
        if asked:
            await asyncio.wait(asked.values(), timeout=_ANSWER_S)
        answered = {name: each.result() for name, each in asked.items() if each.done()}
        for name in answered:
            self._asked.pop(name, None)
        return {name: answer for name, answer in answered.items() if answer is not None}

    def _merge(self, process: AgentProcess, answers: Mapping[str, ProcessDescription]) -> ProcessDescription:
        leases = [lease.describe() for lease in process.leases if lease.describe is not None]
        answer = answers.get(process.name)
        state: ActorState = "ready"
        if process.is_retired:
            state = "retiring"
        elif self._pool.is_idle(process):
            state = "kept"
        elif not _has_begun(process):
            state = "starting"
        elif answer is None:
            state = "silent"
        known = ProcessDescription(
            name=process.name,
            kind=process.type,
            state=state,
            node_id=process.node_id,
            reserved=str(process.requirements) if process.requirements else "",
            runs=tuple(each.run for each in leases[:_MOST_RUNS]),
            more_runs=max(0, len(leases) - _MOST_RUNS),
            tasks=tuple(task for each in leases for task in each.tasks)[:MOST_TASKS],
        )
        return merge_description(known, answer, handed=_load(process))


def merge_description(
    known: ProcessDescription, answer: ProcessDescription | None, *, handed: int
) -> ProcessDescription:
    """Return what is known of a process: what it was handed, and what it says itself.

    What it was handed and does not tell of is on its way there. What it tells of and was not handed is work for other agents, which
    these hand on themselves.

    Args:
        known: As its scheduler knows it, with tasks that it was handed.
        answer: What it says; None: it did not answer.
        handed: How many tasks it was handed and has not reported.
    """
    if answer is None:
        return replace(known, queue=handed, more_tasks=max(0, handed - len(known.tasks)))
    deaths = {(each.run_id, each.instance): each.deaths for each in known.tasks}
    begun = [replace(each, deaths=deaths.pop((each.run_id, each.instance), 0)) for each in answer.tasks]
    told = len(answer.tasks) + answer.more_tasks
    # Where it left some out, nobody can say which of the others are on their way.
    coming = [each for each in known.tasks if (each.run_id, each.instance) in deaths] if not answer.more_tasks else []
    shown = (*begun, *coming)[:MOST_TASKS]
    whole = max(told + len(coming), handed)
    return replace(
        known,
        node_id=answer.node_id,
        host=answer.host,
        pid=answer.pid,
        memory_bytes=answer.memory_bytes,
        endpoints=answer.endpoints,
        tasks=shown,
        more_tasks=whole - len(shown),
        queue=answer.queue + whole - told,
    )


def _load(process: AgentProcess) -> int:
    return sum(lease.count_tasks() for lease in process.leases)


def _has_begun(process: AgentProcess) -> bool:
    """Return whether a process answers, as far as is known: one that has no run any more did."""
    return not process.leases or any(lease.is_ready for lease in process.leases)


async def _answer_of(process: AgentProcess) -> ProcessDescription | None:
    """Return what a process says; None: it died, which the pool hears of by itself, or cannot say it."""
    try:
        return load_actor(await process.handle.describe.remote()).process
    except Exception:  # noqa: BLE001  whatever it is, it is shown as a process that does not answer
        return None
