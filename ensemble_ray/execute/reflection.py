"""LocalRunReflections: one run's reflections, in the process that has the user's store and strategies.

In: keys, reflections. Out: what the store had before the run, and has now. Must never happen: a task that is shown what
its own run learned (S-REFL-2).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from ensemble_ray.definition.task import ReflectionInput
from ensemble_ray.errors import BudgetExhaustedError, IllegalStateError, message_of
from ensemble_ray.errors.texts import describe
from ensemble_ray.events import TaskReflectedEvent
from ensemble_ray.execute.agent.attempts import Attempts
from ensemble_ray.execute.agent.context_window import estimated_input
from ensemble_ray.execute.effects import TaskEffects
from ensemble_ray.execute.scope import answer_tokens
from ensemble_ray.facts.effects import ReflectionRecalled, ReflectionRecorded, ReflectionStored
from ensemble_ray.ports import Persistence
from ensemble_ray.process.context import bounded_logger, use_effect_key
from ensemble_ray.process.forks import USER_ERRORS, call_user
from ensemble_ray.prompts.task import build_reflection_request, parse_reflection
from ensemble_ray.values.ids import effect_name, reflected_instance, uuid_of
from ensemble_ray.values.memory import TaskReflection
from ensemble_ray.values.messages import ChatMessage, ChatResponse, TokenUsage, whole_response
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.execute.scope import RunReflections, TaskScope
    from ensemble_ray.ports import ChatModel, ReflectionStore
    from ensemble_ray.values.task_output import TaskOutput


class LocalRunReflections:
    """The reflections of one run. Fulfils `RunReflections`."""

    def __init__(self, store: ReflectionStore) -> None:
        self._store = store
        #: key -> what the store had before this run stored anything under it
        self._before: dict[str, asyncio.Task[TaskReflection | None] | TaskReflection | None] = {}

    async def recall(self, key: str) -> TaskReflection | None:
        """Return the reflection that was there before the run stored one under that key."""
        if key not in self._before:
            self._before[key] = asyncio.get_running_loop().create_task(self.find_prior(key))
        found = self._before[key]
        if not isinstance(found, asyncio.Task):
            return found
        try:
            return await asyncio.shield(found)
        except Exception:
            self._before.pop(key, None)  # whoever asks next asks the store again
            raise

    async def find_prior(self, key: str) -> TaskReflection | None:
        """Return the reflection that is there now."""
        return await call_user(
            cast("Callable[[str], TaskReflection | Awaitable[TaskReflection | None] | None]", self._store.retrieve), key
        )

    async def store(self, key: str, reflection: TaskReflection) -> None:
        """Keep a reflection, in place of the one that has that key."""
        await self.recall(key)
        await call_user(cast("Callable[..., object]", self._store.store), key, reflection)

    async def ask_strategy(self, asked: ReflectionInput) -> TaskReflection:
        """Return what the task's own strategy makes of its output.

        Raises:
            IllegalStateError: the strategy is not of this process, as in a run that was submitted by another one.
            TypeError: it made something else.
        """
        config = asked.task.reflection_config
        if config is None or config.strategy is None or not config.is_strategy_here:
            raise IllegalStateError("the strategy is not in this process")
        made: object = await call_user(cast("Callable[..., object]", config.strategy), asked)
        if not isinstance(made, TaskReflection):
            raise TypeError(f"the strategy returned {type(made).__name__} instead of a TaskReflection")
        return made

    def restore(self, key: str, reflection: TaskReflection | None) -> None:
        """Remember what an earlier process of the run was shown."""
        self._before.setdefault(key, reflection)


_log = bounded_logger(__name__)
#: End of the names of the effects.
_REFLECTION = "reflection"


def reflection_key(description: str) -> str:
    """Return what a task's reflection is kept under: SHA-256 of its description, in hex (S-REFL-4)."""
    return hashlib.sha256(description.encode()).hexdigest()


async def recall_notes(scope: TaskScope) -> TaskReflection | None:
    """Return what earlier runs learned of the task; None: nothing, or it does not ask (S-REFL-8)."""
    task, reflections = scope.order.task, scope.ports.reflections
    if task.reflection_config is None or not scope.context.has_reflections:
        return None
    name = _name(scope)
    fact = scope.find_recorded(name, ReflectionRecalled)
    if fact is not None:
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
    """Reflect on an accepted output and keep what was learned, before anything follows from the output (S-REFL-3).

    Args:
        scope: The task.
        output: What it gave, edits included.
        agent: Who did it; None: a handler.
        is_stopped: Tells a wanted cancellation from user code's own.
    """
    if scope.order.task.reflection_config is None or scope.ports.compare is not None:
        return  # a replay performs nothing
    name = _name(scope)
    made = scope.find_recorded(name, ReflectionRecorded)
    reflections = scope.ports.reflections
    if not scope.context.has_reflections or reflections is None:
        _log.warning("Task '%s' is not reflected on: its run has no reflection_store", scope.order.key)
        return
    try:
        learned = made.data if made is not None else await _learn(scope, reflections, output, agent)
    except asyncio.CancelledError as error:
        if is_stopped():
            raise
        _warn(scope, "it is not reflected on", error)  # user code raised it; nobody asked this task to end
        return
    except USER_ERRORS as error:  # also a budget that is spent: the task is done, and what follows it is told
        _warn(scope, "it is not reflected on", error)
        return
    if learned is not None:
        if made is None:
            await scope.note(name, learned, until=Persistence.COMMITTED)  # stored twice, it is counted once
        await _keep(scope, name, reflections, learned)


