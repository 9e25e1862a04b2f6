"""Review gates before and after a task, and of tools."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from datetime import timedelta
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, OutputParsingError
from ensemble_ray.execute.agent.structured import parse_output
from ensemble_ray.execute.memory import remember_edit
from ensemble_ray.execute.orders import RunContext, TaskOrder
from ensemble_ray.execute.redaction import restore_arguments
from ensemble_ray.execute.scope import TaskScope
from ensemble_ray.facts.effects import ToolIntended
from ensemble_ray.facts.fact import Fact, find_fact
from ensemble_ray.facts.runs import (
    ExitRecorded,
    FailureRecorded,
    LossAccepted,
    OutputRecorded,
    ReviewDecided,
    ReviewRequested,
)
from ensemble_ray.ports import Persistence, Reviewer
from ensemble_ray.tools.user_code import TimeLimit
from ensemble_ray.values.ids import effect_name, uuid_of
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.reviews import (
    Edit,
    ExitEarly,
    OpenReview,
    Review,
    ReviewAnswer,
    ReviewDecision,
    ReviewPolicy,
    ReviewRequest,
    ReviewTiming,
    decision_at_timeout,
)
from ensemble_ray.values.task_output import OutputType, TaskOutput, type_name
from ensemble_ray.values.value import utc_of

REVIEW_SERVICE = "review"  # service of the driver that asks
TIMEOUT = "(timeout)"  # reviewer of a decision at a timeout
_MOST_TRIES = 3  # edits of a wrong type before the task fails; a detached run has no limit
_BY_POLICY = Review()


class ReviewOpenError(ExitEarlyError):
    """Suspends a task at open gates (S-REV-115)."""

    def __init__(self, reviews: Sequence[OpenReview]) -> None:
        super().__init__("A review is open")
        self.reviews = tuple(reviews)


def review_before(order: TaskOrder, context: RunContext) -> Review | None:
    review = order.task.before_review
    return None if review is None or review.is_skip or not _has_gates(order, context) else review


def review_after(order: TaskOrder, context: RunContext) -> Review | None:
    if not _has_gates(order, context):
        return None
    review = order.task.review
    if review is not None:
        return None if review.is_skip else review
    total = context.total_tasks if order.total_tasks is None else order.total_tasks
    is_in_unit = "/" in order.instance
    is_last = context.workflow == "sequential" and not is_in_unit and order.index == total
    policy = context.review_policy
    is_due = policy == ReviewPolicy.AFTER_EVERY_TASK or (policy == ReviewPolicy.AFTER_LAST_TASK and is_last)
    return (context.policy_review or _BY_POLICY) if is_due else None


def _has_gates(order: TaskOrder, context: RunContext) -> bool:
    return context.review_policy is not None and context.hierarchy is None and not order.depth


class ReviewedOutput(Struct, frozen=True):
    output: TaskOutput
    exit_reason: ExitReason | None = None  # reason if the gate ended the run


async def review_before_task(scope: TaskScope) -> None:
    """Ask whether a task may start, unless its end is recorded; may end the run (S-REV-30)."""
    review = review_before(scope.order, scope.context)
    if review is None and not scope.recorded_facts:
        return
    name = effect_name(scope.order.instance, 0, "before-review")
    if scope.find_recorded(name, ReviewDecided) is not None:
        review = review or Review()  # a recorded decision is valid even if the gate is gone
    else:
        ends = (OutputRecorded, FailureRecorded, ExitRecorded)
        has_ended = any(find_fact(scope.recorded_facts, scope.order.instance, end) is not None for end in ends)
        if review is None or has_ended:
            return
    decision = await decide_at_gate(scope, name, _request(scope, review, ReviewTiming.BEFORE_EXECUTION, ""))
    if isinstance(decision, ExitEarly):
        raise ExitEarlyError("The run was ended at a review gate", decision.timed_out)


async def review_output(scope: TaskScope, output: TaskOutput) -> ReviewedOutput:
    """Ask about an output, which stays even if the decision ends the run (S-REV-31, S-REV-32)."""
    review = review_after(scope.order, scope.context)
    if review is None and not scope.recorded_facts:
        return ReviewedOutput(output)
    name = _name_after(scope)
    if scope.find_recorded(name, ReviewDecided) is not None:
        review = review or Review()  # a recorded decision is valid even if the gate is gone
    if review is None:
        return ReviewedOutput(output)
    request, tries = _request(scope, review, ReviewTiming.AFTER_EXECUTION, output.raw), 1
    decision = await decide_at_gate(scope, name, request)
    while isinstance(decision, Edit) and (
        why := describe_misfit(decision.revised_output, scope.order.task.output_type)
    ):
        if tries == _MOST_TRIES and not scope.context.is_detached:
            order = scope.order
            raise OutputParsingError(
                f"The review of task '{order.key}' gave {_MOST_TRIES} edits that do not fit. {why}",
                decision.revised_output,
                order.task.output_type,
                (why,),
                _MOST_TRIES,
                order.task.description,
                order.agent_role,
            )
        prompt = f"{why} Edit again, or decide otherwise."
        request = request.replace(prompt=f"{prompt} {review.prompt}" if review.prompt else prompt)
        decision, tries = await decide_at_gate(scope, _name_after(scope, tries), request), tries + 1
    if isinstance(decision, Edit):
        text, output_type = decision.revised_output, scope.order.task.output_type
        parsed = None if output_type is None else parse_output(text, output_type).value
        output = output.replace(raw=text, parsed_output=parsed)
    if output.trace is not None:
        seen = {"final_output": output.raw, "parsed_output": output.parsed_output, "metadata": scope.effects.metadata}
        output = output.replace(trace=output.trace.replace(**seen))
    if isinstance(decision, Edit):
        await remember_edit(scope, output)
    if not isinstance(decision, ExitEarly):
        return ReviewedOutput(output)
    return ReviewedOutput(output, ExitReason.TIMEOUT if decision.timed_out else ExitReason.USER_EXIT_EARLY)  # S-REV-34


def _name_after(scope: TaskScope, number: int = 0) -> str:
    """Each refused edit opens the next gate."""
    return effect_name(scope.order.instance, number, "after-review")


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


def describe_misfit(text: str, output_type: OutputType | None) -> str:
    """Return why an edit is refused, for its reviewer; "": it fits (S-REV-136)."""
    if output_type is None or (why := parse_output(text, output_type).error_message) is None:
        return ""
    why = why.replace("in response", "in the text") if text.strip() else "the text is empty"
    return f"The edit was refused, since it must fit {type_name(output_type)}: {why.rstrip('.')}."


def is_not_review(fact: Fact) -> bool:
    """Whether a fact counts for the task's work time; reviewers may take days (S-REV-118)."""
    return not isinstance(fact.data, LossAccepted | ReviewRequested | ReviewDecided)


