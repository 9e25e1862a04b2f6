"""Shared actors: the journal of a node's record files (S-DUR-7), and the cluster's rate limiter."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import ray

from ensemble_ray.errors import EnsembleError
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact
from ensemble_ray.llm.limits.accounts import BudgetMessage, BudgetReply, BudgetService
from ensemble_ray.llm.limits.bucket import HolderGone
from ensemble_ray.llm.limits.limiter import LimiterService, Message, Reply
from ensemble_ray.ports import Journal, OfferedAnswer, Persistence
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.values.metrics import ActorDescription, ActorKind, ProcessDescription, dump_actor

AppendCall = tuple[Sequence[Fact], int, int]


class JournalActor:
    """Writes record files for processes on other nodes."""

    def __init__(self) -> None:
        self._journals: dict[tuple[str, str], asyncio.Task[Journal]] = {}

    async def append(
        self, address: StoreAddress, run_id: str, writer: str, groups: Sequence[AppendCall]
    ) -> list[BaseException | None]:
        """Append groups in order. Return None or the error for each."""
        journal = await self._journal(address, run_id, writer)
        # Concurrent calls share a commit. Each group is a call, since its epoch may be refused.
        appended = (journal.append(facts, epoch=epoch, until=Persistence(until)) for facts, epoch, until in groups)
        return await asyncio.gather(*appended, return_exceptions=True)

    async def lookup_recorded(
        self, address: StoreAddress, run_id: str, writer: str, instance: str
    ) -> Mapping[tuple[str, str], Fact]:
        return await (await self._journal(address, run_id, writer)).lookup_recorded(instance)

    async def store_content(self, address: StoreAddress, run_id: str, writer: str, content: bytes) -> bool:
        return await (await self._journal(address, run_id, writer)).store_content(content)

    async def read_content(self, address: StoreAddress, run_id: str, writer: str, sha256: str) -> bytes | None:
        return await (await self._journal(address, run_id, writer)).read_content(sha256)

    async def find_answer(
        self, address: StoreAddress, digest: str, since: float, run_id: str
    ) -> Fact[ModelAnswered] | None:
        return await store_at(address).find_answer(digest, since=since, run_id=run_id)

    async def offer_answers(self, address: StoreAddress, run_id: str, answers: Sequence[OfferedAnswer]) -> None:
        await store_at(address).offer_answers(run_id, answers)

    async def close(self, run_id: str, writer: str) -> None:
        opening = self._journals.pop((run_id, writer), None)
        if opening is not None:
            await (await opening).close()

    async def detach(self, writer: str) -> None:
        for run_id, _ in [key for key in self._journals if key[1] == writer]:
            await self.close(run_id, writer)

    async def describe(self) -> bytes:
        runs, writers = (len({key[part] for key in self._journals}) for part in (0, 1))
        note = f"runs: {runs}, processes of other nodes that write here: {writers}"
        return dump_actor(ActorDescription(process=describe_this_process("journal", "journal", note=note)))

    async def _journal(self, address: StoreAddress, run_id: str, writer: str) -> Journal:
        key = (run_id, writer)
        if key not in self._journals:
            opening = store_at(address).join(run_id, writer=writer)
            self._journals[key] = asyncio.get_running_loop().create_task(opening)
        try:
            return await asyncio.shield(self._journals[key])
        except EnsembleError:
            self._journals.pop(key, None)  # the next call tries again
            raise


class RateLimiter:
    def __init__(self) -> None:
        self._permits = LimiterService()
        self._accounts = BudgetService()

    async def receive(self, message: Message) -> Reply:
        if isinstance(message, HolderGone):
            self._accounts.detach(message.holder)
        return await self._permits.receive(message)

    async def account(self, message: BudgetMessage) -> BudgetReply:
        return await self._accounts.receive(message)

    async def describe(self) -> bytes:
        buckets, more = self._permits.describe()
        process = describe_this_process("limiter", "rate_limiter")
        return dump_actor(ActorDescription(process=process, buckets=tuple(buckets), more_buckets=more))


def describe_this_process(kind: ActorKind, name: str, **more: Any) -> ProcessDescription:
    context = ray.get_runtime_context()
    return ProcessDescription(
        name=name,
        kind=kind,
        node_id=str(context.get_node_id()),
        host=socket.gethostname(),
        pid=os.getpid(),
        memory_bytes=psutil.Process().memory_info().rss,
        **more,
    )
