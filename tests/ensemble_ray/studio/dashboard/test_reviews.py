"""Reviews in the browser: what is sent, what is decided, and by whom first."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from ensemble_ray import (
    OnTimeoutAction,
    ReviewDecision,
    ReviewHandler,
    ReviewRequest,
    ReviewTimeoutError,
    ReviewTiming,
    WebReviewHandler,
)
from ensemble_ray.events.messages import Message
from ensemble_ray.execute.review.handlers import LocalReviewer
from ensemble_ray.studio.dashboard.hub import Connection, MessageHub, Snapshot
from ensemble_ray.values.reviews import ReviewAnswer
from tests.ensemble_ray.virtual_time import run_in_virtual_time


def asked(review_id: str = "r", **fields: object) -> ReviewRequest:
    """Return a request."""
    values: dict[str, Any] = {
        "task_description": "Draft",
        "task_output": "a text",
        "timing": ReviewTiming.AFTER_EXECUTION,
        "run_id": "run",
        "review_id": review_id,
        **fields,
    }
    return ReviewRequest(**values)


class Web:
    """A handler, with a page that hears everything."""

    def __init__(self) -> None:
        self.hub = MessageHub(Snapshot(most_runs=1, most_iterations=0))
        self.handler = WebReviewHandler(self.hub, timeout=timedelta(minutes=1), on_timeout=OnTimeoutAction.EXIT_EARLY)

    async def open(self, *requests: ReviewRequest) -> list[asyncio.Task[ReviewDecision]]:
        """Ask, and return when all are open."""
        asking = [asyncio.ensure_future(self.handler.review(each)) for each in requests]
        await asyncio.sleep(0)
        assert [each["review_id"] for each in self.handler.open_reviews()] == [each.review_id for each in requests]
        return asking


async def heard(page: Connection) -> list[dict[str, Any]]:
    """Return what waits for a page, but for the first message."""
    return [each for text in await page.take() if (each := json.loads(text))["type"] != "hello"]


def checked(test: Callable[[Web], Awaitable[None]]) -> Callable[[], None]:
    """Run a test on a loop whose time moves when nothing else does."""

    def run() -> None:
        async def body() -> None:
            await test(Web())

        run_in_virtual_time(body())

    run.__doc__, run.__name__ = test.__doc__, test.__name__
    return run


@checked
async def test_what_pages_are_told(web: Web) -> None:
    """S-WEB-50, S-WEB-59, S-WEB-57: all that a reviewer needs; it waits, though the role is checked by nobody here."""
    page = web.hub.join()
    (asking,) = await web.open(
        asked(prompt="Polite?", required_role="lawyer", timeout=90, on_timeout="fail", timing="before_execution")
    )
    assert await heard(page) == [
        {
            "type": "review_requested",
            "run_id": "run",
            "review_id": "r",
            "task_description": "Draft",
            "task_output": "a text",
            "timing": "before_execution",
            "prompt": "Polite?",
            "timeout_ms": 90_000,
            "on_timeout": "fail",
            "required_role": "lawyer",
        }
    ]
    assert not asking.done()
    assert web.handler.decide("r", "approve")
    assert await asking == ReviewDecision.continue_execution()
    assert await heard(page) == [
        {
            "type": "review_decided",
            "run_id": "run",
            "review_id": "r",
            "decision": "approve",
            "by": "WebReviewHandler",
        }
    ]


@checked
async def test_what_is_none_is_left_out(web: Web) -> None:
    """S-WEB-51: zero is without limit, and says no time."""
    page = web.hub.join()
    (asking,) = await web.open(asked(timeout=0))
    assert {"prompt", "required_role", "timeout_ms"}.isdisjoint((await heard(page))[0])
    await asyncio.sleep(10**7)
    assert not asking.done()
    asking.cancel()


@pytest.mark.parametrize(
    ("word", "text", "decision", "verdict"),
    [
        ("approve", None, ReviewDecision.continue_execution(), "approve"),
        ("CONTINUE", "ignored", ReviewDecision.continue_execution(), "approve"),
        ("Edit", "better", ReviewDecision.edit("better"), "edit"),
        ("edit", None, ReviewDecision.edit(""), "edit"),
        ("exit", None, ReviewDecision.exit_early(), "exit"),
        ("exit_early", None, ReviewDecision.exit_early(), "exit"),
        ("whatever", None, ReviewDecision.exit_early(), "exit"),
        ("", None, ReviewDecision.exit_early(), "exit"),
    ],
)
def test_words_of_decisions(word: str, text: str | None, decision: ReviewDecision, verdict: str) -> None:
    """S-WEB-53: in any case."""

    async def body() -> None:
        web = Web()
        page = web.hub.join()
        (asking,) = await web.open(asked())
        assert web.handler.decide("r", word, text)
        assert await asking == decision
        assert (await heard(page))[-1]["decision"] == verdict

    run_in_virtual_time(body())


@checked
async def test_the_first_decision_counts(web: Web) -> None:
    """S-WEB-54: later, unknown and late ones are ignored, and nobody is told of them."""
    page = web.hub.join()
    (asking,) = await web.open(asked())
    assert not web.handler.decide("other", "exit")
    assert web.handler.decide("r", "approve")
    assert not web.handler.decide("r", "exit")
    assert await asking == ReviewDecision.continue_execution()
    assert not web.handler.decide("r", "exit")
    assert [each["type"] for each in await heard(page)] == ["review_requested", "review_decided"]


@pytest.mark.parametrize("action", list(OnTimeoutAction))
def test_nobody_answers_in_time(action: OnTimeoutAction) -> None:
    """S-WEB-55, S-WEB-52: what was announced follows, and pages are told."""

    async def body() -> ReviewDecision | str:
        web = Web()
        page = web.hub.join()
        try:
            return await web.handler.review(asked(timeout=30, on_timeout=action))
        except ReviewTimeoutError as failed:
            return str(failed)
        finally:
            first, last = await heard(page)
            assert first["on_timeout"] == action.value
            assert last == {"type": "review_timed_out", "run_id": "run", "review_id": "r", "action": action.value}
            assert not web.handler.decide("r", "approve")

    expected = {
        OnTimeoutAction.CONTINUE: ReviewDecision.continue_execution(),
        OnTimeoutAction.EXIT_EARLY: ReviewDecision.exit_early_timeout(),
        OnTimeoutAction.FAIL: "Review gate timed out after 30s (on_timeout=fail)",
    }
    assert run_in_virtual_time(body()) == (expected[action], 30.0)


@checked
async def test_a_page_that_leaves_decides_nothing(web: Web) -> None:
    """S-WEB-56: a gate stays open until its own timeout, or until a page that comes back decides it."""
    page = web.hub.join()
    timed, decided = await web.open(asked("timed", timeout=30, on_timeout="continue"), asked("decided"))
    web.hub.detach(page)
    await asyncio.sleep(29)
    assert [each["review_id"] for each in web.handler.open_reviews()] == ["timed", "decided"]
    assert web.handler.decide("decided", "edit", "better")
    assert await decided == ReviewDecision.edit("better")
    assert await timed == ReviewDecision.continue_execution()


@checked
async def test_a_gate_that_nobody_waits_for(web: Web) -> None:
    """S-WEB-61: its run was cancelled: pages hear that it is over."""
    page = web.hub.join()
    (asking,) = await web.open(asked())
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await heard(page))[-1] == {
        "type": "review_decided",
        "run_id": "run",
        "review_id": "r",
        "decision": "exit",
        "by": "(run ending)",
    }
    assert not web.handler.is_open("r")


@checked
async def test_open_gates_as_data(web: Web) -> None:
    """S-WEB-21."""
    asking = await web.open(asked("a", timeout=60), asked("b", timeout=0, prompt="Sure?"))
    first, second = web.handler.open_reviews()
    assert list(first) == [
        *("review_id", "run_id", "task_description", "task_output", "timing", "prompt", "timeout_ms"),
        *("created_at", "expires_at"),
    ]
    assert (first["review_id"], first["run_id"], first["timeout_ms"], first["prompt"]) == ("a", "run", 60_000, None)
    assert str(first["created_at"]).endswith("Z")
    assert str(first["expires_at"]) > str(first["created_at"])
    assert (second["timeout_ms"], second["expires_at"], second["prompt"]) == (None, None, "Sure?")
    for each in asking:
        each.cancel()


@checked
async def test_a_decision_in_the_moment_of_the_request(web: Web) -> None:
    """S-WEB-42, S-WEB-54: pages hear of the request first, so that none keeps a gate that is decided."""
    page, publish = web.hub.join(), web.hub.publish
    deciding = threading.Thread(target=web.handler.decide, args=("r", "approve"))

    def decide_before(run_id: str, message: Message) -> None:
        if message.type == "review_requested":
            deciding.start()
            deciding.join(0.2)  # it is done by then, or waits for this one to be sent
        publish(run_id, message)

    web.hub.publish = decide_before  # type: ignore[method-assign]
    assert await web.handler.review(asked(timeout=0)) == ReviewDecision.continue_execution()
    deciding.join()
    assert [each["type"] for each in await heard(page)] == ["review_requested", "review_decided"]
    assert "review_requested" not in web.hub._snapshot.hello()()


async def both_open(page: Connection) -> None:
    """Return when a page has heard of two gates."""
    requests: list[object] = []
    while len(requests) < 2:
        requests += await heard(page)


def answered(decision: ReviewDecision, by: str = "WebReviewHandler") -> ReviewAnswer:
    """Return an answer."""
    return ReviewAnswer(decision=decision, by=by)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_gates_of_one_run_are_open_at_the_same_time(*, is_wrapped: bool) -> None:
    """S-WEB-58: they have their own ids, and resolve in any order; a notifier before them changes nothing."""

    async def body() -> None:
        web = Web()
        handler = ReviewHandler.notifying(web.handler, lambda _: None) if is_wrapped else web.handler
        reviewer, page = LocalReviewer(handler), web.hub.join()
        by = "NotifyingHandler" if is_wrapped else "WebReviewHandler"
        first, second = (asyncio.ensure_future(reviewer.ask(asked(each))) for each in "ab")
        await both_open(page)
        assert web.handler.decide("b", "edit", "second")
        assert await second == answered(ReviewDecision.edit("second"), by)
        assert not first.done()
        assert web.handler.decide("a", "approve")
        assert await first == answered(ReviewDecision.continue_execution(), by)

    asyncio.run(body())


@checked
async def test_a_gate_that_ends_the_run_closes_the_others(web: Web) -> None:
    """S-WEB-58, S-REV-17, S-REV-37: what waits goes on unchanged, and nobody is asked any more."""
    reviewer, page = LocalReviewer(web.handler), web.hub.join()
    first, second = (asyncio.ensure_future(reviewer.ask(asked(each))) for each in "ab")
    await both_open(page)
    assert web.handler.decide("b", "exit")
    assert await second == answered(ReviewDecision.exit_early())
    assert await first == answered(ReviewDecision.continue_execution(), "(run ending)")
    assert await reviewer.ask(asked("c")) == answered(ReviewDecision.continue_execution(), "(run ending)")
    await asyncio.sleep(0)
    assert web.handler.open_reviews() == []
