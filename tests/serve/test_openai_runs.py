"""The OpenAI API over runs that do as a test says: what was said, who waits, whose client goes away."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from openai import APIError, APIStatusError, AsyncOpenAI, OpenAI
from starlette.types import Message

from ensemble_ray.access.quotas import Account
from ensemble_ray.serve import blocking_run
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.blocking_run import BlockingRun, StreamedText
from ensemble_ray.serve.schemas import NewRun, RunStatus
from tests.scenarios.teams import PATIENCE_S
from tests.serve.http_server import served
from tests.serve.runs_double import RunsDouble, as_service, detail, token

DONE = detail(RunStatus.COMPLETED, "one two")
HI: Any = [{"role": "user", "content": "Hi"}]


def streamed(double: RunsDouble) -> list[str]:
    """The pieces of text of a streamed answer."""
    with served(as_service(double)) as url, OpenAI(base_url=url, api_key="any", max_retries=0) as asking:
        chunks = asking.chat.completions.create(model="team", messages=HI, stream=True)
        return [each.choices[0].delta.content for each in chunks if each.choices[0].delta.content]


def refused(double: RunsDouble) -> APIStatusError:
    """The error that a client gets that waits for the whole answer."""
    with (
        served(as_service(double)) as url,
        OpenAI(base_url=url, api_key="any") as asking,
        pytest.raises(APIStatusError) as found,
    ):
        asking.chat.completions.create(model="team", messages=HI)
    return found.value


def test_tokens_come_as_they_are_said_and_what_was_not_said_at_the_end() -> None:
    """S-SRV-120, S-SRV-121: tokens of other tasks are no content."""
    events = (token("a draft", instance="draft#0"), token("one"), token(" t"))
    assert streamed(RunsDouble(*events, end=DONE)) == ["one", " t", "wo"]


def test_an_answer_that_was_begun_anew_is_an_error() -> None:
    """S-SRV-123: what was sent cannot be taken back, and is no answer; the error says where that is."""
    with pytest.raises(APIError, match="GET /v1/responses/") as found:
        streamed(RunsDouble(token("three"), end=DONE))
    assert found.value.code == "answer_begun_anew"


@pytest.mark.parametrize(
    ("said", "answer", "rest"),
    [
        ((), "ab", "ab"),
        (((0, "a"), (0, "b")), "ab", ""),
        (((0, "a"),), "ab", "b"),
        (((0, "ab\n"),), "ab", ""),
        (((0, "look"), (1, "ab")), "ab", ""),
        (((0, "a"), (0, "a")), "ab", None),
        (((0, "abc"),), "ab", None),
    ],
)
def test_what_is_left_of_an_answer(said: tuple[tuple[int, str], ...], answer: str, rest: str | None) -> None:
    """S-SRV-121, S-SRV-123."""
    text = StreamedText()
    sent = "".join(text.add(each, turn=turn) for turn, each in said)
    assert text.rest(answer) == rest
    if len(said) > 1 and said[-1][0]:
        assert sent == "look\n\nab"


def test_a_run_that_waits_for_people_is_an_error_that_names_the_gates() -> None:
    """S-SRV-112: it is not cancelled, and its answer can be fetched later."""
    waiting = detail(RunStatus.WAITING, "a draft", reviews=["gate-1", "gate-2"])
    double = RunsDouble(end=waiting)
    error = refused(double)
    assert (error.status_code, error.code) == (409, "run_waiting")
    assert "[gate-1, gate-2]" in error.message
    assert "GET /v1/responses/" in error.message
    assert len(double.started) == 1
    double = RunsDouble(token("a"), end=waiting, has_last=False)
    with pytest.raises(APIError, match="gate-1, gate-2"):
        streamed(double)
    assert not double.cancelled


@pytest.mark.parametrize(
    ("status", "raw", "code", "http"),
    [
        (RunStatus.CANCELLED, "a part", "run_cancelled", 502),
        (RunStatus.CANCELLED, None, "run_cancelled", 502),
        (RunStatus.INTERRUPTED, None, "run_interrupted", 503),
        (RunStatus.BUDGET_EXHAUSTED, "", "no_answer", 502),
    ],
)
def test_a_run_without_an_answer_is_an_error(status: RunStatus, raw: str | None, code: str, http: int) -> None:
    """S-SRV-110: never an empty answer."""
    error = refused(RunsDouble(end=detail(status, raw)))
    assert (error.status_code, error.code) == (http, code)


def test_a_spent_budget_is_told_beside_what_there_is() -> None:
    """S-SRV-106: `finish_reason` `length`; a response is `incomplete`. Tokens that nobody counted are null."""
    double = RunsDouble(end=detail(RunStatus.BUDGET_EXHAUSTED, "a part", tokens=None))
    with served(as_service(double)) as url, OpenAI(base_url=url, api_key="any") as asking:
        completion = asking.chat.completions.create(model="team", messages=HI)
        response = asking.responses.create(model="team", input="Hi")
        *_, last = asking.responses.create(model="team", input="Hi", stream=True)
    assert (completion.choices[0].finish_reason, completion.choices[0].message.content) == ("length", "a part")
    assert (completion.usage, response.usage) == (None, None)
    assert (response.status, response.output_text) == ("incomplete", "a part")
    assert last.type == "response.incomplete"


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_run_ends_with_its_connection(is_streamed: bool) -> None:  # noqa: FBT001  a case
    """S-SRV-130."""
    double = RunsDouble(token("one"), has_last=False)
    with served(as_service(double)) as url:
        async with AsyncOpenAI(base_url=url, api_key="any") as asking:
            if is_streamed:
                stream = await asking.chat.completions.create(model="team", messages=HI, stream=True)
                assert (await anext(stream)).choices
                await stream.close()
            else:
                waiting = asyncio.create_task(asking.chat.completions.create(model="team", messages=HI))
                assert await asyncio.to_thread(double.is_started.wait, 60)
                waiting.cancel()
            assert await asyncio.to_thread(double.is_cancelled.wait, 60)
    assert double.cancelled == [double.started[0].run_id]


async def ask_and_leave(double: RunsDouble, key: str | None, **options: Any) -> int:
    """Send a request whose client goes away; gives the status that nobody reads."""
    api = build_api(as_service(double), **options)
    body = json.dumps({"model": "team", "messages": HI}).encode()
    coming: list[Message] = [{"type": "http.request", "body": body}]
    statuses: list[int] = []

    async def receive() -> Message:
        return coming.pop() if coming else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = {"host": "localhost", "content-type": "application/json", **({"idempotency-key": key} if key else {})}
    path = "/v1/chat/completions"
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    async with api.router.lifespan_context(api):
        await api(scope, receive, send)
    return statuses[0]


@pytest.mark.parametrize(("key", "ends", "cancelled"), [(None, True, 1), (None, False, 0), ("k", True, 0)])
async def test_a_run_goes_on_where_its_client_can_come_back(key: str | None, *, ends: bool, cancelled: int) -> None:
    """S-SRV-130: the operator says so, or the request has an `Idempotency-Key`."""
    double = RunsDouble()
    assert await ask_and_leave(double, key, cancel_on_disconnect=ends) == 408
    assert (len(double.started), len(double.cancelled)) == (1, cancelled)


async def test_a_client_that_goes_while_its_run_begins_ends_it() -> None:
    """S-SRV-130: also before anybody knew the run."""
    is_asked, go_on = asyncio.Event(), asyncio.Event()

    class Slow(RunsDouble):
        async def start(
            self, asked: NewRun, *, idempotency_key: str | None = None, account: Account | None = None
        ) -> Any:
            is_asked.set()
            await go_on.wait()
            return await super().start(asked, idempotency_key=idempotency_key)

    double = Slow()
    beginning = asyncio.create_task(BlockingRun.begin(double, NewRun(), idempotency_key=None, ends_with_client=True))
    await is_asked.wait()
    beginning.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    assert double.cancelled == [double.started[0].run_id]


async def test_a_client_that_goes_after_the_answer_ends_nothing() -> None:
    """S-SRV-130."""
    double = RunsDouble(end=DONE)
    run = await BlockingRun.begin(double, NewRun(), idempotency_key=None, ends_with_client=True)
    assert (await run.end()).status == "completed"
    await run.detach()
    assert not double.cancelled


async def test_a_client_that_goes_after_a_decision_ends_its_run() -> None:
    """S-SRV-130, S-INT-26: the run was seen waiting, with all of its gates decided, and goes on: that was no answer."""
    goes_on = asyncio.Event()

    class Decided(RunsDouble):
        async def wait(self, run_id: str, timeout_s: float) -> Any:
            if not self.is_started.is_set():
                self.is_started.set()
                return detail(RunStatus.WAITING)
            goes_on.set()
            return await super().wait(run_id, timeout_s)

    double = Decided()
    run = BlockingRun(double, "r", ends_with_client=True)
    waiting = asyncio.create_task(run.end_or_gate())
    async with asyncio.timeout(PATIENCE_S):
        await goes_on.wait()
    waiting.cancel()
    await asyncio.wait({waiting})
    await run.detach()
    assert double.cancelled == ["r"]


async def test_a_run_that_nothing_goes_on_with_is_told_as_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-INT-26: all of its gates are decided; its client is answered, where what drives it stays away."""
    monkeypatch.setattr(blocking_run, "_DECIDED_LOOK_S", 0.0)
    monkeypatch.setattr(blocking_run, "_DECIDED_LOOKS", 3)
    double = RunsDouble(end=detail(RunStatus.WAITING))
    found = await BlockingRun(double, "r", ends_with_client=True).end_or_gate()
    assert (found.status, list(found.reviews)) == (RunStatus.WAITING, [])


async def test_a_run_ends_though_its_request_is_cancelled_meanwhile() -> None:
    """S-SRV-130: as Serve cancels a request, together with what was called for it, while the run is being ended."""
    has_begun, may_go_on = asyncio.Event(), asyncio.Event()
    ended: list[str] = []

    class Slow:
        async def cancel(self, run_id: str) -> None:
            has_begun.set()
            await may_go_on.wait()
            ended.append(run_id)

    leaving = asyncio.create_task(BlockingRun(cast("Any", Slow()), "a", ends_with_client=True).detach())
    await has_begun.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    may_go_on.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert ended == ["a"]
