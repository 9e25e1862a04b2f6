"""How many tokens a text has where nobody counted them. Package: text. Pure.

The one estimate of the library: budgets of runs and of contexts, groups of a map-reduce and embeddings use it.
"""

from __future__ import annotations

__all__ = ["CHARACTERS_PER_TOKEN", "estimate_tokens"]

#: Characters that are counted as one token.
CHARACTERS_PER_TOKEN = 4


def estimate_tokens(characters: int) -> int:
    """Return the tokens of that many characters, rounded down."""
    return characters // CHARACTERS_PER_TOKEN
