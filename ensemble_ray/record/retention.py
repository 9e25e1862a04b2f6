"""Which records are old enough to go, and their removal.

In: a store and an age. Out: what was removed.
Never: the record of a run that is running; anything at all unless somebody asked for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta

from ensemble_ray.errors import EnsembleError, RunExistsError, ValidationError, message_of
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.stores import RecordedRun, RunStore, StoreAddress
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.value import utc_now

_log = bounded_logger(__name__)
#: Environment variable that has old records removed at the end of each run.
RETENTION_VARIABLE = "ENSEMBLE_RAY_RETENTION"
#: Hours of each unit.
_HOURS = {"h": 1, "d": 24, "w": 168}
#: more digits than these are more than a calendar holds
_AGE = re.compile(r"([0-9]{1,12})\s*([hdw])")
#: A process looks at all records once in so long, s, however many runs end in it: ages are counted in hours.
_PAUSE_S = 60.0
_ENDED = frozenset(state for state in RunState if state.is_final)


def age_from(text: str) -> timedelta:
    """Return an age as people write it: `30d`, `12h`, `2w`.

    Raises:
        ValidationError: it is none.
    """
    found = _AGE.fullmatch(text.strip().lower())
    if found is None:
        msg = f"'{text}' is no age: write 30d for days, 12h for hours, 2w for weeks"
        raise ValidationError(msg)
    try:
        return timedelta(hours=int(found[1]) * _HOURS[found[2]])
    except OverflowError:
        msg = f"'{text}' is too long an age"
        raise ValidationError(msg) from None


async def prune(
    store: RunStore,
    older_than: timedelta,
    *,
    keep: int = 0,
    states: Collection[RunState] = (),
    spared: str = "",
    is_dry: bool = False,
    now: datetime | None = None,
) -> list[RecordedRun]:
    """Remove the records of old runs (S-DUR-53).

    Args:
        store: Where they are.
        older_than: How long ago a run must have begun.
        keep: So many of the newest are kept, however old they are.
        states: Only of runs in these states; none named: of those that completed, failed or were cancelled. Runs that
            somebody owns are never removed.
        spared: Id of a run that is kept in any case.
        is_dry: Only say what would be removed.
        now: What ages are measured by; None: the clock.

    Returns:
        What was removed, newest first.
    """
    wanted = set(states) or _ENDED
    removable = [run for run in await store.runs() if run.state in wanted]
    until = (now or utc_now()) - older_than
    old = [run for run in removable[keep:] if run.created_at < until and run.run_id != spared]
    removed: list[RecordedRun] = []
    for run in old:
        try:
            if not is_dry:
                await store.delete(run.run_id)
        except (RunExistsError, ValidationError):
            continue  # somebody resumed it, or removed it, a moment ago
        removed.append(run)
    return removed


async def apply_retention(
    store: RunStore, environ: Mapping[str, str] | None = None, *, spared: str = ""
) -> Sequence[RecordedRun]:
    """Remove what `ENSEMBLE_RAY_RETENTION` calls old; nothing where it says nothing. Failures are WARN lines.

    The run that has just ended is spared, since it may have begun long ago.
    """
    value = (os.environ if environ is None else environ).get(RETENTION_VARIABLE, "").strip()
    if not value:
        return ()
    try:
        removed = await prune(store, age_from(value), spared=spared)
    except EnsembleError as error:
        _log.warning("%s: old records were not removed: %s", RETENTION_VARIABLE, message_of(error))
        return ()
    if removed:
        _log.info("%s: %d old records were removed", RETENTION_VARIABLE, len(removed))
    return removed


class Retention:
    """Old records of a process's stores go when runs end in it, and not at each end of many."""

    def __init__(self) -> None:
        #: store -> when its records were looked at
        self._looked_at: dict[StoreAddress, float] = {}

    async def run_ended(self, address: StoreAddress, store: RunStore, *, spared: str, at: float) -> None:
        """Remove what is old, as `apply_retention` does, where nobody has looked for a minute.

        Args:
            address: Which store it is.
            store: The same, opened.
            spared: Id of the run that ended.
            at: The time, s of a steady clock.
        """
        is_wanted = bool(os.environ.get(RETENTION_VARIABLE, "").strip())
        if is_wanted and at - self._looked_at.get(address, -_PAUSE_S) >= _PAUSE_S:
            self._looked_at[address] = at
            await apply_retention(store, spared=spared)
