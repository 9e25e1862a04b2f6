"""How patient a run is with providers that fail. Package: definition. In: numbers. Out: a frozen value that waits for nothing.

Which failures are repeated, and when, is told by `llm.retry`; carrying it out is `execute.model_calls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

from pydantic import model_validator

from ensemble_ray.definition.fields import StrictInt, initially
from ensemble_ray.errors import ValidationError
from ensemble_ray.values.value import DurationField, Value

__all__ = ["RetryPolicy"]

_LONGEST_S = timedelta(days=365).total_seconds()


class RetryPolicy(Value):
    """What becomes of model calls that fail by the provider's fault.

    Attributes:
        max_attempts: Times that a model is asked for one answer; 1: no retries.
        first_delay: Wait before the second attempt; it doubles from there. Seconds or `timedelta`, as all of these.
        max_delay: The longest wait, unless the provider asks for more.
        max_wait: All waits for one answer, those for an endpoint that fails for everybody included.

    Raises:
        ValidationError: a value cannot work.

    Examples:
        >>> RetryPolicy(max_attempts=3, max_wait=20).max_wait
        datetime.timedelta(seconds=20)
    """

    max_attempts: StrictInt = 5
    first_delay: DurationField = initially(timedelta(seconds=0.5))
    max_delay: DurationField = initially(timedelta(seconds=30))
    max_wait: DurationField = initially(timedelta(seconds=120))

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        arguments = cast("Mapping[str, object]", data) if isinstance(data, Mapping) else {}
        attempts = arguments.get("max_attempts")
        if isinstance(attempts, int | float) and attempts < 1:
            raise ValidationError(f"RetryPolicy max_attempts must be >= 1, got: {attempts}")
        for name in ("first_delay", "max_delay", "max_wait"):
            value = arguments.get(name)
            seconds = value.total_seconds() if isinstance(value, timedelta) else value
            # Written so that NaN is refused too.
            if isinstance(seconds, int | float) and not 0 <= seconds <= _LONGEST_S:
                raise ValidationError(f"RetryPolicy {name} must be between 0 s and 365 days, got: {value}")
        return data

    @model_validator(mode="after")
    def _check_order(self) -> RetryPolicy:
        if self.max_delay < self.first_delay:
            raise ValidationError(
                f"RetryPolicy max_delay ({self.max_delay}) must not be below first_delay ({self.first_delay})"
            )
        return self
