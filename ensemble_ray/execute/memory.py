"""Read a run's memory for the prompt of a task, and write the task's output to it.

Both are effects: recorded ones are not performed again (S-MEM-111, S-MEM-112). An error of a store fails the task
(S-MEM-110). Managers use no memory, but their workers do (S-HIER-8).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.execute.effects import MemoryUse
from ensemble_ray.execute.scope import TaskScope
from ensemble_ray.facts.effects import MemoryRecalled, MemoryStored, ModelAnswered
from ensemble_ray.facts.runs import DirectivesShown
from ensemble_ray.ports import Persistence, RunMemory
from ensemble_ray.values.ids import effect_name
from ensemble_ray.values.memory import MemoryNote, MemoryQuery, MemoryRules, MemoryScope, RecalledMemory
from ensemble_ray.values.task_output import TaskOutput

#: Last parts of effect names: reading or writing memory, and writing an edited output.
_MEMORY, _EDIT = "memory", "memory-edit"
#: Kinds of memory that can accept a note.
_SHORT_TERM, _LONG_TERM = "short_term", "long_term"


@contextmanager
def memory_counted(scope: TaskScope) -> Generator[None]:
    """Count the memory operations inside the block, in every capture mode (S-MEM-100)."""
    if _rules(scope) is not None:
        scope.effects.memory_listener = scope.effects.memory = MemoryUse()
    try:
        yield
    finally:
        scope.effects.memory_listener = None


async def recall(scope: TaskScope) -> RecalledMemory | None:
    """Return the memory that the task's prompt shows; None: the task uses none."""
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
        found = await _memory(scope).recall(query)
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
    """Write an output to memory before it is recorded; return it with the counts of memory operations."""
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
    """Write an output that a reviewer edited as a further entry of the task's scopes (S-MEM-79)."""
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
    """Return the directives that the task's prompt shows; a resumed task shows its first ones (S-CTL-6)."""
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
    """Return the kinds of memory that the task uses, or None."""
    return None if scope.is_manager else scope.context.memory


def _scopes(scope: TaskScope, rules: MemoryRules) -> tuple[MemoryScope, ...]:
    """Return the task's memory scopes, which have no effect without a store (S-MEM-78)."""
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
    # A trace may be long, and only the user's extractor may read it.
    sent = output if rules.has_extractor else output.model_copy(update={"trace": None})
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
    """Write a note to memory, and record that; the facts are in order, so a later commit of the output commits this."""
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
    """Charge embedded tokens to the run's budget; their number is known only afterwards (S-MEM-129)."""
    if tokens and scope.ports.spending is not None:
        await scope.ports.spending.charge_input(tokens)
