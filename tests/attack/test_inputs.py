"""Hostile texts in inputs, arguments, results and answers: a paid run and the endpoint survive them."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from httpx import ASGITransport, AsyncClient
from pydantic import BaseModel

from ensemble_ray import (
    Agent,
    AgentTool,
    CaptureMode,
    Ensemble,
    OpenAIChatModel,
    OutputParsingError,
    RetryPolicy,
    Task,
    TaskExecutionError,
    ToolCall,
    ToolResult,
    tool,
)
from ensemble_ray.serve.api import build_api
from ensemble_ray.testing import Fault, ModelServer, Reply, ScriptedModel
from tests.command_line import COMMAND, environment_of
from tests.processes import own_directory
from tests.serve.driving import driven

#: Half of a surrogate pair, and what becomes of it.
HALF, WHOLE = "\ud800", "\ufffd"
NESTED = "[" * 200_000 + "]" * 200_000
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the traces of capture mode full go to a folder of the test."""
    monkeypatch.chdir(tmp_path)


def model_of(server: ModelServer) -> OpenAIChatModel:
    """A model at that server."""
    return OpenAIChatModel("m", base_url=server.base_url, api_key="sk-test")


def team_of(server: ModelServer, *tools: object, **fields: object) -> Ensemble:
    """One agent with these tools, asked about {topic}."""
    agent = Agent(role="Writer", goal="Write", tools=tools, llm=model_of(server))
    task = Task(description="Write about {topic}", expected_output="A text", agent=agent, **fields)  # type: ignore[arg-type]
    return Ensemble(tasks=[task], capture_mode=CaptureMode.FULL, retry=None)


def sent_to(server: ModelServer) -> list[str]:
    """The bodies that came, as UTF-8; what they say is UTF-8 too."""
    texts = [request.raw.decode() for request in server.requests]
    for request in server.requests:
        json.dumps(request.body, ensure_ascii=False).encode()
    return texts


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_is_done_when_its_inputs_and_answers_hold_half_a_pair(stream: bool) -> None:  # noqa: FBT001
    """S-SEC-56: input, key, definition and answer; the request is UTF-8, and so is all that the run gives."""
    tokens: list[str] = []
    with ModelServer(
        [Reply(text=f"an{HALF}swer", fragments=["an", HALF, "swer ", "\ud83d", "\ude00", HALF])]
    ) as server:
        agent = Agent(role=f"Wri{HALF}ter", goal=f"Write{HALF}", background=f"b{HALF}", llm=model_of(server))
        task = Task(description=f"About {{topic}} {HALF}", expected_output=f"A{HALF}", agent=agent)
        team = Ensemble(tasks=[task], capture_mode=CaptureMode.FULL, on_token=lambda event: tokens.append(event.token))
        output = (
            team.run({"topic": f"ti{HALF}des", f"k{HALF}": 1}, options=None, runtime="inline")
            if not stream
            else (team.replace(stream=True).run({"topic": f"ti{HALF}des"}, runtime="inline"))
        )
        [sent] = sent_to(server)
    assert f"About ti{WHOLE}des {WHOLE}" in json.loads(sent)["messages"][1]["content"]
    assert output.raw == (f"an{WHOLE}swer \U0001f600{WHOLE}" if stream else f"an{WHOLE}swer")
    assert "".join(tokens) == (output.raw if stream else "")
    assert output.task_outputs[0].agent_role == f"Wri{WHOLE}ter"
    assert output.trace is not None
    output.trace.to_json().encode()
    output.model_dump_json()


class Echo(AgentTool):
    """Gives its input back."""

    name = "echo"
    description = "Echoes"

    def execute(self, text: str, /) -> ToolResult:
        """Echo."""
        return ToolResult.success(text[:100])


class Asked(BaseModel):
    """What a typed function takes."""

    items: list[str]


@tool
def repeat(text: str) -> list[str]:
    """Repeat a text."""
    return [text, HALF]


