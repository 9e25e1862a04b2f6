"""Reflections in records: what is shown of them, what they cost, what they are in a definition."""

from __future__ import annotations

from ensemble_ray import Ensemble, ReflectionConfig, ReflectionInput, Task, TaskReflection
from ensemble_ray.facts.effects import ReflectionRecalled, ReflectionRecorded, ReflectionStored
from ensemble_ray.facts.fact import Fact, FactData
from ensemble_ray.plan.planner import plan_run, resolve_tasks
from ensemble_ray.record.identity.definition import definition_data
from ensemble_ray.record.resume.fork import ForkPlan, copied_facts
from ensemble_ray.record.trace import fold_trace
from ensemble_ray.record.view.tree import reflection_rows
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, task
from tests.ensemble_ray.record.facts_of_runs import spent_of

LEARNED = TaskReflection(refined_description="a", refined_expected_output="b", observations=["c"], run_count=3)


def fact(name: str, data: FactData) -> Fact:
    """A fact of a run."""
    return Fact(run="run", name=name, at=1.0, data=data)


def made(tokens: int = 0) -> ReflectionRecorded:
    """What was learned."""
    return ReflectionRecorded(key="k", reflection=LEARNED.to_data(), input_tokens=tokens)


def strategy(_: ReflectionInput) -> TaskReflection:
    """Reflect."""
    return LEARNED


def definition_of(*tasks: Task) -> object:
    """What a definition's data tells of its tasks."""
    team = Ensemble(tasks=tasks)
    return definition_data(plan_run(team, resolve_tasks(team, None)), team)["tasks"]


def test_what_was_learned_stands_behind_the_tree() -> None:
    """S-REFL-41: each output with what was learned of it, and whether that is stored."""
    facts = [
        fact("a#0/0/reflection", ReflectionRecalled(key="k")),
        fact("a#0/0/reflection", made(1200)),
        fact("a#0/0/reflection", ReflectionStored(key="k")),
        fact("phase:p#1/reflect:b#0/0/reflection", made()),
    ]
    first, second = reflection_rows(facts)
    assert (first.title, first.is_bad) == ("reflected on a#0", False)
    assert first.details == ("execution 3", "1 observations", "0 suggestions", "1,200 tokens")
    assert (second.title, second.details[-1], second.is_bad) == ("reflected on phase:p#1/b#0", "not stored", True)


def test_a_trace_has_nothing_of_it() -> None:
    """S-REFL-18: no task appears because it was reflected on."""
    assert fold_trace([fact("phase:p#1/reflect:b#0/0/reflection", made(5))]).task_traces == ()


def test_reflections_are_paid_for_once() -> None:
    """S-REFL-35: by the run that made them, and not by its forks."""
    facts = [fact("a#0/0/reflection", made(1200))]
    assert spent_of(facts, None).tokens == 1200
    plan = ForkPlan(reused=("a",), again=(), keys=("a",), instances=frozenset({"a#0"}))
    (copy,) = copied_facts(facts, "fork", plan)
    assert spent_of([copy], None).tokens == 0


def test_a_definition_says_who_reflects() -> None:
    """S-REFL-39: nothing of tasks that are not reflected on."""
    by = agent(ScriptedModel("x"))
    assert definition_of(task("a", by, name="a")) == {}
    assert definition_of(task("a", by, name="a", reflection_config=True)) == {"a": {"reflection": {}}}
    with_model = definition_of(task("a", by, name="a", reflection_config=ReflectionConfig(model=ScriptedModel("y"))))
    assert with_model == {"a": {"reflection": {"llm": {"class": "ensemble_ray.ScriptedModel"}}}}
    asked = definition_of(task("a", by, name="a", reflection_config=ReflectionConfig(strategy=strategy)))
    assert "strategy" in asked["a"]["reflection"]  # type: ignore[index]  nested data
