"""What running under an id means that was used before, and whether two definitions are the same. Pure.

Rules (S-SET-39): finished, of the same definition and inputs -> its recorded output; interrupted or cancelled -> an
error that names `resume`; failed -> one that names `fork`; running -> `RunExistsError`; unknown -> a new run.
Never: a second run under one id, an answer of another definition.
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

#: Differences that a message names.
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
    """Return the output of an earlier run of that id; None when it recorded nothing, so that the run begins.

    Args:
        run_id: The id asked for.
        state: How the store says that the run stands.
        facts: What it recorded.
        header: The first fact that this run would record; None: that has been compared.
        output_types: See `fold_output`.
        object_ids: See `fold_output`.

    Raises:
        RunExistsError: a run of that id is running.
        ValidationError: it cannot be answered from the record: interrupted, cancelled, failed, or another definition.
        RecordError: its record is damaged.
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
    """Whether a run of that id is over, so that its record gives its output; False: it recorded nothing and begins.

    Args:
        run_id: The id asked for.
        state: How the store says that the run stands.
        recorded_state: How its facts say that it stands.
        recorded: Its first fact; an empty one when it recorded nothing.
        header: The first fact that this run would record; None: that has been compared.
        fork: How a new run can use what a failed one did; empty: it cannot.

    Raises:
        RunExistsError: a run of that id is running.
        ValidationError: it cannot be answered from the record: interrupted, cancelled, failed, or another definition.
    """
    if state.is_going_on:
        msg = f"Run '{run_id}' is running: wait for its end, or choose another run_id"
        raise RunExistsError(msg)
    if recorded.is_empty:
        return False  # it never began
    if recorded_state is not RunState.INTERRUPTED:
        state = recorded_state  # the facts are the truth: its process may have died before it wrote the state
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
    """Refuse another definition than the recorded one (S-DUR-36, S-SET-39).

    Args:
        run_id: The run's id.
        recorded: The run's first fact.
        current: The first fact that the definition at hand would record.
        doing: What is refused: answering a run from the record, or going on with it.

    Raises:
        ValidationError: they differ; each difference is named by its path.
    """
    found = what_differs(recorded, current)
    if not found:
        return
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    differing = "; ".join(found[:_NAMED]) + more
    if doing == "run":
        msg = f"Run '{run_id}' is finished, and was of another definition or other inputs: {differing}. Choose another run_id"
    else:
        msg = (
            f"Run '{run_id}' was of another definition: {differing}. Go on with the one it was begun with, or allow the "
            "changes (allow_changes=True, --allow-changes): then what is recorded is used as it is"
        )
    raise ValidationError(msg)


def what_differs(recorded: PlanRecorded, current: PlanRecorded) -> list[str]:
    """List what differs between the first facts of two runs, one line per path: inputs, plan, definition."""
    plans = (
        {name: each for name, each in (header.plan or {}).items() if name != "inputs"} for header in (recorded, current)
    )
    return [
        *(f"inputs.{difference}" for difference in differences(recorded.inputs or {}, current.inputs or {})),
        *(f"plan.{difference}" for difference in differences(*plans)),  # its inputs are those above
        *(
            f"definition.{difference}"
            for difference in differences(recorded.definition or {}, current.definition or {})
        ),
    ]
