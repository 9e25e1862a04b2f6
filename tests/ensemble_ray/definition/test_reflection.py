"""How tasks say that they are reflected on, and ensembles where that is kept."""

from __future__ import annotations

import logging
import pickle
from threading import Lock

import cloudpickle
import pytest

from ensemble_ray import (
    Ensemble,
    InMemoryReflectionStore,
    ReflectionConfig,
    ReflectionInput,
    Task,
    TaskReflection,
    ValidationError,
    Workflow,
)
from ensemble_ray.definition import validate
from ensemble_ray.memory import tools as held
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, task

MODEL = ScriptedModel("x")


def notes(**fields: object) -> TaskReflection:
    """A reflection."""
    return TaskReflection(**{"refined_description": "Better", "refined_expected_output": "Good", **fields})  # type: ignore[arg-type]  its fields


def told(asked: ReflectionInput) -> TaskReflection:
    """A strategy."""
    return notes(suggestions=[asked.task_output.raw])


@pytest.mark.parametrize("value", [None, False])
def test_a_task_is_not_reflected_on_unless_it_says_so(*, value: bool | None) -> None:
    """S-REFL-1: None and False are off."""
    assert Task(description="d", expected_output="e", reflection_config=value).reflection_config is None
    assert Task(description="d", expected_output="e").reflection_config is None


def test_true_is_the_usual_config() -> None:
    """S-REFL-1: True means `ReflectionConfig()`."""
    config = Task(description="d", expected_output="e", reflection_config=True).reflection_config
    assert config == ReflectionConfig()
    assert config is not None
    assert (config.model, config.strategy) == (None, None)
    given = ReflectionConfig(model=MODEL, strategy=told)
    assert Task(description="d", expected_output="e", reflection_config=given).reflection_config is given


def test_what_is_no_config_is_refused() -> None:
    """S-REFL-40: the texts."""
    with pytest.raises(
        ValidationError, match=r"^Task reflection_config must be a ReflectionConfig, True or False, got: str$"
    ):
        Task(description="d", expected_output="e", reflection_config="yes")  # type: ignore[arg-type]  what is refused
    with pytest.raises(ValidationError, match=r"^ReflectionConfig strategy must be callable, got: int$"):
        ReflectionConfig(strategy=5)  # type: ignore[arg-type]  what is refused
    with pytest.raises(ValidationError, match=r"^Ensemble reflection_store \(object\) has no method 'store' and no "):
        Ensemble(tasks=[task("a")], reflection_store=object())  # type: ignore[arg-type]  what is refused


def test_a_handler_may_be_reflected_on() -> None:
    """S-REFL-16: a reflection is none of the things that only a model could use."""
    assert task("a", handler=lambda _: "x", reflection_config=True).reflection_config is not None


@pytest.mark.parametrize("count", [0, -1])
def test_a_reflection_counts_from_one(count: int) -> None:
    """S-REFL-7: the text."""
    with pytest.raises(ValidationError, match=f"^run_count must be >= 1, was: {count}$"):
        notes(run_count=count)


def test_a_reflection_says_what_it_is() -> None:
    """S-REFL-7: its fields; sequences are copied and never None."""
    made = notes(observations=["a"], suggestions=None)
    assert (made.observations, made.suggestions, made.run_count) == (("a",), (), 1)
    assert made.reflected_at.utcoffset() is not None
    assert TaskReflection(**made.to_data()) == made  # type: ignore[arg-type]  its fields as data
    with pytest.raises(ValidationError, match=r"^TaskReflection refined_description must not be None$"):
        TaskReflection(refined_description=None, refined_expected_output="x")  # type: ignore[arg-type]  what is refused


def test_a_strategy_stays_where_it_is() -> None:
    """S-REFL-31: it need not travel; a copy at home has the very object."""
    lock = Lock()

    def strategy(asked: ReflectionInput) -> TaskReflection:
        with lock:
            return told(asked)

    config = ReflectionConfig(strategy=strategy)
    body = cloudpickle.dumps(task("a", reflection_config=config))
    found = cloudpickle.loads(body).reflection_config
    assert found.strategy is strategy
    assert cloudpickle.loads(pickle.dumps(config)).strategy is strategy


def test_a_strategy_of_another_process_is_known_and_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-REFL-31: there it only stands for the way back, also when it travels on."""
    config = ReflectionConfig(strategy=told)
    body = pickle.dumps(config)
    with monkeypatch.context() as away:
        away.setattr(held.os, "getpid", lambda: 1)
        there = cloudpickle.loads(body)
        assert not there.is_strategy_here
        with pytest.raises(ValidationError, match="is called in the process that began the run"):
            there.strategy(None)
        back = pickle.dumps(there)
    assert cloudpickle.loads(back).strategy is told


def test_an_ensemble_has_a_store_of_its_own_across_its_runs(caplog: pytest.LogCaptureFixture) -> None:
    """S-REFL-6: made once, with a warning, for all copies that runs make of the ensemble."""
    team = Ensemble(tasks=[task("a", reflection_config=True)])
    configs = [each.reflection_config for each in team.tasks]
    with caplog.at_level(logging.WARNING):
        store = team.find_reflection_store(configs)
        assert team.model_copy().find_reflection_store(configs) is store
    assert isinstance(store, InMemoryReflectionStore)
    (line,) = caplog.messages
    assert "nothing of them outlives this process" in line
    assert Ensemble(tasks=[task("a")]).find_reflection_store([None]) is None


def test_a_given_store_is_used(caplog: pytest.LogCaptureFixture) -> None:
    """S-REFL-5: without a warning."""
    given = InMemoryReflectionStore()
    team = Ensemble(tasks=[task("a", reflection_config=True)], reflection_store=given)
    assert team.find_reflection_store([each.reflection_config for each in team.tasks]) is given
    assert caplog.messages == []


def test_a_manager_decides_what_becomes_of_its_tasks() -> None:
    """S-REFL-36: their reflection is without effect, which is said."""
    team = Ensemble(
        tasks=[task("a", reflection_config=True)], agents=[agent(MODEL)], workflow=Workflow.HIERARCHICAL, llm=MODEL
    )
    (warning,) = validate(team)
    assert warning.startswith("Task 'a' has reflection_config without effect in HIERARCHICAL workflow")
