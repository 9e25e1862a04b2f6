"""Recall memory and reflections for a task's prompt, and store its output; recorded effects are not repeated.

A store's error fails the task (S-MEM-110), except for reflections. Managers use no memory (S-HIER-8).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import cast

from msgspec import structs

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import ReflectionInput
from ensemble_ray.errors import BudgetExhaustedError, IllegalStateError, message_of
from ensemble_ray.errors.texts import describe
from ensemble_ray.events import TaskReflectedEvent
from ensemble_ray.execute.agent.attempts import ask_once, declared_model
from ensemble_ray.execute.agent.context_window import estimated_input
from ensemble_ray.execute.effects import TaskEffects
from ensemble_ray.execute.scope import RunReflections, TaskScope, answer_tokens
from ensemble_ray.facts.effects import (
    MemoryRecalled,
    MemoryStored,
    ModelAnswered,
    ReflectionRecalled,
    ReflectionRecorded,
    ReflectionStored,
)
from ensemble_ray.facts.runs import DirectivesShown
from ensemble_ray.llm.names import NO_NAMES, added_names, model_names
from ensemble_ray.llm.prices import price_mark
from ensemble_ray.ports import ChatModel, Persistence, ReflectionStore, RunMemory
from ensemble_ray.process.concurrency import USER_ERRORS, call_user
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.prompts.task import build_reflection_request, parse_reflection
from ensemble_ray.values.ids import effect_name, reflected_instance
from ensemble_ray.values.memory import MemoryNote, MemoryQuery, MemoryRules, MemoryScope, RecalledMemory, TaskReflection
from ensemble_ray.values.messages import ChatMessage, ChatResponse, TokenUsage
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.value import utc_of

_MEMORY, _EDIT = "memory", "memory-edit"  # last parts of effect names
_SHORT_TERM, _LONG_TERM = "short_term", "long_term"  # kinds of memory that accept notes


async def recall(scope: TaskScope) -> RecalledMemory | None:
    """Return the memory for the task's prompt; None: the task uses none."""
    rules = _rules(scope)
    if rules is None:
        return None
    scopes = _scopes(scope, rules)
    if not (rules.has_ensemble_memory or scopes):
        return None
    name = effect_name(scope.order.instance, 0, _MEMORY)
    if (fact := scope.find_recorded(name, MemoryRecalled)) is not None:
        found = fact.data.recalled
    else:
        query = MemoryQuery(
            scopes=tuple(each.name for each in scopes),
            text=scope.order.task.description,
            uses_ensemble=rules.has_ensemble_memory,
        )
        found = scope.clean(await _memory(scope).recall(query))
        await scope.note(name, MemoryRecalled.of(found))
        await _charge(scope, found.embedding_tokens)
    scope.effects.embedding_tokens += found.embedding_tokens
    if (listener := scope.effects.memory_listener) is not None:
        if found.retrieval_s is not None:
            listener.on_ltm_retrieval(found.retrieval_s)
        if found.lookup_s is not None:
            listener.on_entity_lookup(found.lookup_s)
    return found


async def remember(scope: TaskScope, output: TaskOutput) -> TaskOutput:
    """Write an output to memory, and return it with the counts of memory operations."""
    rules = _rules(scope)
    if rules is None:
        return output
    scopes = _scopes(scope, rules)
    if not (rules.has_short_term or rules.has_long_term or scopes):
        return output
    name = effect_name(scope.order.instance, 0, _MEMORY)
    fact = scope.find_recorded(name, MemoryStored)
    if fact is None:
        stored = await _store(scope, name, _note(scope, name, output, scopes, rules, is_stored=False))
    else:
        stored = fact.data
        if rules.has_short_term:  # the run's own notes ended with the process that had them
            await _memory(scope).remember(_note(scope, name, output, scopes, rules, is_stored=True))
    scope.effects.embedding_tokens += stored.embedding_tokens
    if (listener := scope.effects.memory_listener) is not None:
        if _SHORT_TERM in stored.taken_by:
            listener.on_stm_write()
        if _LONG_TERM in stored.taken_by:
            listener.on_ltm_store()
    elif not stored.embedding_tokens:
        return output
    metrics = scope.effects.metrics(scope.context.cost)
    changed = {"metrics": metrics, "metadata": scope.effects.metadata}
    trace = None if output.trace is None else output.trace.model_copy(update=changed)
    return output.model_copy(update={"metrics": metrics, "trace": trace})


async def remember_edit(scope: TaskScope, output: TaskOutput) -> None:
    """Write an edited output as a further entry of the task's scopes (S-MEM-79)."""
    rules, name = _rules(scope), effect_name(scope.order.instance, 0, _EDIT)
    scopes = () if rules is None else _scopes(scope, rules)
    if not scopes or scope.find_recorded(name, MemoryStored) is not None:
        return
    edited = output.model_copy(update={"parsed_output": None, "trace": None})
    note = MemoryNote(
        instance=scope.order.instance, entry_id=f"{scope.order.run_id}/{name}", output=edited, scopes=scopes
    )
    await _store(scope, name, note, until=Persistence.COMMITTED)


async def recall_directives(scope: TaskScope) -> tuple[str, ...]:
    """Return the directives for the prompt; a resumed task keeps its first ones (S-CTL-6)."""
    instance, directives = scope.order.instance, scope.order.directives
    if not directives and not scope.recorded_facts:
        return ()
    name = effect_name(instance, 0, "directives")
    if (shown := scope.find_recorded(name, DirectivesShown)) is not None:
        return shown.data.texts
    if not directives or scope.find_recorded(effect_name(instance, 0), ModelAnswered) is not None:
        return ()  # the model was called before there were directives
    await scope.note(name, DirectivesShown(texts=directives))
    return directives


