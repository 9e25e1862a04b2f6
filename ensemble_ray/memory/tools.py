"""Tools by which agents use memory themselves: `MemoryTool`, `EntityMemoryTool`. Package: memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from ensemble_ray.errors import ValidationError
from ensemble_ray.memory.held import HeldObject
from ensemble_ray.ports.memory import EntityMemory
from ensemble_ray.tools.decorator import tool
from ensemble_ray.tools.tool import AbstractAgentTool, ToolResult, current_tool_context
from ensemble_ray.values.memory import MemoryEntry

if TYPE_CHECKING:
    from ensemble_ray.memory.store import MemoryStore

__all__ = ["EntityMemoryTool", "MemoryTool"]

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
