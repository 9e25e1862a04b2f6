"""How many tokens an output, or an item, takes. Package: plan. Calls nothing but the user's estimators.

In: a definition, and an output or items. Out: a count, and what to warn of. The same count decides whether outputs fit
together and how they are packed (S-MR-61).
"""

from __future__ import annotations

from collections.abc import Iterable

from ensemble_ray.definition.map_reduce import MapReduceDefinition
from ensemble_ray.errors import ValidationError
from ensemble_ray.text.token_estimate import estimate_tokens as length_tokens
from ensemble_ray.values.task_output import TaskOutput

__all__ = ["estimate_tokens", "input_estimate", "input_tokens"]


def estimate_tokens(output: TaskOutput, definition: MapReduceDefinition) -> tuple[int, str | None]:
    """Return the tokens of an output (S-MR-60), and a warning where they are only guessed from its length.

    Raises:
        ValidationError: `token_estimator` gave something that is no count; what it raises goes on unchanged.
    """
    if output.metrics.output_tokens >= 0:
        return output.metrics.output_tokens, None
    if definition.token_estimator is not None:
        estimated: object = definition.token_estimator(output.raw)
        if estimated is not None:
            if isinstance(estimated, bool) or not isinstance(estimated, int) or estimated < 0:
                raise ValidationError(f"token_estimator must return a number >= 0, or None, got: {estimated!r}")
            return estimated, None
    guessed = length_tokens(len(output.raw))
    reason = "there is no token_estimator" if definition.token_estimator is None else "token_estimator could not tell"
    return guessed, (
        f"Output of '{output.agent_role}' is taken to have {guessed} tokens, by its length: its provider counted none, and "
        f"{reason}"
    )


def input_tokens(definition: MapReduceDefinition, item: object) -> int:
    """Return the tokens of one item, for the short-circuit check only (S-MR-80, S-MR-84).

    Raises:
        ValidationError: `input_estimator` gave no text; what it raises goes on unchanged.
    """
    text: object = definition.input_estimator(item)
    if not isinstance(text, str):
        raise ValidationError(f"input_estimator must return a str, got: {type(text).__name__}")
    return length_tokens(len(text))


def input_estimate(definition: MapReduceDefinition, items: Iterable[object]) -> int:
    """Return the tokens of all items together: the sum of what each has, rounded down (S-MR-80)."""
    return sum(input_tokens(definition, item) for item in items)
