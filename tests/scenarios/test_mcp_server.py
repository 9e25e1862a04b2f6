"""Teams as tools of an MCP server: the program, asked by the official SDK's client over standard input and output."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import RunState
from ensemble_ray.testing import Fault, ModelServer
from tests.command_line import COMMAND, call_command, environment_of, run_command
from tests.processes import own_directory
from tests.scenarios.teams import PATIENCE_S

mcp = pytest.importorskip("mcp")

pytestmark = [pytest.mark.program, pytest.mark.usefixtures("forked_servers")]

CLOSED = mcp.types.ElicitResult(action="cancel")

TEAM = """
llm: openai:m
inputs: {tone: calm}
tasks:
  - {name: facts, description: "Find facts on {topic}", expected_output: Facts}
  - {name: draft, description: "Write, {tone}", expected_output: Prose, context: [facts]}
"""


GATED = TEAM.replace("context: [facts]", "context: [facts], review: {prompt: Right or wrong}")
#: Two gates that are open at once.
TWICE = """
llm: openai:m
workflow: parallel
review_handler: console
tasks:
  - {name: facts, description: "Find facts on {topic}", expected_output: Facts, review: {prompt: Right or wrong}}
  - {name: songs, description: "Find songs on {topic}", expected_output: Songs, review: {prompt: Right or wrong}}
"""
#: Its tasks are made while it runs.
MANY = """
from ensemble_ray import MapReduceEnsemble, Task

team = MapReduceEnsemble(
    items=["salt"],
    map_task=lambda item: Task(description=f"Read {item}", expected_output="A text"),
    reduce_task=lambda group: Task(description="Join", expected_output="A text", context=group),
    mode="pipelined",
    llm="openai:m",
)
"""
ASKING = f"{GATED}review_handler: console\n"


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with the team file."""
    with own_directory() as directory:
        (directory / "news-team.yaml").write_text(TEAM, encoding="utf-8")
        (directory / "asking.yaml").write_text(ASKING, encoding="utf-8")
        (directory / "twice.yaml").write_text(TWICE, encoding="utf-8")
        yield directory


@asynccontextmanager
async def served(place: Path, models: ModelServer, **options: Any) -> AsyncGenerator[mcp.Client]:
    """A client of the server of the teams; inline."""
    parameters = mcp.StdioServerParameters(
        command=COMMAND[0],
        args=[*COMMAND[1:], "mcp", "news-team.yaml", "asking.yaml", "twice.yaml"],
        env=environment_of(place, models),
        cwd=place,
    )
    async with asyncio.timeout(PATIENCE_S), mcp.Client(parameters, **options) as client:
        yield client


