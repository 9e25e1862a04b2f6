"""When a loop stops: the predicates that people write most often. Package: definition.

A predicate is any callable of a `LoopIterationContext`. These are values: they travel, they compare, and a record can say what
they look for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ensemble_ray.errors import ValidationError
from ensemble_ray.values.iterations import GraphRoutingContext, LoopIterationContext

if TYPE_CHECKING:
    from ensemble_ray.values.task_output import TaskOutput

__all__ = ["Predicate", "Until"]

#: Whether a loop is done, sync or async.
Predicate: TypeAlias = Callable[[LoopIterationContext], bool | Awaitable[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """A predicate for `Loop(until=...)` and `GraphEdge(condition=...)`; made by `Until.parsed`, `Until.text_contains` or `Until.unchanged`.

    Examples:
        >>> Until.text_contains("APPROVED", ignore_case=True)
        Until(kind='text_contains', text='APPROVED', ignore_case=True, condition=None)
    """

    kind: Literal["parsed", "text_contains", "unchanged"]
    #: that has to be in the answer
    text: str = ""
    ignore_case: bool = False
    #: asked with the parsed answer
    condition: Callable[[Any], bool | Awaitable[bool]] | None = None

    @classmethod
    def parsed(cls, condition: Callable[[Any], bool | Awaitable[bool]]) -> Until:
        """Stop when a condition holds for the parsed output of the last body task, which needs an `output_type`.

        Raises:
            ValidationError: the condition cannot be called.
        """
        if not callable(condition):
            raise ValidationError(f"Until.parsed needs a callable, got: {type(condition).__name__}")
        return cls(kind="parsed", condition=condition)

    @classmethod
    def text_contains(cls, text: str, *, ignore_case: bool = False) -> Until:
        """Stop when the text of the last body task's output contains this one.

        Raises:
            ValidationError: the text is blank.
        """
        if not isinstance(text, str) or not text.strip():
            raise ValidationError("Until.text_contains needs a text that is not blank")
        return cls(kind="text_contains", text=text, ignore_case=ignore_case)

    @classmethod
    def unchanged(cls) -> Until:
        """Stop when the last body task says the same as in the iteration before, but for space at the ends."""
        return cls(kind="unchanged")

    def __call__(self, context: LoopIterationContext | GraphRoutingContext) -> bool | Awaitable[bool]:
        """Return whether the loop is done after this iteration, or the edge is taken after this step."""
        output, before = _outputs_of(context)
        if self.condition is not None:
            return self.condition(output.parsed)
        if self.kind == "unchanged":
            return before is not None and before.raw.strip() == output.raw.strip()
        if self.ignore_case:
            return self.text.casefold() in output.raw.casefold()
        return self.text in output.raw


def _outputs_of(context: LoopIterationContext | GraphRoutingContext) -> tuple[TaskOutput, TaskOutput | None]:
    """Return the output that is judged, and the one before it: of the iteration before, or of the state's visit before."""
    if isinstance(context, GraphRoutingContext):
        visits = context.state_history[context.current_state]
        return context.last_output, visits[-2] if len(visits) > 1 else None
    if len(context.history) < 2:  # noqa: PLR2004  there is no iteration before the first
        return context.last_body_output, None
    *_, before = context.history[-2].values()
    return context.last_body_output, before
