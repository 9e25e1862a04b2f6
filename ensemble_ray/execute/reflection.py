"""Reflect on the outputs of tasks: recall the notes of earlier runs, and store new ones."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import cast

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import ReflectionInput
from ensemble_ray.errors import BudgetExhaustedError, IllegalStateError, message_of
from ensemble_ray.errors.texts import describe
from ensemble_ray.events import TaskReflectedEvent
from ensemble_ray.execute.agent.attempts import Attempts, chat
from ensemble_ray.execute.agent.context_window import estimated_input
from ensemble_ray.execute.effects import TaskEffects
from ensemble_ray.execute.scope import RunReflections, TaskScope, answer_tokens
from ensemble_ray.facts.effects import ReflectionRecalled, ReflectionRecorded, ReflectionStored
from ensemble_ray.ports import ChatModel, Persistence, ReflectionStore
from ensemble_ray.process.context import bounded_logger, use_effect_key
from ensemble_ray.process.forks import USER_ERRORS, call_user
from ensemble_ray.prompts.task import build_reflection_request, parse_reflection
from ensemble_ray.values.ids import effect_name, reflected_instance, uuid_of
from ensemble_ray.values.memory import TaskReflection
from ensemble_ray.values.messages import ChatMessage, ChatResponse, TokenUsage
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.value import utc_of

_log = bounded_logger(__name__)
#: Last part of the effect names, and kind of agent of the requests.
_REFLECTION = "reflection"


class LocalRunReflections:
    """Reflections of one run, in the process with the user's store and strategies. Implements `RunReflections`."""

    def __init__(self, store: ReflectionStore) -> None:
        self._store = store
        #: key -> reflection before the run stored one under the key; a running task while it is read
        self._before: dict[str, asyncio.Task[TaskReflection | None] | TaskReflection | None] = {}

    async def recall(self, key: str) -> TaskReflection | None:
        if key not in self._before:
            self._before[key] = asyncio.get_running_loop().create_task(self.find_prior(key))
        found = self._before[key]
        if not isinstance(found, asyncio.Task):
            return found
        try:
            return await asyncio.shield(found)
        except Exception:
            self._before.pop(key, None)  # the next caller reads the store again
            raise

    async def find_prior(self, key: str) -> TaskReflection | None:
        retrieve = cast(
            "Callable[[str], TaskReflection | Awaitable[TaskReflection | None] | None]", self._store.retrieve
        )
        return await call_user(retrieve, key)

    async def store(self, key: str, reflection: TaskReflection) -> None:
        await self.recall(key)  # before it is replaced
        await call_user(cast("Callable[..., object]", self._store.store), key, reflection)

    async def ask_strategy(self, asked: ReflectionInput) -> TaskReflection:
        """Call the task's strategy. It is in another process if that one submitted the run."""
        config = asked.task.reflection_config
        if config is None or config.strategy is None or not config.is_strategy_here:
            raise IllegalStateError("the strategy is not in this process")
        made: object = await call_user(cast("Callable[..., object]", config.strategy), asked)
        if not isinstance(made, TaskReflection):
            raise TypeError(f"the strategy returned {type(made).__name__} instead of a TaskReflection")
        return made

    def restore(self, key: str, reflection: TaskReflection | None) -> None:
        """Set the reflection that an earlier process of the run recalled."""
        self._before.setdefault(key, reflection)


def reflection_key(description: str) -> str:
    """Return the storage key of a task's reflection: the SHA-256 of its description, in hex (S-REFL-4)."""
    return hashlib.sha256(description.encode()).hexdigest()


async def recall_notes(scope: TaskScope) -> TaskReflection | None:
    """Return the reflection of earlier runs on the task; None: there is none, or it does not reflect (S-REFL-8)."""
    task, reflections = scope.order.task, scope.ports.reflections
    if task.reflection_config is None or not scope.context.has_reflections:
        return None
    name = effect_name(scope.order.instance, 0, _REFLECTION)
    if (fact := scope.find_recorded(name, ReflectionRecalled)) is not None:
        return fact.data.recalled
    if reflections is None:
        return None
    key, found = reflection_key(task.description), None
    try:
        found = await reflections.recall(key)
    except USER_ERRORS as error:
        _warn(scope, "its notes of earlier runs cannot be read, and it runs without them", error)
    await scope.note(name, ReflectionRecalled.of(key, found))
    return found


async def reflect(scope: TaskScope, output: TaskOutput, agent: Agent | None, *, is_stopped: Callable[[], bool]) -> None:
    """Reflect on an accepted output and store the result, before other tasks use the output (S-REFL-3).

    Errors of the reflection are logged; they do not fail the task. Unless `is_stopped`, a `CancelledError` is an error
    of user code.
    """
    if scope.order.task.reflection_config is None or scope.ports.compare is not None:  # a replay has no effects
        return
    name = effect_name(scope.order.instance, 0, _REFLECTION)
    recorded = scope.find_recorded(name, ReflectionRecorded)
    reflections = scope.ports.reflections
    if not scope.context.has_reflections or reflections is None:
        _log.warning("Task '%s' is not reflected on: its run has no reflection_store", scope.order.key)
        return
    try:
        learned = recorded.data if recorded is not None else await _learn(scope, reflections, output, agent)
    except asyncio.CancelledError as error:
        if is_stopped():
            raise
        _warn(scope, "it is not reflected on", error)
        return
    except USER_ERRORS as error:  # an exhausted budget, too: the task has its output
        _warn(scope, "it is not reflected on", error)
        return
    if learned is None:
        return
    if recorded is None:
        await scope.note(name, learned, until=Persistence.COMMITTED)  # so that a repeated `store` stores the same
    if scope.find_recorded(name, ReflectionStored) is None:  # S-REFL-15
        try:
            await reflections.store(learned.key, learned.reflection_value)
        except USER_ERRORS as error:
            _warn(scope, "what was learned of its output cannot be stored", error)
            return
        await scope.note(name, ReflectionStored(key=learned.key))
    _announce(scope, learned)


