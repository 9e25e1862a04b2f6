"""Shows the values of a reversible run to a reader with its key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

from ensemble_ray.definition.redactor import REDACTION_KEY, learn_value, recorded_redaction
from ensemble_ray.errors import ValidationError
from ensemble_ray.facts.effects import ValueRedacted
from ensemble_ray.facts.fact import Fact, kinds_of
from ensemble_ray.process.concurrency import bridge, run_blocking
from ensemble_ray.record.head import read_head
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.resume.reading import read_pages
from ensemble_ray.record.stores import RunStore
from ensemble_ray.runs.ports import Runtime
from ensemble_ray.runtime import connect
from ensemble_ray.text.redaction import Redaction, map_texts

T = TypeVar("T")


def reveal(value: T, run_id: str | None = None, *, key: str = REDACTION_KEY, runtime: Runtime | str | None = None) -> T:
    """Return a copy of the value with the real values in place of the placeholders of a reversible run.

    Args:
        value: A text, an output, a trace, or any data that contains texts.
        run_id: The run's id, a unique prefix of it, or `latest`; default: the `run_id` of the value.
        key: Name of the environment variable with the key of the run.
        runtime: Runtime that stores the record; default: the runtime that the environment names.

    Raises:
        ValidationError: there is no such run, it cannot be reversed, or the key is missing or wrong.
        RecordError: the record cannot be read.
    """
    return run_blocking(_reveal(value, run_id, key, runtime))


async def areveal(
    value: T, run_id: str | None = None, *, key: str = REDACTION_KEY, runtime: Runtime | str | None = None
) -> T:
    """`reveal` for async code, with the same contract."""
    return await bridge(_reveal(value, run_id, key, runtime))


async def _reveal(value: T, run_id: str | None, key: str, runtime: Runtime | str | None) -> T:
    chosen = run_id or getattr(value, "run_id", None)
    if not isinstance(chosen, str):
        raise ValidationError("reveal needs the id of the run: reveal(text, run_id)")
    store = store_at(connect(runtime or "inline").store_address)
    redaction = await read_redaction(store, (await store.find(chosen)).run_id, key=key)
    return cast("T", map_texts(value, redaction.restore))


async def read_redaction(store: RunStore, run_id: str, *, key: str = REDACTION_KEY) -> Redaction:
    """Return the redactor of a recorded run with all its values.

    Raises:
        ValidationError: the run had no redactor, cannot be reversed, or the key is missing or wrong.
    """
    header = (await read_head(store, run_id)).header.redaction
    if header is None:
        raise ValidationError(f"Run '{run_id}' had no redactor: its texts are as they were, and need no --reveal")
    if header.get("reversible") is not True:
        raise ValidationError(
            f"Run '{run_id}' cannot be revealed: its redactor is not reversible, so the record has no values. Runs of a "
            "Redactor(reversible=True) can be revealed"
        )
    redaction = recorded_redaction(header, key=key)

    def take(page: Sequence[Fact]) -> None:
        for fact in page:
            if isinstance(fact.data, ValueRedacted):
                learn_value(redaction, fact.name, fact.data.token)

    await read_pages(store, run_id, kinds_of(ValueRedacted), take)
    return redaction
