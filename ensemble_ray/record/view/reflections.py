"""What was learned in a run, as rows behind its tree; a trace has nothing of it (S-REFL-18). Pure.

In: facts of a run. Out: a row for each output that was reflected on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ensemble_ray.facts.reflection import ReflectionRecorded, ReflectionStored
from ensemble_ray.record.view.texts import row_text
from ensemble_ray.record.view.tree import TreeRow
from ensemble_ray.values.ids import reflected_instance

if TYPE_CHECKING:
    from ensemble_ray.facts.fact import Fact

#: Characters of a name that are shown.
_TITLE = 120


def reflection_rows(facts: Iterable[Fact]) -> tuple[TreeRow, ...]:
    """Return a row for each output that was reflected on, in order."""
    made: dict[str, ReflectionRecorded] = {}
    stored: set[str] = set()
    for fact in facts:
        if isinstance(fact.data, ReflectionRecorded):
            made[fact.instance] = fact.data
        elif isinstance(fact.data, ReflectionStored):
            stored.add(fact.instance)
    return tuple(_row(instance, data, is_stored=instance in stored) for instance, data in made.items())


def _row(instance: str, data: ReflectionRecorded, *, is_stored: bool) -> TreeRow:
    learned = data.reflection_value
    details = [
        f"execution {learned.run_count:,}",
        f"{len(learned.observations):,} observations",
        f"{len(learned.suggestions):,} suggestions",
    ]
    if tokens := data.input_tokens + data.output_tokens:
        details.append(f"{tokens:,} tokens")
    if not is_stored:
        details.append("not stored")
    title = f"reflected on {reflected_instance(instance)}"
    return TreeRow(
        depth=1, kind="reflection", title=row_text(title, _TITLE), details=tuple(details), is_bad=not is_stored
    )
