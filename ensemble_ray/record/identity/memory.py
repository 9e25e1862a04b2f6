"""What memory an ensemble uses, as data (S-MEM-113). Pure.

What is in a store says nothing of what the definition is; which kinds of memory are asked does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.record.identity.callables import identity_of
from ensemble_ray.record.identity.names import recorded_name

if TYPE_CHECKING:
    from ensemble_ray.definition.ensemble import EnsembleDefinition


def memory_data(definition: EnsembleDefinition) -> dict[str, object] | None:
    """Return which kinds of memory it has; None: none."""
    memory, store = definition.memory, definition.memory_store
    if memory is None and store is None:
        return None
    data: dict[str, object] = {}
    if store is not None:
        data["store"] = recorded_name(type(store))
    if memory is None:
        return data
    if memory.short_term:
        data["short_term"] = True
    if memory.long_term is not None:
        data["long_term"] = recorded_name(type(memory.long_term))
        data["long_term_max_results"] = memory.long_term_max_results
    if memory.entity_memory is not None:
        data["entity_memory"] = recorded_name(type(memory.entity_memory))
    if memory.extractor is not None:
        data["extractor"] = identity_of(memory.extractor)
    return data
