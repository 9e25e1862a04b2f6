"""Events as they travel to pages and clients: the messages of the specification's file 27. Package: events. Pure.

In: events of a run as they happen, and what a record tells of those that are over (`record.following`). Out: a type and plain
JSON data. What no record keeps, such as tokens, has no cursor: it is shown as it happens, and to nobody later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from ensemble_ray.events import TokenEvent
from ensemble_ray.events.messages import instant

__all__ = ["LAST_TYPE", "Cursor", "WireEvent", "render_token"]

#: The type that ends every stream.
LAST_TYPE = "ensemble_completed"


class Cursor(NamedTuple):
    """Where a reader of a run's events stands: the last one that it has had; as text `12.1`."""

    #: position of a fact in the record
    seq: int = 0
    #: which of the events that follow from the fact, from 1
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the cursor that a reader sent back.

        Raises:
            ValueError: it is none.
        """
        seq, _, number = text.partition(".")
        if not (text.isascii() and seq.isdecimal() and number.isdecimal() and len(text) < 40):  # noqa: PLR2004  far above any record
            raise ValueError(f"'{text[:40]}' is no cursor of a run's events")
        return cls(int(seq), int(number))

    def __str__(self) -> str:
        return f"{self.seq}.{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WireEvent:
    """One message about a run."""

    #: of file 27: `task_started`
    type: str
    #: JSON data
    data: Mapping[str, object]
    #: None: it is shown as it happens and never again
    cursor: Cursor | None = None


def render_token(event: TokenEvent, at: float) -> WireEvent:
    """Return the message of a streamed fragment, which no record keeps; `at` is the time, Unix time, s."""
    data: dict[str, object] = {
        "token": event.token,
        "agent_role": event.agent_role,
        "task_description": event.task_description,
        "iteration_index": event.iteration,
        "sent_at": instant(at),
        "instance": event.instance,
        **({"is_reasoning": True} if event.is_reasoning else {}),
    }
    return WireEvent(type="token", data=data)
