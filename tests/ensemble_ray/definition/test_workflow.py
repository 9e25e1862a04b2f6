"""The words of workflows."""

from __future__ import annotations

from ensemble_ray import ParallelErrorStrategy, Workflow


def test_values_are_plain_words_when_compared() -> None:
    """S-DOM-80, S-PAR-20, S-CONV-6."""
    assert [member.value for member in Workflow] == ["sequential", "hierarchical", "parallel"]
    assert [member.value for member in ParallelErrorStrategy] == ["fail_fast", "continue_on_error"]
    assert Workflow.SEQUENTIAL == "sequential"
