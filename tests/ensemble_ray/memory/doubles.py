"""Embeddings that tests can questions_after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["WordsModel"]


class WordsModel:
    """Counts words of a few topics: texts with words of the same topic are near to each other."""

    def __init__(self, topics: Mapping[str, Sequence[str]] | None = None) -> None:
        self._topics = topics or {
            "money": ("money", "refund", "price"),
            "sea": ("sea", "tide", "ship"),
            "food": ("soup",),
        }
        #: texts that were embedded
        self.asked: list[str] = []

    def embed(self, text: str) -> list[float]:
        """Return how many words of each topic the text has, and a little of everything."""
        self.asked.append(text)
        words = text.lower().split()
        return [0.01 + sum(word in topic for word in words) for topic in self._topics.values()]