def _announce(scope: TaskScope, learned: ReflectionRecorded) -> None:
    order, reflection = scope.order, learned.reflection_value
    scope.emit(
        TaskReflectedEvent,
        lambda: TaskReflectedEvent(
            task_description=order.task.description,
            reflection=reflection,
            is_first_reflection=learned.is_first,
            run_id=order.run_id,
            instance=order.instance if order.reflects_on is None else reflected_instance(order.instance),
        ),
    )


async def _learn(
    scope: TaskScope, reflections: RunReflections, output: TaskOutput, agent: Agent | None
) -> ReflectionRecorded | None:
    """Call the strategy or a model; None: there is neither (S-REFL-9)."""
    task = scope.order.task
    config, key = task.reflection_config, reflection_key(task.description)
    assert config is not None, "the caller checked it"  # noqa: S101  for the type
    # The agent has the task's model if the task names one; handlers and runners have none.
    own = None if agent is None or agent.runner is not None else agent.llm
    model = next((each for each in (config.model, own, task.llm) if each is not None), None)
    if config.strategy is not None:
        prior = await reflections.find_prior(key)
        asked = ReflectionInput(task=task.rewritten(llm=None), task_output=output, prior_reflection=prior)
        learned = await reflections.ask_strategy(asked)
        return ReflectionRecorded(key=key, reflection=learned.to_data(), is_first=prior is None)
    if model is None:
        _log.warning(
            "Task '%s' is not reflected on: there is neither a model nor a strategy. Give ReflectionConfig(model=...)",
            scope.order.key,
        )
        return None
    return await _ask_model(scope, model, output, await reflections.find_prior(key))


async def _ask_model(
    scope: TaskScope, model: ChatModel, output: TaskOutput, prior: TaskReflection | None
) -> ReflectionRecorded:
    """Call a model once, and fill the gaps of its answer with the task's texts (S-REFL-12, S-REFL-13)."""
    task, count = scope.order.task, 1 if prior is None else prior.run_count + 1
    messages = [ChatMessage(role="user", content=build_reflection_request(task, output.raw, prior))]
    tokens = (0, 0)
    observations: tuple[str, ...]
    parts = parse_reflection("")
    try:
        response, tokens = await _call_model(scope, model, messages)
        if response.text is None or not response.text.strip():
            raise ValueError("the model's answer is empty")
        parts = parse_reflection(response.text)
        observations = parts.observations
    except BudgetExhaustedError:
        raise
    except USER_ERRORS as error:
        observations = (f"Reflection could not be completed: {describe(error)}",)
    reflection = TaskReflection(
        refined_description=parts.description or task.description,
        refined_expected_output=parts.expected_output or task.expected_output,
        observations=observations,
        suggestions=parts.suggestions,
        reflected_at=utc_of(scope.ports.clock.now()),
        run_count=count,
    )
    return ReflectionRecorded(
        key=reflection_key(task.description),
        reflection=reflection.to_data(),
        input_tokens=tokens[0],
        output_tokens=tokens[1],
        is_first=prior is None,
    )


async def _call_model(
    scope: TaskScope, model: ChatModel, messages: list[ChatMessage]
) -> tuple[ChatResponse, tuple[int, int]]:
    """Return the answer and its (input, output) tokens, which do not count for the task (S-REFL-18)."""
    order, effects = scope.order, scope.effects
    separate_effects = TaskEffects(
        task_description=effects.task_description,
        expected_output=effects.expected_output,
        agent_role=effects.agent_role,
        started_at=effects.started_at,
    )
    key = uuid_of(f"{order.run_id}/{effect_name(order.instance, 0, _REFLECTION)}")

    async def attempt() -> ChatResponse:
        with use_effect_key(key):
            return await chat(model, messages)

    attempts = Attempts(replace(scope, effects=separate_effects), model, template=_REFLECTION)
    response = await attempts.answer(attempt, messages)
    usage = response.usage or TokenUsage()
    estimated = attempts.estimated or (
        estimated_input(messages, ()),
        answer_tokens(response.text, response.tool_calls, response.reasoning),
    )
    return response, (
        usage.input_tokens if usage.input_tokens >= 0 else estimated[0],
        usage.output_tokens if usage.output_tokens >= 0 else estimated[1],
    )


def _warn(scope: TaskScope, what: str, error: BaseException) -> None:
    _log.warning("Task '%s': %s: %s", scope.order.key, what, message_of(error) or type(error).__name__)
