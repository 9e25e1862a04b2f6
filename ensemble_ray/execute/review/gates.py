"""The gates of a task: before it, and behind it. See `rules` for when they fire.

A gate that ends the run before the task raises what any early exit raises; behind the task its output is there, and is
kept (S-REV-32).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Never, cast

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, OutputParsingError
from ensemble_ray.execute.agent.structured import parse_output
from ensemble_ray.execute.memory import remember_edit
from ensemble_ray.facts.fact import find_fact
from ensemble_ray.facts.runs import (
    ExitRecorded,
    FailureRecorded,
    LossAccepted,
    OutputRecorded,
    ReviewDecided,
    ReviewRequested,
)
from ensemble_ray.ports import Persistence
from ensemble_ray.values.ids import effect_name, uuid_of
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.reviews import (
    Edit,
    ExitEarly,
    Review,
    ReviewAnswer,
    ReviewDecision,
    ReviewPolicy,
    ReviewRequest,
    ReviewTiming,
    decision_at_timeout,
)
from ensemble_ray.values.task_output import type_name
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.execute.orders import RunContext, TaskOrder
    from ensemble_ray.execute.scope import TaskScope
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.ports import Reviewer
    from ensemble_ray.values.reviews import OpenReview
    from ensemble_ray.values.task_output import OutputType, TaskOutput


class ReviewOpenError(ExitEarlyError):
    """Puts a task down, since somebody has to decide at these gates first (S-REV-115)."""

    def __init__(self, reviews: Sequence[OpenReview]) -> None:
        super().__init__("A review is open")
        self.reviews = tuple(reviews)


def review_entry(
    asked: ReviewRequested, asked_at: float, decided: ReviewDecided | None, decided_at: float
) -> Mapping[str, object]:
    """Return a gate for a trace.

    Args:
        asked: What was asked.
        asked_at: When, Unix time, s.
        decided: What was decided; None: nothing yet.
        decided_at: When.
    """
    entry: dict[str, object] = {"review_id": asked.review_id, "timing": asked.timing.value}
    if asked.prompt is not None:
        entry["prompt"] = asked.prompt
    if asked.timing == "during_execution":
        entry["question"] = asked.task_description
    entry["asked_at"] = utc_of(asked_at).isoformat()
    if decided is None:
        return {**entry, "verdict": "waiting"}
    entry |= {"verdict": decided.verdict, "by": decided.by, "decided_at": utc_of(decided_at).isoformat()}
    if decided.timed_out:
        entry["timed_out"] = True
    if decided.comment:
        entry["comment"] = decided.comment
    if decided.text is not None:
        entry |= {"original": asked.task_output, "text": decided.text}
    return entry


#: Name of the driver's service that asks.
REVIEW_SERVICE = "review"
#: Who decided where the time was up.
TIMEOUT = "(timeout)"


def review_id_of(run_id: str, name: str) -> str:
    """Return the id of a gate: the same when it is asked again, and unique among the runs of a store."""
    return uuid_of(f"{run_id}/{name}/review")


async def decide_at_gate(scope: TaskScope, name: str, request: ReviewRequest) -> ReviewDecision:
    """Return what is decided at a gate.

    Args:
        scope: The task that it belongs to.
        name: Of the gate, like that of an effect.
        request: What is asked; its ids are filled in.

    Raises:
        ReviewTimeoutError: nobody answered in time, and that fails the task.
        ReviewOpenError: nobody has decided, and the run is detached (S-REV-115).
        BaseException: what the handler raised.
    """
    clock = scope.ports.clock
    request = request.replace(review_id=review_id_of(scope.order.run_id, name), run_id=scope.order.run_id)
    asked, decided = scope.find_recorded(name, ReviewRequested), scope.find_recorded(name, ReviewDecided)
    is_detached = scope.context.is_detached
    question = ReviewRequested.of(request, detached=is_detached) if asked is None else asked.data
    asked_at = clock.now() if asked is None else asked.at
    is_expired = asked is not None and _is_expired(asked, clock.now())
    if decided is None and asked is not None and asked.data.detached:
        if not is_detached:  # from here on nobody else decides
            await scope.note(name, replace(asked.data, detached=False), until=Persistence.COMMITTED, at=asked_at)
        decided = await _decided_meanwhile(scope, name)
        if decided is not None and is_detached:  # what is behind the gate begins now, and not when it is picked up
            await scope.note(name, replace(asked.data, detached=False), until=Persistence.SYNCED, at=asked_at)
    if decided is not None:
        decision, decided_at = decided.data, decided.at
    else:
        if is_expired:
            answer = ReviewAnswer(decision=decision_at_timeout(request, question.timeout_s or 0.0), by=TIMEOUT)
        elif is_detached:
            await _put_down(scope, name, question, asked_at, is_new=asked is None)
        else:
            answer = await _get_answer(scope, name, request, question, asked)
        decision, decided_at = ReviewDecided.of(answer), clock.now()
        # On the disk: a person's decision is asked for once.
        await scope.note(name, decision, until=Persistence.SYNCED)
    scope.effects.reviews.append(review_entry(question, asked_at, decision, decided_at))
    return decision.answer.decision


async def _get_answer(
    scope: TaskScope,
    name: str,
    request: ReviewRequest,
    question: ReviewRequested,
    asked: Fact[ReviewRequested] | None,
) -> ReviewAnswer:
    if asked is None:
        # What the task did so far is committed with it: nobody is shown what a run that goes on would not have.
        await scope.note(name, question, until=Persistence.COMMITTED)
    elif asked.data.timeout_s is not None:
        left_s = asked.at + asked.data.timeout_s - scope.ports.clock.now()
        request = request.replace(timeout=timedelta(seconds=left_s))
    return await _ask(scope, request)


def _is_expired(asked: Fact[ReviewRequested], now: float) -> bool:
    """Whether the timeout of a gate has passed since it was opened."""
    return asked.data.timeout_s is not None and asked.at + asked.data.timeout_s <= now


async def _decided_meanwhile(scope: TaskScope, name: str) -> Fact[ReviewDecided] | None:
    """Return what somebody decided since the task's facts were read; None: nothing.

    Asked when nobody else can decide any more, or the gate is left open: so one decision counts for everybody (S-REV-128).
    """
    known = await scope.ports.journal.lookup_recorded(scope.order.instance)
    return find_fact(known, name, ReviewDecided)


async def _put_down(scope: TaskScope, name: str, question: ReviewRequested, asked_at: float, *, is_new: bool) -> Never:
    """Leave the gate open on record, and the task with it.

    Raises:
        ReviewOpenError: always.
    """
    if is_new or not question.detached:  # one that was asked by a handler keeps its time
        await scope.note(name, replace(question, detached=True), until=Persistence.COMMITTED, at=asked_at)
    scope.effects.reviews.append(review_entry(question, asked_at, None, asked_at))
    raise ReviewOpenError([question.open_since(scope.order.run_id, asked_at)])


async def _ask(scope: TaskScope, request: ReviewRequest) -> ReviewAnswer:
    """Ask where the run was started or resumed."""
    driver = scope.ports.services.driver
    if driver is not None:
        payload = request.model_dump(mode="json")
        return ReviewAnswer.from_data(cast("Mapping[str, object]", await driver.ask(REVIEW_SERVICE, payload)))
    reviewer = scope.ports.reviewer
    if reviewer is None:
        raise IllegalStateError(f"Run {request.run_id} has nobody to ask at its review gates")
    return await reviewer.ask(request)


async def answer_review(reviewer: Reviewer, payload: Mapping[str, object]) -> Mapping[str, object]:
    """Answer a task of another process, in the one that has the reviewer."""
    request = ReviewRequest(**cast("Mapping[str, Any]", payload))
    return (await reviewer.ask(request)).to_data()


_BY_POLICY = Review()


def review_before(order: TaskOrder, context: RunContext) -> Review | None:
    """Return the gate before a task; None: nobody is asked."""
    review = order.task.before_review
    return None if review is None or review.is_skip or not _has_gates(order, context) else review


def review_after(order: TaskOrder, context: RunContext) -> Review | None:
    """Return the gate behind a task; None: nobody is asked."""
    if not _has_gates(order, context):
        return None
    review = order.task.review
    if review is not None:
        return None if review.is_skip else review
    match context.review_policy:
        case ReviewPolicy.AFTER_EVERY_TASK:
            return context.policy_review or _BY_POLICY
        case ReviewPolicy.AFTER_LAST_TASK:
            return (context.policy_review or _BY_POLICY) if _is_last(order, context) else None
        case _:
            return None


def _has_gates(order: TaskOrder, context: RunContext) -> bool:
    return context.review_policy is not None and context.hierarchy is None and not order.depth


def _is_last(order: TaskOrder, context: RunContext) -> bool:
    is_of_list = "/" not in order.instance  # a path leads into a unit
    total = context.total_tasks if order.total_tasks is None else order.total_tasks
    return context.workflow == "sequential" and is_of_list and order.index == total


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
