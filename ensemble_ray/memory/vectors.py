"""VectorSearch: exact search by meaning in memory that lasts. Package: memory.

Tables that can search by vectors do it themselves. Of the others the vectors of the scopes that were searched last stay in
memory, as one float32 matrix each; a search reads what is new.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ensemble_ray.errors import ValidationError
from ensemble_ray.memory.tables import MemoryTables
from ensemble_ray.process.forks import new_lock
from ensemble_ray.values.memory import MemoryEntry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ensemble_ray.ports.memory import EmbeddingModel

__all__ = ["VectorSearch"]

_EmbedAll = Callable[[Sequence[str]], Sequence[Sequence[float]]]
#: Entries that get their vectors in one go.
_AT_ONCE = 1000
#: Scopes whose vectors stay in memory.
_MOST_SCOPES = 8


@dataclass(frozen=True, slots=True)
class _Scope:
    """The vectors of a scope as they were read last."""

    extent: tuple[int, int]
    rows: NDArray[np.int64]
    vectors: NDArray[np.float32]


class VectorSearch:
    """Searches the scopes of one place with one model."""

    def __init__(self, tables: MemoryTables, model: EmbeddingModel) -> None:
        """Make one.

        Raises:
            ValidationError: numpy is not installed.
        """
        try:
            import numpy as np
        except ImportError:
            raise ValidationError('Memory by meaning needs numpy: pip install "ensemble-ray[memory]"') from None
        self._np = np
        self._tables = tables
        self.model = model
        self._scopes: OrderedDict[str, _Scope] = OrderedDict()
        self._lock = new_lock()
        self._is_checked = False

    def vector_of(self, text: str) -> bytes:
        """Return the vector of a text as it is kept: of length 1.

        Raises:
            ValidationError: the place was filled with another model.
        """
        return self._embed(text).tobytes()

    def search(self, scope: str, query: str, most: int) -> list[MemoryEntry]:
        """Return the entries whose angle to the query is the smallest, none beyond a right angle; nearest first."""
        self._add_missing(scope)
        wanted = self._embed(query)
        if (nearest := self._tables.nearest(scope, wanted.tobytes(), most)) is not None:
            return nearest
        known = self._read(scope)
        if not len(known.rows):
            return []
        scores = known.vectors @ wanted
        best = self._np.argpartition(-scores, most - 1)[:most] if most < len(scores) else self._np.arange(len(scores))
        order = sorted((int(position) for position in best), key=lambda position: (-float(scores[position]), position))
        return self._tables.entries_of([int(known.rows[position]) for position in order if scores[position] >= 0.0])

    def _add_missing(self, scope: str) -> None:
        """Give vectors to the entries that were stored without a model; a model that takes many texts at once gets them so."""
        missing = self._tables.without_vector(scope)
        embed_all = cast("_EmbedAll | None", getattr(self.model, "embed_all", None))
        for start in range(0, len(missing), _AT_ONCE):
            some = missing[start : start + _AT_ONCE]
            texts = [stored.entry.content for stored in some]
            vectors = map(self.model.embed, texts) if embed_all is None else embed_all(texts)
            self._tables.set_vectors(
                [(self._as_kept(vector).tobytes(), stored.row) for vector, stored in zip(vectors, some, strict=True)]
            )

    def _embed(self, text: str) -> NDArray[np.float32]:
        return self._as_kept(self.model.embed(text))

    def _as_kept(self, numbers_of_text: Sequence[float]) -> NDArray[np.float32]:
        numbers = self._np
        vector: NDArray[np.float32] = numbers.array(numbers_of_text, dtype=numbers.float32)
        if not self._is_checked:
            self._check(len(vector))
            self._is_checked = True
        length = float(numbers.linalg.norm(vector))
        if length:
            vector /= numbers.float32(length)
        return vector

    def _check(self, dimensions: int) -> None:
        name = f"{type(self.model).__name__} {getattr(self.model, 'model', '')}".strip()
        model, found = self._tables.embedding(name, dimensions)
        if (model, found) != (name, dimensions):
            raise ValidationError(
                f"{self._tables.location} has vectors of {model} ({found} numbers each), which cannot be compared with those of "
                f"{name} ({dimensions}). Use that model, or another place"
            )

    def _read(self, scope: str) -> _Scope:
        """Return the vectors of a scope as they are now."""
        with self._lock:
            known = self._scopes.pop(scope, None)
            extent = self._tables.extent(scope)
            if known is None or known.extent != extent:
                known = self._update(scope, known, extent)
            self._scopes[scope] = known
            while len(self._scopes) > _MOST_SCOPES:
                self._scopes.popitem(last=False)
        return known

    def _update(self, scope: str, known: _Scope | None, extent: tuple[int, int]) -> _Scope:
        np = self._np
        if known is not None:
            added = self._tables.vectors(scope, known.extent[1])
            # Rows are never changed, and numbers never used again: as many as there are means that none is gone.
            if known.extent[0] + sum(row <= extent[1] for row, _ in added) == extent[0]:
                return self._join(known, added)
        found = self._tables.vectors(scope, 0)
        empty = _Scope((0, 0), np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.float32))
        return self._join(empty, found)

    def _join(self, known: _Scope, added: Sequence[tuple[int, bytes]]) -> _Scope:
        np = self._np
        if not added:
            return known
        rows = np.array([row for row, _ in added], dtype=np.int64)
        vectors = np.frombuffer(b"".join(vector for _, vector in added), dtype=np.float32).reshape(len(added), -1)
        if len(known.rows):
            rows, vectors = np.concatenate([known.rows, rows]), np.concatenate([known.vectors, vectors])
        return _Scope((len(rows), int(rows[-1])), rows, vectors)
