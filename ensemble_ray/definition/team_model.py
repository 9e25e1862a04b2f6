"""The model of an agent that names none: that of its ensemble. Package: definition.

In: a definition, at the start of a run or a plan. Out: its agents with the models that they will use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.fields import limit_model
from ensemble_ray.definition.model_placeholder import TEAM_MODEL
from ensemble_ray.definition.run_rules import RunRules
from ensemble_ray.errors import ValidationError

if TYPE_CHECKING:
    from ensemble_ray.llm.rate_limited import RateLimitedChatModel
    from ensemble_ray.ports import ChatModel

__all__ = ["TeamModels", "uses_team_model", "with_model", "with_task_model"]


def uses_team_model(agent: Agent) -> bool:
    """Return whether an agent needs a model and names none of its own; it may have a limit of its own."""
    if agent.runner is not None:
        return False
    return agent.llm is TEAM_MODEL or (agent.rate_limit is not None and getattr(agent.llm, "delegate", 0) is TEAM_MODEL)


def with_model(agent: Agent, model: ChatModel) -> Agent:
    """Return the same agent with another model, which the limit of its own one holds for, too."""
    from ensemble_ray.llm.rate_limited import RateLimitedChatModel  # few runs change models

    own = agent.llm
    return agent.rewritten(llm=own.around(model) if isinstance(own, RateLimitedChatModel) else model)


def with_task_model(agent: Agent, model: ChatModel) -> Agent:
    """Return the same agent with the model of one of its tasks, which the agent's own limit holds for, too (S-DOM-90)."""
    return with_model(agent, model) if agent.rate_limit is not None else agent.rewritten(llm=model)


class TeamModels:
    """What the agents of one run ask that name no model of their own."""

    def __init__(self, definition: RunRules) -> None:
        """Limit the model of the ensemble: one bucket for the run (S-RATE-33)."""
        self._model = definition.llm
        #: the ensemble's model under the ensemble's limit
        self.shared: ChatModel | None = None if self._model is None else limit_model(self._model, definition.rate_limit)
        #: by bucket, so that an agent has one model in a run, however often its tasks are planned
        self._limited: WeakValueDictionary[str, RateLimitedChatModel] = WeakValueDictionary()

    def resolve_agent(self, agent: Agent, task_model: ChatModel | None = None) -> Agent:
        """Return the same agent with the model that it will use; where there is none, with that of its task (S-DOM-91).

        Raises:
            ValidationError: neither it nor the ensemble has one.
        """
        if not uses_team_model(agent):
            return agent
        if self._model is None and task_model is not None:
            return with_task_model(agent, task_model)
        if self._model is None or self.shared is None:
            raise ValidationError(f"Agent '{agent.role}' has no llm: give it one, or give the ensemble llm=...")
        return agent.rewritten(llm=self.shared if agent.llm is TEAM_MODEL else self._limit_by_own(agent, self._model))

    def _limit_by_own(self, agent: Agent, model: ChatModel) -> ChatModel:
        """Return the ensemble's model in the agent's own bucket, which it keeps across runs (S-RATE-30)."""
        from ensemble_ray.llm.rate_limited import RateLimitedChatModel  # few agents have limits

        own = agent.llm
        assert isinstance(own, RateLimitedChatModel)  # noqa: S101  `uses_team_model` saw what is behind it
        return self._limited.setdefault(own.bucket, own.around(model))
