"""Memory that lasts as long as its process. Package: memory. Its methods may be called from any thread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

from ensemble_ray.errors import ValidationError
from ensemble_ray.process.forks import new_lock
from ensemble_ray.values.memory import EmbeddingMatch

__all__ = ["InMemoryEmbeddingStore", "InMemoryEntityMemory", "StaysHere", "check_fact"]


class StaysHere:
    """Memory of this process alone: a copy elsewhere would not be what its owner reads."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} lives in the process that made it and cannot be copied to another. Give it to the "
            "ensemble (memory_store=, memory=), to a MemoryTool or to an EntityMemoryTool, which reach it from there"
        )


class InMemoryEntityMemory(StaysHere):
    """Facts by name. Fulfils `EntityMemory`."""

    def __init__(self) -> None:
        self._facts: dict[str, str] = {}
        self._lock = new_lock()

    def put(self, name: str, fact: str) -> None:
        """Keep a fact, in place of an earlier one of that name.

        Raises:
            ValidationError: the name is blank, or the fact None.
        """
        name = check_fact(name, fact)
        with self._lock:
            self._facts[name] = fact

    def get(self, name: str | None) -> str | None:
        """Return the fact; None where none is known."""
        return None if name is None else self._facts.get(name.strip())

    def get_all(self) -> Mapping[str, str]:
        """Return all facts by name, in order of first put; nobody can change them."""
        with self._lock:
            return MappingProxyType(dict(self._facts))

    def is_empty(self) -> bool:
        """Return whether nothing is known."""
        return not self._facts


def check_fact(name: str | None, fact: str | None) -> str:
    """Return the name as it is kept.

    Raises:
        ValidationError: it is blank, or the fact is None (S-MEM-41).
    """
    if name is None or not name.strip():
        raise ValidationError("entity_name must not be None or blank")
    if fact is None:
        raise ValidationError("fact must not be None")
    return name.strip()


class InMemoryEmbeddingStore(StaysHere):
    """Texts by vector; all are looked at in each search. Fulfils `EmbeddingStore`."""

    def __init__(self) -> None:
        #: (vector of length 1, text, metadata)
        self._texts: list[tuple[tuple[float, ...], str, Mapping[str, str]]] = []
        self._lock = new_lock()

    def add(self, vector: Sequence[float], text: str, metadata: Mapping[str, str]) -> None:
        """Keep a text."""
        kept = (_of_length_one(vector), text, dict(metadata))
        with self._lock:
            self._texts.append(kept)

    def search(
        self,
        vector: Sequence[float],
        max_results: int,
        min_score: float = 0.0,
        filter: Mapping[str, str] | None = None,  # noqa: A002  the name of the port
    ) -> Sequence[EmbeddingMatch]:
        """Return the nearest texts, nearest first; of equally near ones that which came first."""
        wanted = (filter or {}).items()
        with self._lock:
            texts = list(self._texts)
        asked = _of_length_one(vector)
        scored = [
            (sum(a * b for a, b in zip(asked, vector, strict=True)), text, metadata)
            for vector, text, metadata in texts
            if wanted <= metadata.items()
        ]
        near = sorted((found for found in scored if found[0] >= min_score), key=lambda found: -found[0])
        return [
            EmbeddingMatch(text=text, metadata=metadata, score=score) for score, text, metadata in near[:max_results]
        ]


def _of_length_one(vector: Sequence[float]) -> tuple[float, ...]:
    """Return a vector of that direction; the null vector has none, and is as far from everything as can be."""
    length = math.hypot(*vector)
    return tuple(each / length for each in vector) if length else tuple(vector)
