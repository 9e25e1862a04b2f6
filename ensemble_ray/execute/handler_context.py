"""What a task's handler is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble_ray.values.task_output import TaskOutput

__all__ = ["TaskHandlerContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHandlerContext:
    """What a handler is given. Nothing in it is None; context outputs are in context order."""

    description: str
    expected_output: str
    context_outputs: Sequence[TaskOutput] = ()
    #: the same when the handler is called again after a crash, so that it can do its work once; empty outside a run
    idempotency_key: str = ""

    def __post_init__(self) -> None:
        for name in ("description", "expected_output", "context_outputs"):
            if getattr(self, name) is None:
                raise ValueError(f"TaskHandlerContext {name} must not be None")
        object.__setattr__(self, "context_outputs", tuple(self.context_outputs))
