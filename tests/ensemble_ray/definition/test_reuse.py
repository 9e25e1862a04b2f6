"""What a task may be given as the age of answers that it reuses, and teams in which it has a place."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest

from ensemble_ray import Agent, Durability, Ensemble, RunOptions, Task, ValidationError
from ensemble_ray.definition.validation import validate
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, task


@pytest.mark.parametrize(
    ("given", "age"),
    [
        ("7d", timedelta(days=7)),
        ("12h", timedelta(hours=12)),
        ("30m", timedelta(minutes=30)),
        (" 2 W ", timedelta(weeks=2)),
        ("90s", timedelta(seconds=90)),
        (timedelta(days=1), timedelta(days=1)),
        (None, None),
    ],
)
def test_age_is_a_text_or_a_duration(given: Any, age: timedelta | None) -> None:
    """S-USE-1: the same in other processes; None by default."""
    made = Task("Count", reuse=given)
    assert made.reuse == pickle.loads(pickle.dumps(made)).reuse == age  # noqa: S301  our own bytes
    assert Task("Count").reuse is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            "7 days",
            "'7 days' is no age: write 30d for days, 12h for hours, 2w for weeks, 30m for minutes, 90s for seconds",
        ),
        ("", "'' is no age"),
        ("999999999999w", "'999999999999w' is too long an age"),
        ("0d", "Task reuse must be > 0 when set, got: 0d"),
        (timedelta(seconds=-1), "Task reuse must be > 0 when set, got: -1 day, 23:59:59"),
        (7, "Task reuse must be an age such as '7d' or '12h', or a timedelta, got: int"),
        (True, "Task reuse must be an age such as '7d' or '12h', or a timedelta, got: bool"),
    ],
)
def test_what_is_no_age_is_refused(given: Any, text: str) -> None:
    """S-USE-1."""
    with pytest.raises(ValidationError) as caught:
        Task("Count", reuse=given)
    assert str(caught.value).startswith(text)


def test_task_without_a_model_has_nothing_to_reuse() -> None:
    """S-USE-4, S-DET-3."""
    with pytest.raises(ValidationError, match=r"^Task cannot have both a handler and a reuse\. "):
        Task("Count", handler=lambda _: "3", reuse="1d")


def test_team_without_a_record_is_refused() -> None:
    """S-USE-3: also if the options of a run leave the record out; before any call."""
    model = ScriptedModel()
    team = Ensemble(tasks=[task("count", agent(model), reuse="1d")])
    text = r"^Task 'count' reuses answers from the records of earlier runs, and durability is 'off'\. Use durability 'effects'"
    for refused in (team.replace(durability="off"), team.with_options(RunOptions(durability=Durability.OFF))):
        with pytest.raises(ValidationError, match=text):
            validate(refused)
    assert validate(team) == []
    assert model.calls == ()


class Runner:
    """Does the tasks of an agent."""

    def run(self, request: object) -> str:
        """Do nothing."""
        return str(request)


def test_tasks_that_cannot_reuse_say_so() -> None:
    """S-USE-4, S-DOM-92, S-HIER-88."""
    runs = Agent(role="Runner", goal="Run", runner=Runner())
    (warning,) = validate(Ensemble(tasks=[task("count", runs, reuse="1d")]))
    assert warning.startswith("Task 'count' has reuse without effect: the runner of its agent 'Runner' has its own.")
    led = Ensemble(tasks=[task("count", agent(ScriptedModel()), reuse="1d")], workflow="hierarchical")
    (warning,) = validate(led)
    assert warning.startswith("Task 'count' has reuse without effect in HIERARCHICAL workflow")
