"""Agents for tasks that name none. The only step of planning that may call a model.

In: resolved tasks. Out: an agent per task, by the task's object id. The user's tasks stay as they are (S-DET-22).
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Annotated, Any, cast

from pydantic import BeforeValidator

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.fields import TEAM_MODEL, Workflow, limit_model, resolve_model
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.validation import declared_agents
from ensemble_ray.errors import (
    AgentExecutionError,
    BudgetExhaustedError,
    EnsembleError,
    IllegalStateError,
    ValidationError,
)
from ensemble_ray.errors.texts import agent_failure, brief, describe
from ensemble_ray.plan.plan import MANAGER_ROLE
from ensemble_ray.plan.planner import ResolvedTasks
from ensemble_ray.plan.unit_plans import SYNTHESIZED
from ensemble_ray.ports import ChatModel
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import USER_ERRORS, call_user
from ensemble_ray.text.answers import find_json
from ensemble_ray.text.foreign_text import whole_json
from ensemble_ray.values.delegation import spoken_role
from ensemble_ray.values.ids import effect_name, instance_of
from ensemble_ray.values.messages import ChatMessage, ChatResponse
from ensemble_ray.values.value import Value

_log = bounded_logger(__name__)

#: How many words of a description are searched for a verb (S-DET-23).
_SEARCHED_WORDS = 8
_NO_VERB = "Agent"
#: Where the synthesizer's answer may begin.
_OBJECT = re.compile(r"\{")
_ROLES: Mapping[str, str] = {
    verb: role
    for role, verbs in {
        "Researcher": "research investigate find discover search",
        "Writer": "write draft compose document",
        "Analyst": "analyze analyse evaluate assess compare",
        "Developer": "build implement develop code program",
        "Tester": "test verify",
        "Summarizer": "summarize summarise",
        "Classifier": "classify categorize",
        "Calculator": "calculate compute",
        "Creator": "create",
        "Generator": "generate",
        "Reviewer": "review",
        "Auditor": "audit",
        "Designer": "design",
        "Planner": "plan",
        "Validator": "validate",
        "Translator": "translate",
        "Extractor": "extract",
        "Monitor": "monitor",
        "Tracker": "track",
        "Collector": "scrape",
        "Parser": "parse",
        "Converter": "convert",
        "Formatter": "format",
        "Cleaner": "clean",
        "Processor": "process",
    }.items()
    for verb in verbs.split()
}
_LONGEST_VERB = max(map(len, _ROLES))
_ASK_FOR_AGENT = """\
Describe the person best suited to do the task below. Answer with ONLY one JSON object with these string fields:
"role" (a short job title), "goal" (what that person works towards), "backstory" (experience and manner, one or two \
sentences). Write the values in the language with the code "{locale}".

## Task
{description}

