"""Embeddings of the protocol server: vectors that tests can foresee."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:
    from ensemble_ray.testing.model_server.script import ServedRequest

#: Returns the vector of a text.
Embed: TypeAlias = Callable[[str], Sequence[float]]
#: Length of the vectors of `count_words`.
_DIMENSIONS = 64


def is_for_embeddings(path: str) -> bool:
    """Return whether a request asks for vectors."""
    return path.partition("?")[0].endswith("/embeddings")


def count_words(text: str) -> Sequence[float]:
    """Return how often each word of a text comes, the words spread over a few numbers: texts with like words are near."""
    vector = [0.0] * _DIMENSIONS
    for word in text.lower().split():
        vector[sha256(word.encode()).digest()[0] % _DIMENSIONS] += 1.0
    return vector


def embedding_bytes(request: ServedRequest, embed: Embed) -> bytes:
    """Return the answer to a request for vectors, the last text's first: whoever asks must go by their numbers."""
    asked = request.body.get("input")
    texts = [asked] if isinstance(asked, str) else [str(text) for text in cast("Sequence[object]", asked or ())]
    data = [{"object": "embedding", "index": index, "embedding": list(embed(text))} for index, text in enumerate(texts)]
    tokens = sum(len(text.split()) for text in texts)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json.dumps({"object": "list", "data": data[::-1], "model": request.model, "usage": usage}).encode()