def work_ended_at(scope: TaskScope) -> float:
    """Return now, or the time at which an earlier process opened the gate."""
    asked = scope.find_recorded(_name_after(scope), ReviewRequested)
    return scope.ports.clock.now() if asked is None else asked.at


def recorded_exit(facts: Mapping[tuple[str, str], Fact], instance: str) -> ExitReason | None:
    """Return why the gate after a recorded output ended the run; None: it continued."""
    exited = find_fact(facts, instance, ExitRecorded)
    # A task without budget has an output only if the run was resumed later.
    if exited is None or exited.data.reason is ExitReason.BUDGET_EXHAUSTED:
        return None
    return exited.data.reason


def review_entry(
    asked: ReviewRequested, asked_at: float, decided: ReviewDecided | None, decided_at: float
) -> Mapping[str, object]:
    """Return the trace entry of a gate, with Unix times, s; without a decision it is open."""
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


def review_id_of(run_id: str, name: str) -> str:
    """Return the id of a gate: unique in the store, and stable."""
    return uuid_of(f"{run_id}/{name}/review")


async def decide_at_gate(scope: TaskScope, name: str, request: ReviewRequest) -> ReviewDecision:
    """Return a gate's decision; fills in the request's ids. May raise `ReviewTimeoutError`, `ReviewOpenError`."""
    clock, run_id = scope.ports.clock, scope.order.run_id
    request = scope.clean(request)
    request = request.replace(review_id=review_id_of(run_id, name), run_id=run_id)
    asked, decided = scope.find_recorded(name, ReviewRequested), scope.find_recorded(name, ReviewDecided)
    is_detached = scope.context.is_detached
    question = ReviewRequested.of(request, detached=is_detached) if asked is None else asked.data
    asked_at = clock.now() if asked is None else asked.at
    limit_s = None if asked is None else asked.data.timeout_s
    is_expired = limit_s is not None and asked_at + limit_s <= clock.now()
    if decided is None and asked is not None and asked.data.detached:
        closed = replace(asked.data, detached=False)
        if not is_detached:  # no decision from outside is accepted from here on
            await scope.note(name, closed, until=Persistence.COMMITTED, at=asked_at)
        # All readers must see the same decision, also one after the facts were read (S-REV-128).
        known = await scope.ports.journal.lookup_recorded(scope.order.instance)
        decided = find_fact(known, name, ReviewDecided)
        if decided is not None and is_detached:  # the work after the gate starts now
            await scope.note(name, closed, until=Persistence.SYNCED, at=asked_at)
    if decided is not None:
        decision, decided_at = scope.clean(decided.data), decided.at
    else:
        if is_expired:
            answer = ReviewAnswer(decision=decision_at_timeout(request, question.timeout_s or 0.0), by=TIMEOUT)
        elif is_detached:
            if asked is None or not question.detached:  # a gate that a handler had opened keeps its time
                detached = replace(question, detached=True)
                await scope.note(name, detached, until=Persistence.COMMITTED, at=asked_at)
            scope.effects.reviews.append(review_entry(question, asked_at, None, asked_at))
            raise ReviewOpenError([question.open_since(run_id, asked_at)])
        else:
            if asked is None:
                # A reviewer must not see work that a resumed run would lack.
                await scope.note(name, question, until=Persistence.COMMITTED)
            elif limit_s is not None:
                request = request.replace(timeout=timedelta(seconds=asked_at + limit_s - clock.now()))
            answer = scope.clean(await _ask(scope, request))
        decision, decided_at = ReviewDecided.of(answer), clock.now()
        await scope.note(name, decision, until=Persistence.SYNCED)
    scope.effects.reviews.append(review_entry(question, asked_at, decision, decided_at))
    return decision.answer.decision


