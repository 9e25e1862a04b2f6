"""RunFollower: reads a run's events from anywhere to its end, whatever became of the run.

In: a store, a run's id, where the reader stands; events that happen just now, where this process has them. Out: pages of messages.
Rules: what the record tells comes once each, in the record's order, with a cursor; what only happens now comes between, without one.
One page of facts is in memory at a time. On the library's loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ensemble_ray.events import TokenEvent
from ensemble_ray.events.delivery import EventLog
from ensemble_ray.events.messages import Cursor, WireEvent, render_token
from ensemble_ray.process.forks import SystemClock
from ensemble_ray.record.following.projection import EventProjection
from ensemble_ray.values.outputs import RunState

if TYPE_CHECKING:
    from ensemble_ray.events import LlmIterationStartedEvent
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.record.stores import RecordedRun

#: How often the record is looked at while nothing is heard of the run, s; what happens here wakes its followers before.
POLL_S = 0.25
#: Live events that are kept for readers that are slow; older ones are dropped.
_KEPT = 1000
#: How many messages make a page full: the rest of the facts is read when that is taken.
_PAGE = 200


class LiveEvents:
    """What happens just now in one run of this process. A listener; thread-safe."""

    def __init__(self) -> None:
        self.log = EventLog(is_open=True, kept=_KEPT)
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether no more will come."""
        return self._is_closed

    def on_token(self, event: TokenEvent) -> None:
        """Take a fragment, for those who follow just now."""
        self.log.emit(event)

    def begin_answer(self, event: LlmIterationStartedEvent) -> None:
        """Note between the fragments that a model is asked; the messages that it is sent are not held."""
        self.log.emit(replace(event, messages=()))

    def close(self) -> None:
        """Take notice that no more will come."""
        self._is_closed = True
        self.log.close()


class FollowedStore(Protocol):
    """A `RunStore`, as far as its runs are followed."""

    def read(self, run_id: str, *, after: int = 0) -> AsyncGenerator[Sequence[Fact]]:
        """Return the facts behind a position; see `RunStore.read`."""
        ...

    async def summary(self, run_id: str) -> RecordedRun | None:
        """Return how the run stands; see `RunStore.summary`."""
        ...


class SharedEnds:
    """A store whose runs many readers follow at once: one of them looks whether there is more, for all. Fulfils `FollowedStore`."""

    def __init__(self, store: FollowedStore, *, lasting_s: float = POLL_S * 0.9) -> None:
        """Make it.

        Args:
            store: Has the records.
            lasting_s: For how long nobody looks again.
        """
        self._store = store
        self._lasting_s = lasting_s
        #: by run: the last position, and when somebody saw that there was nothing behind it; those seen last in the end
        self._ends: OrderedDict[str, tuple[int, float]] = OrderedDict()

    async def read(self, run_id: str, *, after: int = 0) -> AsyncGenerator[Sequence[Fact]]:
        """Return the facts behind a position, none where somebody has just seen that there are none."""
        now = asyncio.get_running_loop().time()
        end, seen_at = self._ends.get(run_id, (-1, 0.0))
        if after == end and now - seen_at < self._lasting_s:
            return
        last = after
        async with aclosing(self._store.read(run_id, after=after)) as pages:
            async for page in pages:
                last = page[-1].seq if page else last
                yield page
        self._ends[run_id] = (last, now)
        self._ends.move_to_end(run_id)
        while (oldest := next(iter(self._ends.values())))[1] + self._lasting_s < now and oldest is not self._ends[
            run_id
        ]:
            self._ends.popitem(last=False)

    async def summary(self, run_id: str) -> RecordedRun | None:
        """Return how the run stands."""
        return await self._store.summary(run_id)

    def forget(self, run_id: str) -> None:
        """Take notice that a run has ended: its readers look once more."""
        self._ends.pop(run_id, None)


class RunFollower:
    """One reader of one run."""

    def __init__(
        self,
        store: FollowedStore,
        run_id: str,
        *,
        after: Cursor | None = None,
        live: LiveEvents | None = None,
        outcome: Callable[[], Awaitable[str | None]] | None = None,
    ) -> None:
        """Begin behind a cursor.

        Args:
            store: Has the record, or will have it.
            run_id: The run's id.
            after: The last message that the reader has had; None: it has had none.
            live: What happens just now, where this process has it.
            outcome: Says why nothing more comes where the record has no end, such as `interrupted`; None as long as the run
                goes on. Default: as the store says.
        """
        self.run_id = run_id
        self._store = store
        self._after = after or Cursor()
        self._live = live
        self._outcome = outcome or self._stored_outcome
        self._projection = EventProjection(run_id)
        self._seq = 0
        self._live_cursor = 0
        self._is_over = False
        #: whether it was seen that nothing happens any more
        self._knows_closed = False

    @property
    def is_over(self) -> bool:
        """Whether the last message was given."""
        return self._is_over

    @property
    def cursor(self) -> Cursor:
        """The last message with a cursor that was given."""
        return self._after

    async def read(self, timeout_s: float) -> Sequence[WireEvent]:
        """Return the next messages as soon as there are any; none when the time is up.

        Args:
            timeout_s: How long to wait.

        Raises:
            RecordError: the record is damaged, or was removed meanwhile.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self._is_over:
            if messages := await self._next():
                return messages
            left = deadline - loop.time()
            if left <= 0:
                break
            await self._wait(min(left, POLL_S))
        return ()

    async def _next(self) -> list[WireEvent]:
        """Return what there is, the end included."""
        live = self._read_live()
        messages = await self._read_record()
        if messages or live:
            return [*messages, *live]
        end = self._projection.end()
        if end is None and (reason := await self._outcome()) is not None:
            # It may have ended between the two looks.
            messages = await self._read_record()
            end = self._projection.end() or self._projection.unrecorded_end(reason, SystemClock().now())
        if end is None:
            return []
        if messages:
            return messages
        self._is_over = True
        return [*self._unread([end])]

    async def _read_record(self) -> list[WireEvent]:
        messages: list[WireEvent] = []
        async with aclosing(self._store.read(self.run_id, after=self._seq)) as pages:
            async for page in pages:
                for fact in page:
                    self._seq = fact.seq
                    messages += self._unread(self._projection.apply(fact))
                if len(messages) >= _PAGE:
                    break
        return messages

    def _unread(self, messages: Sequence[WireEvent]) -> list[WireEvent]:
        """Return those that the reader has not had."""
        unread = [each for each in messages if each.cursor is None or each.cursor > self._after]
        self._after = max([self._after, *(each.cursor for each in unread if each.cursor is not None)])
        return unread

    def _read_live(self) -> list[WireEvent]:
        if self._live is None:
            return []
        events, self._live_cursor, _ = self._live.log.read(self._live_cursor)
        now = SystemClock().now()
        return [render_token(event, now) for event in events if isinstance(event, TokenEvent)]

    async def _wait(self, timeout_s: float) -> None:
        """Return when something may be new."""
        if self._live is None:
            await asyncio.sleep(timeout_s)
            return
        is_changed = await self._live.log.wait_until_changed(self._live_cursor, timeout_s=timeout_s)
        if is_changed and self._live.is_closed:
            if self._knows_closed:
                await asyncio.sleep(timeout_s)  # nothing comes any more, but the end
            self._knows_closed = True

    async def _stored_outcome(self) -> str | None:
        summary = await self._store.summary(self.run_id)
        if summary is None or summary.state.is_going_on or summary.state is RunState.WAITING:
            return None
        return (RunState.INTERRUPTED if not summary.state.is_final else summary.state).value
