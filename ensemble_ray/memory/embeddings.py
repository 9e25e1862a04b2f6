"""Memory that finds entries by meaning: an embedding model and a store of vectors.

What an entry has beside its content stands in the metadata of its vector, under names of our own, so that the user's
metadata comes back as it was.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime

from ensemble_ray.errors import ValidationError
from ensemble_ray.ports import EmbeddingModel, EmbeddingStore
from ensemble_ray.process.forks import new_lock
from ensemble_ray.values.memory import EmbeddingMatch, MemoryEntry
from ensemble_ray.values.value import utc_of

_OURS = "ensemble_ray."
SCOPE, _STORED_AT = f"{_OURS}scope", f"{_OURS}stored_at"


class EmbeddingStoreLongTermMemory:
    """Long-term memory over any embedding store. Fulfils `LongTermMemory`."""

    def __init__(self, *, embedding_store: EmbeddingStore, embedding_model: EmbeddingModel) -> None:
        """Make one.

        Raises:
            ValidationError: one of the two is None.
        """
        check_parts(embedding_model=embedding_model, embedding_store=embedding_store)
        self._texts = embedding_store
        self._model = embedding_model

    @property
    def embedding_model(self) -> EmbeddingModel:
        """What makes its vectors."""
        return self._model

    def store(self, entry: MemoryEntry) -> None:
        """Keep an entry.

        Raises:
            ValidationError: it is None, or its content is.
        """
        check_long_term_entry(entry)
        self._texts.add(self._model.embed(entry.content), entry.content, metadata_of(entry))

    def retrieve(self, query: str | None, max_results: int) -> Sequence[MemoryEntry]:
        """Return the entries nearest to the query; none for a blank one."""
        if query is None or not query.strip():
            return []
        found = self._texts.search(self._model.embed(query), max_results)
        return [entry_of(match) for match in found]


def check_long_term_entry(entry: MemoryEntry | None) -> None:
    """Refuse what long-term memory cannot keep (S-MEM-33)."""
    if entry is None:
        raise ValidationError("MemoryEntry must not be None")
    content: str | None = entry.content
    if content is None:
        raise ValidationError("MemoryEntry content must not be None")


def check_parts(*, embedding_model: EmbeddingModel | None, embedding_store: EmbeddingStore | None) -> None:
    """Refuse a memory that has one of the two alone (S-MEM-32)."""
    if embedding_store is None:
        raise ValidationError("embedding_store must not be None")
    if embedding_model is None:
        raise ValidationError("embedding_model must not be None")
    for name, value, methods in (("model", embedding_model, ("embed",)), ("store", embedding_store, ("add", "search"))):
        if missing := [method for method in methods if not callable(getattr(value, method, None))]:
            raise ValidationError(
                f"embedding_{name} ({type(value).__name__}) has no method {' and no method '.join(map(repr, missing))}"
            )


def metadata_of(entry: MemoryEntry) -> dict[str, str]:
    """Return what the vector of an entry carries."""
    ours = {} if entry.stored_at is None else {_STORED_AT: entry.stored_at.isoformat()}
    return {**entry.metadata, **ours}


def entry_of(match: EmbeddingMatch) -> MemoryEntry:
    """Return the entry that was found."""
    return MemoryEntry(
        content=match.text,
        stored_at=_time_of(match.metadata),
        metadata={name: value for name, value in match.metadata.items() if not name.startswith(_OURS)},
    )


def _time_of(metadata: Mapping[str, str]) -> datetime:
    """Return when the entry came to be; the epoch for texts that something else stored (S-MEM-34)."""
    at = metadata.get(_STORED_AT)
    return utc_of(0) if at is None else datetime.fromisoformat(at)


class EmbeddingMeter:
    """Counts; any thread may add."""

    def __init__(self) -> None:
        self.tokens = 0
        self._lock = new_lock()

    def add(self, tokens: int) -> None:
        """Add what one request read."""
        with self._lock:
            self.tokens += tokens


_meter: ContextVar[EmbeddingMeter | None] = ContextVar("ensemble_ray_embedding_meter", default=None)


@contextmanager
def metered_embeddings() -> Generator[EmbeddingMeter]:
    """Count what is embedded in the block, also in threads that are started from it."""
    meter = EmbeddingMeter()
    token = _meter.set(meter)
    try:
        yield meter
    finally:
        _meter.reset(token)


def count_embedding(tokens: int) -> None:
    """Count the tokens of an answered request; outside any meter nobody wants to know."""
    if (meter := _meter.get()) is not None:
        meter.add(tokens)