async def _ask(scope: TaskScope, request: ReviewRequest) -> ReviewAnswer:
    driver = scope.ports.services.driver
    if driver is not None:
        payload = request.model_dump(mode="json")
        return ReviewAnswer.from_data(cast("Mapping[str, object]", await driver.ask(REVIEW_SERVICE, payload)))
    reviewer = scope.ports.reviewer
    if reviewer is None:
        raise IllegalStateError(f"Run {request.run_id} has no reviewer for its review gates")
    return await reviewer.ask(request)


async def answer_review(reviewer: Reviewer, payload: Mapping[str, object]) -> Mapping[str, object]:
    request = ReviewRequest(**cast("Mapping[str, Any]", payload))
    return (await reviewer.ask(request)).to_data()


def _gate_name(call: str, number: int) -> str:
    return f"{call}-review-{number}"


def tool_reviews(scope: TaskScope, call: str, limits: Sequence[TimeLimit]) -> ToolReviews | None:
    """Return a call's handler, which pauses its time limits (S-REV-88); None: no reviewer, no decision."""
    if scope.context.review_policy is None:
        was_asked = scope.recorded_facts and scope.find_recorded(_gate_name(call, 0), ReviewDecided) is not None
        if not was_asked:
            return None
    return ToolReviews(scope, call, limits)


def can_repeat_at_gate(scope: TaskScope, call: str, *, asks_first: bool) -> bool:
    """Whether to repeat a call that stopped at a gate without other effects (S-REV-89, S-REV-117)."""
    if not scope.recorded_facts:
        return False
    newest, asked = 0, scope.find_recorded(_gate_name(call, 0), ReviewRequested)
    if asked is None:
        return False
    while (later := scope.find_recorded(_gate_name(call, newest + 1), ReviewRequested)) is not None:
        newest, asked = newest + 1, later
    if not asked.data.detached and not (asks_first and newest == 0):
        return False
    decided = scope.find_recorded(_gate_name(call, newest), ReviewDecided)
    if decided is None:
        return True
    intent = scope.find_recorded(call, ToolIntended)
    return decided.data.outside and (intent is None or intent.seq < decided.seq)


class ToolReviews:
    """Asks for one call. Implements `Reviewing`, and `ThreadReviewing` for tools in threads."""

    def __init__(self, scope: TaskScope, call: str, limits: Sequence[TimeLimit]) -> None:
        self._scope = scope
        self._call = call
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._asked = 0
        self._decisions: dict[str, ReviewDecision] = {}  # of this process, by gate
        self._open: set[Future[ReviewDecision]] | None = set()  # of waiting threads; None: the call has ended
        self._lock = threading.Lock()  # guards `_open`: the call may end while a thread starts a question
        self._open_gates: list[OpenReview] = []  # gates that suspended the call

    def restart(self) -> None:
        """Restart the numbering for a repeated call."""
        self._asked = 0

    async def review(self, request: ReviewRequest) -> ReviewDecision:
        name = _gate_name(self._call, self._asked)
        self._asked += 1
        if (decision := self._decisions.get(name)) is not None:
            return decision
        paused = tuple(self._limits)
        for limit in paused:
            limit.pause()
        try:
            decision = await decide_at_gate(self._scope, name, request)
        except ReviewOpenError as suspended:
            self._open_gates += suspended.reviews
            raise
        finally:
            for limit in paused:
                limit.resume()
        if isinstance(decision, Edit) and (redaction := self._scope.context.redaction) is not None:
            # A person edits the placeholders of a call that receives values.
            decision = Edit(await restore_arguments(redaction, self._scope.ports.journal, decision.revised_output))
        self._decisions[name] = decision
        return decision

    def review_from_thread(self, request: ReviewRequest) -> ReviewDecision:
        """Block a thread until the decision; the end of the call raises `CancelledError`."""
        with self._lock:
            if self._open is None:
                raise CancelledError
            asking = asyncio.run_coroutine_threadsafe(self.review(request), self._loop)
            self._open.add(asking)
        try:
            return asking.result()
        finally:
            with self._lock:
                if self._open is not None:
                    self._open.discard(asking)

    def close(self) -> None:
        """End the call: cancel open questions, and refuse further ones."""
        with self._lock:
            left, self._open = self._open or (), None
        for asking in left:
            asking.cancel()

    def check_decided(self) -> None:
        """Raise `ReviewOpenError` again if the call was suspended, even if the tool caught it."""
        if self._open_gates:
            raise ReviewOpenError(self._open_gates)
