"""AgentActor as a plain class on an event loop: a run that ends while this process gets ready for it."""

from __future__ import annotations

import asyncio

import pytest

from ensemble_ray import ValidationError
from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.packing import pack
from ensemble_ray.actors.link.wire import Binding
from ensemble_ray.actors.scheduler.scheduler import SchedulerActor
from ensemble_ray.actors.worker import agent
from ensemble_ray.actors.worker.agent import AgentActor
from ensemble_ray.execute.orders import RunContext
from ensemble_ray.llm.limits.endpoints import process_endpoints
from ensemble_ray.ports import Journal
from ensemble_ray.process.concurrency import DaemonThreads
from ensemble_ray.record.journal import MemoryJournal

RUN_CONTEXT = RunContext(run_id="run-1", workflow="sequential", total_tasks=1)


@pytest.fixture
def actor(ray_cluster: str, monkeypatch: pytest.MonkeyPatch) -> AgentActor:
    """One in this process."""
    del ray_cluster
    spawn.scheduler(SchedulerActor)
    monkeypatch.setattr(agent, "freeze_modules", lambda: None)
    monkeypatch.setattr(agent, "threads", DaemonThreads("of a test"))  # those of other tests may be busy still
    monkeypatch.setattr(process_endpoints(), "share", process_endpoints().share)  # set by it, and set back
    return AgentActor("process")


async def test_run_is_not_kept_when_it_ended_while_its_journal_was_opened(
    actor: AgentActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-SET-42: a process that serves the next run has nothing of this one, and its journal is closed."""
    opening, journal = asyncio.Event(), MemoryJournal("run-1")

    async def open_slowly(*_: object, **__: object) -> Journal:
        await opening.wait()
        return journal

    monkeypatch.setattr(agent, "open_journal", open_slowly)
    binding = asyncio.ensure_future(actor.bind(pack(Binding(RUN_CONTEXT, {}, None))))
    await asyncio.sleep(0)
    assert await actor.release("run-1")
    opening.set()
    await binding
    assert actor._host._runs == {}
    assert journal._is_closed


async def test_refusal_is_told_when_the_run_ended_meanwhile(actor: AgentActor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error itself, and not that nobody waits for it."""
    opening = asyncio.Event()

    async def refuse_slowly(*_: object, **__: object) -> Journal:
        await opening.wait()
        raise ValidationError("no such record")

    monkeypatch.setattr(agent, "open_journal", refuse_slowly)
    binding = asyncio.ensure_future(actor.bind(pack(Binding(RUN_CONTEXT, {}, None))))
    await asyncio.sleep(0)
    await actor.release("run-1")
    opening.set()
    with pytest.raises(ValidationError, match="no such record"):
        await binding
