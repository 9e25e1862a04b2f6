"""What a scheduler says of its processes: what it handed out beside what they say themselves, and never more than so much."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable

import pytest

from ensemble_ray.actors.driver.cluster import LOCAL
from ensemble_ray.actors.driver.cluster_probe import answer_questions
from ensemble_ray.actors.scheduler.processes import AgentProcess, Lease, LeaseDescription, ProcessPool
from ensemble_ray.actors.scheduler.scheduler import ProcessSurvey, merge_description
from ensemble_ray.plan.placement import ResourceRequirements
from ensemble_ray.values.metrics import (
    MOST_PROCESSES,
    MOST_TASKS,
    ActorDescription,
    ClusterDescription,
    EndpointDescription,
    ProcessDescription,
    RunDescription,
    TaskDescription,
    dump_actor,
    dump_cluster,
    load_actor,
    load_cluster,
)


def doing(instance: str, began_at: float | None = None, *, deaths: int = 0, run: str = "r") -> TaskDescription:
    """A task."""
    return TaskDescription(run_id=run, instance=instance, began_at=began_at, deaths=deaths)


def of(*tasks: TaskDescription, **more: object) -> ProcessDescription:
    """A process with these tasks."""
    return ProcessDescription(name="agent-1", kind="agent", tasks=tasks, **more)  # type: ignore[arg-type]


def test_tasks_are_those_that_were_handed_and_those_that_the_process_tells_of() -> None:
    """S-CLU-101: what is on its way waits; work for other agents, which nobody handed out, counts; deaths stay known."""
    known = of(doing("a#0", deaths=2), doing("b#0"), reserved="num_gpus=1")
    answer = of(doing("a#0", 5.0), doing("a#0/0/call-0/delegate#0", 6.0), doing("c#0"), queue=1, pid=7, host="h")
    told = merge_description(known, answer, handed=2)
    assert [(each.instance, each.began_at, each.deaths) for each in told.tasks] == [
        ("a#0", 5.0, 2),
        ("a#0/0/call-0/delegate#0", 6.0, 0),
        ("c#0", None, 0),
        ("b#0", None, 0),
    ]
    assert (told.queue, told.more_tasks, told.pid, told.host, told.reserved) == (2, 0, 7, "h", "num_gpus=1")


def test_all_that_was_handed_waits_when_the_process_says_nothing() -> None:
    """S-CLU-101: nothing is known of what began."""
    told = merge_description(of(doing("a#0")), None, handed=3)
    assert (len(told.tasks), told.more_tasks, told.queue, told.pid) == (1, 2, 3, None)


def test_what_is_left_out_is_counted() -> None:
    """S-CLU-100: a process that tells of some of its tasks; those on their way are those that it does not count."""
    some = [doing(f"t#{number}", float(number)) for number in range(MOST_TASKS)]
    told = merge_description(of(doing("x#0")), of(*some, more_tasks=70, queue=20), handed=130)
    assert (len(told.tasks), told.more_tasks) == (MOST_TASKS, 130 - MOST_TASKS)
    assert told.queue == 20 + 130 - MOST_TASKS - 70


class Handle:
    """A process that answers when it is let, and counts what it is asked."""

    def __init__(self, answer: Callable[[], Awaitable[bytes]]) -> None:
        self.asked = 0
        self._answer = answer
        self.describe = self

    def remote(self) -> Awaitable[bytes]:
        """Ask."""
        self.asked += 1
        return self._answer()


async def fine() -> bytes:
    """Answer."""
    process = of(pid=1, host="h", endpoints=(EndpointDescription(name="e", state="open", probe_in_s=2.0),))
    return dump_actor(ActorDescription(process=process))


async def never() -> bytes:
    """Answer never, as a process does whose loop is blocked."""
    return await asyncio.get_running_loop().create_future()


async def broken() -> bytes:
    """Fail."""
    raise RuntimeError("gone")


def pool_of(*processes: AgentProcess) -> ProcessPool:
    """A pool with these processes, each at work on some tasks of a run."""
    pool = ProcessPool()
    for number, process in enumerate(processes):
        pool._living.add(process)
        if process.name.startswith("kept"):
            pool._idle.append(process)
            continue
        run = RunDescription(run_id=f"r{number}", agents=("Ann",))
        lease = Lease(process=process, run_id=run.run_id, is_ready=not process.name.startswith("starting"))
        lease.count_tasks = lambda number=number: number
        lease.describe = lambda run=run: LeaseDescription(run, ())
        process.leases.append(lease)
    return pool


@pytest.mark.heavy
async def test_each_process_says_how_it_stands() -> None:
    """S-CLU-101: one that has not begun is not asked; one that does not answer is asked once, and not again before it has."""
    stuck = Handle(never)
    starting = Handle(fine)
    gpu = ResourceRequirements(num_gpus=1)
    pool = pool_of(
        AgentProcess(handle=Handle(fine), name="ready"),
        AgentProcess(handle=Handle(fine), name="kept"),
        AgentProcess(handle=starting, name="starting", requirements=gpu),
        AgentProcess(handle=stuck, name="stuck"),
        AgentProcess(handle=Handle(broken), name="broken", is_retired=True),
    )
    survey = ProcessSurvey(pool)
    for _ in range(2):
        told, more = await survey.describe()
        assert {each.name: each.state for each in told} == {
            "broken": "retiring",
            "stuck": "silent",
            "starting": "starting",
            "kept": "kept",
            "ready": "ready",
        }
    assert (stuck.asked, starting.asked, more) == (1, 0, 0)
    by_name = {each.name: each for each in told}
    assert (by_name["starting"].reserved, by_name["ready"].pid) == ("num_gpus=1", 1)
    assert by_name["ready"].endpoints[0].state == "open"
    assert by_name["stuck"].runs == (RunDescription(run_id="r3", agents=("Ann",)),)


async def test_description_of_many_processes_is_bounded() -> None:
    """S-CLU-100: those that have most to do are told of, and only these are asked."""
    handle = Handle(fine)
    pool = pool_of(*(AgentProcess(handle=handle, name=f"p{number}") for number in range(MOST_PROCESSES + 250)))
    told, more = await ProcessSurvey(pool).describe()
    assert (len(told), more, handle.asked) == (MOST_PROCESSES, 250, MOST_PROCESSES)
    assert {each.name for each in told} == {f"p{number}" for number in range(250, MOST_PROCESSES + 250)}
    body = dump_actor(ActorDescription(process=of(), processes=tuple(told), more_processes=more))
    assert len(body) < 1_000_000
    assert load_actor(body).processes == tuple(told)


def test_descriptions_of_another_version_are_read() -> None:
    """S-CLU-103: fields that are not known are passed over, and those that are missing have their defaults."""
    body = b'{"address": "h:1", "actors": [{"process": {"name": "s", "kind": "scheduler", "mood": "good"}}], "x": 1}'
    assert load_cluster(body) == ClusterDescription(
        address="h:1", actors=(ActorDescription(process=ProcessDescription(name="s", kind="scheduler")),)
    )
    assert b"\n" not in dump_cluster(load_cluster(body))


def test_each_question_gets_a_line_and_no_cluster_is_started() -> None:
    """S-CLU-104: an address that means one's own is none of a cluster that is there."""
    answers = io.BytesIO()
    answer_questions(LOCAL, io.BytesIO(b"\n\n"), answers)
    first, second = answers.getvalue().splitlines()
    assert first == second
    assert "127.0.0.1:6379" in json.loads(first)["error"]
