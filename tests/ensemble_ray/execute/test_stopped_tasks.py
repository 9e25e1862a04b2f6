"""Tasks that are stopped: when a wish to stop comes too late, and what is told of those that it stopped (S-DUR-138)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from ensemble_ray import ExitEarlyError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.ports import Persistence
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.testing import ScriptedModel
from tests.ensemble_ray.execute.running import Bench, writer


class _SlowEnds(MemoryJournal):
    """Takes a while to commit how a task ended, as a disk does."""

    def __init__(self, *kinds: str) -> None:
        super().__init__("run")
        self._kinds = kinds
        self.is_committing, self.is_committed = asyncio.Event(), asyncio.Event()

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:
        """Add them."""
        await super().append(facts, epoch=epoch, until=until)
        if any(fact.kind in self._kinds for fact in facts):
            self.is_committing.set()
            await self.is_committed.wait()

    async def flush(self) -> None:
        """Return when they are committed."""
        await self.is_committed.wait()


@pytest.mark.parametrize(
    ("kind", "answer", "status"),
    [
        ("output", "Done", "completed"),
        ("task_exited", ExitEarlyError("enough"), "exited"),
        ("task_failed", ValueError("broke"), "failed"),
    ],
)
async def test_stop_comes_too_late_while_an_end_is_recorded(kind: str, answer: object, status: str) -> None:
    """S-DUR-138: else the run would say that the task was cancelled, and its record how it ended."""
    journal = _SlowEnds(kind)
    bench = Bench(handlers={"draft": lambda _: _give(answer)}, journal=journal)
    running = asyncio.create_task(bench.run(is_stopped=True))
    await journal.is_committing.wait()
    running.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not running.done()  # what is not on the disk yet is told to nobody
    journal.is_committed.set()
    assert (await running).status == status
    assert [fact.kind for fact in journal.facts()].count(kind) == 1


def _give(answer: object) -> object:
    if isinstance(answer, BaseException):
        raise answer
    return answer


async def test_task_of_a_unit_that_is_stopped_before_it_did_anything_leaves_no_trace() -> None:
    """S-DUR-138: the record knows nothing of it either. Of a plain task, what it was about to do is shown."""
    bench = Bench(agents={"draft": writer(ScriptedModel(asyncio.CancelledError()))})
    result = await bench.run(is_stopped=True, instance="graph:triage#0/draft#0")
    assert (result.status, result.trace, bench.named) == ("cancelled", None, [])
    bench = Bench(agents={"draft": writer(ScriptedModel(asyncio.CancelledError()))})
    plain = await bench.run(is_stopped=True)
    assert plain.trace is not None
    assert (plain.trace.task_description, plain.trace.metadata) == ("Do draft", {"state": "cancelled"})


async def test_trace_of_a_stopped_task_says_so() -> None:
    """S-DUR-138, S-DUR-26: and that nobody knows what came of a handler that was called."""

    async def endless(_: object) -> str:
        raise asyncio.CancelledError

    bench = Bench(handlers={"draft": endless})
    result = await bench.run(is_stopped=True)
    assert result.trace is not None
    assert result.trace.metadata == {"outcome": "unknown", "state": "cancelled"}


async def test_stop_comes_while_the_call_of_a_handler_is_recorded() -> None:
    """S-DUR-138, S-DUR-26: it was not called, but the record cannot tell; the trace says what the record will."""
    journal = _SlowEnds("tool_intent")
    bench = Bench(handlers={"draft": lambda _: "Done"}, journal=journal)
    running = asyncio.create_task(bench.run(is_stopped=True))
    await journal.is_committing.wait()
    running.cancel()
    assert getattr((await running).trace, "metadata", None) == {"outcome": "unknown", "state": "cancelled"}
