"""Agents of other systems that break, are lost, or answer what nobody understands: what is asked again, and what is flagged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from ensemble_ray import (
    Ensemble,
    RemoteAgent,
    RunState,
    Task,
    TaskExecutionError,
    ToolConfigurationError,
    resume,
)
from ensemble_ray.serve.api import build_api
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.tools.a2a import client as a2a_client
from ensemble_ray.tools.a2a.client import AgentAddress, RemoteAgentError, RemoteAnswer, ask_agent
from tests.serve.driving import driven
from tests.serve.gates import Gate
from tests.serve.http_server import served_app
from tests.serve.remote_agents import Remote, served_remote
from tests.serve.test_a2a import question

SEND = "SendStreamingMessage"


@pytest.fixture(autouse=True)
def inline(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs live in this process, and what is lost is asked again at once."""
    monkeypatch.setenv("ENSEMBLE_RAY_RUNTIME", "inline")
    monkeypatch.setattr(a2a_client, "_AGAIN_S", (0.0,) * 5)


@pytest.fixture
def remote() -> Remote:
    """What a remote agent does."""
    return Remote()


@pytest.fixture
def url(remote: Remote) -> Iterator[str]:
    """Where it is."""
    with served_remote(remote) as served:
        yield served


def answered(**members: Any) -> str:
    """An answer by JSON-RPC."""
    return json.dumps({"jsonrpc": "2.0", "id": "1", **members})


def task(state: str, text: str = "") -> dict[str, Any]:
    """A task as the protocol has it."""
    artifacts = [{"artifactId": "a", "parts": [{"text": text}]}] if text else []
    return {"id": "T", "contextId": "C", "status": {"state": f"TASK_STATE_{state}"}, "artifacts": artifacts}


def error(code: int) -> str:
    """An error of the protocol."""
    return answered(error={"code": code, "message": "boom"})


async def say(agent: RemoteAgent, word: str) -> str:
    """What a task of one agent gives, or why it fails."""
    asked = Task(name="paint", description="Paint", expected_output=f"say-{word}", agent=agent)
    try:
        return (await Ensemble(tasks=[asked]).arun()).raw
    except TaskExecutionError as failed:
        return str(failed.__cause__)


WORKING = f"data: {answered(result={'task': task('WORKING')})}\n\n"


@pytest.mark.parametrize(
    ("method", "instead", "text"),
    [
        (SEND, [502], "HTTP 502"),
        (SEND, [408], "HTTP 408"),
        (SEND, [error(-32603)], "boom"),
        (SEND, [error(-32050)], "boom"),
        (SEND, [answered(result={})], "its answer has neither a task nor a message"),
        (SEND, [answered(result={"task": 5})], "its answer cannot be read"),
        (SEND, ["{"], "JSON"),
        ("GetTask", [401], "says of its task 'T': HTTP 401"),
        ("GetTask", [404], "says of its task 'T': HTTP 404"),
        ("GetTask", [error(-32001)], "says of its task 'T': boom"),
        ("GetTask", [500] * 6, "says of its task 'T': HTTP 500"),
    ],
)
async def test_what_may_have_been_done_is_flagged(
    remote: Remote, url: str, method: str, instead: list[int | str], text: str
) -> None:
    """S-INT-84, S-INT-85: whatever went wrong after the message left, for a task and for a model that asks."""
    remote.instead = {SEND: [WORKING], method: list(instead)}
    said = await say(RemoteAgent(url), "well")
    assert "Outcome unknown: Remote agent" in said
    assert text in said
    remote.instead = {SEND: [WORKING], method: list(instead)}
    told = await asyncio.to_thread(RemoteAgent(url).as_tool().execute, "say-well")
    assert str(getattr(told, "error_message", "")).startswith("Outcome unknown: Remote agent")
    remote.instead = {SEND: [WORKING], method: list(instead)}
    assert "unknown" not in await say(RemoteAgent(url, runner_effect="idempotent"), "well")


@pytest.mark.parametrize(
    ("instead", "text"),
    [(401, "HTTP 401"), (404, "HTTP 404"), (307, "Redirects"), (error(-32602), "refuses: boom")],
)
async def test_what_was_refused_is_not_flagged(remote: Remote, url: str, instead: int | str, text: str) -> None:
    """S-INT-84: nothing was begun, and it is not sent again."""
    for effect in ("once", "idempotent"):
        remote.instead, remote.methods = {SEND: [instead]}, []
        said = await say(RemoteAgent(url, runner_effect=effect), "well")
        assert text in said
        assert "unknown" not in said
        assert remote.methods == ["card", SEND]