def test_what_is_no_message_is_answered_with_an_error(place: Path, model_server: Callable[..., ModelServer]) -> None:
    """S-INT-89: whatever it is, and the server goes on."""
    ping = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "ping"})
    lines = ["no message", '{"jsonrpc": "2.0", "id": 3}', "[" * 50_000, "\ufffd\x00", ping]
    with subprocess.Popen(  # noqa: S603  our own command
        [*COMMAND, "mcp", "news-team.yaml"],
        env=environment_of(place, model_server()),
        cwd=place,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write("\n".join([*lines, ""]))
        server.stdin.flush()
        answers = [json.loads(server.stdout.readline()) for _ in lines]
        server.stdin.close()
    assert [(each["id"], each["error"]["code"]) for each in answers[:4]] == [(None, -32700)] * 4
    assert answers[4]["id"] == 7


async def test_a_team_is_a_tool_with_its_inputs(place: Path, model_server: Callable[..., ModelServer]) -> None:
    """S-INT-20, S-INT-21, S-INT-22: inputs as schema, the output's text as the result, tasks done as progress."""
    left = ["facts", "the draft"]
    told: list[tuple[float, float | None]] = []

    async def progress(done: float, total: float | None, _message: str | None) -> None:
        told.append((done, total))

    async with served(place, model_server(lambda _: left.pop(0))) as client:
        tool, *_ = (await client.list_tools()).tools
        assert tool.name == "news_team"
        assert tool.input_schema["required"] == ["topic"]
        assert tool.input_schema["properties"]["tone"]["default"] == "calm"
        answer = await client.call_tool("news_team", {"topic": "tea"}, progress_callback=progress)
        assert not answer.is_error
        assert [block.text for block in answer.content] == ["the draft"]
        assert told == [(1, 2), (2, 2)]
        wrong = await client.call_tool("news_team", {"topics": "tea"})
        assert wrong.is_error
        assert "'topics'" in wrong.content[0].text
        with pytest.raises(mcp.MCPError, match="news_team"):
            await client.call_tool("other", {})


async def test_a_run_that_fails_or_waits_is_an_error_of_the_tool(
    place: Path, model_server: Callable[..., ModelServer]
) -> None:
    """S-INT-23: with its causes; also inputs that are missing; a client without forms is told what to do.

    The console belongs to the protocol, and asks nobody.
    """
    left: list[Fault] = [Fault(status=401, message="no such key")]
    async with served(place, model_server(lambda _: left.pop() if left else "fine")) as client:
        failed = await client.call_tool("news_team", {"topic": "tea"})
        assert failed.is_error
        assert "no such key" in failed.content[0].text
        missing = await client.call_tool("news_team", {})
        assert missing.is_error
        assert "topic" in missing.content[0].text
        waiting = await client.call_tool("asking", {"topic": "tea"})
        assert waiting.is_error
        assert "ensemble-ray review" in waiting.content[0].text
    assert sorted(await states(place)) == [RunState.FAILED, RunState.WAITING]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_open_reviews_are_forms_for_the_clients_user(
    place: Path, model_server: Callable[..., ModelServer], mode: str
) -> None:
    """S-INT-23: in both protocols, in place of the console; what is closed stays open, what is declined ends the run.

    Of two open gates each is a form; the command for what is decided is not shown, and the other one ends the run's wait.
    """
    answers: list[tuple[str, dict[str, Any] | None]] = [
        ("accept", {"decision": "edit", "text": "better"}),
        ("decline", None),
        ("cancel", None),
    ]
    shown: list[str] = []

    async def fill_in(_context: object, params: Any) -> Any:
        shown.append(params.message)
        if answers:
            action, content = answers.pop(0)
            return mcp.types.ElicitResult(action=action, content=content)
        if "facts" in params.message:  # the older protocol asks one after the other: this one is no answer at all
            return (
                mcp.types.ErrorData(code=mcp.types.INVALID_REQUEST, message="no line") if mode == "legacy" else CLOSED
            )
        return mcp.types.ElicitResult(action="accept", content={"decision": "approve"})

    async with served(place, model_server(lambda _: "fine"), mode=mode, elicitation_callback=fill_in) as client:
        edited = await client.call_tool("asking", {"topic": "tea"})
        assert [block.text for block in edited.content] == ["better"]
        declined = await client.call_tool("asking", {"topic": "tea"})
        assert "ended early (user_exit_early)" in declined.content[0].text
        closed = await client.call_tool("asking", {"topic": "tea"})
        assert closed.is_error
        assert "waits for a person" in closed.content[0].text
        assert all("Right or wrong" in each and each.endswith("\nfine") for each in shown)
        shown.clear()
        half = await client.call_tool("twice", {"topic": "tea"})
    assert sorted("songs" in each for each in shown) == [False, True]
    await decided(place, closed, model_server("never"))
    assert sorted(await states(place)) == [RunState.COMPLETED] * 3 + [RunState.WAITING]
    assert "facts" in await decided(place, half, model_server("never"))
    assert await states(place) == [RunState.COMPLETED] * 4


async def decided(place: Path, answer: Any, models: ModelServer) -> str:
    """Carry out the only command that an answer names, and return it."""
    (command,) = [line for line in answer.content[0].text.splitlines() if line.startswith("ensemble-ray")]
    words = command.partition("#")[0].split()[1:]
    done = await asyncio.to_thread(run_command, place, environment_of(place, models), *words)
    assert done.returncode == 0, done.stderr
    return command


async def test_a_call_that_is_cancelled_ends_its_run_and_so_does_the_end_of_the_input(
    place: Path, model_server: Callable[..., ModelServer]
) -> None:
    """S-INT-24, S-INT-20: the record says so of a run that goes on."""
    asked, free = threading.Semaphore(0), threading.Semaphore(0)

    def wait(_: object) -> str:
        asked.release()
        free.acquire(timeout=PATIENCE_S)
        return "late"

    try:
        async with served(place, model_server(wait)) as client:
            call = asyncio.ensure_future(client.call_tool("news_team", {"topic": "tea"}))
            assert await asyncio.to_thread(asked.acquire, timeout=PATIENCE_S)
            call.cancel()
            async with asyncio.timeout(PATIENCE_S):
                while await states(place) != [RunState.CANCELLED]:  # noqa: ASYNC110  another process writes it
                    await asyncio.sleep(0.2)
            free.release()  # the server gives one answer after the other
            call = asyncio.ensure_future(client.call_tool("news_team", {"topic": "tea"}))
            assert await asyncio.to_thread(asked.acquire, timeout=PATIENCE_S)
        await asyncio.wait({call}, timeout=PATIENCE_S)
        assert isinstance(call.exception(), mcp.MCPError)
        assert await states(place) == [RunState.CANCELLED] * 2
    finally:
        free.release()


async def states(place: Path) -> list[str]:
    """States of the recorded runs."""
    done = await asyncio.to_thread(call_command, place, environment_of(place), "runs", "--json")
    return [run["state"] for run in json.loads(done.stdout)]


def test_teams_that_cannot_be_served_are_refused(place: Path) -> None:
    """S-INT-20: two of one name, one that is not there, a map-reduce whose tasks are made while it runs."""
    environment = environment_of(place)
    twice = call_command(place, environment, "mcp", "news-team.yaml", "news-team.yaml")
    assert twice.returncode == 2
    assert "'news_team'" in twice.stderr
    assert call_command(place, environment, "mcp", "none.yaml").returncode == 2
    (place / "many.py").write_text(MANY, encoding="utf-8")
    dynamic = call_command(place, environment, "mcp", "many:team")
    assert dynamic.returncode == 2
    assert "many" in dynamic.stderr
