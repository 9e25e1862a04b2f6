"""A call whose outcome is unknown, as people and callables are asked about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, cast

__all__ = ["UnknownEffect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEffect:
    """A call that was begun, and of which nobody knows whether it was done; what `on_unknown` is asked about."""

    run_id: str
    #: key of the task: its name, else its position
    task: str
    agent_role: str
    #: `handler` where the task has one
    tool_name: str
    #: JSON text as the model wrote it; empty for a handler
    arguments: str
    #: name of the effect in the record: `INSTANCE/TURN/CALL`
    effect: str
    #: what the call was given, and gets again if it is repeated
    idempotency_key: str
    begun_at: datetime
    #: whether the part of the record is lost in which it would stand: then it may not have been begun at all, and
    #: `begun_at` is when the loss was accepted
    is_lost: bool = False

    def to_dict(self) -> dict[str, object]:
        """As data, for another process."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> UnknownEffect:
        """Return what `to_dict` gave."""
        return cls(**cast("dict[str, Any]", dict(data)))
