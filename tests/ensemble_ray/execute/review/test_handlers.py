"""Ready-made handlers, and the one place that asks a run's handler."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from ensemble_ray import ExitEarlyError, ReviewDecision, ReviewHandler, ReviewRequest, ReviewTiming, ValidationError
from ensemble_ray.execute.review.handlers import LocalReviewer
from ensemble_ray.values.reviews import ReviewAnswer
from tests.ensemble_ray.virtual_time import run_in_virtual_time

REQUEST = ReviewRequest(task_description="Draft", timing=ReviewTiming.AFTER_EXECUTION)


async def decided_by(handler: object) -> ReviewDecision:
    """What a run's handler decides."""
    return (await LocalReviewer(handler).ask(REQUEST)).decision


def test_auto_approval_approves_at_once() -> None:
    """S-REV-40."""
    assert run_in_virtual_time(decided_by(ReviewHandler.auto_approve())) == (ReviewDecision.Continue(), 0.0)


@pytest.mark.parametrize("delay", [timedelta(seconds=90), 90.0])
def test_delayed_approval_approves_after_its_delay(delay: timedelta | float) -> None:
    """S-REV-41."""
    handler = ReviewHandler.auto_approve_with_delay(delay)
    assert run_in_virtual_time(decided_by(handler)) == (ReviewDecision.Continue(), 90.0)


@pytest.mark.parametrize(
    ("delay", "text"),
    [
        (None, "delay must not be None"),
        (-1, "delay must not be negative"),
        (timedelta(-1), "delay must not be negative"),
    ],
)
def test_delays_that_are_refused(delay: object, text: str) -> None:
    """S-REV-41."""
    with pytest.raises(ValidationError) as refused:
        ReviewHandler.auto_approve_with_delay(delay)  # type: ignore[arg-type]
    assert str(refused.value) == text


class Editor:
    """An object with `review`."""

    def review(self, request: ReviewRequest) -> ReviewDecision:
        """Decide."""
        return ReviewDecision.edit(request.task_description.upper())


class AsyncEditor(ReviewHandler):
    """A handler of one's own."""

    async def review(self, request: ReviewRequest, /) -> ReviewDecision:
        """Decide."""
        await asyncio.sleep(0)
        return ReviewDecision.edit(request.task_description.upper())


async def edit(request: ReviewRequest) -> ReviewDecision:
    """An async function."""
    return ReviewDecision.edit(request.task_description.upper())


@pytest.mark.parametrize(
    "handler", [Editor(), AsyncEditor(), edit, lambda asked: ReviewDecision.edit(asked.task_description.upper())]
)
async def test_forms_of_handlers(handler: object) -> None:
    """S-REV-22: any callable, sync or async, or an object with `review`."""
    assert await decided_by(handler) == ReviewDecision.Edit("DRAFT")


async def test_who_decided_is_told() -> None:
    """S-REV-82: the handler's name."""
    answer = await LocalReviewer(edit).ask(REQUEST)
    assert answer == ReviewAnswer(decision=ReviewDecision.Edit("DRAFT"), by="edit")
    assert (await LocalReviewer(Editor()).ask(REQUEST)).by == "Editor"


async def forget(_request: ReviewRequest) -> None:
    """Decide nothing."""


@pytest.mark.parametrize(("handler", "returned"), [(forget, "None"), (lambda _: True, "bool")])
async def test_what_is_no_decision_is_refused(handler: object, returned: str) -> None:
    """S-REV-81: the error names the handler and what it returned."""
    name = handler.__name__  # type: ignore[attr-defined]
    with pytest.raises(ValidationError) as refused:
        await decided_by(handler)
    assert str(refused.value) == (
        f"Review handler '{name}' returned {returned}, expected a ReviewDecision. Return "
        "ReviewDecision.continue_execution(), .edit(text) or .exit_early()"
    )


async def test_a_handler_that_ends_the_run_by_an_error_ends_it() -> None:
    """S-REV-81: as its decision would."""

    def leave(_request: ReviewRequest) -> ReviewDecision:
        raise ExitEarlyError("enough", timed_out=True)

    assert await decided_by(leave) == ReviewDecision.ExitEarly(timed_out=True)


class Counting:
    """Decides when it is told to; counts who is being asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.open = 0
        self.most_open = 0
        self.decisions: asyncio.Queue[ReviewDecision] = asyncio.Queue()

    async def review(self, request: ReviewRequest) -> ReviewDecision:
        """Wait for the decision."""
        self.asked.append(request.task_description)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self.decisions.get()
        finally:
            self.open -= 1


def asking(reviewer: LocalReviewer, name: str, *, ends_run: bool = True) -> asyncio.Task[ReviewAnswer]:
    """A request that was made."""
    return asyncio.ensure_future(reviewer.ask(REQUEST.replace(task_description=name, ends_run=ends_run)))


async def test_one_request_is_asked_at_a_time() -> None:
    """S-REV-17: in the order in which they came; one that is given up lets the next one through."""
    handler = Counting()
    reviewer = LocalReviewer(handler)
    first, second, third = (asking(reviewer, name) for name in ("first", "second", "third"))
    await asyncio.sleep(0)
    second.cancel()
    handler.decisions.put_nowait(ReviewDecision.edit("1"))
    handler.decisions.put_nowait(ReviewDecision.edit("3"))
    assert ((await first).decision, (await third).decision) == (ReviewDecision.Edit("1"), ReviewDecision.Edit("3"))
    assert (handler.asked, handler.most_open) == (["first", "third"], 1)


async def test_nobody_is_asked_once_the_run_ends() -> None:
    """S-REV-17, S-REV-37: what waits goes on unchanged; a tool's refusal ends no run."""
    handler = Counting()
    reviewer = LocalReviewer(handler)
    refused = asking(reviewer, "tool", ends_run=False)
    handler.decisions.put_nowait(ReviewDecision.exit_early())
    await refused
    leaving, waiting = asking(reviewer, "leaving"), asking(reviewer, "waiting")
    handler.decisions.put_nowait(ReviewDecision.exit_early())
    assert (await leaving).decision == ReviewDecision.ExitEarly()
    assert await waiting == ReviewAnswer(decision=ReviewDecision.Continue(), by="(run ending)")
    assert handler.asked == ["tool", "leaving"]