## Expected Output
{expected_output}"""


class SynthesisContext(Value):
    """What a synthesizer may use.

    Attributes:
        model: The model that the agent will have, unless the synthesizer chooses another.
        locale: Language of generated texts, such as `"en"`.
    """

    model: Annotated[ChatModel, BeforeValidator(resolve_model)]
    locale: str = "en"


class AgentSynthesizer(ABC):
    """Makes an agent for a task that names none. Subclass it, or give any object or function of the same shape."""

    @abstractmethod
    def synthesize(self, task: Task, context: SynthesisContext, /) -> Agent | Awaitable[Agent]:
        """Return the agent for that task; may be `async`."""

    @staticmethod
    def template() -> AgentSynthesizer:
        """Take the role from the first verb of the description, without a model call; the default."""
        return _TemplateSynthesizer()

    @staticmethod
    def llm_based() -> AgentSynthesizer:
        """Ask the model for role, goal and background: one call per task."""
        return _LlmSynthesizer()


class _TemplateSynthesizer(AgentSynthesizer):
    def synthesize(self, task: Task, context: SynthesisContext, /) -> Agent:
        return _from_template(task, context.model)


class _LlmSynthesizer(AgentSynthesizer):
    async def synthesize(self, task: Task, context: SynthesisContext, /) -> Agent:
        text = await self._ask(task, context)
        answer = _json_object(text)
        role, goal, background = (_text(answer.get(name)) for name in ("role", "goal", "backstory"))
        if not role or not goal:
            _log.warning("Agent synthesis for task '%s' gave no usable JSON; using the template", task.description[:80])
            return _from_template(task, context.model)
        return Agent(role=role, goal=goal, background=background or None, llm=context.model)

    async def _ask(self, task: Task, context: SynthesisContext) -> str:
        prompt = _ASK_FOR_AGENT.format(
            locale=context.locale, description=task.description, expected_output=task.expected_output
        )
        try:
            response = await call_user(context.model.chat, [ChatMessage("user", prompt)])
        except BudgetExhaustedError:
            raise
        except USER_ERRORS as error:
            raise AgentExecutionError(agent_failure(SYNTHESIZED, error), SYNTHESIZED, task.description) from error
        return (response.text or "") if isinstance(response, ChatResponse) else ""


async def synthesize_agents(
    resolved: ResolvedTasks,
    definition: EnsembleDefinition,
    *,
    locale: str = "en",
    recorded: Callable[[str, ChatModel], ChatModel] | None = None,
) -> Mapping[str, Agent]:
    """Make an agent for each task that names none and has no handler (S-DET-20), all at the same time.

    Args:
        resolved: The run's tasks.
        definition: The ensemble.
        locale: Passed to the synthesizer.
        recorded: Dresses a model such that calls of it are recorded under the given effect name (S-SET-46); the agents
            themselves keep the model undressed.

    Returns:
        Agents by object id of their tasks.

    Raises:
        AgentExecutionError: a model call of the LLM-based synthesizer failed.
        ValidationError: a synthesizer gave something that is no agent.
    """
    shared = resolved.models.shared
    waiting: dict[str, tuple[Task, str]] = {}
    for task, key in zip(resolved.tasks, resolved.keys, strict=True):
        if task.agent is None and task.handler is None:
            waiting.setdefault(task.object_id, (task, key))
    agents: dict[str, Agent] = {}
    slow: dict[str, Awaitable[Agent]] = {}
    synthesizer = definition.agent_synthesizer or AgentSynthesizer.template()
    for object_id, (task, key) in waiting.items():
        model = _model_for(task, definition, shared)
        if isinstance(synthesizer, _TemplateSynthesizer):
            agents[object_id] = _fit(_from_template(task, model), task)
            continue
        dressed = model if recorded is None else recorded(effect_name(instance_of(key), 0, "synthesis"), model)
        context = SynthesisContext(model=dressed, locale=locale)
        slow[object_id] = _ask_synthesizer(synthesizer, task, context, model)
    if slow:
        agents.update(zip(slow, await _all(slow.values(), cap=definition.max_parallel_tasks), strict=True))
    return _number_roles(agents, definition) if resolved.workflow is Workflow.HIERARCHICAL else agents


def _number_roles(agents: Mapping[str, Agent], definition: EnsembleDefinition) -> Mapping[str, Agent]:
    """Return the same agents, those whose role another worker has numbered from ` 2` on (S-DET-26).

    The roles that the user wrote stay as they are, and the manager's is left to the manager.
    """
    declared = declared_agents(definition)
    used = {spoken_role(MANAGER_ROLE), *(spoken_role(agent.role) for agent in declared)}
    # An agent that a synthesizer gave to several tasks, or took from the ensemble, is one worker.
    workers = {agent.object_id: agent for agent in declared}
    numbers: dict[str, int] = {}
    for agent in agents.values():
        if agent.object_id in workers:
            continue
        role, number = agent.role, numbers.get(agent.role, 1)
        while spoken_role(role) in used:
            number += 1
            role = f"{agent.role} {number}"
        numbers[agent.role] = number
        used.add(spoken_role(role))
        workers[agent.object_id] = agent if role == agent.role else agent.rewritten(role=role)
    return {object_id: workers[agent.object_id] for object_id, agent in agents.items()}


def _model_for(task: Task, definition: EnsembleDefinition, shared: ChatModel | None) -> ChatModel:
    """Return the task's own model, else the ensemble's under the task's limit, else the ensemble's own (S-DET-20)."""
    if task.llm is not None:
        return task.llm
    if definition.llm is None or shared is None:
        raise ValidationError(f"Task '{task.description}' has no LLM available.")
    return shared if task.rate_limit is None else limit_model(definition.llm, task.rate_limit)


async def _ask_synthesizer(synthesizer: object, task: Task, context: SynthesisContext, model: ChatModel) -> Agent:
    function = cast("Callable[[Task, SynthesisContext], object]", getattr(synthesizer, "synthesize", synthesizer))
    try:
        agent = await call_user(cast("Callable[..., Any]", function), task, context)
    except (EnsembleError, IllegalStateError, BudgetExhaustedError):
        raise
    except USER_ERRORS as error:  # S-ERR-37: no class of others leaves a run
        text = f"The agent synthesizer failed for task '{brief(task.description)}': {describe(error)}"
        raise AgentExecutionError(text, SYNTHESIZED, task.description) from error
    if not isinstance(agent, Agent):
        raise ValidationError(
            f"The agent synthesizer must return an Agent for task '{brief(task.description)}', "
            f"got: {type(agent).__name__}"
        )
    if agent.llm is TEAM_MODEL or (agent.llm is context.model and model is not context.model):
        agent = agent.rewritten(llm=model)
    return _fit(agent, task)


def _fit(agent: Agent, task: Task) -> Agent:
    """Return the agent with the tools and the limit that the task asks for (S-DET-21)."""
    changes: dict[str, object] = {}
    if task.tools:
        changes["tools"] = task.tools
    if task.max_iterations is not None:
        changes["max_iterations"] = task.max_iterations
    # A copy with an id of its own: a synthesizer may give one agent to several tasks.
    return agent.replace(**changes) if changes else agent


async def _all(calls: Iterable[Awaitable[Agent]], *, cap: int | None) -> list[Agent]:
    """Return all results in order, at most `cap` asked at the same time; the first failure ends the others."""
    slots = nullcontext() if cap is None else asyncio.Semaphore(cap)

    async def in_slot(call: Awaitable[Agent]) -> Agent:
        async with slots:
            return await call

    asked = [asyncio.ensure_future(in_slot(call)) for call in calls]
    try:
        return await asyncio.gather(*asked)
    except BaseException:
        for one in asked:
            one.cancel()
        raise


def _from_template(task: Task, model: ChatModel) -> Agent:
    role = _role_of(task.description)
    background = f"You have worked as an expert {role} for many years."
    return Agent(role=role, goal=task.description, background=background, llm=model)


def _role_of(description: str) -> str:
    # Texts may be megabytes without a space: nothing is looked at that cannot decide.
    for word in description.split(maxsplit=_SEARCHED_WORDS)[:_SEARCHED_WORDS]:
        characters = filter(str.isalpha, word.lower())
        role = _ROLES.get("".join(islice(characters, _LONGEST_VERB + 1)))
        if role is not None:
            return role
    return _NO_VERB


def _json_object(text: str) -> Mapping[str, object]:
    """Return the first JSON object in a text, fences and words around it ignored; {} when there is none."""
    found = find_json(whole_json(text), _OBJECT)
    return {} if found is None else cast("Mapping[str, object]", found.value)


def _text(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""
