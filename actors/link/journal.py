"""A run's journal for a process on any node."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias, cast

import ray
import ray.exceptions

from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.reach import RESTART_PAUSES_S, BatchSender, last_line, reach
from ensemble_ray.actors.link.wire import RecordLocation
from ensemble_ray.actors.shared.journal import AppendCall, JournalActor
from ensemble_ray.errors import EnsembleError, IllegalStateError, RecordError, StaleEpochError
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact
from ensemble_ray.ports import Journal, OfferedAnswer, Persistence, StoredAnswers
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.journal import EpochFence, MemoryJournal, in_json_form
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress

_log = bounded_logger(__name__)
_Append: TypeAlias = tuple[Sequence[Fact], int, Persistence, "asyncio.Future[None]"]


async def open_journal(location: RecordLocation | None, run_id: str, *, writer: str, is_buffered: bool) -> Journal:
    """In memory if the run is not recorded."""
    if location is None:
        return MemoryJournal(run_id)
    address = location.address
    if address.url or ray.get_runtime_context().get_node_id() == location.node_id:
        return await store_at(address).join(run_id, writer=writer, is_buffered=is_buffered)
    actor = spawn.journal_actor(JournalActor, location.node_id)
    return RemoteJournal(actor, address, run_id, writer=writer, is_buffered=is_buffered)


def answers_at(location: RecordLocation | None) -> StoredAnswers | None:
    """Return the answers in the records of all runs there; None if the run is not recorded."""
    if location is None:
        return None
    address = location.address
    if address.url or ray.get_runtime_context().get_node_id() == location.node_id:
        return store_at(address)
    return RemoteAnswers(location)


class RemoteAnswers:
    """Answers in records for a process without access to the store. Implements `StoredAnswers`."""

    def __init__(self, location: RecordLocation) -> None:
        self._location = location

    @cached_property
    def _actor(self) -> Any:
        return spawn.journal_actor(JournalActor, self._location.node_id)

    async def find_answer(self, digest: str, *, since: float, run_id: str) -> Fact[ModelAnswered] | None:
        return cast("Fact[ModelAnswered] | None", await self._call("find_answer", digest, since, run_id))

    async def offer_answers(self, run_id: str, answers: Sequence[OfferedAnswer]) -> None:
        await self._call("offer_answers", run_id, answers)

    async def _call(self, method: str, *arguments: object) -> object:
        try:
            return await getattr(self._actor, method).remote(self._location.address, *arguments)
        except ray.exceptions.RayError as error:
            raise RecordError(f"The records of earlier runs cannot be reached: {last_line(error)}") from None


class RemoteJournal:
    """A run's journal for a process without access to the store. Implements `Journal`.

    A group with an unknown outcome is sent again: a fact that is recorded twice has no effect.
    """

    def __init__(
        self, actor: Any, address: StoreAddress, run_id: str, *, writer: str, is_buffered: bool = False
    ) -> None:
        self._actor = actor
        self._address = address
        self._run_id = run_id
        self._writer = writer
        self._is_buffered = is_buffered
        self._fence = EpochFence(run_id)
        self._sender = BatchSender(self._send)
        self._is_closed = False
        #: if set, facts were lost, and later ones must not be recorded without them
        self._failure: Exception | None = None

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:
        if self._is_closed:
            raise IllegalStateError(f"The journal of run '{self._run_id}' is closed")
        if self._failure is not None:
            raise self._failure
        self._fence.admit(facts, epoch)
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waits = until > Persistence.SOON and not self._is_buffered
        # The message waits for its commit even if its caller does not, so that the next one receives a refusal.
        degree = Persistence.QUEUED if self._is_buffered else max(until, Persistence.COMMITTED)
        self._sender.add(([in_json_form(fact) for fact in facts], epoch, degree, arrived))
        if not waits:
            arrived.add_done_callback(_log_refusal)
        else:
            await arrived

    async def lookup_recorded(self, instance: str) -> Mapping[tuple[str, str], Fact]:
        await self.flush()
        found = await self._call("lookup_recorded", self._address, self._run_id, self._writer, instance)
        return cast("Mapping[tuple[str, str], Fact]", found)

    async def store_content(self, content: bytes) -> bool:
        return bool(await self._call("store_content", self._address, self._run_id, self._writer, content))

    async def read_content(self, sha256: str) -> bytes | None:
        found = await self._call("read_content", self._address, self._run_id, self._writer, sha256)
        return cast("bytes | None", found)

    async def flush(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._sender.is_idle:
            arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._sender.add(((), 0, Persistence.COMMITTED, arrived))
            await arrived

    async def close(self) -> None:
        if self._is_closed:
            return
        try:
            await self.flush()
        finally:
            self._is_closed = True
            self._actor.close.remote(self._run_id, self._writer)

    async def _send(self, batch: Sequence[_Append]) -> None:
        groups: list[AppendCall] = [(facts, epoch, int(until)) for facts, epoch, until, _ in batch]
        try:
            results = await self._call("append", self._address, self._run_id, self._writer, groups)
        except Exception as error:  # noqa: BLE001  every waiting caller receives the error
            results = [error] * len(batch)
        for (facts, epoch, _, arrived), refused in zip(batch, cast("list[Exception | None]", results), strict=True):
            if isinstance(refused, StaleEpochError):
                for fact in facts:  # the whole group is lost, so no instance in it may continue
                    self._fence.learn(fact.fence, epoch + 1)
                self._fence.learn(refused.name, refused.newest)
            elif refused is not None:
                self._failure = self._failure or refused
            if arrived.done():
                continue
            if refused is None:
                arrived.set_result(None)
            else:
                arrived.set_exception(refused)

    async def _call(self, method: str, *arguments: object) -> object:
        if self._failure is not None:  # earlier facts were lost
            raise self._failure
        call = getattr(self._actor, method)
        try:
            return await reach(lambda: call.remote(*arguments), RESTART_PAUSES_S, retry_on=ray.exceptions.RayActorError)
        except ray.exceptions.RayActorError as error:
            raise RecordError(f"Run {self._run_id}: its journal cannot be reached: {last_line(error)}") from None
        except ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise cause if isinstance(cause, EnsembleError) else IllegalStateError(last_line(error)) from None


def _log_refusal(arrived: asyncio.Future[None]) -> None:
    if not arrived.cancelled() and (error := arrived.exception()) is not None:
        _log.warning("Facts were refused without a waiting caller: %s", error)
