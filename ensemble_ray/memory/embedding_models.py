"""Resolve embedding models, and run the one on this machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from ensemble_ray.errors import ValidationError

if TYPE_CHECKING:
    from ensemble_ray.ports import EmbeddingModel


KNOWN_MODELS = ("local", "openai:MODEL")


def resolve_embedding_model(value: object) -> EmbeddingModel | None:
    """Return the embedding model that a value names, or raise `ValidationError`."""
    if value is None or callable(getattr(value, "embed", None)):
        return cast("EmbeddingModel | None", value)
    if isinstance(value, str):
        prefix, _, name = value.strip().partition(":")
        if value.strip() == "local":
            return LocalEmbeddingModel()
        if prefix == "openai" and name.strip():
            from ensemble_ray.memory.openai_embeddings import OpenAIEmbeddingModel  # slow to import

            return OpenAIEmbeddingModel(name.strip())
        raise ValidationError(f"Unknown embedding_model '{value}'. Known: [{', '.join(KNOWN_MODELS)}]")
    raise ValidationError(
        f"embedding_model must be a model with a method 'embed' or one of [{', '.join(KNOWN_MODELS)}], got: "
        f"{type(value).__name__}"
    )


class _Loaded(Protocol):
    def embed(self, texts: list[str], *, norm: bool) -> Sequence[Sequence[float]]: ...


class LocalEmbeddingModel:
    """A small model of static word embeddings for use offline and without a key. Fulfils `EmbeddingModel`.

    It compares words and ignores their order. A vector has 256 numbers.
    """

    model = "wordllama-256"

    def __init__(self) -> None:
        """Check that the extra `memory` is installed."""
        import importlib.util

        if importlib.util.find_spec("wordllama") is None:
            raise ValidationError('embedding_model="local" needs an extra: pip install "ensemble-ray[memory]"')

    def embed(self, text: str) -> Sequence[float]:
        """Return the vector of a text. The first call loads the model."""
        return [float(each) for each in _load().embed([text], norm=True)[0]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalEmbeddingModel)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return "LocalEmbeddingModel()"


@lru_cache(maxsize=1)
def _load() -> _Loaded:
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)  # the package calls `basicConfig`, which has no effect if there is a handler (S-ERR-65)
    try:
        import wordllama
    finally:
        root.removeHandler(handler)

    package = cast("Any", wordllama)
    folder = Path(str(package.__file__)).parent
    return cast("_Loaded", package.WordLlama.load(dim=256, cache_dir=folder, disable_download=True))
