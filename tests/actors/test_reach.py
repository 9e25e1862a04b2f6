"""`reach`: which calls are tried again, how often, and what ends the tries; batches of messages."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError

from ensemble_ray.actors.link.reach import BatchSender, reach


class Calls:
    """A call that fails so often in that way; then it is answered."""

    def __init__(self, *errors: RayError) -> None:
        self._errors = list(errors)
        self.count = 0

    async def __call__(self) -> str:
        self.count += 1
        if self._errors:
            raise self._errors.pop(0)
        return "here"


def away() -> ActorUnavailableError:
    """An actor that is being started again."""
    return ActorUnavailableError("out of reach", None)


async def test_call_is_made_again_until_the_actor_is_back() -> None:
    """S-PAR-34."""
    call = Calls(away(), away())
    assert await reach(call, (0.0, 0.0)) == "here"
    assert call.count == 3


async def test_error_is_raised_when_the_last_pause_is_over() -> None:
    """S-DUR-34."""
    call = Calls(away(), away(), away())
    with pytest.raises(ActorUnavailableError):
        await reach(call, (0.0,))
    assert call.count == 2


async def test_dead_actor_is_not_asked_again_unless_its_caller_wants_that() -> None:
    """S-DUR-34: most actors do not come back."""
    with pytest.raises(ActorDiedError):
        await reach(Calls(ActorDiedError()), (0.0,))
    assert await reach(Calls(ActorDiedError(), away()), (0.0, 0.0), retry_on=RayActorError) == "here"


async def test_tries_end_when_the_caller_finds_no_reason_for_another() -> None:
    """S-DUR-34: such as that the cluster is gone."""
    call = Calls(away(), away())

    async def give_up() -> None:
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        await reach(call, (0.0, 0.0), before_retry=give_up)
    assert call.count == 1


class Sent:
    """Keeps batches; each arrives when it may."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.may = asyncio.Event()

    async def send(self, batch: list[str]) -> None:
        self.batches.append(batch)
        await self.may.wait()


async def test_entries_that_may_wait_go_with_the_next_entry_that_may_not() -> None:
    """S-DUR-156."""
    sent = Sent()
    sent.may.set()
    sender = BatchSender(sent.send)
    sender.add("a", within_s=600.0)
    sender.add("b", within_s=600.0)
    assert not sender.is_idle
    sender.add("c")
    await sender.flush()
    assert (sent.batches, sender.is_idle) == ([["a", "b", "c"]], True)


async def test_flush_sends_entries_that_may_wait_and_all_before_them() -> None:
    """S-DUR-156: also with entries that come while a batch is in flight."""
    sent = Sent()
    sender = BatchSender(sent.send)
    sender.add("a")
    await asyncio.sleep(0)
    sender.add("b", within_s=600.0)
    flushing = asyncio.ensure_future(sender.flush())
    await asyncio.sleep(0)
    sender.add("c", within_s=600.0)
    sent.may.set()
    await flushing
    assert sent.batches == [["a"], ["b", "c"]]


async def test_entries_that_may_wait_do_not_follow_a_batch_immediately() -> None:
    """S-DUR-156."""
    sent = Sent()
    sender = BatchSender(sent.send)
    sender.add("a")
    await asyncio.sleep(0)
    sender.add("b", within_s=600.0)
    sent.may.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (sent.batches, sender.is_idle) == ([["a"]], False)
    await sender.flush()
    assert sent.batches == [["a"], ["b"]]
