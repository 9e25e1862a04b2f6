"""LocalRunMemory: one run's memory, in the process of the objects that the user passed. Package: memory.

In: what tasks ask and leave, from this process or another. Out: what they are reminded of. User's objects are called in
threads; what they raise belongs to the task that needed them. Must never happen: a note that is taken twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar, cast

from ensemble_ray.memory.embedding_meter import metered_embeddings
from ensemble_ray.process.threads import call_user
from ensemble_ray.values.memory import (
    AGENT_ROLE,
    TASK_DESCRIPTION,
    EvictionPolicy,
    MemoryEntry,
    MemoryNote,
    MemoryQuery,
    MemoryRules,
    RecalledMemory,
    RememberedNote,
    ScopeReset,
)

if TYPE_CHECKING:
    from ensemble_ray.memory.ensemble_memory import EnsembleMemory
    from ensemble_ray.memory.store import MemoryStore
    from ensemble_ray.values.task_output import TaskOutput

__all__ = ["LocalRunMemory", "rules_of"]

_Found = TypeVar("_Found")

#: Entries of a scope that a task sees (S-MEM-73).
_MOST_OF_SCOPE = 5


def rules_of(memory: EnsembleMemory | None, store: MemoryStore | None) -> MemoryRules | None:
    """Return which kinds of memory a run has; None: none."""
    if memory is None and store is None:
        return None
    return MemoryRules(
        has_short_term=memory is not None and memory.short_term,
        has_long_term=memory is not None and memory.long_term is not None,
        has_entities=memory is not None and memory.entity_memory is not None,
        has_store=store is not None,
        has_extractor=memory is not None and memory.extractor is not None,
    )


class LocalRunMemory:
    """The memory of one run; short-term memory is its own and starts empty (S-MEM-5). Fulfils `RunMemory`."""

    def __init__(self, memory: EnsembleMemory | None, store: MemoryStore | None) -> None:
        self._memory = memory
        self._store = store
        #: instance -> (role, description, content), in recording order
        self._short_term: dict[str, tuple[str, str, str]] = {}
        #: entry id -> taking it; whoever leaves it again, since a process died, waits for the same
        self._taking: dict[str, asyncio.Task[RememberedNote]] = {}

    async def recall(self, query: MemoryQuery) -> RecalledMemory:
        """Return what a task is to be reminded of; what a store raises is raised here."""
        with metered_embeddings() as meter:
            found = await self._find(query)
        return replace(found, embedding_tokens=meter.tokens)

    async def remember(self, note: MemoryNote) -> RememberedNote:
        """Keep what a completed task leaves; what a store raises is raised here. A note that was taken is not taken again."""
        taking = self._taking.get(note.entry_id)
        if taking is None:
            taking = self._taking[note.entry_id] = asyncio.get_running_loop().create_task(self._take(note))
        try:
            return await asyncio.shield(taking)
        except Exception:
            self._taking.pop(note.entry_id, None)  # whoever does the task again leaves it again
            raise

    async def reset(self, reset: ScopeReset) -> None:
        """Clear or cut scopes before an iteration of a loop.

        Raises:
            NotImplementedError: the store cannot clear (S-LOOP-92).
        """
        for scope in reset.scopes if self._store is not None else ():
            if reset.mode == "window":
                with suppress(NotImplementedError):
                    await self._evict(scope, EvictionPolicy.keep_last_entries(reset.window_size))
            else:
                await self._clear(reset.loop, scope)

    def restore(self, instance: str, output: TaskOutput) -> None:
        """Put back into short-term memory what an earlier process of the run recorded."""
        self._short_term[instance] = _short_term_of(output)

    async def _find(self, query: MemoryQuery) -> RecalledMemory:
        scopes = [(scope, await self._of_scope(scope, query.text)) for scope in query.scopes]
        if not query.uses_ensemble or self._memory is None:
            return RecalledMemory(scopes=tuple(scopes))
        short_term = tuple(self._short_term.values()) if self._memory.short_term else None
        long_term, retrieval_s = await _time(self._of_long_term, query.text)
        entities, lookup_s = await _time(self._of_entities, query.text)
        return RecalledMemory(
            scopes=tuple(scopes),
            short_term=short_term,
            long_term=long_term or (),
            entities=entities or (),
            retrieval_s=None if long_term is None else retrieval_s,
            lookup_s=None if entities is None else lookup_s,
        )

    async def _take(self, note: MemoryNote) -> RememberedNote:
        with metered_embeddings() as meter:
            taken_by = await self._store_note(note)
        return RememberedNote(taken_by=tuple(taken_by), embedding_tokens=meter.tokens)

    async def _store_note(self, note: MemoryNote) -> list[str]:
        """Store a note; return what took it."""
        taken: list[str] = []
        memory = self._memory if note.uses_ensemble else None
        if memory is not None and not note.is_stored and await self._store_long_term(note):
            taken.append("long_term")
        if self._store is not None and not note.is_stored:
            for scope in note.scopes:
                entry = _entry_of(note, note.output.raw, note.output.parsed_output)
                await call_user(self._store.store, scope.name, entry)
                if (policy := scope.policy) is not None:
                    await self._evict(scope.name, policy)
        if memory is not None and memory.short_term:  # last: it does not raise, and a task that failed has no notes
            self._short_term[note.instance] = _short_term_of(note.output)
            taken.append("short_term")
        return taken

    async def _store_long_term(self, note: MemoryNote) -> bool:
        """Return whether there was anything to store (S-MEM-6)."""
        memory = self._memory
        if memory is None or memory.long_term is None:
            return False
        content: str | None = note.output.raw
        if memory.extractor is not None:
            extract = cast("Callable[[TaskOutput], str | Awaitable[str | None] | None]", memory.extractor)
            content = await call_user(extract, note.output)
        if content is None:
            return False
        await call_user(memory.long_term.store, _entry_of(note, content))
        return True

    async def _of_scope(self, scope: str, text: str) -> tuple[str, ...]:
        if self._store is None:
            return ()
        found = await call_user(self._store.retrieve, scope, text, _MOST_OF_SCOPE)
        return tuple(entry.content for entry in found)

    async def _of_long_term(self, text: str) -> tuple[str, ...] | None:
        memory = self._memory
        if memory is None or memory.long_term is None:
            return None
        found = await call_user(memory.long_term.retrieve, text, memory.long_term_max_results)
        return tuple(entry.content for entry in found)

    async def _of_entities(self, _text: str) -> tuple[tuple[str, str], ...] | None:
        entities = None if self._memory is None else self._memory.entity_memory
        if entities is None:
            return None
        return tuple((await call_user(entities.get_all)).items())

    async def _evict(self, scope: str, policy: EvictionPolicy) -> None:
        if self._store is not None:
            await call_user(self._store.evict, scope, policy)

    async def _clear(self, loop: str, scope: str) -> None:
        store = self._store
        if store is None:
            return
        try:
            await call_user(store.clear, scope)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"Loop '{loop}' has memory_mode=fresh_per_iteration but the configured MemoryStore "
                f"({type(store).__name__}) does not support per-scope clear for scope '{scope}'. {error}. Use "
                "memory_mode=accumulate, or a store that can clear, such as MemoryStore.in_memory()"
            ) from error


async def _time(ask: Callable[[str], Awaitable[_Found]], text: str) -> tuple[_Found, float]:
    began = time.monotonic()
    found = await ask(text)
    return found, time.monotonic() - began


def _short_term_of(output: TaskOutput) -> tuple[str, str, str]:
    return output.agent_role, output.task_description, output.raw


def _entry_of(note: MemoryNote, content: str, structured: object = None) -> MemoryEntry:
    output = note.output
    return MemoryEntry(
        content=content,
        structured_content=structured,
        stored_at=output.completed_at,
        metadata={AGENT_ROLE: output.agent_role, TASK_DESCRIPTION: output.task_description},
        entry_id=note.entry_id,
    )
