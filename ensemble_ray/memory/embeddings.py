"""Long-term memory over any embedding store, and the count of embedded tokens."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime

from ensemble_ray.errors import ValidationError
from ensemble_ray.ports import EmbeddingModel, EmbeddingStore
from ensemble_ray.process.concurrency import new_lock
from ensemble_ray.values.memory import EmbeddingMatch, MemoryEntry
from ensemble_ray.values.value import utc_of

_OURS = "ensemble_ray."
SCOPE, _STORED_AT = f"{_OURS}scope", f"{_OURS}stored_at"


class EmbeddingStoreLongTermMemory:
    """Long-term memory over an embedding store. Fulfils `LongTermMemory`."""

    def __init__(self, *, embedding_store: EmbeddingStore, embedding_model: EmbeddingModel) -> None:
        """Combine a store and a model."""
        check_parts(embedding_model=embedding_model, embedding_store=embedding_store)
        self._texts = embedding_store
        self._model = embedding_model

    @property
    def embedding_model(self) -> EmbeddingModel:
        """Model of the vectors."""
        return self._model

    def store(self, entry: MemoryEntry) -> None:
        """Store an entry.

        Raises:
            ValidationError: The entry or its content is None.
        """
        check_long_term_entry(entry)
        self._texts.add(self._model.embed(entry.content), entry.content, metadata_of(entry))

    def retrieve(self, query: str | None, max_results: int) -> Sequence[MemoryEntry]:
        """Return the entries most similar to the query; an empty list for a blank query."""
        if query is None or not query.strip():
            return []
        found = self._texts.search(self._model.embed(query), max_results)
        return [entry_of(match) for match in found]


def check_long_term_entry(entry: MemoryEntry | None) -> None:
    if entry is None:
        raise ValidationError("MemoryEntry must not be None")
    content: str | None = entry.content
    if content is None:
        raise ValidationError("MemoryEntry content must not be None")


def check_parts(*, embedding_model: EmbeddingModel | None, embedding_store: EmbeddingStore | None) -> None:
    if embedding_store is None:
        raise ValidationError("embedding_store must not be None")
    if embedding_model is None:
        raise ValidationError("embedding_model must not be None")
    check_methods(embedding_model, ("embed",), "embedding_model")
    check_methods(embedding_store, ("add", "search"), "embedding_store")


def check_methods(value: object, methods: Iterable[str], subject: str) -> None:
    """Raise `ValidationError` for an object that lacks some of these methods; accept None."""
    missing = [method for method in methods if value is not None and not callable(getattr(value, method, None))]
    if missing:
        raise ValidationError(
            f"{subject} ({type(value).__name__}) has no method {' and no method '.join(map(repr, missing))}"
        )


def metadata_of(entry: MemoryEntry) -> dict[str, str]:
    ours = {} if entry.stored_at is None else {_STORED_AT: entry.stored_at.isoformat()}
    return {**entry.metadata, **ours}


def entry_of(match: EmbeddingMatch) -> MemoryEntry:
    at = match.metadata.get(_STORED_AT)
    return MemoryEntry(
        content=match.text,
        # Texts that other programs stored have no time (S-MEM-34).
        stored_at=utc_of(0) if at is None else datetime.fromisoformat(at),
        metadata={name: value for name, value in match.metadata.items() if not name.startswith(_OURS)},
    )


class EmbeddingMeter:
    def __init__(self) -> None:
        self.tokens = 0
        self._lock = new_lock()

    def add(self, tokens: int) -> None:
        with self._lock:
            self.tokens += tokens


_meter: ContextVar[EmbeddingMeter | None] = ContextVar("ensemble_ray_embedding_meter", default=None)


@contextmanager
def metered_embeddings() -> Generator[EmbeddingMeter]:
    """Count the tokens that are embedded in the block, in threads that it starts too."""
    meter = EmbeddingMeter()
    token = _meter.set(meter)
    try:
        yield meter
    finally:
        _meter.reset(token)


def count_embedding(tokens: int) -> None:
    """Add tokens to the current meter, if there is one."""
    if (meter := _meter.get()) is not None:
        meter.add(tokens)
