"""Agents with a runner in place of a model: what they accept and refuse, and what a team needs around them."""

from __future__ import annotations

import pickle

import pytest

from ensemble_ray import Agent, RateLimit, RunsTask, Task, TaskRequest, ValidationError, tool
from ensemble_ray.definition import EnsembleDefinition, validate
from ensemble_ray.definition.agent import effect_of_runner
from ensemble_ray.definition.validation import manager_model, uses_team_model
from ensemble_ray.execute.local_executor import AgentTemplates
from ensemble_ray.testing import ScriptedModel


class Echo:
    """A runner."""

    async def run(self, request: TaskRequest) -> str:
        return request.prompt


class Careful(Echo):
    effect = "idempotent"


class Odd(Echo):
    effect = "twice"


@tool
def count(text: str) -> int:
    """Count words."""
    return len(text.split())


def own(runner: object, **fields: object) -> Agent:
    """An agent with that runner."""
    return Agent(role="Writer", goal="Write", runner=runner, **fields)  # type: ignore[arg-type]


def test_agent_with_a_runner_needs_no_model() -> None:
    """S-INT-50: neither it nor its ensemble."""
    agent = own(Echo())
    assert isinstance(agent.runner, RunsTask)
    assert not uses_team_model(agent)
    team = EnsembleDefinition(tasks=[Task(description="Draft", expected_output="Prose", agent=agent)])
    assert validate(team) == []


def test_copy_keeps_the_runner() -> None:
    """S-INT-50: a replaced one and one that travelled."""
    agent = own(Echo(), runner_effect="none")
    changed = agent.replace(goal="Write more")
    assert (changed.runner, changed.runner_effect, changed.goal) == (agent.runner, "none", "Write more")
    assert isinstance(pickle.loads(pickle.dumps(agent)).runner, Echo)  # noqa: S301  bytes of its own


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"llm": ScriptedModel()}, "a llm"),
        ({"tools": [count]}, "tools"),
        ({"max_iterations": 3}, "max_iterations"),
        ({"rate_limit": RateLimit.per_minute(6)}, "a rate_limit"),
        ({"on_incomplete": "retry"}, "on_incomplete='retry'"),
        ({"allow_delegation": True}, "allow_delegation"),
    ],
)
def test_what_only_a_model_could_use_is_refused(fields: dict[str, object], what: str) -> None:
    """S-INT-50: with what to leave out."""
    with pytest.raises(ValidationError) as refused:
        own(Echo(), **fields)
    [field] = fields
    assert str(refused.value) == (
        f"Agent cannot have both a runner and {what}. "
        f"A runner brings its own model and tools: leave out either runner or {field}."
    )


@pytest.mark.parametrize(
    ("runner", "fields", "text"),
    [
        (object(), {}, "Agent runner must have a method run(request), as RunsTask says, got: object"),
        (Echo, {}, "Agent runner must be an object, got the class Echo. Write Echo(...)"),
        (Odd(), {}, "Agent runner Odd: effect must be one of [none, idempotent, once], got: 'twice'"),
        (Echo(), {"runner_effect": "x"}, "Agent runner_effect must be one of [none, idempotent, once], got: 'x'"),
        (
            None,
            {"runner_effect": "none"},
            "Agent runner_effect is that of a runner, and this agent has none. Tools say their own: @tool(effect=...)",
        ),
    ],
)
def test_what_is_no_runner_is_refused(runner: object, fields: dict[str, object], text: str) -> None:
    """S-INT-50."""
    with pytest.raises(ValidationError) as refused:
        own(runner, **fields)
    assert str(refused.value) == text


def test_effect_is_once_unless_somebody_says_otherwise() -> None:
    """S-INT-50: the agent's word outranks the runner's."""
    assert effect_of_runner(Echo(), None) == "once"
    assert effect_of_runner(Careful(), None) == "idempotent"
    assert effect_of_runner(Careful(), "none") == "none"


def test_manager_has_the_model_of_the_first_agent_that_has_one() -> None:
    """S-INT-53: a runner is no model of others."""
    model = ScriptedModel()
    workers = [own(Echo()), Agent(role="Editor", goal="Edit", llm=model)]
    team = EnsembleDefinition(tasks=[Task(description="Draft", expected_output="Prose")])
    assert manager_model(team, workers) is model
    with pytest.raises(ValidationError, match="No Manager LLM available"):
        manager_model(team, workers[:1])


def test_made_agents_of_other_runners_are_of_another_kind() -> None:
    """S-INT-57: so that no process takes one for the other."""
    kinds, runner = AgentTemplates(), Echo()
    first, same = own(runner), own(runner, background="Long")
    assert kinds.name_of(first) == kinds.name_of(same)
    assert kinds.name_of(first) != kinds.name_of(own(Echo()))
    assert kinds.name_of(first) != kinds.name_of(own(runner, runner_effect="none"))
