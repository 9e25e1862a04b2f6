"""Decide the result of a run under a used id, and compare two definitions. Pure.

A finished run of the same definition and inputs returns its recorded output (S-SET-39). Other states raise an error that
names `resume` or `fork`; a running one raises `RunExistsError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from ensemble_ray.errors import RunExistsError, ValidationError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.identity.definition import differences
from ensemble_ray.record.stores import fork_advice, resume_advice
from ensemble_ray.record.trace import output_of
from ensemble_ray.values.outputs import EnsembleOutput, RunState
from ensemble_ray.values.task_output import OutputType

_NAMED = 20


def recorded_output(
    run_id: str,
    state: RunState,
    facts: Iterable[Fact],
    header: PlanRecorded | None,
    *,
    output_types: Mapping[str, OutputType] | None = None,
    object_ids: Mapping[str, str] | None = None,
) -> EnsembleOutput | None:
    """Return the output of an earlier run of that id; None if it has no facts, so that the run can begin.

    `header` is the first fact that this run would record; None: the caller has compared it. See `fold_output` for
    `output_types` and `object_ids`, and `is_answered` for the errors.
    """
    facts = list(facts)
    history = RunHistory(facts, has_details=True)
    head = history.head
    fork = fork_advice(run_id, head.header.origin or "", facts)
    if not is_answered(run_id, state, recorded_state=head.state, recorded=head.header, header=header, fork=fork):
        return None
    return output_of(history, output_types, object_ids)


def is_answered(
    run_id: str,
    state: RunState,
    *,
    recorded_state: RunState,
    recorded: PlanRecorded,
    header: PlanRecorded | None,
    fork: str = "",
) -> bool:
    """Whether a run of that id has completed; False: it can begin.

    Args:
        run_id: The requested id.
        state: By the store.
        recorded_state: By the run's facts, which take precedence.
        recorded: The first fact; an empty one if there is none.
        header: The first fact that this run would record; None: the caller has compared it.
        fork: How a new run can reuse the outputs of a failed one; empty: it cannot.

    Raises:
        RunExistsError: a run of that id is running.
        ValidationError: the record has no answer: interrupted, cancelled, failed, or another definition.
    """
    if state.is_active:
        raise RunExistsError(f"Run '{run_id}' is running: wait for its end, or choose another run_id")
    if recorded.is_empty:
        return False  # it never began
    if recorded_state is not RunState.INTERRUPTED:
        state = recorded_state  # its process may have died before it stored the state
    if recorded_state is RunState.COMPLETED:
        if header is not None:
            check_same(run_id, recorded, header, doing="run")
        return True
    field = "max_tokens=N" if state is RunState.BUDGET_EXHAUSTED else ""
    resume = f"{resume_advice(run_id, recorded.origin or '', field=field)}; or choose another run_id"
    if state is RunState.FAILED and recorded.is_dynamic:
        msg = f"Run '{run_id}' has failed and is not begun again under its id. Resume it, which tries again what failed: {resume}"
    elif state is RunState.FAILED:
        msg = f"Run '{run_id}' has failed and is not run again under its id: choose another run_id"
        msg += f", or begin a new run with what it did: {fork}" if fork else ""
    elif state is RunState.BUDGET_EXHAUSTED:
        msg = f"Run '{run_id}' has spent its budget and is not begun again under its id. Resume it with a larger one: {resume}"
    elif state is RunState.WAITING:
        msg = f"Run '{run_id}' waits for reviews and is not begun again under its id. Decide them, and resume it: {resume}"
    else:
        ended = "cancelled" if state is RunState.CANCELLED else "interrupted"
        msg = f"Run '{run_id}' was {ended} and is not begun again under its id. Resume it: {resume}"
    raise ValidationError(msg)


def check_same(run_id: str, recorded: PlanRecorded, current: PlanRecorded, *, doing: Literal["run", "resume"]) -> None:
    """Refuse a definition that is not the recorded one, and list the differences (S-DUR-36, S-SET-39)."""
    found = what_differs(recorded, current)
    if not found:
        return
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    differing = "; ".join(found[:_NAMED]) + more
    if doing == "run":
        msg = f"Run '{run_id}' is finished, and was of another definition or other inputs: {differing}. Choose another run_id"
    else:
        msg = (
            f"Run '{run_id}' was of another definition: {differing}. Resume it with its original definition, or allow the "
            "changes (allow_changes=True, --allow-changes): then recorded outputs are used unchanged"
        )
    raise ValidationError(msg)


def what_differs(recorded: PlanRecorded, current: PlanRecorded) -> list[str]:
    plans = (
        {name: each for name, each in (header.plan or {}).items() if name != "inputs"} for header in (recorded, current)
    )
    return [
        *(f"inputs.{difference}" for difference in differences(recorded.inputs or {}, current.inputs or {})),
        *(f"plan.{difference}" for difference in differences(*plans)),  # the inputs are listed above
        *(
            f"definition.{difference}"
            for difference in differences(recorded.definition or {}, current.definition or {})
        ),
    ]
