"""What running under an id means that was used before. Room: record.

Rules (S-SET-39): finished, of the same definition and inputs -> its recorded output; interrupted or cancelled -> an
error that names `resume`; running -> `RunExistsError`; unknown -> a new run.
Never: a second run under one id, an answer of another definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ensemble_ray.errors import RunExistsError, ValidationError
from ensemble_ray.outputs import EnsembleOutput, RunState
from ensemble_ray.record.digest import differences
from ensemble_ray.record.fold import RunFold
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.record.task_fold import as_mapping

__all__ = ["recorded_output"]

#: Differences that a message names.
_NAMED = 3


def recorded_output(
    home: Path,
    run_id: str,
    header: Mapping[str, object],
    *,
    output_types: Mapping[str, type[Any]] | None = None,
    object_ids: Mapping[str, str] | None = None,
) -> EnsembleOutput | None:
    """The output of an earlier run of that id; None when there was none, so that the run begins.

    Args:
        home: Directory of the records.
        run_id: The id asked for.
        header: Data of the first fact that this run would record.
        output_types: See `fold_output`.
        object_ids: See `fold_output`.

    Raises:
        RunExistsError: a run of that id is running.
        ValidationError: it cannot be answered from the record: interrupted, cancelled, failed, or another definition.
        RecordError: its record is damaged.
    """
    directory = RunDirectory(home, run_id)
    if not directory.path.exists():
        return None
    state = directory.state()
    if state in {RunState.PENDING, RunState.RUNNING, RunState.WAITING}:
        msg = f"Run '{run_id}' is running: wait for its end, or choose another run_id"
        raise RunExistsError(msg)
    fold = RunFold(directory.facts())
    if not fold.header:
        return None  # it never began
    if fold.state is not RunState.INTERRUPTED:
        state = fold.state  # the facts are the truth: the process may have died between the end and the writing of it
    if fold.state is RunState.COMPLETED:
        _check_same(run_id, fold.header, header)
        return fold.output(output_types or {}, object_ids or {})
    if state is RunState.FAILED:
        msg = f"Run '{run_id}' has failed and is not run again under its id: choose another run_id"
    else:
        msg = f"Run '{run_id}' was {_ended(state)} and is not begun again under its id: resume it, or choose another run_id"
    raise ValidationError(msg)


def _ended(state: RunState) -> str:
    return "cancelled" if state is RunState.CANCELLED else "interrupted"


def _check_same(run_id: str, recorded: Mapping[str, object], current: Mapping[str, object]) -> None:
    found = [
        *differences(as_mapping(recorded.get("inputs")), as_mapping(current.get("inputs"))),
        *differences(as_mapping(recorded.get("plan")), as_mapping(current.get("plan"))),
    ]
    if not found and recorded.get("digest") == current.get("digest"):
        return
    if not found:
        found = ["something that the plan does not show"]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    msg = (
        f"Run '{run_id}' is finished, and was of another definition or other inputs: "
        f"{'; '.join(found[:_NAMED])}{more}. Choose another run_id"
    )
    raise ValidationError(msg)
