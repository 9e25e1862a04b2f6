"""The gates of a task: before it, and behind it. Package: execute. See `rules` for when they fire.

A gate that ends the run before the task raises what any early exit raises; behind the task its output is there, and is
kept (S-REV-32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble_ray.errors import ExitEarlyError, OutputParsingError
from ensemble_ray.execute.agent.structured import parse_output
from ensemble_ray.execute.memory import remember_edit
from ensemble_ray.execute.review.asking import decide_at_gate
from ensemble_ray.execute.review.rules import review_after, review_before
from ensemble_ray.facts.ends import ExitRecorded, FailureRecorded, OutputRecorded
from ensemble_ray.facts.fact import find_fact
from ensemble_ray.facts.reviews import ReviewDecided, ReviewRequested
from ensemble_ray.facts.runs import LossAccepted
from ensemble_ray.values.ids import effect_name
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.reviews import Edit, ExitEarly, Review, ReviewRequest, ReviewTiming
from ensemble_ray.values.task_output import type_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ensemble_ray.execute.scope import TaskScope
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.values.task_output import OutputType, TaskOutput

__all__ = [
    "Reviewed",
    "ask_before",
    "describe_misfit",
    "exit_reason_of",
    "is_of_work",
    "recorded_exit",
    "review_output",
    "work_ended_at",
]

#: Edits that do not fit until the task fails; a run that waits in its record asks as often as people edit.
_MOST_TRIES = 3


@dataclass(frozen=True, slots=True)
class Reviewed:
    """An output behind its gate."""

    output: TaskOutput
    #: why the run ends with it; None: it goes on
    exit_reason: ExitReason | None = None


async def ask_before(scope: TaskScope) -> None:
    """Ask whether a task may begin; of one that has ended already nobody is asked.

    Raises:
        ExitEarlyError: it must not, and the run ends (S-REV-30).
    """
    review = review_before(scope.order, scope.context)
    if review is None and not scope.recorded_facts:  # as a rule
        return
    name = effect_name(scope.order.instance, 0, "before-review")
    if scope.find_recorded(name, ReviewDecided) is not None:
        review = review or Review()  # also where nobody would be asked now
    if review is None or (scope.find_recorded(name, ReviewDecided) is None and _has_ended(scope)):
        return
    decision = await decide_at_gate(scope, name, _request(scope, review, ReviewTiming.BEFORE_EXECUTION, ""))
    if isinstance(decision, ExitEarly):
        raise ExitEarlyError("The run was ended at a review gate", decision.timed_out)


async def review_output(scope: TaskScope, output: TaskOutput) -> Reviewed:
    """Ask about an output, and return what becomes of it (S-REV-31, S-REV-32)."""
    review = review_after(scope.order, scope.context)
    if review is None and not scope.recorded_facts:
        return Reviewed(output)
    name = _after(scope)
    if scope.find_recorded(name, ReviewDecided) is not None:
        review = review or Review()  # also where nobody would be asked now
    if review is None:
        return Reviewed(output)
    request, tries = _request(scope, review, ReviewTiming.AFTER_EXECUTION, output.raw), 1
    decision = await decide_at_gate(scope, name, request)
    while isinstance(decision, Edit) and (why := _misfit(scope, decision.revised_output)):
        if tries == _MOST_TRIES and not scope.context.is_detached:
            raise _unfit_edit(scope, decision.revised_output, why)
        prompt = f"{why} Edit again, or decide otherwise."
        request = request.replace(prompt=f"{prompt} {review.prompt}" if review.prompt else prompt)
        decision, tries = await decide_at_gate(scope, _after(scope, tries), request), tries + 1
    match decision:
        case Edit(revised_output=text):
            output_type = scope.order.task.output_type
            parsed = None if output_type is None else parse_output(text, output_type).value
            edited = _add_gate_trace(scope, output.replace(raw=text, parsed_output=parsed))
            await remember_edit(scope, edited)
            return Reviewed(edited)
        case ExitEarly(timed_out=timed_out):
            return Reviewed(_add_gate_trace(scope, output), exit_reason_of(timed_out=timed_out))
        case _:
            return Reviewed(_add_gate_trace(scope, output))


def _misfit(scope: TaskScope, text: str) -> str:
    output_type = scope.order.task.output_type
    return "" if output_type is None else describe_misfit(text, output_type)


def describe_misfit(text: str, output_type: OutputType) -> str:
    """Return why an edit is refused, as its reviewer reads it; empty: it fits the type of the task (S-REV-136)."""
    why = parse_output(text, output_type).error_message
    if why is None:
        return ""
    why = why.replace("in response", "in the text") if text.strip() else "the text is empty"
    return f"The edit was refused, since it must fit {type_name(output_type)}: {why.rstrip('.')}."


def _unfit_edit(scope: TaskScope, text: str, why: str) -> OutputParsingError:
    """Return what fails a task whose reviewer gives no edit that fits."""
    order = scope.order
    return OutputParsingError(
        f"The review of task '{order.key}' gave {_MOST_TRIES} edits that do not fit. {why}",
        text,
        order.task.output_type,
        (why,),
        _MOST_TRIES,
        order.task.description,
        order.agent_role,
    )


def is_of_work(fact: Fact) -> bool:
    """Whether a recorded fact tells that its task was at work: people may take days to decide (S-REV-118)."""
    return not isinstance(fact.data, LossAccepted | ReviewRequested | ReviewDecided)


def work_ended_at(scope: TaskScope) -> float:
    """Return when the work of a task ended that has just given its text: before it came to its gate, where it came there."""
    asked = scope.find_recorded(_after(scope), ReviewRequested) if scope.recorded_facts else None
    return scope.ports.clock.now() if asked is None else asked.at


def _after(scope: TaskScope, number: int = 0) -> str:
    """Return the name of the gate behind a task; each refused edit opens the next one."""
    return effect_name(scope.order.instance, number, "after-review")


def _has_ended(scope: TaskScope) -> bool:
    ends = (OutputRecorded, FailureRecorded, ExitRecorded)
    return any(find_fact(scope.recorded_facts, scope.order.instance, end) is not None for end in ends)


def recorded_exit(facts: Mapping[tuple[str, str], Fact], instance: str) -> ExitReason | None:
    """Return why the run ended at the gate behind a task whose output is recorded; None: it went on."""
    exited = find_fact(facts, instance, ExitRecorded)
    # One that had spent its budget, and was gone on with, gave its output after that.
    if exited is None or exited.data.reason is ExitReason.BUDGET_EXHAUSTED:
        return None
    return exited.data.reason


def exit_reason_of(*, timed_out: bool) -> ExitReason:
    """Return why a run ends whose gate said so (S-REV-34)."""
    return ExitReason.TIMEOUT if timed_out else ExitReason.USER_EXIT_EARLY


def _request(scope: TaskScope, review: Review, timing: ReviewTiming, output: str) -> ReviewRequest:
    return ReviewRequest(
        task_description=scope.order.task.description,
        task_output=output,
        timing=timing,
        timeout=review.timeout,
        on_timeout=review.on_timeout,
        prompt=review.prompt,
        required_role=review.required_role,
    )


def _add_gate_trace(scope: TaskScope, output: TaskOutput) -> TaskOutput:
    """Return the output with a trace that tells of the gate and ends with what it left."""
    if output.trace is None:
        return output
    trace = output.trace.replace(
        final_output=output.raw, parsed_output=output.parsed_output, metadata=scope.effects.metadata
    )
    return output.replace(trace=trace)
