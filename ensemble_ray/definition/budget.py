"""What a run may spend, as it is written: the checks of `max_tokens` and `max_cost`. Package: definition. Pure.

In: what a user gave. Out: nothing, or the first mistake. Must never happen: a budget that no money can be counted for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ensemble_ray.definition.fields import check_positive
from ensemble_ray.errors import ValidationError

if TYPE_CHECKING:
    from ensemble_ray.values.metrics import CostConfiguration

__all__ = ["check_budget", "check_costs"]


def check_budget(arguments: Mapping[str, object], owner: str) -> None:
    """Check the fields `max_tokens` and `max_cost` of what is being made (S-BUD-1).

    Args:
        arguments: The fields as they were given, by name; those of other names are left alone.
        owner: How a message begins: `Ensemble`, `RunOptions`, ...

    Raises:
        ValidationError: one is 0 or less, or no amount at all.
    """
    check_positive(arguments.get("max_tokens"), f"{owner} max_tokens must be > 0 when set")
    cost = arguments.get("max_cost")
    check_positive(cost, f"{owner} max_cost must be > 0 when set")
    if isinstance(cost, float) and not math.isfinite(cost):
        raise ValidationError(f"{owner} max_cost must be a finite amount, got: {cost}")


def check_costs(max_cost: float | None, costs: CostConfiguration | None) -> None:
    """Check that money can be counted where it is limited (S-BUD-1); for the start of a run.

    Raises:
        ValidationError: nobody said what tokens cost.
    """
    if max_cost is not None and costs is None:
        raise ValidationError(
            f"max_cost needs cost_configuration: without the money per token nobody can tell when {max_cost:g} is spent. "
            "Set cost_configuration, or limit tokens with max_tokens"
        )
