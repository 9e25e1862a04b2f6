"""Agents that name no model: they use the one of the ensemble that they run in."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle

import pytest

from ensemble_ray import (
    Agent,
    IllegalStateError,
    RateLimit,
    RateLimitedChatModel,
    StreamingChatModel,
    Task,
    ValidationError,
)
from ensemble_ray.definition import EnsembleDefinition, validate
from ensemble_ray.definition.fields import TEAM_MODEL
from ensemble_ray.definition.validation import TeamModels, uses_team_model
from ensemble_ray.plan.planner import plan_run, resolve_tasks
from ensemble_ray.record.identity.definition import definition_data
from ensemble_ray.testing import ScriptedModel

WRITER = Agent(role="Writer", goal="Write")
LIMITED = Agent(role="Slow", goal="Write", rate_limit=RateLimit.per_minute(7))
NO_MODEL = "Agent 'Writer' has no llm: give it one, or give the ensemble llm=..."


def team(*agents: Agent, **fields: object) -> EnsembleDefinition:
    """One task for each agent."""
    tasks = [Task(description=agent.role, expected_output="o", agent=agent) for agent in agents]
    return EnsembleDefinition(tasks=tasks, **fields)  # type: ignore[arg-type]  any field


def planned(definition: EnsembleDefinition) -> dict[str, Agent]:
    """The agents of its plan, by key."""
    validate(definition)
    return dict(plan_run(definition, resolve_tasks(definition)).agents)


def test_placeholder_is_one_object_that_is_never_asked() -> None:
    """S-DOM-72: it says what it is, survives copies and pickling, and refuses to answer."""
    assert repr(WRITER.llm) == "team's llm"
    assert pickle.loads(pickle.dumps(WRITER)).llm is TEAM_MODEL  # noqa: S301  its own
    assert copy.deepcopy(WRITER).llm is TEAM_MODEL
    assert WRITER.replace(goal="g").llm is TEAM_MODEL
    with pytest.raises(IllegalStateError, match="only in a run"):
        asyncio.run(WRITER.llm.chat([]))


def test_agent_is_planned_with_the_model_of_its_ensemble() -> None:
    """S-DOM-72: the same agent, and `replace(llm=...)` still decides; one with its own keeps that."""
    first, second, own = ScriptedModel(), ScriptedModel(), ScriptedModel()
    definition = team(WRITER, Agent(role="Own", goal="g", llm=own), llm=first)
    agents = planned(definition)
    assert (agents["writer"], agents["writer"].llm, agents["own"].llm) == (WRITER, first, own)
    assert planned(definition.replace(llm=second))["writer"].llm is second
    assert WRITER.llm is TEAM_MODEL


def test_limit_of_the_ensemble_holds_for_the_agents_that_use_its_model() -> None:
    """S-RATE-33: one bucket for them and for the agents that are made."""
    definition = team(WRITER, Agent(role="Editor", goal="g"), llm=ScriptedModel(), rate_limit=RateLimit.per_minute(3))
    resolved = resolve_tasks(definition)
    writer, editor = plan_run(definition, resolved).agents.values()
    assert writer.llm is editor.llm is resolved.models.shared
    assert isinstance(writer.llm, RateLimitedChatModel)


def test_limit_of_the_agent_is_kept_with_its_bucket() -> None:
    """S-RATE-30: around the ensemble's model as it was given, in the same bucket in every run, one object in a run."""
    model = ScriptedModel()
    definition = team(LIMITED, llm=model, rate_limit=RateLimit.per_minute(3))
    models = TeamModels(definition)
    first, again = models.resolve_agent(LIMITED), models.resolve_agent(LIMITED)
    other = planned(definition)["slow"]
    assert isinstance(first.llm, RateLimitedChatModel)
    assert (first.llm.delegate, first.llm.rate_limit.requests) == (model, 7)
    assert first.llm is again.llm
    assert first.llm == other.llm == LIMITED.llm
    assert isinstance(first.llm, StreamingChatModel) is isinstance(model, StreamingChatModel)
    changed = LIMITED.replace(rate_limit=RateLimit.per_minute(9))
    assert uses_team_model(changed)
    assert models.resolve_agent(changed).llm.rate_limit.requests == 9  # type: ignore[attr-defined]
    del first, again
    gc.collect(1)  # what is young; to look through all that a session has loaded takes seconds
    assert not models._limited  # what no agent uses is not kept, however many agents a map makes


@pytest.mark.parametrize(
    "fields", [{}, {"workflow": "parallel"}, {"workflow": "hierarchical", "manager_llm": "openai:m"}]
)
def test_team_without_a_model_is_refused_before_anything_is_asked(fields: dict[str, object]) -> None:
    """S-DOM-73: the agent is named, and what to do."""
    with pytest.raises(ValidationError) as caught:
        validate(team(Agent(role="Own", goal="g", llm=ScriptedModel()), WRITER, **fields))
    assert str(caught.value) == NO_MODEL
    with pytest.raises(ValidationError, match="Agent 'Slow' has no llm"):
        validate(team(LIMITED))
    with pytest.raises(ValidationError, match="Agent 'Writer' has no llm"):
        validate(EnsembleDefinition(tasks=[Task.of("t").replace(llm=ScriptedModel())], agents=[WRITER]))


def test_colleagues_and_workers_get_it_too() -> None:
    """S-DOM-72: whoever may be asked, and a manager that has the first agent's model (S-HIER-2)."""
    model = ScriptedModel()
    lead, peer = Agent(role="Lead", goal="g", allow_delegation=True), Agent(role="Peer", goal="g")
    rules = RateLimit.per_minute(3)
    delegating = planned(team(lead, llm=model).replace(agents=[lead, peer]))
    assert [agent.llm for agent in delegating.values()] == [model, model]
    led = planned(team(lead, peer, llm=model, workflow="hierarchical", rate_limit=rules))
    assert len({id(agent.llm) for agent in led.values()}) == 1
    assert len(led) == 3


def test_digest_of_a_definition_holds_the_model_that_is_used() -> None:
    """S-DOM-72, S-DUR-36: it is the same as with the model given to the agent, and another with another model."""

    def data(definition: EnsembleDefinition) -> object:
        return definition_data(plan_run(definition, resolve_tasks(definition)), definition)

    given = data(team(WRITER.replace(llm="openai:a")))
    assert data(team(WRITER, llm="openai:a")) == given
    assert data(team(WRITER, llm="openai:b")) != given