def _rules(scope: TaskScope) -> MemoryRules | None:
    return None if scope.is_manager else scope.context.memory


def _scopes(scope: TaskScope, rules: MemoryRules) -> tuple[MemoryScope, ...]:
    """Return the task's memory scopes (S-MEM-78)."""
    return tuple(scope.order.task.memory_scopes) if rules.has_store else ()


def _memory(scope: TaskScope) -> RunMemory:
    memory = scope.ports.memory
    if memory is None:
        raise IllegalStateError(f"Run {scope.order.run_id}: its memory is in its driver, which cannot be reached")
    return memory


def _note(
    scope: TaskScope,
    name: str,
    output: TaskOutput,
    scopes: tuple[MemoryScope, ...],
    rules: MemoryRules,
    *,
    is_stored: bool,
) -> MemoryNote:
    sent = output if rules.has_extractor else output.model_copy(update={"trace": None})  # a trace may be long
    return MemoryNote(
        instance=scope.order.instance,
        entry_id=f"{scope.order.run_id}/{name}",
        output=sent,
        scopes=scopes,
        uses_ensemble=rules.has_short_term or rules.has_long_term,
        is_stored=is_stored,
    )


async def _store(
    scope: TaskScope, name: str, note: MemoryNote, *, until: Persistence = Persistence.QUEUED
) -> MemoryStored:
    """Write a note, and record that. A later commit of the output also commits this fact."""
    remembered = await _memory(scope).remember(note)
    stored = MemoryStored(
        scopes=tuple(each.name for each in note.scopes),
        taken_by=remembered.taken_by,
        embedding_tokens=remembered.embedding_tokens,
    )
    await scope.note(name, stored, until=until)
    await _charge(scope, stored.embedding_tokens)
    return stored


async def _charge(scope: TaskScope, tokens: int) -> None:
    """Charge embedded tokens, whose number is known only afterwards (S-MEM-129)."""
    if tokens and scope.ports.spending is not None:
        await scope.ports.spending.charge_embeddings(tokens)


_log = bounded_logger(__name__)
_REFLECTION = "reflection"  # effect name and kind of agent


class LocalRunReflections:
    """Reflections of one run, in the process with the user's store. Implements `RunReflections`."""

    def __init__(self, store: ReflectionStore) -> None:
        self._store = store
        #: by key: reflection before the run stored one; a task while it is read
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
        config = asked.task.reflection_config
        if config is None or config.strategy is None or not config.is_strategy_here:
            raise IllegalStateError("the strategy is not in this process")
        made: object = await call_user(cast("Callable[..., object]", config.strategy), asked)
        if not isinstance(made, TaskReflection):
            raise TypeError(f"the strategy returned {type(made).__name__} instead of a TaskReflection")
        return made

    def restore(self, key: str, reflection: TaskReflection | None) -> None:
        """Set the reflection that an earlier process recalled."""
        self._before.setdefault(key, reflection)


def reflection_key(description: str) -> str:
    """Return the SHA-256 of a task's description, in hex (S-REFL-4)."""
    return hashlib.sha256(description.encode()).hexdigest()


async def recall_notes(scope: TaskScope) -> TaskReflection | None:
    """Return the reflection of earlier runs on the task, if it reflects (S-REFL-8)."""
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
    """Reflect on an accepted output before other tasks use it (S-REFL-3). Errors are only logged.

    Unless `is_stopped`, a `CancelledError` is an error of user code.
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
    # The agent has the task's model. Handlers and runners have none.
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
    """Call a model, and fill gaps of its answer with the task's texts (S-REFL-12, S-REFL-13)."""
    task, count = scope.order.task, 1 if prior is None else prior.run_count + 1
    messages = [ChatMessage(role="user", content=build_reflection_request(task, output.raw, prior))]
    usage, names, asked = TokenUsage(0, 0), NO_NAMES, model
    observations: tuple[str, ...]
    parts = parse_reflection("")
    try:
        response, usage, asked = await _call_model(scope, model, messages)
        names = added_names(model_names(asked), declared_model(scope, model, model_names(model)))
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
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        is_first=prior is None,
        model=names.model,
        provider=names.provider,
        cached_tokens=usage.cached_tokens,
        cache_write_tokens=usage.cache_write_tokens,
        price=price_mark(scope.context.cost, asked),
    )


async def _call_model(
    scope: TaskScope, model: ChatModel, messages: list[ChatMessage]
) -> tuple[ChatResponse, TokenUsage, ChatModel]:
    """Return the answer, its tokens, which do not count for the task (S-REFL-18), and the model that answered."""
    order, effects = scope.order, scope.effects
    separate_effects = TaskEffects(
        task_description=effects.task_description,
        expected_output=effects.expected_output,
        agent_role=effects.agent_role,
        started_at=effects.started_at,
    )
    response, attempts, _ = await ask_once(
        structs.replace(scope, effects=separate_effects),
        model,
        messages,
        effect_name(order.instance, 0, _REFLECTION),
        template=_REFLECTION,
    )
    usage = response.usage or TokenUsage()
    estimated = attempts.estimated or (
        estimated_input(messages, ()),
        answer_tokens(response.text, response.tool_calls, response.reasoning),
    )
    tokens = replace(
        usage,
        input_tokens=usage.input_tokens if usage.input_tokens >= 0 else estimated[0],
        output_tokens=usage.output_tokens if usage.output_tokens >= 0 else estimated[1],
    )
    return response, tokens, attempts.model


def _warn(scope: TaskScope, what: str, error: BaseException) -> None:
    _log.warning("Task '%s': %s: %s", scope.order.key, what, message_of(error) or type(error).__name__)
