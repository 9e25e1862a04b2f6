"""What was learned of a task from one of its outputs. Layer: values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import Field, Strict, model_validator

from ensemble_ray.errors import ValidationError
from ensemble_ray.values.value import FrozenSequence, Instant, Value, utc_now

__all__ = ["TaskReflection"]


class TaskReflection(Value):
    """Notes on how to do a task better next time.

    Attributes:
        refined_description: How the task could be described better.
        refined_expected_output: How what is wanted could be described better.
        observations: What was noticed about the output.
        suggestions: What to try next time.
        reflected_at: When it was made, UTC; now where nothing is said.
        run_count: How many outputs of the task were reflected on so far, this one included; 1 for the first.
    """

    refined_description: str
    refined_expected_output: str
    observations: FrozenSequence[str] = ()
    suggestions: FrozenSequence[str] = ()
    reflected_at: Instant = Field(default_factory=utc_now)
    run_count: Annotated[int, Strict()] = 1

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        arguments = cast("Mapping[str, Any]", data)
        for name in ("refined_description", "refined_expected_output"):
            if arguments.get(name) is None:
                raise ValidationError(f"TaskReflection {name} must not be None")
        count = arguments.get("run_count", 1)
        if isinstance(count, int) and count < 1:
            raise ValidationError(f"run_count must be >= 1, was: {count}")
        return arguments

    def to_data(self) -> dict[str, object]:
        """Return it as JSON-able data."""
        return self.model_dump(mode="json")
