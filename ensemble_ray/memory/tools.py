"""Tools by which agents use memory themselves: `MemoryTool`, `EntityMemoryTool`."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakValueDictionary

from ensemble_ray.errors import IllegalStateError, ValidationError
from ensemble_ray.memory.embeddings import metered_embeddings
from ensemble_ray.ports import EntityMemory, services
from ensemble_ray.process.forks import call_user
from ensemble_ray.tools.tool import AbstractAgentTool, ToolResult, current_tool_context, tool
from ensemble_ray.values.ids import new_object_id
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
    from ensemble_ray.memory.store import EnsembleMemory, MemoryStore
    from ensemble_ray.values.task_output import TaskOutput


#: Name of the driver's service.
HELD_SERVICE = "held_object"
#: What may be called from another process.
_METHODS = frozenset({"store", "retrieve", "get"})
_held: WeakValueDictionary[str, HeldObject] = WeakValueDictionary()


class HeldObject:
    """An object of this process, or the way to one of another."""

    def __init__(self, thing: object) -> None:
        self._id = new_object_id()
        self._thing = thing
        self._process_id = os.getpid()
        _held[self._id] = self

    @property
    def is_here(self) -> bool:
        """Whether the object lives in this process."""
        return self._process_id == os.getpid()

    @property
    def thing(self) -> Any:
        """The object itself, in its own process; None elsewhere."""
        return self._thing if self.is_here else None

    async def call(self, method: str, *arguments: object) -> object:
        """Call a method of the object where it lives; what it raises is raised here.

        Raises:
            IllegalStateError: its process cannot be reached from here.
        """
        if self.is_here:
            return await call_user(
                cast("Callable[..., object | Awaitable[object]]", getattr(self._thing, method)), *arguments
            )
        here = services()
        if here is None or here.driver is None:
            raise IllegalStateError(
                "The memory of a tool lives in another process, which cannot be reached outside its run"
            )
        payload = {"id": self._id, "method": method, "body": pickle.dumps(arguments)}
        return await here.driver.ask(HELD_SERVICE, payload)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_find, (self._id, self._process_id))

    @classmethod
    def find(cls, held_id: str, process_id: int) -> HeldObject:
        """Return the object that was pickled: itself at home, the way to it elsewhere."""
        found = _held.get(held_id)
        if found is not None and found.is_here:
            return found
        away = object.__new__(cls)
        away._id, away._thing, away._process_id = held_id, None, process_id
        return away


def _find(held_id: str, process_id: int) -> HeldObject:
    """Return what a pickle stands for; a function of a module travels by its name alone."""
    return HeldObject.find(held_id, process_id)


def has_held_objects() -> bool:
    """Return whether tools of this process may be reached from others; a runtime then has to listen for their calls."""
    return any(each.is_here for each in list(_held.values()))


async def answer_held(payload: Mapping[str, object]) -> object:
    """Do what a tool in another process asks of an object of this one.

    Raises:
        IllegalStateError: the object is gone, or has no such method.
    """
    found, method = _held.get(str(payload["id"])), str(payload["method"])
    if found is None or not found.is_here or method not in _METHODS:
        raise IllegalStateError(
            "The memory of a tool is gone: its owner has let go of it; keep a reference for as long as the run lasts"
        )
    arguments = cast("tuple[object, ...]", pickle.loads(cast("bytes", payload["body"])))  # noqa: S301  our own cluster
    return await found.call(method, *arguments)


#: Entries that one retrieval gives (S-MEM-93).
_MOST = 5
_SOURCE = "MemoryTool"


class MemoryTool:
    """Two tools over one scope of a store: `store_memory` and `retrieve_memory`."""

    def __init__(self, scope: str, store: MemoryStore) -> None:
        """Make them.

        Raises:
            ValidationError: the scope is blank, or the store None.
        """
        scope_given: str | None = scope
        store_given: MemoryStore | None = store
        if scope_given is None or not scope_given.strip():
            raise ValidationError("MemoryTool scope must not be None or blank")
        if store_given is None:
            raise ValidationError("MemoryTool memory_store must not be None")
        self._scope = scope
        self._store = HeldObject(store)

    @classmethod
    def of(cls, scope: str, store: MemoryStore) -> MemoryTool:
        """Return the tools of a scope of that store."""
        return cls(scope, store)

    @tool(effect="idempotent")
    async def store_memory(self, key: str, value: str) -> str:
        """Remember something, so that it can be retrieved later.

        Args:
            key: A short name for it.
            value: What to remember.
        """
        if not key.strip():
            return "Error: key must not be blank"
        if not value.strip():
            return "Error: value must not be blank"
        entry = MemoryEntry(
            content=f"{key}: {value}",
            metadata={"key": key, "source": _SOURCE},
            entry_id=current_tool_context().idempotency_key,
        )
        await self._store.call("store", self._scope, entry)
        return f"Stored: {key}"

    @tool(effect="none")
    async def retrieve_memory(self, query: str) -> str:
        """Find what was remembered earlier.

        Args:
            query: What to look for.
        """
        if not query.strip():
            return "No query provided"
        found = cast("Sequence[MemoryEntry]", await self._store.call("retrieve", self._scope, query, _MOST))
        if not found:
            return f"No relevant memories found for: {query}"
        return "\n".join(["Retrieved memories:", *(f"- {entry.content}" for entry in found)])


class EntityMemoryTool(AbstractAgentTool):
    """Looks up what an entity memory knows."""

    name = "lookup_entity"
    description = "Looks up the known fact about a person, a company or a thing. Input: its name."
    effect = "none"

    def __init__(self, entity_memory: EntityMemory) -> None:
        self._memory = HeldObject(entity_memory)

    async def do_execute(self, text: str, /) -> ToolResult:
        """Return the fact."""
        fact = cast("str | None", await self._memory.call("get", text))
        return ToolResult.success(f"No known facts about: {text.strip()}" if fact is None else fact)


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