async def _learn(
    scope: TaskScope, reflections: RunReflections, output: TaskOutput, agent: Agent | None
) -> ReflectionRecorded | None:
    """Return what is learned of an output; None: there is nobody to ask (S-REFL-9)."""
    task = scope.order.task
    config, key = task.reflection_config, reflection_key(task.description)
    assert config is not None, "the caller asked"  # noqa: S101  for the type
    # An agent comes with the model of the task, if it names one; handlers and runners have none.
    own = None if agent is None or agent.runner is not None else agent.llm
    models = (config.model, own, task.llm)
    model = next((each for each in models if each is not None), None)
    if config.strategy is None and model is None:
        _log.warning(
            "Task '%s' is not reflected on: there is neither a model nor a strategy. Give ReflectionConfig(model=...)",
            scope.order.key,
        )
        return None
    prior = await reflections.find_prior(key)
    if config.strategy is not None:
        asked = ReflectionInput(task=task.rewritten(llm=None), task_output=output, prior_reflection=prior)
        learned = await reflections.ask_strategy(asked)
        return ReflectionRecorded(key=key, reflection=learned.to_data(), is_first=prior is None)
    assert model is not None, "asked above"  # noqa: S101  for the type
    return await _ask_model(scope, model, output, prior)


async def _keep(scope: TaskScope, name: str, reflections: RunReflections, learned: ReflectionRecorded) -> None:
    """Store what was learned, unless the record says that it is, and tell of it (S-REFL-15)."""
    if scope.find_recorded(name, ReflectionStored) is None:
        try:
            await reflections.store(learned.key, learned.reflection_value)
        except USER_ERRORS as error:
            _warn(scope, "what was learned of its output cannot be stored", error)
            return
        await scope.note(name, ReflectionStored(key=learned.key))
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


async def _ask_model(
    scope: TaskScope, model: ChatModel, output: TaskOutput, prior: TaskReflection | None
) -> ReflectionRecorded:
    """Ask a model once; what it or its answer lacks is made of the task's own texts (S-REFL-12, S-REFL-13)."""
    task, count = scope.order.task, 1 if prior is None else prior.run_count + 1
    messages = [ChatMessage(role="user", content=build_reflection_request(task, output.raw, prior))]
    tokens = (0, 0)
    observations: tuple[str, ...]
    parts = parse_reflection("")
    try:
        response, tokens = await _answer(scope, model, messages)
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


async def _answer(
    scope: TaskScope, model: ChatModel, messages: list[ChatMessage]
) -> tuple[ChatResponse, tuple[int, int]]:
    """Return the answer and its input and output tokens; requests of it are not the task's own (S-REFL-18)."""
    order, effects = scope.order, scope.effects
    apart = TaskEffects(
        task_description=effects.task_description,
        expected_output=effects.expected_output,
        agent_role=effects.agent_role,
        started_at=effects.started_at,
    )
    key = uuid_of(f"{order.run_id}/{_name(scope)}")

    async def attempt() -> ChatResponse:
        with use_effect_key(key):
            response: object = await call_user(model.chat, list(messages))
        if not isinstance(response, ChatResponse):
            raise TypeError(f"model returned {type(response).__name__} instead of a ChatResponse")
        return whole_response(response)

    spending, request, send = scope.ports.spending, None, attempt
    if spending is not None:
        request = spending.request(_REFLECTION, model, messages)
        send = partial(request.send, attempt)
    response = await Attempts(replace(scope, effects=apart), model).answer(send, lambda: False)
    usage = response.usage or TokenUsage()
    estimated = (estimated_input(messages, ()), answer_tokens(response.text, response.tool_calls, response.reasoning))
    if request is not None and request.estimated is not None:
        estimated = request.estimated
    return response, (
        usage.input_tokens if usage.input_tokens >= 0 else estimated[0],
        usage.output_tokens if usage.output_tokens >= 0 else estimated[1],
    )


def _name(scope: TaskScope) -> str:
    return effect_name(scope.order.instance, 0, _REFLECTION)


def _warn(scope: TaskScope, what: str, error: BaseException) -> None:
    _log.warning("Task '%s': %s: %s", scope.order.key, what, message_of(error) or type(error).__name__)
