"""JournalActor: writes for processes that cannot reach the store of files themselves; and the way to it (S-DUR-7).

A file of records can be written on the machine that it lies on and nowhere else. Processes on other nodes send their
groups here. Never: an order of one writer's facts that is not that in which it appended them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import ray
import ray.exceptions

from actors.failures import last_line
from actors.wire import RunPlace
from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.errors import EnsembleError, IllegalStateError, RecordError, StaleEpochError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.ports import Journal, Until
from ensemble_ray.record.journal import EpochGate, MemoryJournal
from ensemble_ray.record.rendering import in_json_form
from ensemble_ray.record.stores import StoreAddress, store_at

__all__ = ["JournalActor", "JournalLine", "open_journal"]

_log = bounded_logger(__name__)
#: What one call appended: facts, their epoch, and how safe they must be before it returns (`Until`).
Group = tuple[Sequence[Fact], int, int]
#: How long a group waits before it is sent again to a journal that is being started again, s.
_PAUSES_S = (0.2, 1.0, 2.0, 4.0, 8.0)


async def open_journal(place: RunPlace | None, run_id: str, *, writer: str, is_buffered: bool) -> Journal:
    """The journal of a run as a process of this node writes it; in memory where the run is recorded nowhere."""
    if place is None:
        return MemoryJournal(run_id)
    address = place.address
    if address.url or ray.get_runtime_context().get_node_id() == place.node_id:
        return await store_at(address).join(run_id, writer=writer, is_buffered=is_buffered)
    from actors.spawn import journal_actor  # actors make each other

    return JournalLine(journal_actor(place.node_id), address, run_id, writer=writer, is_buffered=is_buffered)


class JournalActor:
    """Holds the journals of runs as one process of the store's node."""

    def __init__(self) -> None:
        self._journals: dict[tuple[str, str], asyncio.Task[Journal]] = {}

    async def append(
        self, address: StoreAddress, run_id: str, writer: str, groups: Sequence[Group]
    ) -> list[BaseException | None]:
        """Append groups of facts in order; gives what became of each: None, or why it was refused."""
        journal = await self._journal(address, run_id, writer)
        # At the same time, so that they share a commit; each is asked for itself, since it may be refused for its epoch.
        taken = (journal.append(facts, epoch=epoch, until=Until(until)) for facts, epoch, until in groups)
        return await asyncio.gather(*taken, return_exceptions=True)

    async def known(
        self, address: StoreAddress, run_id: str, writer: str, instance: str
    ) -> Mapping[tuple[str, str], Fact]:
        """What is recorded of an instance."""
        return await (await self._journal(address, run_id, writer)).known(instance)

    async def close(self, run_id: str, writer: str) -> None:
        """A writer has nothing more to write."""
        opening = self._journals.pop((run_id, writer), None)
        if opening is not None:
            await (await opening).close()

    async def leave(self, writer: str) -> None:
        """A writer died: its journals are of no use to anybody."""
        for run_id, _ in [key for key in self._journals if key[1] == writer]:
            await self.close(run_id, writer)

    async def _journal(self, address: StoreAddress, run_id: str, writer: str) -> Journal:
        key = (run_id, writer)
        if key not in self._journals:
            opening = store_at(address).join(run_id, writer=writer)
            self._journals[key] = asyncio.get_running_loop().create_task(opening)
        try:
            return await asyncio.shield(self._journals[key])
        except EnsembleError:
            self._journals.pop(key, None)  # the next group tries again
            raise


