"""Gates of a task: what is on record when, what becomes of the task, what a run that goes on asks again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import timedelta

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    ExitReason,
    OutputParsingError,
    Review,
    ReviewDecision,
    ReviewRequest,
    ReviewTimeoutError,
    ReviewTiming,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskStartEvent,
)
from ensemble_ray.execute.review.gates import REVIEW_SERVICE, answer_review, review_id_of
from ensemble_ray.execute.review.handlers import LocalReviewer
from ensemble_ray.facts.runs import ExitRecorded, OutputRecorded, ReviewDecided
from ensemble_ray.ports import Persistence
from ensemble_ray.testing import ScriptedModel
from tests.ensemble_ray.execute.review.gating import AFTER, BEFORE, CONTEXT, Deciding, bench_of
from tests.ensemble_ray.execute.running import Bench, WatchedJournal, named, writer


async def test_an_approved_output_goes_on() -> None:
    """S-REV-19, S-REV-20, S-REV-31: of a handler task too; the request tells all of the gate."""
    handler = Deciding(ReviewDecision.continue_execution())
    result = await bench_of(handler).run()
    assert (result.status, result.output and result.output.raw) == ("completed", "first")
    assert handler.asked == [
        ReviewRequest(
            task_description="Do draft",
            task_output="first",
            timing=ReviewTiming.AFTER_EXECUTION,
            prompt="Polite?",
            review_id=review_id_of("run", AFTER),
            run_id="run",
        )
    ]


class Title(BaseModel):
    """A typed answer."""

    title: str


@pytest.mark.parametrize(
    ("output_type", "text", "parsed", "recorded_parsed"),
    [
        (Title, '{"title": "New"}', Title(title="New"), {"title": "New"}),
        (Title | None, '{"title": "New"}', Title(title="New"), {"title": "New"}),
        (object, "{}", {}, {}),
    ],
)
async def test_an_edit_takes_the_place_of_the_output(
    output_type: type[object], text: str, parsed: object, recorded_parsed: object
) -> None:
    """S-REV-31, S-REV-38, S-EVT-18: raw is the new text, and parsed; the complete event and the record say so."""
    bench = Bench(
        agents={"draft": writer(ScriptedModel('{"title": "Old"}'))},
        context=CONTEXT,
        reviewer=LocalReviewer(Deciding(ReviewDecision.edit(text))),
    )
    bench.tasks["draft"] = bench.tasks["draft"].replace(output_type=output_type, review=Review())
    result = await bench.run()
    output = result.output
    assert output is not None
    assert (output.raw, output.parsed_output, result.status) == (text, parsed, "completed")
    assert output.trace is not None
    assert (output.trace.final_output, output.trace.parsed_output) == (text, parsed)
    assert [event.task_output for event in bench.sink.of(TaskCompleteEvent)] == [output]
    (recorded,) = [fact.data.output_data() for fact in bench.journal.facts() if isinstance(fact.data, OutputRecorded)]
    assert (recorded["raw"], recorded["parsed_output"]) == (text, recorded_parsed)


def typed_bench(handler: object) -> Bench:
    """A task that gives a title, with a gate behind it."""
    bench = Bench(
        agents={"draft": writer(ScriptedModel('{"title": "Old"}'))},
        context=CONTEXT,
        reviewer=LocalReviewer(handler),
    )
    bench.tasks["draft"] = bench.tasks["draft"].replace(output_type=Title, review=Review.required("Good?"))
    return bench


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("New", "Could not find valid JSON in the text: New."),
        ('{"name": "New"}', "JSON could not be deserialized as Title: 'title': Field required."),
        ("", "the text is empty."),
    ],
)
async def test_an_edit_that_does_not_fit_is_refused_and_asked_for_again(text: str, why: str) -> None:
    """S-REV-136, S-REV-137: the prompt of the next gate says why; the edit that fits counts."""
    handler = Deciding(ReviewDecision.edit(text), ReviewDecision.edit('{"title": "New"}'))
    bench = typed_bench(handler)
    result = await bench.run()
    assert result.output is not None
    assert result.output.parsed_output == Title(title="New")
    first, again = handler.asked
    assert first.prompt == "Good?"
    assert again.prompt == (
        f"The edit was refused, since it must fit Title: {why} Edit again, or decide otherwise. Good?"
    )
    assert first.task_output == again.task_output == '{"title": "Old"}'
    assert first.review_id != again.review_id
    assert result.output.trace is not None
    assert [each["verdict"] for each in result.output.trace.metadata["reviews"]] == ["edit", "edit"]


async def test_the_old_output_counts_when_an_edit_was_refused_and_the_reviewer_continues() -> None:
    """S-REV-136: with its type."""
    bench = typed_bench(Deciding(ReviewDecision.edit("New"), ReviewDecision.continue_execution()))
    result = await bench.run()
    assert result.output is not None
    assert (result.output.raw, result.output.parsed_output) == ('{"title": "Old"}', Title(title="Old"))


async def test_a_task_fails_when_its_handler_gives_no_edit_that_fits() -> None:
    """S-REV-138: the third one; the error says why."""
    bench = typed_bench(Deciding(*[ReviewDecision.edit("New")] * 3))
    error = (await bench.run()).error
    assert isinstance(error, OutputParsingError)
    assert "gave 3 edits that do not fit. The edit was refused, since it must fit Title" in str(error)
    assert (error.raw_output, error.attempt_count) == ("New", 3)


@pytest.mark.parametrize("text", ["", "New"])
async def test_an_edit_is_traced_with_what_it_changed(text: str) -> None:
    """S-REV-85: who decided what, when, and both texts."""
    bench = bench_of(Deciding(ReviewDecision.edit(text)))
    result = await bench.run()
    assert result.output is not None
    assert result.output.trace is not None
    (entry,) = result.output.trace.metadata["reviews"]
    assert entry == {
        "review_id": review_id_of("run", AFTER),
        "timing": "after_execution",
        "prompt": "Polite?",
        "asked_at": "1970-01-01T00:16:40+00:00",
        "verdict": "edit",
        "by": "Deciding",
        "decided_at": "1970-01-01T00:16:40+00:00",
        "original": "first",
        "text": text,
    }


@pytest.mark.parametrize(
    ("decision", "reason"),
    [
        (ReviewDecision.exit_early(), ExitReason.USER_EXIT_EARLY),
        (ReviewDecision.exit_early_timeout(), ExitReason.TIMEOUT),
    ],
)
async def test_a_gate_behind_a_task_ends_the_run_with_its_output(decision: ReviewDecision, reason: ExitReason) -> None:
    """S-REV-32, S-REV-34, S-REV-38: the complete event is fired; output and exit are recorded together."""
    bench = bench_of(Deciding(decision))
    result = await bench.run()
    assert (result.status, result.exit_reason, result.error) == ("exited", reason, None)
    assert result.output is not None
    assert result.output.raw == "first"
    assert len(bench.sink.of(TaskCompleteEvent)) == 1
    assert bench.named[-2:] == [("output", "draft#0"), ("task_exited", "draft#0")]
    assert bench.journal.facts()[-1].data == ExitRecorded(reason=reason)


@pytest.mark.parametrize("decision", [ReviewDecision.continue_execution(), ReviewDecision.edit("ignored")])
async def test_a_task_that_may_begin_runs_unchanged(decision: ReviewDecision) -> None:
    """S-REV-11, S-REV-30: also after an edit; it is asked before the start event."""
    starts: list[int] = []
    handler = Deciding(decision)

    def counting(request: ReviewRequest) -> ReviewDecision:
        starts.append(len(bench.sink.of(TaskStartEvent)))
        return handler.review(request)

    bench = bench_of(counting, reviews={"before_review": Review.required("Now?")})
    result = await bench.run()
    assert (result.output and result.output.raw, starts) == ("first", [0])
    assert [(each.timing, each.task_output, each.prompt) for each in handler.asked] == [
        (ReviewTiming.BEFORE_EXECUTION, "", "Now?")
    ]
    assert bench.named[:2] == [("review", BEFORE), ("review_decision", BEFORE)]


async def test_a_task_that_must_not_begin_does_nothing() -> None:
    """S-REV-30: no handler call, no events of it, no output."""
    bench = bench_of(Deciding(ReviewDecision.exit_early_timeout()), reviews={"before_review": Review()})
    result = await bench.run()
    assert (result.status, result.exit_reason, result.output) == ("exited", ExitReason.TIMEOUT, None)
    assert bench.sink.events == ()
    assert bench.named == [("review", BEFORE), ("review_decision", BEFORE), ("task_exited", "draft#0")]


@pytest.mark.parametrize("error", [ReviewTimeoutError("too late"), RuntimeError("no network")])
@pytest.mark.parametrize("gate", ["review", "before_review"])
async def test_what_a_handler_raises_fails_the_task(error: Exception, gate: str) -> None:
    """S-REV-39: with its failed event; the gate stays undecided on record."""
    bench = bench_of(Deciding(error), reviews={gate: Review()})
    result = await bench.run()
    assert (result.status, result.error) == ("failed", error)
    assert [event.cause for event in bench.sink.of(TaskFailedEvent)] == [error]
    assert bench.sink.of(TaskCompleteEvent) == ()
    assert not any(isinstance(fact.data, ReviewDecided) for fact in bench.journal.facts())


async def test_a_gate_is_on_record_before_anybody_is_asked() -> None:
    """S-REV-82: with all that the task did so far; its decision is on the disk before anything follows."""
    journal = WatchedJournal()
    seen: list[list[tuple[str, str]]] = []

    def look(_request: ReviewRequest) -> ReviewDecision:
        seen.append(named(journal.facts()))
        return ReviewDecision.continue_execution()

    bench = bench_of(look, journal=journal)
    await bench.run()
    assert seen == [[("tool_intent", "draft#0/0/handler"), ("tool_result", "draft#0/0/handler"), ("review", AFTER)]]
    assert journal.degrees_of("review", "review_decision") == [
        ("review", Persistence.COMMITTED),
        ("review_decision", Persistence.SYNCED),
    ]


async def test_a_run_without_reviews_records_none() -> None:
    """S-REV-15, S-REV-82: what it records is what it always did."""
    bench = Bench(handlers={"draft": lambda _: "first"})
    bench.tasks["draft"] = bench.tasks["draft"].replace(review=Review(), before_review=Review())
    result = await bench.run()
    assert bench.named == [
        ("tool_intent", "draft#0/0/handler"),
        ("tool_result", "draft#0/0/handler"),
        ("output", "draft#0"),
    ]
    assert result.output is not None
    assert result.output.trace is not None
    assert "reviews" not in result.output.trace.metadata


async def test_what_a_task_cost_does_not_grow_while_it_waits() -> None:
    """S-REV-86: its duration is that of its work; the wait is in the trace."""

    def late(_request: ReviewRequest) -> ReviewDecision:
        bench.clock.advance(600.0)
        return ReviewDecision.continue_execution()

    bench = bench_of(late)
    result = await bench.run()
    assert result.duration_s == 0.0
    assert result.output is not None
    assert result.output.trace is not None
    (entry,) = result.output.trace.metadata["reviews"]
    assert (entry["asked_at"], entry["decided_at"]) == ("1970-01-01T00:16:40+00:00", "1970-01-01T00:26:40+00:00")


class Driver:
    """The driver's services, with a reviewer among them."""

    def __init__(self, reviewer: LocalReviewer) -> None:
        self._reviewer = reviewer
        self.asked: list[str] = []

    async def ask(self, name: str, payload: Mapping[str, object]) -> object:
        """Answer."""
        self.asked.append(name)
        return await answer_review(self._reviewer, payload)

    def notify(self, name: str, payload: Mapping[str, object]) -> None:
        """Do nothing."""