@tool
def count(asked: Asked) -> int:
    """Count items."""
    return len(asked.items)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("repeat", NESTED, "Tool error: invalid arguments"),
        ("repeat", f'{{"text": {NESTED}}}', "Tool error: invalid arguments"),
        ("count", f'{{"asked": {{"items": {NESTED}}}}}', "Tool error: invalid arguments"),
        ("echo", NESTED, "["),
        ("echo", f'{{"input": {NESTED}}}', '{"input": ['),
        ("unknown", NESTED, "Error: Unknown tool"),
        ("repeat", '{"text": "\\ud800"}', f'["{WHOLE}","{WHOLE}"]'),
        ("repeat", f'{{"text": "{HALF}"}}', f'["{WHOLE}","{WHOLE}"]'),
        ("echo", '{"input": "\\udcff"}', WHOLE),
    ],
    ids=["nested", "nested value", "nested typed", "nested text", "nested input", "unknown", "escape", "half", "input"],
)
def test_the_model_is_told_and_the_run_goes_on_when_arguments_are_hostile(name: str, arguments: str, told: str) -> None:
    """S-SEC-55, S-SEC-56: a tool error or the tool's result, never a `RecursionError` or the end of the run."""
    with ModelServer([ToolCall(f"c{HALF}", name, arguments), "done"]) as server:
        output = team_of(server, repeat, count, Echo()).run({"topic": "tides"}, runtime="inline")
        _, second = server.requests
        result = second.messages[-1]
    assert output.raw == "done"
    assert (result["role"], result["tool_call_id"]) == ("tool", f"c{WHOLE}")
    assert str(result["content"]).startswith(told)
    assert output.trace is not None
    output.trace.to_json().encode()


class Place(BaseModel):
    """A typed answer."""

    name: str
    parts: list[str] = []


@pytest.mark.parametrize("answer", ['{"name": "\\ud800"}', f'Here: {{"name": "{HALF}"}}'])
def test_a_typed_answer_is_parsed_when_it_holds_half_a_pair(answer: str) -> None:
    """S-SEC-56: at the first attempt, which has been paid for."""
    with ModelServer([answer]) as server:
        output = team_of(server, output_type=Place).run({"topic": "tides"}, runtime="inline")
        assert len(server.requests) == 1
    assert output.task_outputs[0].parsed_output == Place(name=WHOLE)


@pytest.mark.parametrize("answer", [NESTED, f'{{"name": {NESTED}}}', f"```json\n{NESTED}\n```", '{"a":' * 100_000])
def test_a_typed_answer_does_not_parse_when_it_is_nested_too_deeply(answer: str) -> None:
    """S-SEC-55: corrected, then an `OutputParsingError`."""
    with ModelServer(answer) as server:
        with pytest.raises(OutputParsingError):
            team_of(server, output_type=Place, max_output_retries=1).run({"topic": "tides"}, runtime="inline")
        assert len(server.requests) == 2


def test_a_handlers_output_is_whole_when_it_holds_half_a_pair() -> None:
    """S-SEC-56: also what Python code gives is sent on and written."""
    first = Task(description="Read", expected_output="A text", handler=lambda _: f"from a file: {HALF}")
    with ModelServer(["done"]) as server:
        last = Task(description="Sum up", expected_output="A line", context=[first], llm=model_of(server))
        output = Ensemble(tasks=[first, last]).run(runtime="inline")
        [sent] = sent_to(server)
    assert output.task_outputs[0].raw == f"from a file: {WHOLE}"
    assert f"from a file: {WHOLE}" in json.loads(sent)["messages"][1]["content"]


