"""Agents of other systems in a team: a small server made with the official SDK, and our own endpoint, over real HTTP."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel

from ensemble_ray import (
    Agent,
    AgentExecutionError,
    AgentTool,
    Ensemble,
    OpenTelemetryListener,
    RemoteAgent,
    RunState,
    Task,
    TaskExecutionError,
    TokenEvent,
    ToolCall,
    ToolConfigurationError,
    ToolResult,
    UnknownOutcomeError,
    ValidationError,
    resume,
)
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.process.context import use_traceparent
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.callers import CallerCache
from ensemble_ray.teamfile import load_ensemble
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from ensemble_ray.tools.a2a import client as a2a_client
from tests.serve.driving import driven
from tests.serve.http_server import served_app
from tests.serve.keys import make_key
from tests.serve.remote_agents import Remote, served_remote
from tests.serve.test_a2a import question
from tests.template import ForkedProgram


@pytest.fixture(autouse=True)
def inline(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs live in this process."""
    monkeypatch.setenv("ENSEMBLE_RAY_RUNTIME", "inline")


@pytest.fixture
def remote() -> Remote:
    """What a remote agent does."""
    return Remote()


@pytest.fixture
def url(remote: Remote) -> Iterator[str]:
    """Where it is."""
    with served_remote(remote) as served:
        yield served


def team(agent: Agent, word: str, **fields: Any) -> Ensemble:
    """One task, whose last word says what the remote agent does."""
    options = {name: fields.pop(name) for name in ("stream", "on_unknown", "listeners") if name in fields}
    task = Task(name="paint", description="Paint", expected_output=f"say-{word}", agent=agent, **fields)
    return Ensemble(tasks=[task], **options)


def ask(tool: AgentTool, text: str) -> ToolResult:
    """What a tool gives."""
    found = tool.execute(text)
    assert isinstance(found, ToolResult)
    return found


@pytest.mark.parametrize("streams", [True, False])
def test_a_remote_agent_does_a_task(streams: bool) -> None:  # noqa: FBT001  a case
    """S-INT-80, S-INT-82: the prompt goes, with the idempotency key as id and the deadline beside; the artifact comes."""
    remote = Remote()
    with served_remote(remote, streams=streams) as url:
        output = team(RemoteAgent(url, role="Painter", headers={"X-Key": "secret"}), "well").run()
        replied = team(RemoteAgent(url), "reply").run()
    assert (output.raw, replied.raw) == ("one two", "at once")
    assert output.task_outputs[0].agent_role == "Painter"
    asked = remote.asked[0]
    assert "Paint" in asked.parts[0].text
    assert len(asked.message_id) == 36
    assert datetime.fromisoformat(remote.metadata[0]["deadline"]) > datetime.now(UTC)
    assert {each.get("x-key") for each in remote.headers[:2]} == {"secret"}


async def test_its_requests_are_part_of_the_span_of_the_call(remote: Remote, url: str) -> None:
    """S-INT-37: all of them; a header of the user's own wins."""
    kept = InMemorySpanExporter()
    listener = OpenTelemetryListener(span_processor=SimpleSpanProcessor(kept), meter_provider=MeterProvider())
    await team(RemoteAgent(url), "well", listeners=[listener]).arun()
    listener.close()
    (call,) = [each for each in kept.get_finished_spans() if each.name.startswith("chat")]
    assert call.context is not None
    span = f"00-{call.context.trace_id:032x}-{call.context.span_id:016x}-01"
    assert [each.get("traceparent") for each in remote.headers] == [span] * 2
    with use_traceparent(span):
        await asyncio.to_thread(ask, RemoteAgent(url, headers={"Traceparent": "mine"}).as_tool(), "say-well")
    assert [each.get("traceparent") for each in remote.headers[2:]] == ["mine"] * 2
    await team(RemoteAgent(url), "well").arun()
    assert [each.get("traceparent") for each in remote.headers[4:]] == [None] * 2


async def test_pieces_of_its_answer_are_tokens(url: str) -> None:
    """S-INT-82."""
    events = [each async for each in team(RemoteAgent(url), "well", stream=True).stream()]
    assert [each.token for each in events if isinstance(each, TokenEvent)] == ["one ", "two"]


class Fish(BaseModel):
    """What a typed task answers."""

    name: str
    fins: int


