"""How a recorded run stands, and what it gave, without its team: who attaches to it has only the record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble_ray.errors import RecordError
from ensemble_ray.record.head import locate_errors, read_head
from ensemble_ray.record.history import ExecutionEnded, RunHistory
from ensemble_ray.record.identity.map_reduce import DIRECT, FINAL
from ensemble_ray.record.trace import fold_output
from ensemble_ray.values.ids import instance_of
from ensemble_ray.values.outputs import RunState

if TYPE_CHECKING:
    from ensemble_ray.facts.runs import RecordedError
    from ensemble_ray.record.stores import RunStore

_WITH_TEXT = frozenset({RunState.COMPLETED, RunState.BUDGET_EXHAUSTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEnd:
    """How a run stands."""

    run_id: str
    state: str
    #: why it ended; empty: it has not
    exit_reason: str = ""
    #: None: it gave none
    text: str | None = None
    #: why it failed
    errors: Sequence[str] = ()
    #: what else is known of the first of them
    details: Sequence[str] = ()
    #: see `error_data`
    error: Mapping[str, object] | None = None
    #: where its record is
    record: str = ""
    #: see `notes_of`
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON data."""
        return {
            "run_id": self.run_id,
            "state": self.state,
            "exit_reason": self.exit_reason or None,
            "raw": self.text,
            "error": self.error,
            "errors": list(self.errors),
            "notes": list(self.notes),
            "record": self.record,
        }


def error_data(error: RecordedError) -> dict[str, object]:
    """Return why a run failed as JSON data (S-ERR-68)."""
    return {
        "type": error.error_type,
        "message": error.message,
        **({"place": error.place} if error.place else {}),
        **(
            {"causes": [{"type": each.error_type, "message": each.message} for each in error.causes]}
            if error.causes
            else {}
        ),
    }


def notes_of(incomplete_answers: int, capped: Iterable[str]) -> list[str]:
    """Return what people should know of the result of a run: answers that were cut off or empty, loops that ended at a cap."""
    counted = (
        [f"{incomplete_answers:,} incomplete answer{'' if incomplete_answers == 1 else 's'}"]
        if incomplete_answers
        else []
    )
    return [*counted, *(f"{each} ended at its cap" for each in capped)]


async def read_notes(store: RunStore, run_id: str) -> list[str]:
    """Return `notes_of` of a run that failed; none where no end is recorded, or the record cannot be read."""
    try:
        end = (await read_head(store, run_id)).end
    except RecordError:  # what the run failed for is shown all the same
        return []
    return [] if end is None else notes_of(end.incomplete_answers, end.capped)


async def read_end(store: RunStore, run_id: str) -> RecordedEnd:
    """Read how a run stands, and its text where it ended with one.

    Raises:
        RecordError: the record is damaged, or was removed meanwhile.
    """
    found = await store.find(run_id)
    head = await read_head(store, run_id)
    end = head.end
    text = None
    if found.state in _WITH_TEXT:
        with locate_errors(found.location):
            text = await (_last_text(store, run_id) if head.is_dynamic else _planned_text(store, run_id))
    errors = head.errors
    return RecordedEnd(
        run_id=run_id,
        state=found.state.value,
        exit_reason="" if end is None else end.reason.value,
        text=text,
        record=found.location,
        error=error_data(errors[0]) if errors else None,
        notes=() if end is None else notes_of(end.incomplete_answers, end.capped),
        details=errors[0].lines() if errors else (),
        errors=tuple(f"task '{each.key}': {each.message}" if each.key else each.message for each in errors),
    )


async def _planned_text(store: RunStore, run_id: str) -> str:
    return fold_output(await store.facts(run_id)).raw


async def _last_text(store: RunStore, run_id: str) -> str | None:
    """Return the text of a map-reduce's last reduce; None where there is none, as of a map."""
    history, text = RunHistory(), None
    for instance in map(instance_of, (FINAL, DIRECT)):
        for fact in await store.facts_of(run_id, instance):
            for change in history.apply(fact):
                if isinstance(change, ExecutionEnded) and change.execution.id == instance and change.output is not None:
                    text = change.output.raw
    return text