async def test_what_comes_later_is_waited_for(remote: Remote, url: str) -> None:
    """S-INT-84: an agent that is being restarted, or has no time, before and after it took the message."""
    done = answered(result=task("COMPLETED", "in the end"))
    remote.instead = {"card": [503, 429], SEND: [429, WORKING], "GetTask": [429, 502, error(-32603), "{", done]}
    assert await say(RemoteAgent(url), "well") == "in the end"
    assert remote.methods == ["card"] * 3 + [SEND] * 2 + ["GetTask"] * 5


async def test_a_stream_that_breaks_is_taken_up_by_its_task(remote: Remote, url: str) -> None:
    """S-INT-84: an error in the middle of a stream is no refusal."""
    broken = f"{WORKING}event: error\ndata: {error(-32603)}\n\n"
    remote.instead = {SEND: [broken], "GetTask": [answered(result=task("COMPLETED", "all the same"))]}
    assert await say(RemoteAgent(url), "well") == "all the same"


def deep(depth: int) -> str:
    """Data that is nested so deeply."""
    return "[" * depth + "]" * depth


def nested(method: str, state: str, depth: int) -> str:
    """The answer to a method: a task in that state, with deep data."""
    told = {**task(state), "artifacts": [{"artifactId": "a", "parts": [{"data": "DATA"}]}]}
    return answered(result={"task": told} if method == SEND else told).replace('"DATA"', deep(depth))


def replied(depth: int) -> str:
    """A message in place of a task, with deep data."""
    message = {"messageId": "m", "role": "ROLE_AGENT", "parts": [{"data": "DATA"}]}
    return answered(result={"message": message}).replace('"DATA"', deep(depth))


@pytest.mark.parametrize(
    ("method", "answer", "is_unknown"),
    [
        (SEND, nested(SEND, "COMPLETED", 60), False),
        ("GetTask", nested("GetTask", "COMPLETED", 60), False),
        ("GetTask", nested("GetTask", "FAILED", 60), False),
        (SEND, replied(60), False),
        (SEND, f"data: {nested(SEND, 'COMPLETED', 60)}\r\n\r\n", False),
        (SEND, nested(SEND, "WORKING", 60), True),
        (SEND, f"data: {nested(SEND, 'WORKING', 60)}\n\n", True),
        ("GetTask", nested("GetTask", "WORKING", 60), True),
        ("GetTask", nested("GetTask", "INPUT_REQUIRED", 60), True),
        (SEND, nested(SEND, "COMPLETED", 20_000), True),
        ("GetTask", nested("GetTask", "COMPLETED", 20_000), True),
    ],
)
async def test_an_answer_that_is_nested_too_deeply_is_an_outcome_if_it_is_final(
    remote: Remote,
    url: str,
    method: str,
    answer: str,
    is_unknown: bool,  # noqa: FBT001  a case
) -> None:
    """S-INT-97: the agent is not asked again; JSON beyond the depth of Python's parser shows no state."""
    for ask in (
        lambda: say(RemoteAgent(url), "well"),
        lambda: asyncio.to_thread(RemoteAgent(url).as_tool().execute, "say-well"),
    ):
        remote.methods, remote.instead = [], {SEND: [WORKING], method: [answer]}
        told: Any = await ask()
        text = str(getattr(told, "error_message", told))
        assert "nested too deeply" in text
        assert ("Outcome unknown" in text) == is_unknown
        assert remote.methods.count(method) == 1


@pytest.mark.parametrize(
    ("pieces", "is_final"),
    [
        (["data: {}\n\ndata: ", '{"status":\ndata: {"state": "TASK_STATE_FAILED"}}\n\n'], True),
        (["data: {}\r\n\r\ndata: {", '"kind": "message"}\r\n\r\n'], True),
        (['data: {"status": {"state": "completed"}}\n\n', "data: {}\n\n"], False),
        (['data: {"status": {"state": ["completed"]}}\n\n'], False),
        (["data: [[\n\ndata: 5\n\n"], False),
    ],
)
def test_the_newest_events_of_a_stream_show_its_end(pieces: list[str], is_final: bool) -> None:  # noqa: FBT001  a case
    """S-INT-97: events before the newest piece were read."""
    newest = a2a_client.NewestAnswer()
    newest.begin(is_stream=True)
    for piece in pieces:
        newest.add(piece.encode())
    assert newest.is_final == is_final


