"""Today's plan of a recorded run.

In: a definition, inputs, and the facts of the run. Out: the plan; agents that a model made are made of its recorded answers.
Never: a model that is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ensemble_ray.errors import EnsembleError, ValidationError, message_of
from ensemble_ray.execute.effects import answers_before
from ensemble_ray.plan.planner import Planned, needs_synthesis, plan_run
from ensemble_ray.plan.synthesis import synthesize_agents
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import threads
from ensemble_ray.runs.planned import check
from ensemble_ray.values.messages import ChatResponse

if TYPE_CHECKING:
    from ensemble_ray.ensemble import Ensemble
    from ensemble_ray.facts.effects import ModelAnswered
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.values.messages import ChatMessage, ToolSpec

_log = bounded_logger(__name__)


async def plan_again(
    definition: Ensemble, inputs: Mapping[str, object], facts: Sequence[Fact], *, is_replay: bool = False
) -> Planned:
    """Today's plan with these inputs; agents that a model made are made of its recorded answers.

    Raises:
        ValidationError: in a replay, an answer is not recorded; elsewhere its agent is made later.
    """
    resolved = check(definition, inputs)
    answers = answers_before(facts)
    try:
        agents = (
            await synthesize_agents(
                resolved, definition, recorded=lambda name, _: _Answers(name, answers.get(name, ()))
            )
            if needs_synthesis(resolved.tasks)
            else {}
        )
    except EnsembleError as error:
        if is_replay:
            raise
        _log.debug("Agents are made when the fork begins: %s", message_of(error))
        agents = {}
    return await threads.run(plan_run, definition, resolved, agents)  # a manager's prompts are user code


class _Answers:
    """A model that gives recorded answers in their order, and asks nobody."""

    def __init__(self, name: str, facts: Sequence[Fact[ModelAnswered]]) -> None:
        self._name = name
        self._facts = iter(facts)

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Return the next recorded answer.

        Raises:
            ValidationError: there is none.
        """
        del messages, tools
        fact = next(self._facts, None)
        if fact is None:
            raise ValidationError(f"Replay: no answer is recorded for the call that makes an agent, '{self._name}'")
        return ChatResponse(text=fact.data.text)
