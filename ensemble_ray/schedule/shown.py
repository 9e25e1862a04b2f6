"""Which outputs a loop shows to the rest of a run (S-LOOP-70 to S-LOOP-72). Package: schedule. Pure.

The one rule for a loop of a plan, for its result, and for the loop of an item of a map.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, assert_never

from ensemble_ray.values.ids import node_key

if TYPE_CHECKING:
    from ensemble_ray.plan.units import LoopUnit

__all__ = ["list_shown"]


def list_shown(unit: LoopUnit, iterations: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the instances of each output that a loop shows, in body order; those of several are joined to one.

    Args:
        unit: The loop.
        iterations: Per iteration what completed; the last one may be unfinished (S-LOOP-112).
    """
    # A review may end an iteration before its first task gave anything: then the one before it is the last.
    last = next((each for each in reversed(iterations) if each), ())
    match unit.output_mode:
        case "last_iteration":
            return [(name,) for name in last]
        case "final_task_only":
            return _of_task(unit.body[-1], [last])
        case "all_iterations":
            given = (tuple(name for (name,) in _of_task(key, iterations)) for key in unit.body)
            return [names for names in given if names]
        case _:
            assert_never(unit.output_mode)


def _of_task(key: str, iterations: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    return [(name,) for names in iterations for name in names if node_key(name) == key]
