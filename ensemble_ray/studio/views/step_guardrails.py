"""What the guardrails of a step said. Pure.

In: how far the step came, and the definition that its run began with. Out: a verdict for each guardrail that is known to have
given one. That a guardrail accepted is no fact of its own: a task goes on past a stage only when all guardrails of it accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ensemble_ray.execute.guardrails import GuardrailType
from ensemble_ray.facts.lenient import as_mapping, as_sequence, as_text
from ensemble_ray.studio.schemas.steps import GuardrailCheck

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ensemble_ray.facts.runs import PlanRecorded

_VIOLATION = "GuardrailViolationError"


def guardrail_checks(
    header: PlanRecorded,
    node: str | None,
    links: Sequence[Mapping[str, object]],
    *,
    has_answer: bool,
    has_output: bool,
) -> list[GuardrailCheck]:
    """Return what the guardrails of a step said, in the order in which they were asked.

    Args:
        header: The run's first fact.
        node: The task's name in the plan; None: it has none.
        links: The error that the step failed with and its causes; empty: it did not fail.
        has_answer: Whether an answer of its model is recorded.
        has_output: Whether its output is.
    """
    task = as_mapping(as_mapping((header.definition or {}).get("tasks")).get(node or ""))
    refusal = next((each for each in links if as_text(each.get("type")).endswith(_VIOLATION)), None)
    refused = [] if refusal is None else [_refusal(refusal)]
    is_past_input = has_output or has_answer or GuardrailType.OUTPUT in [each.kind for each in refused]
    found = _list_accepted(task, "input") if is_past_input else []
    return [*found, *(_list_accepted(task, "output") if has_output else []), *([] if has_output else refused)]


def _list_accepted(task: Mapping[str, object], stage: Literal["input", "output"]) -> list[GuardrailCheck]:
    names = (as_text(as_mapping(each).get("callable")) for each in as_sequence(task.get(f"{stage}_guardrails")))
    return [GuardrailCheck(kind=stage, name=name, accepted=True) for name in names]


def _refusal(link: Mapping[str, object]) -> GuardrailCheck:
    kind = as_text(as_mapping(link.get("fields")).get("guardrail_type"), "guardrail")
    return GuardrailCheck(kind=kind, accepted=False, message=as_text(link.get("text")))