def test_its_data_is_a_typed_answer(url: str) -> None:
    """S-INT-82: a data part is the answer of a task with an output type."""
    output = team(RemoteAgent(url), "data", output_type=Fish).run()
    assert output.task_outputs[0].parsed_output == Fish(name="ray", fins=2)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("fail", "it failed: no ink"),
        ("ask", "waits for input on its task '.*', which a team cannot provide: Which colour"),
    ],
)
def test_its_failures_and_questions_fail_the_task(url: str, remote: Remote, word: str, text: str) -> None:
    """S-INT-83: a task that asks for input is cancelled there; as a tool both are told to the model (S-INT-85)."""
    with pytest.raises(TaskExecutionError) as found:
        team(RemoteAgent(url), word).run()
    cause = found.value.__cause__
    assert isinstance(cause, AgentExecutionError)
    told = ask(RemoteAgent(url).as_tool(), f"say-{word}")
    for each in (str(cause), told.error_message or ""):
        assert re.search(text, each), each
    assert len(remote.cancelled) == (2 if word == "ask" else 0)


async def test_a_cancelled_run_cancels_the_task_there(url: str, remote: Remote) -> None:
    """S-INT-83, S-INT-56."""
    run = team(RemoteAgent(url), "hang").start()
    assert await asyncio.to_thread(remote.is_told.wait, 60)
    await run.acancel()
    await run.ajoin()
    assert run.state is RunState.CANCELLED
    assert len(remote.cancelled) == 1


async def test_what_takes_too_long_is_cancelled_there(url: str, remote: Remote) -> None:
    """S-INT-83: also for a tool, whose outcome is then unknown, and that of a message that led to no task yet."""
    assert (await team(RemoteAgent(url), "well").arun()).raw == "one two"  # the SDK is loaded, which takes its time
    limit_s = 8  # for a card and a message, on a machine with much else to do
    late = team(RemoteAgent(url, timeout=limit_s), "hang").start()
    tool = RemoteAgent(url).as_tool(timeout=limit_s)
    async with asyncio.timeout(120):
        *told, _ = await asyncio.gather(
            *(asyncio.to_thread(ask, tool, f"say-{word}") for word in ("hang", "mute")), late.ajoin()
        )
    with pytest.raises(TaskExecutionError) as found:
        late.result()
    said = f"Outcome unknown: Remote agent {url}: no answer within {limit_s} s"
    assert said in str(found.value.__cause__)
    assert [(each.error_message or "")[: len(said)] for each in told] == [said] * 2
    assert len(remote.cancelled) == 2


def test_a_lost_stream_is_taken_up_by_its_task(url: str, remote: Remote) -> None:
    """S-INT-84: once the task is known nothing is sent again; an answer that was lost is asked for by its id."""
    remote.cuts = 1
    assert team(RemoteAgent(url), "slow").run().raw == "one two"
    assert (len(remote.asked), remote.cuts) == (1, 0)