async def test_another_process_asks_the_one_that_started_the_run() -> None:
    """S-REV-49: as data, in both directions."""
    handler = Deciding(ReviewDecision.edit("New"))
    driver = Driver(LocalReviewer(handler))
    bench = Bench(handlers={"draft": lambda _: "first"}, context=CONTEXT, driver=driver)
    bench.tasks["draft"] = bench.tasks["draft"].replace(
        review=Review(timeout=90, on_timeout="fail", required_role="editor")
    )
    result = await bench.run()
    assert result.output is not None
    assert (result.output.raw, driver.asked) == ("New", [REVIEW_SERVICE])
    (asked,) = handler.asked
    assert (asked.timeout, asked.on_timeout, asked.required_role) == (timedelta(seconds=90), "fail", "editor")


async def test_required_role_is_carried_to_the_handler() -> None:
    """S-REV-70: nobody checks it here."""
    handler = Deciding(ReviewDecision.continue_execution())
    await bench_of(handler, reviews={"review": Review(required_role="lawyer")}).run()
    assert [each.required_role for each in handler.asked] == ["lawyer"]


async def test_a_stopped_task_stops_waiting(caplog: pytest.LogCaptureFixture) -> None:
    """S-REV-87: a cancelled run waits for nobody, and its gate is not decided."""
    waiting, cancelled = asyncio.Event(), asyncio.Event()

    async def never(_request: ReviewRequest) -> ReviewDecision:
        waiting.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            cancelled.set()

    bench = bench_of(never)
    with caplog.at_level(logging.WARNING):
        running = asyncio.ensure_future(bench.run(is_stopped=True))
        await waiting.wait()
        running.cancel()
        result = await running
    assert (result.status, cancelled.is_set()) == ("cancelled", True)
    assert not any(isinstance(fact.data, ReviewDecided) for fact in bench.journal.facts())
