"""Budgets as they are written: what is refused, and when."""

from __future__ import annotations

from decimal import Decimal

import pytest

from ensemble_ray import Agent, CostConfiguration, RunOptions, Task, ValidationError
from ensemble_ray.definition import EnsembleDefinition, validate
from ensemble_ray.definition.map_reduce import MapReduceDefinition
from ensemble_ray.testing import ScriptedModel

TASK = Task(description="Write it", expected_output="Prose", agent=Agent(role="W", goal="g", llm=ScriptedModel()))
COSTS = CostConfiguration(input_token_rate=Decimal("0.1"), output_token_rate=Decimal("0.2"))


@pytest.mark.parametrize("field", ["max_tokens", "max_cost"])
@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize(("kind", "name"), [(EnsembleDefinition, "Ensemble"), (RunOptions, "RunOptions")])
def test_budget_of_nothing_is_refused(
    kind: type[EnsembleDefinition | RunOptions], name: str, field: str, value: int
) -> None:
    """S-BUD-1."""
    with pytest.raises(ValidationError) as caught:
        kind(**{field: value})
    assert str(caught.value) == f"{name} {field} must be > 0 when set, got: {value}"


def test_map_reduce_has_a_budget_too() -> None:
    """S-BUD-1: the same fields, the same check."""
    assert {"max_tokens", "max_cost"} <= MapReduceDefinition.model_fields.keys()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_amount_that_is_none_is_refused(value: float) -> None:
    """S-BUD-1: it would never be reached."""
    with pytest.raises(ValidationError, match="Ensemble max_cost must be a finite amount, got: "):
        EnsembleDefinition(max_cost=value)


@pytest.mark.parametrize("given", [{"max_tokens": "5"}, {"max_tokens": True}, {"max_cost": "5"}, {"max_tokens": 1.5}])
def test_other_types_are_refused(given: dict[str, object]) -> None:
    """S-BUD-1, S-CONV-13: numbers as numbers."""
    with pytest.raises(ValueError, match="max_"):
        EnsembleDefinition(**given)  # type: ignore[arg-type]  what is refused


def test_money_needs_to_be_counted() -> None:
    """S-BUD-1, S-BUD-10: at the start of a run, also where the run's options limit it; one rate holds for all models."""
    dear = EnsembleDefinition(tasks=[TASK], max_cost=2)
    for definition in (dear, EnsembleDefinition(tasks=[TASK]).with_options(RunOptions(max_cost=2.0))):
        with pytest.raises(ValidationError, match=r"^max_cost needs cost_configuration: .* limit of 2 needs"):
            validate(definition)
    validate(dear.replace(cost_configuration=COSTS))
    validate(EnsembleDefinition(tasks=[TASK], max_tokens=5))


def test_budget_of_a_run_wins() -> None:
    """S-BUD-1: over its ensemble's; each by itself."""
    made = EnsembleDefinition(tasks=[TASK], max_tokens=5, max_cost=1.0)
    changed = made.with_options(RunOptions(max_tokens=7))
    assert (changed.max_tokens, changed.max_cost, made.max_tokens) == (7, 1.0, 5)
