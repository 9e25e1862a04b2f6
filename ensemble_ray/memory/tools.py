"""Memory as agents and runs use it: `MemoryTool`, `EntityMemoryTool`, and the memory of one run."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

from msgspec.structs import replace

from ensemble_ray.errors import IllegalStateError, ValidationError
from ensemble_ray.memory.embeddings import metered_embeddings
from ensemble_ray.ports import EntityMemory, services
from ensemble_ray.process.concurrency import call_user
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


HELD_SERVICE = "held_object"
#: Methods that other processes may call.
_METHODS = frozenset({"store", "retrieve", "get"})
_held: WeakValueDictionary[str, HeldObject] = WeakValueDictionary()


class HeldObject:
    """An object of this process. A pickled copy is a proxy."""

    def __init__(self, thing: object) -> None:
        self._id = new_object_id()
        self._thing = thing
        self._process_id = os.getpid()
        _held[self._id] = self

    @property
    def is_here(self) -> bool:
        return self._process_id == os.getpid()

    @property
    def thing(self) -> Any:
        """The object; None in a proxy."""
        return self._thing if self.is_here else None

    async def call(self, method: str, *arguments: object) -> object:
        """Call a method of the object in its process; `IllegalStateError` if it cannot be reached."""
        if self.is_here:
            here_method = cast("Callable[..., object | Awaitable[object]]", getattr(self._thing, method))
            return await call_user(here_method, *arguments)
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
        """Return the object in its own process, otherwise a new proxy."""
        found = _held.get(held_id)
        if found is not None and found.is_here:
            return found
        proxy = object.__new__(cls)
        proxy._id, proxy._thing, proxy._process_id = held_id, None, process_id
        return proxy


def _find(held_id: str, process_id: int) -> HeldObject:
    return HeldObject.find(held_id, process_id)  # a function, because pickle refers to it by name


def has_held_objects() -> bool:
    """Return whether this process holds objects for tools."""
    return any(each.is_here for each in list(_held.values()))


async def answer_held(payload: Mapping[str, object]) -> object:
    """Call a method of a held object for another process; `IllegalStateError` if it is gone or may not be called."""
    found, method = _held.get(str(payload["id"])), str(payload["method"])
    if found is None or not found.is_here or method not in _METHODS:
        raise IllegalStateError(
            "The memory of a tool is gone: its owner has let go of it; keep a reference for as long as the run lasts"
        )
    arguments = cast("tuple[object, ...]", pickle.loads(cast("bytes", payload["body"])))  # noqa: S301  our own cluster
    return await found.call(method, *arguments)


#: Limit of entries in one retrieval (S-MEM-93).
_MAX_RETRIEVED = 5
_SOURCE = "MemoryTool"


class MemoryTool:
    """Two tools over one scope of a store: `store_memory` and `retrieve_memory`."""

    def __init__(self, scope: str, store: MemoryStore) -> None:
        if not cast("str | None", scope) or not scope.strip():
            raise ValidationError("MemoryTool scope must not be None or blank")
        if cast("MemoryStore | None", store) is None:
            raise ValidationError("MemoryTool memory_store must not be None")
        self._scope = scope
        self._store = HeldObject(store)

    @classmethod
    def of(cls, scope: str, store: MemoryStore) -> MemoryTool:
        """Return the tools of a scope of a store."""
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
        found = cast("Sequence[MemoryEntry]", await self._store.call("retrieve", self._scope, query, _MAX_RETRIEVED))
        if not found:
            return f"No relevant memories found for: {query}"
        return "\n".join(["Retrieved memories:", *(f"- {entry.content}" for entry in found)])


class EntityMemoryTool(AbstractAgentTool):
    """Looks up facts in an entity memory."""

    name = "lookup_entity"
    description = "Looks up the known fact about a person, a company or a thing. Input: its name."
    effect = "none"

    def __init__(self, entity_memory: EntityMemory) -> None:
        self._memory = HeldObject(entity_memory)

    async def do_execute(self, text: str, /) -> ToolResult:
        """Return the fact, or the message that there is none."""
        fact = cast("str | None", await self._memory.call("get", text))
        return ToolResult.success(f"No known facts about: {text.strip()}" if fact is None else fact)


#: Limit of entries of a scope in a task's prompt (S-MEM-73).
_MAX_SCOPE_ENTRIES = 5


def rules_of(memory: EnsembleMemory | None, store: MemoryStore | None) -> MemoryRules | None:
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
    """The memory of one run. Fulfils `RunMemory`."""

    def __init__(self, memory: EnsembleMemory | None, store: MemoryStore | None) -> None:
        self._memory = memory
        self._store = store
        self._short_term: dict[str, tuple[str, str, str]] = {}  # instance -> (role, description, content)
        #: by entry id; a repeated request after the death of a process awaits the same task
        self._storing: dict[str, asyncio.Task[RememberedNote]] = {}

    async def recall(self, query: MemoryQuery) -> RecalledMemory:
        with metered_embeddings() as meter:
            found = await self._find(query)
        return replace(found, embedding_tokens=meter.tokens)

    async def remember(self, note: MemoryNote) -> RememberedNote:
        storing = self._storing.get(note.entry_id)
        if storing is None:
            storing = self._storing[note.entry_id] = asyncio.get_running_loop().create_task(self._store_note(note))
        try:
            return await asyncio.shield(storing)
        except Exception:
            self._storing.pop(note.entry_id, None)  # a retry of the task stores the note again
            raise

    async def reset(self, reset: ScopeReset) -> None:
        """Clear scopes, or drop their older entries, before an iteration of a loop (S-LOOP-92)."""
        store = self._store
        if store is None:
            return
        for scope in reset.scopes:
            if reset.mode == "window":
                with suppress(NotImplementedError):
                    await call_user(store.evict, scope, EvictionPolicy.keep_last_entries(reset.window_size))
                continue
            try:
                await call_user(store.clear, scope)
            except NotImplementedError as error:
                raise NotImplementedError(
                    f"Loop '{reset.loop}' has memory_mode=fresh_per_iteration but the configured MemoryStore "
                    f"({type(store).__name__}) does not support per-scope clear for scope '{scope}'. {error}. Use "
                    "memory_mode=accumulate, or a store that can clear, such as MemoryStore.in_memory()"
                ) from error

    def restore(self, instance: str, output: TaskOutput) -> None:
        """Add a recorded output to short-term memory."""
        self._short_term[instance] = (output.agent_role, output.task_description, output.raw)

    async def _find(self, query: MemoryQuery) -> RecalledMemory:
        scopes: list[tuple[str, tuple[str, ...]]] = []
        for scope in query.scopes:
            found: Sequence[MemoryEntry] = ()
            if self._store is not None:
                found = await call_user(self._store.retrieve, scope, query.text, _MAX_SCOPE_ENTRIES)
            scopes.append((scope, tuple(entry.content for entry in found)))
        memory = self._memory
        if not query.uses_ensemble or memory is None:
            return RecalledMemory(scopes=tuple(scopes))
        long_term, entities = memory.long_term, memory.entity_memory
        began = time.monotonic()
        entries: Sequence[MemoryEntry] = ()
        if long_term is not None:
            entries = await call_user(long_term.retrieve, query.text, memory.long_term_max_results)
        retrieved = time.monotonic()
        facts = {} if entities is None else await call_user(entities.get_all)
        return RecalledMemory(
            scopes=tuple(scopes),
            short_term=tuple(self._short_term.values()) if memory.short_term else None,
            long_term=tuple(entry.content for entry in entries),
            entities=tuple(facts.items()),
            retrieval_s=None if long_term is None else retrieved - began,
            lookup_s=None if entities is None else time.monotonic() - retrieved,
        )

    async def _store_note(self, note: MemoryNote) -> RememberedNote:
        memory = self._memory if note.uses_ensemble else None
        taken: list[str] = []
        with metered_embeddings() as meter:
            if memory is not None and not note.is_stored and await self._store_long_term(memory, note):
                taken.append("long_term")
            if self._store is not None and not note.is_stored:
                for scope in note.scopes:
                    entry = _entry_of(note, note.output.raw, note.output.parsed_output)
                    await call_user(self._store.store, scope.name, entry)
                    if scope.policy is not None:
                        await call_user(self._store.evict, scope.name, scope.policy)
        if memory is not None and memory.short_term:  # last: it cannot fail, and a failed task leaves no notes
            self.restore(note.instance, note.output)
            taken.append("short_term")
        return RememberedNote(taken_by=tuple(taken), embedding_tokens=meter.tokens)

    async def _store_long_term(self, memory: EnsembleMemory, note: MemoryNote) -> bool:
        if memory.long_term is None:
            return False
        content: str | None = note.output.raw
        if memory.extractor is not None:
            extract = cast("Callable[[TaskOutput], str | Awaitable[str | None] | None]", memory.extractor)
            content = await call_user(extract, note.output)
        if content is None:
            return False
        await call_user(memory.long_term.store, _entry_of(note, content))
        return True


def _entry_of(note: MemoryNote, content: str, structured: object = None) -> MemoryEntry:
    output = note.output
    return MemoryEntry(
        content=content,
        structured_content=structured,
        stored_at=output.completed_at,
        metadata={AGENT_ROLE: output.agent_role, TASK_DESCRIPTION: output.task_description},
        entry_id=note.entry_id,
    )
