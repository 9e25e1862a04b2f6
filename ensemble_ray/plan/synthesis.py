"""Agents for tasks that name none. The tasks of the user do not change (S-DET-22)."""

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
from ensemble_ray.process.concurrency import USER_ERRORS, call_user
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.text.answers import find_json
from ensemble_ray.text.foreign_text import whole_json
from ensemble_ray.values.delegation import spoken_role
from ensemble_ray.values.ids import effect_name, instance_of
from ensemble_ray.values.messages import ChatMessage, ChatResponse
from ensemble_ray.values.value import Value

_log = bounded_logger(__name__)

_SEARCHED_WORDS = 8
_OBJECT_START = re.compile(r"\{")
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
    """Input of a synthesizer.

    Attributes:
        model: The model of the agent, unless the synthesizer sets another.
        locale: Language of generated texts, such as `"en"`.
    """

    model: Annotated[ChatModel, BeforeValidator(resolve_model)]
    locale: str = "en"


class AgentSynthesizer(ABC):
    """Makes an agent for a task that names none. Any object with this method, or a function of this form, is accepted too."""

    @abstractmethod
    def synthesize(self, task: Task, context: SynthesisContext, /) -> Agent | Awaitable[Agent]:
        """Return the agent for a task; may be `async`."""

    @staticmethod
    def template() -> AgentSynthesizer:
        """Derive the role from the first verb of the description, without a model call. The default."""
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
        prompt = _ASK_FOR_AGENT.format(
            locale=context.locale, description=task.description, expected_output=task.expected_output
        )
        try:
            response = await call_user(context.model.chat, [ChatMessage("user", prompt)])
        except BudgetExhaustedError:
            raise
        except USER_ERRORS as error:
            raise AgentExecutionError(agent_failure(SYNTHESIZED, error), SYNTHESIZED, task.description) from error
        text = (response.text or "") if isinstance(response, ChatResponse) else ""
        found = find_json(whole_json(text), _OBJECT_START)
        answer = {} if found is None else cast("Mapping[str, object]", found.value)
        values = (answer.get(name) for name in ("role", "goal", "backstory"))
        role, goal, background = (value.strip() if isinstance(value, str) else "" for value in values)
        if not role or not goal:
            _log.warning(
                "Agent synthesis for task '%s' returned no usable JSON; using the template", task.description[:80]
            )
            return _from_template(task, context.model)
        return Agent(role=role, goal=goal, background=background or None, llm=context.model)


async def synthesize_agents(
    resolved: ResolvedTasks,
    definition: EnsembleDefinition,
    *,
    locale: str = "en",
    recorded: Callable[[str, ChatModel], ChatModel] | None = None,
) -> Mapping[str, Agent]:
    """Make an agent for each task without agent and handler (S-DET-20), all at the same time; return them by the task's id.

    `recorded` wraps a model so that its calls are recorded under an effect name (S-SET-46). The agents keep the model without
    the wrapper.
    """
    shared = resolved.models.shared
    waiting: dict[str, tuple[Task, str]] = {}
    for task, key in zip(resolved.tasks, resolved.keys, strict=True):
        if task.agent is None and task.handler is None:
            waiting.setdefault(task.object_id, (task, key))
    agents: dict[str, Agent] = {}
    calls: dict[str, Awaitable[Agent]] = {}
    synthesizer = definition.agent_synthesizer or AgentSynthesizer.template()
    for object_id, (task, key) in waiting.items():
        if task.llm is not None:
            model = task.llm
        elif definition.llm is None or shared is None:
            raise ValidationError(f"Task '{task.description}' has no LLM available.")
        else:
            model = shared if task.rate_limit is None else limit_model(definition.llm, task.rate_limit)
        if isinstance(synthesizer, _TemplateSynthesizer):
            agents[object_id] = _fit(_from_template(task, model), task)
            continue
        wrapped = model if recorded is None else recorded(effect_name(instance_of(key), 0, "synthesis"), model)
        context = SynthesisContext(model=wrapped, locale=locale)
        calls[object_id] = _call_synthesizer(synthesizer, task, context, model)
    if calls:
        agents.update(zip(calls, await _all(calls.values(), cap=definition.max_parallel_tasks), strict=True))
    return _number_roles(agents, definition) if resolved.workflow is Workflow.HIERARCHICAL else agents


def _number_roles(agents: Mapping[str, Agent], definition: EnsembleDefinition) -> Mapping[str, Agent]:
    """Return the same agents with unique roles: ` 2`, ` 3` and so on is added to a role in use (S-DET-26)."""
    declared = declared_agents(definition)
    used = {spoken_role(MANAGER_ROLE), *(spoken_role(agent.role) for agent in declared)}
    # A synthesizer may return one agent for several tasks, or an agent of the ensemble: these are one worker.
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


async def _call_synthesizer(synthesizer: object, task: Task, context: SynthesisContext, model: ChatModel) -> Agent:
    function = cast("Callable[[Task, SynthesisContext], object]", getattr(synthesizer, "synthesize", synthesizer))
    try:
        agent = await call_user(cast("Callable[..., Any]", function), task, context)
    except (EnsembleError, IllegalStateError, BudgetExhaustedError):
        raise
    except USER_ERRORS as error:  # S-ERR-37: a run raises no foreign class
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
    """Give the agent the task's tools and limit (S-DET-21)."""
    changes: dict[str, object] = {}
    if task.tools:
        changes["tools"] = task.tools
    if task.max_iterations is not None:
        changes["max_iterations"] = task.max_iterations
    # `replace` makes another agent: a synthesizer may return one agent for several tasks.
    return agent.replace(**changes) if changes else agent


async def _all(calls: Iterable[Awaitable[Agent]], *, cap: int | None) -> list[Agent]:
    """The first failure cancels the others."""
    slots = nullcontext() if cap is None else asyncio.Semaphore(cap)

    async def in_slot(call: Awaitable[Agent]) -> Agent:
        async with slots:
            return await call

    futures = [asyncio.ensure_future(in_slot(call)) for call in calls]
    try:
        return await asyncio.gather(*futures)
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _from_template(task: Task, model: ChatModel) -> Agent:
    role = "Agent"
    # A word may be megabytes long, so only its first characters are read.
    for word in task.description.split(maxsplit=_SEARCHED_WORDS)[:_SEARCHED_WORDS]:
        characters = filter(str.isalpha, word.lower())
        if (found := _ROLES.get("".join(islice(characters, _LONGEST_VERB + 1)))) is not None:
            role = found
            break
    background = f"You have worked as an expert {role} for many years."
    return Agent(role=role, goal=task.description, background=background, llm=model)
