"""What context budgets cut of a task's requests, for people. Pure.

In: metadata of a task's trace. Out: a title and details for each line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ensemble_ray.execute.agent.context_window import describe_context
from ensemble_ray.facts.lenient import as_count, as_mapping, as_sequence


def context_lines(metadata: Mapping[str, object]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return the lines of the first request that was cut, and of the last one that was cut otherwise (S-MEM-136)."""
    cuts = [as_mapping(entry) for entry in as_sequence(metadata.get("context"))]
    for data in cuts[:1] + cuts[1:][-1:]:
        turn = as_count(data.get("turn"))
        needed, budget = as_count(data.get("needed_tokens")), as_count(data.get("budget_tokens"))
        where = f" of model call {turn + 1}" if turn else ""
        yield f"context{where}: {describe_context(data)}", (f"{needed:,} tokens, budget {budget:,}",)