def test_a_redirect_is_not_followed_and_a_refusal_is_told(
    url: str, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-INT-81, S-INT-83: keys go to nobody else, and stand in no error."""
    monkeypatch.setattr(a2a_client, "_AGAIN_S", (0.0,))
    for status, text in ((307, "Redirects are not followed"), (401, "It requires a valid key"), (503, "HTTP 503")):
        remote.refusal = status
        with pytest.raises(TaskExecutionError) as found:
            team(RemoteAgent(url, headers={"X-Key": "secret"}), "well").run()
        assert text in str(found.value.__cause__)
        assert "secret" not in str(found.value.__cause__)
    with pytest.raises(ToolConfigurationError, match="its card cannot be read: HTTP 503"):
        RemoteAgent.discover(url)


def test_a_card_that_names_another_host_is_not_followed() -> None:
    """S-INT-81."""
    remote = Remote()
    remote.card_url = "http://other.example/rpc"
    with served_remote(remote) as url:
        told = ask(RemoteAgent(url).as_tool(), "say-well")
    assert "its card names [http://other.example/rpc], which are other hosts" in (told.error_message or "")
    assert not remote.asked


def test_nobody_there_is_told_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-INT-83: when no connection was made; nothing was sent, so that nothing is unknown."""
    monkeypatch.setattr(a2a_client, "_AGAIN_S", (0.0,))
    told = ask(RemoteAgent("http://127.0.0.1:9").as_tool(), "well")
    assert (told.error_message or "").startswith("Remote agent http://127.0.0.1:9: its card cannot be read")


_FILE = """
agents:
  far: {{role: Far, goal: Answer, runner_effect: {effect}, a2a: {{url: "{url}", headers: {{x-key: {{env: FAR_KEY}}}}}}}}
tasks:
  paint: {{description: Paint, expected_output: {word}, agent: far}}
"""


def _kill_in_call(file: Path, home: str, is_asked: threading.Event) -> None:
    """Run a team file in a process of its own, and kill that when the remote agent is asked."""
    command = [sys.executable, "-m", "ensemble_ray", "run", str(file), "--run-id", "killed"]
    environment = {**os.environ, "ENSEMBLE_RAY_HOME": home, "FAR_KEY": "secret"}
    with ForkedProgram[bytes](
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as program:
        try:
            assert is_asked.wait(timeout=120)
        finally:
            program.kill()  # it would wait for its remote agent for half an hour


def test_a_call_of_unknown_outcome_is_flagged(
    remote: Remote, url: str, home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-INT-84, S-DUR-145: the process died while the remote agent worked; it is not asked again, once that is decided."""
    monkeypatch.setenv("FAR_KEY", "secret")
    file = tmp_path / "far.yaml"
    file.write_text(_FILE.format(effect="once", url=url, word="say-hang"), encoding="utf-8")
    _kill_in_call(file, home, remote.is_asked)
    team = load_ensemble(str(file))
    with pytest.raises(ValidationError, match="stays interrupted: the runner of task 'paint#0' was called"):
        resume("killed", team)
    with pytest.raises(TaskExecutionError) as found:
        resume("killed", team.replace(on_unknown="fail"))
    assert isinstance(found.value.__cause__, UnknownOutcomeError)
    assert len(remote.asked) == 1
    assert any(each.get("x-key") == "secret" for each in remote.headers)
    record = b"".join(each.read_bytes() for each in Path(home).rglob("*") if each.is_file())
    assert b"secret" not in record


def test_an_idempotent_call_finds_the_run_that_there_is(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-INT-84, S-INT-77: our endpoint is asked with the same message id, and has not begun another run."""
    monkeypatch.setenv("FAR_KEY", "secret")
    is_asked, may_answer = threading.Event(), threading.Event()

    def answer(_call: ScriptedCall) -> str:
        is_asked.set()
        assert may_answer.wait(timeout=60)
        return "from afar"

    model = ScriptedModel(otherwise=answer)
    with served_app(build_api(driven({"far": question(llm=model)}))) as endpoint:
        file = tmp_path / "far.yaml"
        file.write_text(_FILE.format(effect="idempotent", url=f"{endpoint}/a2a/far", word="say-well"), encoding="utf-8")
        _kill_in_call(file, home, is_asked)
        may_answer.set()
        assert resume("killed", load_ensemble(str(file))).raw == "from afar"
    assert len(model.calls) == 1


def test_an_agent_is_made_of_its_card(url: str, home: str) -> None:
    """S-INT-80, S-INT-84: name and description; one that may be asked again says so."""
    known = RemoteAgent.discover(url, goal="Mine")
    assert (known.role, known.goal, known.runner_effect) == ("Painter", "Mine", None)
    with served_app(build_api(driven({"team": question()}))) as endpoint:
        ours = RemoteAgent.discover(f"{endpoint}/a2a/team")
    assert (ours.role, ours.runner_effect) == ("team", "idempotent")


async def test_a_team_of_an_endpoint_is_an_agent_and_a_tool(home: str) -> None:
    """S-INT-80, S-INT-85: with a key; a model calls it and reads its answer."""
    file = KeyFile(Path(home))
    remote = question(llm=ScriptedModel(otherwise="from afar"), stream=True)
    with served_app(build_api(driven({"far": remote}), callers=CallerCache(file))) as endpoint:
        key = make_key(file)
        far = RemoteAgent(f"{endpoint}/a2a/far", headers=key)
        events = [each async for each in team(far, "well", stream=True).stream()]
        assert "".join(each.token for each in events if isinstance(each, TokenEvent)) == "from afar"
        model = ScriptedModel(
            ToolCall("c1", "ask_far", '{"input": "tides"}'), lambda call: f"read {call.messages[-1].content}"
        )
        near = Agent(role="Near", goal="Ask", tools=[far.as_tool()], llm=model)
        assert (await team(near, "well").arun()).raw == "read from afar"
        refused = await asyncio.to_thread(ask, RemoteAgent(f"{endpoint}/a2a/far").as_tool(), "tides")
    assert "HTTP 401" in (refused.error_message or "")