def test_log_lines_are_bounded_when_an_endpoint_and_a_model_write_pages(caplog: pytest.LogCaptureFixture) -> None:
    """S-SEC-58: retries, unknown tools and failing tools, each one line; the frames of a tool's own code may follow."""
    page = "\x1b[2J\nERROR forged line\r" * 5000

    @tool
    def fail(text: str) -> str:
        """Fail."""
        raise ValueError(text)

    script = [
        Fault(status=503, message=page),
        [ToolCall("1", page, page), ToolCall("2", "fail", json.dumps({"text": page}))],
        Fault(status=400, message=page),
    ]
    with ModelServer(script) as server, caplog.at_level(logging.WARNING):
        team = team_of(server, fail).replace(retry=RetryPolicy(first_delay=0.01))
        with pytest.raises(TaskExecutionError) as caught:
            team.run({"topic": page}, runtime="inline")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("ensemble_ray")]
    assert len(lines) >= 3
    for line in lines:
        assert len(line) < 3000
        first, _, frames = line.partition("\n")
        assert first.isprintable()
        assert "forged" not in frames
    assert len(str(caught.value.__cause__)) < 1500


@asynccontextmanager
async def endpoint(team: Ensemble) -> AsyncGenerator[AsyncClient, None]:
    """The HTTP interface of a team."""
    api = build_api(driven(team))
    transport = ASGITransport(api, raise_app_exceptions=False)
    async with api.router.lifespan_context(api), AsyncClient(transport=transport, base_url="http://team") as client:
        yield client


async def _post(client: AsyncClient, body: str) -> tuple[int, dict[str, object]]:
    response = await client.post("/runs?wait=60", content=body, headers={"content-type": "application/json"})
    response.content.decode()
    found = response.json()
    json.dumps(found, ensure_ascii=False).encode()
    return response.status_code, found


async def test_the_endpoint_answers_when_inputs_and_answers_hold_half_a_pair(home: str) -> None:
    """S-SEC-100: a run that was paid for is given to its client."""
    task = Task(description="About {topic}", expected_output="A text", llm=ScriptedModel(f"an{HALF}swer"))
    async with endpoint(Ensemble(tasks=[task])) as client:
        status, found = await _post(client, '{"inputs": {"topic": "\\ud800"}}')
    assert (status, found["status"]) == (200, "completed"), home
    result = found["result"]
    assert isinstance(result, dict)
    assert (result["raw"], result["tasks"][0]["description"]) == (f"an{WHOLE}swer", f"About {WHOLE}")


async def test_the_endpoint_says_what_failed_when_the_error_holds_half_a_pair(home: str) -> None:
    """S-SEC-100: errors of user code, of inputs and of ids are answers too."""
    failing = Task(description="About {topic}", expected_output="A text", llm=ScriptedModel(ValueError(f"no{HALF}")))
    async with endpoint(Ensemble(tasks=[failing], retry=None)) as client:
        failed, told = await _post(client, '{"inputs": {"topic": "\\ud800"}}')
        extra, why = await _post(client, '{"inputs": {"topic": "x", "\\ud800": 1}}')
        misnamed, _ = await _post(client, '{"inputs": {"topic": "x"}, "run_id": "\\ud800"}')
        unknown, _ = await _post(client, '{"\\ud800": 1}')
        nested, _ = await _post(client, f'{{"inputs": {{"topic": {NESTED}}}}}')
    assert (failed, extra, misnamed, unknown) == (502, 422, 400, 422), home
    assert why["code"] == "INPUTS_UNKNOWN"
    assert 400 <= nested < 500
    assert f"no{WHOLE}" in str(told["causes"])


TEAM = """
tasks:
  - name: note
    description: "About {topic}"
    expected_output: A text
    llm: openai:m
"""


def test_the_command_line_prints_the_answer_when_it_cannot_be_encoded() -> None:
    """S-SEC-56: an argument that is no UTF-8, and an answer with half a pair; a strict UTF-8 stdout."""
    with own_directory() as place, ModelServer(lambda request: f"{request.text[:20]} {HALF}") as server:
        (place / "team.yaml").write_text(TEAM, encoding="utf-8")
        environment = environment_of(place, server, PYTHONIOENCODING="utf-8:strict")
        command = [*COMMAND, "run", "team.yaml", "--input", b"topic=\xff"]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, timeout=300, check=False)  # noqa: S603
        [sent] = sent_to(server)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    assert WHOLE in done.stdout.decode()
    assert f"About {WHOLE}" in sent