class JournalLine:
    """A run's journal for a process away from the store; fulfils the `Journal` port.

    One group is on its way at a time, what comes meanwhile goes with the next. A group whose arrival is not known is
    sent again: facts that are recorded twice tell the same.
    """

    def __init__(
        self, actor: Any, address: StoreAddress, run_id: str, *, writer: str, is_buffered: bool = False
    ) -> None:
        self._actor = actor
        self._address = address
        self._run_id = run_id
        self._writer = writer
        self._is_buffered = is_buffered
        self._gate = EpochGate(run_id)
        self._waiting: list[tuple[Sequence[Fact], int, Until, asyncio.Future[None]]] = []
        self._sending: asyncio.Task[None] | None = None
        self._is_closed = False
        #: why facts were lost; those behind them must not be recorded as if they were there
        self._failure: Exception | None = None

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Until = Until.TAKEN) -> None:
        """Add facts in order; see the port.

        Raises:
            StaleEpochError: a newer epoch has been seen.
            RecordError: the store refused what was appended, or cannot be reached.
            IllegalStateError: the journal is closed.
        """
        if self._is_closed:
            msg = f"The journal of run '{self._run_id}' is closed"
            raise IllegalStateError(msg)
        if self._failure is not None:
            raise self._failure
        self._gate.admit(facts, epoch)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        waits = until is not Until.TAKEN and not self._is_buffered
        # A message waits for its commit also where nobody here does: so the next one hears what was refused.
        degree = Until.TAKEN if self._is_buffered else max(until, Until.WRITTEN)
        self._waiting.append(([in_json_form(fact) for fact in facts], epoch, degree, arrived))
        if self._sending is None:
            self._sending = loop.create_task(self._send())
        if not waits:
            arrived.add_done_callback(_noted)
        else:
            await arrived

    async def known(self, instance: str) -> Mapping[tuple[str, str], Fact]:
        """What is recorded of an instance; see the port."""
        await self.flush()
        found = await self._call("known", self._address, self._run_id, self._writer, instance)
        return cast("Mapping[tuple[str, str], Fact]", found)

    async def flush(self) -> None:
        """Return when everything appended so far is committed.

        Raises:
            RecordError: the store refused it, or cannot be reached.
        """
        if self._failure is not None:
            raise self._failure
        if self._waiting or self._sending is not None:
            arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(((), 0, Until.WRITTEN, arrived))
            if self._sending is None:
                self._sending = asyncio.get_running_loop().create_task(self._send())
            await arrived

    async def close(self) -> None:
        """Flush, and let the other side forget this writer."""
        if self._is_closed:
            return
        try:
            await self.flush()
        finally:
            self._is_closed = True
            self._actor.close.remote(self._run_id, self._writer)

    async def _send(self) -> None:
        try:
            while self._waiting:
                taken, self._waiting = self._waiting, []
                await self._sent(taken)
        finally:
            self._sending = None

    async def _sent(self, taken: Sequence[tuple[Sequence[Fact], int, Until, asyncio.Future[None]]]) -> None:
        groups: list[Group] = [(facts, epoch, int(until)) for facts, epoch, until, _ in taken]
        try:
            results = await self._call("append", self._address, self._run_id, self._writer, groups)
        except Exception as error:  # noqa: BLE001  whatever it is, those who wait are told
            results = [error] * len(taken)
        for (facts, epoch, _, arrived), refused in zip(taken, cast("list[Exception | None]", results), strict=True):
            if isinstance(refused, StaleEpochError):
                for fence in (
                    fact.fence for fact in facts
                ):  # all of it is lost: none of its instances goes on without it
                    self._gate.learn(fence, epoch + 1)
                self._gate.learn(refused.name, refused.newest)
            elif refused is not None:
                self._failure = self._failure or refused
            if arrived.done():
                continue
            if refused is None:
                arrived.set_result(None)
            else:
                arrived.set_exception(refused)

    async def _call(self, method: str, *arguments: object) -> object:
        if self._failure is not None:  # this came in behind facts that were lost
            raise self._failure
        for pause_s in (*_PAUSES_S, None):
            try:
                return await getattr(self._actor, method).remote(*arguments)
            except ray.exceptions.RayActorError as error:
                if pause_s is None:
                    raise RecordError(
                        f"Run {self._run_id}: its journal cannot be reached: {last_line(error)}"
                    ) from None
                await asyncio.sleep(pause_s)
            except ray.exceptions.RayTaskError as error:
                cause = getattr(error, "cause", None)
                raise cause if isinstance(cause, EnsembleError) else IllegalStateError(last_line(error)) from None
        return None


def _noted(arrived: asyncio.Future[None]) -> None:
    """Nobody waits for it; a refusal is heard by the next one who does, since the journal refuses that too."""
    if not arrived.cancelled() and (error := arrived.exception()) is not None:
        _log.warning("Facts that nobody waited for were refused: %s", error)
