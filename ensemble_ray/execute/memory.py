"""What a task reads of its run's memory before its prompt is built, and leaves in it when it is done.

Both are effects: what is recorded is neither read nor written again (S-MEM-111, S-MEM-112). A store that raises fails the
task that needed it (S-MEM-110). A manager uses no memory, its workers do (S-HIER-8).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.execute.effects import MemoryUse
from ensemble_ray.facts.effects import MemoryRecalled, MemoryStored, ModelAnswered
from ensemble_ray.facts.runs import DirectivesShown
from ensemble_ray.ports import Persistence
from ensemble_ray.values.ids import effect_name
from ensemble_ray.values.memory import MemoryNote, MemoryQuery, MemoryRules, RecalledMemory

if TYPE_CHECKING:
    from collections.abc import Generator

    from ensemble_ray.execute.scope import TaskScope
    from ensemble_ray.ports import MemoryOperationListener, RunMemory
    from ensemble_ray.values.memory import MemoryScope, RememberedNote
    from ensemble_ray.values.task_output import TaskOutput


#: Ends of the names of the effects: memory that is read or written, and what an edit writes.
_MEMORY, _EDIT = "memory", "memory-edit"
#: Who may have taken a note.
_SHORT_TERM, _LONG_TERM = "short_term", "long_term"


_UNCOUNTED = nullcontext()


def memory_counted(scope: TaskScope) -> AbstractContextManager[None]:
    """Count what the task does with memory in the block, in every capture mode (S-MEM-100)."""
    return _UNCOUNTED if _rules(scope) is None else _count(scope)


@contextmanager
def _count(scope: TaskScope) -> Generator[None]:
    scope.effects.memory = MemoryUse()
    scope.effects.memory_listener = scope.effects.memory
    try:
        yield
    finally:
        scope.effects.memory_listener = None


async def recall(scope: TaskScope) -> RecalledMemory | None:
    """Return what the prompt of the task shows of memory; None: it uses none."""
    rules = _rules(scope)
    if rules is None:
        return None
    scopes = _scopes(scope, rules)
    if not (rules.has_ensemble_memory or scopes):
        return None
    name = effect_name(scope.order.instance, 0, _MEMORY)
    fact = scope.find_recorded(name, MemoryRecalled)
    if fact is not None:
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
        _report_reading(listener, found)
    return found


async def remember(scope: TaskScope, output: TaskOutput) -> TaskOutput:
    """Leave what a task gave in memory, before its output is recorded; return the output, with what was counted."""
    rules = _rules(scope)
    if rules is None:
        return output
    scopes = _scopes(scope, rules)
    if not (rules.has_short_term or rules.has_long_term or scopes):
        return output
    name = effect_name(scope.order.instance, 0, _MEMORY)
    fact = scope.find_recorded(name, MemoryStored)
    if fact is None:
        note = _note(scope, name, output, scopes, rules, is_stored=False)
        stored = _to_stored(scopes, await _memory(scope).remember(note))
        await scope.note(name, stored)  # in order before the output, which is waited for
        await _charge(scope, stored.embedding_tokens)
    else:
        stored = fact.data
        if rules.has_short_term:  # the notes of the run itself are gone with the process that had them
            await _memory(scope).remember(_note(scope, name, output, scopes, rules, is_stored=True))
    scope.effects.embedding_tokens += stored.embedding_tokens
    if (listener := scope.effects.memory_listener) is not None:
        _report_writing(listener, stored.taken_by)
    elif not stored.embedding_tokens:
        return output
    metrics = scope.effects.metrics(scope.context.cost)
    changed = {"metrics": metrics, "metadata": scope.effects.metadata}
    trace = None if output.trace is None else output.trace.model_copy(update=changed)
    return output.model_copy(update={"metrics": metrics, "trace": trace})


async def remember_edit(scope: TaskScope, output: TaskOutput) -> None:
    """Store an output that a person edited as a further entry of the task's scopes (S-MEM-79)."""
    rules, name = _rules(scope), effect_name(scope.order.instance, 0, _EDIT)
    scopes = () if rules is None else _scopes(scope, rules)
    if not scopes or scope.find_recorded(name, MemoryStored) is not None:
        return
    edited = output.model_copy(update={"parsed_output": None, "trace": None})
    note = MemoryNote(instance=scope.order.instance, entry_id=_entry_id(scope, name), output=edited, scopes=scopes)
    stored = _to_stored(scopes, await _memory(scope).remember(note))
    await scope.note(name, stored, until=Persistence.COMMITTED)
    await _charge(scope, stored.embedding_tokens)


def _to_stored(scopes: tuple[MemoryScope, ...], remembered: RememberedNote) -> MemoryStored:
    return MemoryStored(
        scopes=tuple(each.name for each in scopes),
        taken_by=remembered.taken_by,
        embedding_tokens=remembered.embedding_tokens,
    )


async def _charge(scope: TaskScope, tokens: int) -> None:
    """Charge the run's budget with what was embedded; how much that is shows only afterwards (S-MEM-129)."""
    if tokens and scope.ports.spending is not None:
        await scope.ports.spending.charge_input(tokens)


def _rules(scope: TaskScope) -> MemoryRules | None:
    """Return which kinds of memory the task uses; None: none."""
    return None if scope.is_manager else scope.context.memory


def _scopes(scope: TaskScope, rules: MemoryRules) -> tuple[MemoryScope, ...]:
    """Return the scopes that the task declares; without a store they mean nothing (S-MEM-78)."""
    return tuple(scope.order.task.memory_scopes) if rules.has_store else ()


def _memory(scope: TaskScope) -> RunMemory:
    memory = scope.ports.memory
    if memory is None:
        raise IllegalStateError(f"Run {scope.order.run_id}: nobody answers for its memory, which only its driver has")
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
    # A trace may be long, and only user code may look into it.
    sent = output if rules.has_extractor else output.model_copy(update={"trace": None})
    return MemoryNote(
        instance=scope.order.instance,
        entry_id=_entry_id(scope, name),
        output=sent,
        scopes=scopes,
        uses_ensemble=rules.has_short_term or rules.has_long_term,
        is_stored=is_stored,
    )


def _entry_id(scope: TaskScope, name: str) -> str:
    return f"{scope.order.run_id}/{name}"


def _report_reading(listener: MemoryOperationListener, found: RecalledMemory) -> None:
    if found.retrieval_s is not None:
        listener.on_ltm_retrieval(found.retrieval_s)
    if found.lookup_s is not None:
        listener.on_entity_lookup(found.lookup_s)


def _report_writing(listener: MemoryOperationListener, taken_by: tuple[str, ...]) -> None:
    if _SHORT_TERM in taken_by:
        listener.on_stm_write()
    if _LONG_TERM in taken_by:
        listener.on_ltm_store()


#: End of the name of the effect.
_DIRECTIVES = "directives"


async def recall_directives(scope: TaskScope) -> tuple[str, ...]:
    """Return the directives that the task is told; one that goes on is told what it was told before (S-CTL-6)."""
    instance, directives = scope.order.instance, scope.order.directives
    if not directives and not scope.recorded_facts:  # as a rule
        return ()
    name = effect_name(instance, 0, _DIRECTIVES)
    shown = scope.find_recorded(name, DirectivesShown)
    if shown is not None:
        return shown.data.texts
    if not directives or scope.find_recorded(effect_name(instance, 0), ModelAnswered) is not None:
        return ()  # its model was asked before they were given
    await scope.note(name, DirectivesShown(texts=directives))
    return directives
