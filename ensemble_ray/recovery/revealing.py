"""Shows the values of a reversible run to a reader with its key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

from msgspec import Struct

from ensemble_ray.definition.redactor import learn_value, recorded_redaction
from ensemble_ray.errors import ValidationError
from ensemble_ray.facts.effects import ValueRedacted
from ensemble_ray.facts.fact import kinds_of
from ensemble_ray.process.concurrency import bridge, run_blocking
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.head import read_head
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import RunReader
from ensemble_ray.runs.ports import Runtime
from ensemble_ray.runtime import connect
from ensemble_ray.text.redaction import Redaction, map_texts

T = TypeVar("T")
_log = bounded_logger(__name__)
_MOST_VALUES = 10_000  # that are shown to another reader


def reveal(value: T, run_id: str | None = None, *, key: str | None = None, runtime: Runtime | str | None = None) -> T:
    """Return a copy of the value with the real values in place of the placeholders of a reversible run.

    Args:
        value: A text, an output, a trace, or any data that contains texts.
        run_id: The run's id, a unique prefix of it, or `latest`; default: the `run_id` of the value.
        key: Name of the environment variable with the key of the run; default: the one that its redactor named.
        runtime: Runtime that stores the record; default: the runtime that the environment names.

    Raises:
        ValidationError: there is no such run, it cannot be reversed, or the key is missing or wrong.
        RecordError: the record cannot be read.
    """
    return run_blocking(_reveal(value, run_id, key, runtime))


async def areveal(
    value: T, run_id: str | None = None, *, key: str | None = None, runtime: Runtime | str | None = None
) -> T:
    """`reveal` for async code, with the same contract."""
    return await bridge(_reveal(value, run_id, key, runtime))


async def _reveal(value: T, run_id: str | None, key: str | None, runtime: Runtime | str | None) -> T:
    chosen = run_id or getattr(value, "run_id", None)
    if not isinstance(chosen, str):
        raise ValidationError("reveal needs the id of the run: reveal(text, run_id)")
    store = store_at(connect(runtime or "inline").store_address)
    redaction = await read_redaction(store, (await store.find(chosen)).run_id, key=key)
    return cast("T", map_texts(value, redaction.restore))


class ValueReader(Struct, frozen=True, kw_only=True):
    """A person or program that asks for the values of a run.

    Attributes:
        name: Of its key; None: the user of this process.
        is_admin: Whether it has the right `admin`.
        roles: Of its key; None: it is not identified.
    """

    name: str | None
    is_admin: bool
    roles: frozenset[str] | None = None


class RevealRefusedError(Exception):
    """The reader may not see the values of the run."""


def may_reveal(header: Mapping[str, object] | None, reader: ValueReader) -> bool:
    """Whether a reader may see the values of a run; `header` describes its redactor, as the first fact has it."""
    if header is None or header.get("reversible") is not True:
        return False
    named = cast("Sequence[str]", header.get("reveal_roles") or ())
    return reader.is_admin or not (reader.roles or frozenset()).isdisjoint(named)


async def reveal_to(reader: ValueReader, store: RunReader, run_id: str) -> Redaction:
    """Return the redactor of a run with all its values, for one answer to a reader. The log names both.

    Raises:
        RevealRefusedError: the reader may not see the values.
        ValidationError: the run had no redactor, cannot be reversed, has too many values, or the key is missing or wrong.
    """
    header = await _reversible_header(store, run_id)
    if not may_reveal(header, reader):
        named = ", ".join(cast("Sequence[str]", header.get("reveal_roles") or ()))
        raise RevealRefusedError(
            "This key may not see the values of the run: it needs the right 'admin'"
            + (f", or one of the roles [{named}]" if named else "")
        )
    redaction = await _read_values(store, run_id, header, most_values=_MOST_VALUES)
    _log.warning("The values of run '%.128s' were revealed to '%.128s'", run_id, reader.name or "the local user")
    return redaction


async def read_redaction(store: RunReader, run_id: str, *, key: str | None = None) -> Redaction:
    """Return the redactor of a recorded run with all its values.

    Raises:
        ValidationError: the run had no redactor, cannot be reversed, or the key is missing or wrong.
    """
    return await _read_values(store, run_id, await _reversible_header(store, run_id), key=key)


async def _reversible_header(store: RunReader, run_id: str) -> Mapping[str, object]:
    header = (await read_head(store, run_id)).header.redaction
    if header is None:
        raise ValidationError(f"Run '{run_id}' had no redactor: its texts are as they were, with nothing to reveal")
    if header.get("reversible") is not True:
        raise ValidationError(
            f"Run '{run_id}' cannot be revealed: its redactor is not reversible, so the record has no values. Runs of a "
            "Redactor(reversible=True) can be revealed"
        )
    return header


async def _read_values(
    store: RunReader,
    run_id: str,
    header: Mapping[str, object],
    *,
    key: str | None = None,
    most_values: int | None = None,
) -> Redaction:
    redaction = recorded_redaction(header, key=key)

    async for page in store.read(run_id, kinds=kinds_of(ValueRedacted)):
        for fact in page:
            if isinstance(fact.data, ValueRedacted):
                learn_value(redaction, fact.name, fact.data.token)
        if most_values is not None and len(redaction.values) > most_values:
            raise ValidationError(
                f"Run '{run_id}' has more than {most_values:,} values, which are not shown here. What to do: "
                f"ensemble-ray trace {run_id} --reveal"
            )
    return redaction
