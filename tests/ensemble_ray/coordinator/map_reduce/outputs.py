"""Outputs of tasks, for the tests of what becomes of them in map-reduces."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from ensemble_ray import TaskMetrics, TaskOutput

_AT = datetime(2026, 1, 1, tzinfo=UTC)


def output(raw: str, output_tokens: int = -1) -> TaskOutput:
    """An output that says that."""
    return TaskOutput(
        raw=raw,
        task_description=f"map {raw}",
        agent_role="Worker",
        completed_at=_AT,
        duration=timedelta(seconds=1),
        metrics=TaskMetrics(output_tokens=output_tokens),
    )
