"""SaidText: what a client was told of an answer while it was said. Pure.

In: tokens of a run's last task, then the answer. Out: what to send on, and what is left of the answer. Rule: what was sent is never
another text than the answer's. Words that a model says before it calls tools come before the answer, apart from it.
"""

from __future__ import annotations

from ensemble_ray.text.answers import split_reasoning

_BETWEEN_TURNS = "\n\n"


class SaidText:
    """What was said so far."""

    def __init__(self) -> None:
        self._turn = 0
        self._said = ""
        self._is_begun = False

    def add(self, token: str, *, turn: int) -> str:
        """Take a token, and return what to send on.

        Args:
            token: A fragment of the text.
            turn: Which turn of the tool loop it is of.
        """
        before = self._begin(turn) if token else ""
        self._said += token
        return before + token

    def rest(self, answer: str) -> str | None:
        """Return what is left to be sent of the answer; None: what was sent is another text."""
        # Text that was sent is reasoning if a closing tag without an opening one follows it (S-LLM-2).
        for said in (self._said, split_reasoning(self._said)[1]):
            if answer.startswith(said):
                return answer[len(said) :]
        return "" if self._said.strip() == answer.strip() else None

    def _begin(self, turn: int) -> str:
        """Return what parts a turn from the one before."""
        is_new = turn != self._turn
        between = _BETWEEN_TURNS if is_new and self._is_begun else ""
        if is_new:
            self._turn, self._said = turn, ""
        self._is_begun = True
        return between