async def test_an_agent_that_is_done_is_not_waited_for_when_its_stream_stays_open(remote: Remote, url: str) -> None:
    """S-INT-98: the task is over."""
    remote.keeps_open = True
    done = {"statusUpdate": {"taskId": "T", "contextId": "C", "status": {"state": "TASK_STATE_COMPLETED"}}}
    spoken = {"artifactUpdate": {"taskId": "T", "contextId": "C", "artifact": task("WORKING", "all")["artifacts"][0]}}
    events = [answered(result=each) for each in ({"task": task("WORKING")}, spoken, done)]
    remote.instead = {SEND: ["".join(f"data: {each}\n\n" for each in events)]}
    async with asyncio.timeout(a2a_client._SILENCE_S / 2):
        assert await say(RemoteAgent(url), "well") == "all"
    assert remote.methods == ["card", SEND]


async def test_a_stream_that_is_silent_is_taken_up_by_its_task(
    remote: Remote, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-INT-84: a connection may be dead without a sign."""
    monkeypatch.setattr(a2a_client, "_SILENCE_S", 0.2)
    assert await say(RemoteAgent(url), "quiet") == "after all"
    assert len(remote.asked) == 1


async def test_an_answer_may_take_as_long_as_the_task() -> None:
    """S-INT-80: an agent without streams says nothing until it is done; a connection stands within its own limit."""
    async with a2a_client.open_http_client(AgentAddress.of("https://a.example", connect_timeout_s=3), 1800) as http:
        assert http.timeout == httpx.Timeout(1800, connect=3)


async def test_a_card_is_waited_for_unless_it_is_all_that_is_asked(remote: Remote, url: str) -> None:
    """S-INT-84: `discover` is told at once; a card that is refused is not asked for again."""
    remote.instead = {"card": [503]}
    with pytest.raises(ToolConfigurationError, match="its card cannot be read: HTTP 503"):
        await RemoteAgent.adiscover(url)
    remote.instead = {"card": [404]}
    assert "its card cannot be read: HTTP 404" in await say(RemoteAgent(url), "well")
    assert remote.methods == ["card", "card"]


async def ask_at(url: str, *, may_repeat: bool) -> str:
    """What an agent answers to one message."""
    asked = ask_agent(AgentAddress.of(url), "say-well", message_id="m", may_repeat=may_repeat, timeout_s=60)
    async with aclosing(asked) as pieces:
        found = [each async for each in pieces]
    assert isinstance(found[-1], RemoteAnswer)
    return found[-1].text


async def test_a_message_whose_task_was_cancelled_is_sent_under_another_id(remote: Remote, url: str) -> None:
    """S-INT-84: the ids follow from the first, up to five; one that must not be repeated is told."""
    cancelled = answered(result={"task": task("CANCELED")})
    ids: list[list[str]] = []
    for _ in range(2):
        remote.instead, remote.asked = {SEND: [cancelled] * 5}, []
        assert await ask_at(url, may_repeat=True) == "one two"
        ids.append([each.message_id for each in remote.asked])
    assert ids[0] == ids[1] != ["m"]
    for may_repeat, count in ((True, 6), (False, 1)):
        remote.instead, remote.methods = {SEND: [cancelled] * count}, []
        with pytest.raises(RemoteAgentError, match="was cancelled there"):
            await ask_at(url, may_repeat=may_repeat)
        assert remote.methods.count(SEND) == count


async def test_a_run_that_was_stopped_goes_on_with_an_agent_that_may_be_asked_again(home: str) -> None:
    """S-INT-84: stopping it cancelled the task there, which the same message would be answered with for ever."""
    gate = Gate("held")
    model = ScriptedModel(gate, otherwise="from afar")
    with served_app(build_api(driven({"far": question(llm=model)}))) as endpoint:
        far = RemoteAgent(f"{endpoint}/a2a/far", runner_effect="idempotent")
        asked = Task(name="paint", description="Paint", expected_output="A line", agent=far)
        run = Ensemble(tasks=[asked]).start(run_id="stopped")
        async with asyncio.timeout(60):
            await gate.is_asked.wait()
        await run.acancel()
        await run.ajoin()
        assert run.state is RunState.CANCELLED
        output = await asyncio.to_thread(resume, "stopped", Ensemble(tasks=[asked]))
        assert output.raw == "from afar"
    assert len(model.calls) == 2
