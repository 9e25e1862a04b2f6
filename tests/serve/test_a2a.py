"""Teams as agents of the A2A protocol: the official client asks an endpoint behind a real HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from a2a.client import Client, ClientConfig, ClientFactory
from a2a.types import (
    CancelTaskRequest,
    GetTaskRequest,
    InvalidParamsError,
    Message,
    Part,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
    StreamResponse,
    SubscribeToTaskRequest,
    Task,
    TaskNotCancelableError,
    TaskNotFoundError,
    TaskState,
    UnsupportedOperationError,
)
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.struct_pb2 import Value
from pydantic import BaseModel

from ensemble_ray import Agent, Ensemble, Review
from ensemble_ray import Task as TeamTask
from ensemble_ray.access.admission import Right
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.callers import CallerCache
from ensemble_ray.serve.driving.requests import EndpointLimits
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.tools.a2a.client import IDEMPOTENT_MESSAGES
from tests.serve.driving import driven
from tests.serve.gates import Gate
from tests.serve.http_server import served_app
from tests.serve.keys import make_key
from tests.serve.teams import pair

S = TaskState


class Fish(BaseModel):
    """What the typed team answers."""

    name: str
    fins: int


def question(**fields: Any) -> Ensemble:
    """A team of one task that takes one text."""
    model = fields.pop("llm", None) or ScriptedModel(
        otherwise=lambda call: f"about {call.text.rpartition('Q:')[2][:4]}"
    )
    agent = Agent(role="Answerer", goal="Answer", llm=model)
    options = {key: fields.pop(key) for key in ("stream", "review_wait") if key in fields}
    task = TeamTask(name="answer", description="Q:{question}", expected_output="A line", agent=agent, **fields)
    return Ensemble(tasks=[task], **options)


def teams() -> dict[str, Any]:
    """A team for each case."""
    return {
        "one": question(),
        "two": pair(ScriptedModel(otherwise="two done")),
        "typed": question(llm=ScriptedModel(otherwise='{"name": "ray", "fins": 2}'), output_type=Fish),
        "failing": question(llm=ScriptedModel(otherwise=ValueError("no model"))),
        "asked": question(review=Review.required("Right?"), review_wait="detach"),
    }


@pytest.fixture(scope="module")
def endpoint_home(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where all runs of this file are recorded."""
    return str(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True)
def home(endpoint_home: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take the place of a home for each test: the endpoint serves them all."""
    monkeypatch.setenv("ENSEMBLE_RAY_HOME", endpoint_home)
    return endpoint_home


@pytest.fixture(scope="module")
def endpoint(endpoint_home: str) -> Iterator[str]:
    """All teams behind one endpoint, whose runs live as long as the tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENSEMBLE_RAY_HOME", endpoint_home)
        with served_app(build_api(driven(teams()))) as url:
            yield url


@asynccontextmanager
async def agent_at(url: str, *, streams: bool = True, **options: Any) -> AsyncGenerator[Client]:
    """The official client of the agent at a URL, of its card."""
    async with httpx.AsyncClient(timeout=60, **options) as http:
        config = ClientConfig(httpx_client=http, streaming=streams)
        yield await ClientFactory(config).create_from_url(url)


def said(*parts: Part | str | dict[str, Any], at_once: bool = False, **fields: str) -> SendMessageRequest:
    """A message of a user."""
    made = [each if isinstance(each, Part) else part(each) for each in parts]
    message = Message(message_id=fields.pop("message_id", str(uuid4())), role=Role.ROLE_USER, parts=made, **fields)
    return SendMessageRequest(message=message, configuration=SendMessageConfiguration(return_immediately=at_once))


def part(content: str | dict[str, Any]) -> Part:
    """A part of a message: text or data."""
    return Part(text=content) if isinstance(content, str) else Part(data=ParseDict(content, Value()))


async def ask(client: Client, request: SendMessageRequest) -> list[StreamResponse]:
    """Everything that comes."""
    return [each async for each in client.send_message(request)]


async def task_of(url: str, *parts: Part | str | dict[str, Any], **fields: Any) -> Task:
    """The task that a message leads to, whole."""
    async with agent_at(url, streams=False) as client:
        (found,) = await ask(client, said(*parts, **fields))
        return found.task


def text_of(task: Task) -> str:
    """The text of its artifacts."""
    return "".join(each.text for artifact in task.artifacts for each in artifact.parts)


def last_state(event: StreamResponse) -> int:
    """The state that the last event of a stream tells: where the run came to it before the first one, that is the task."""
    return event.task.status.state if event.HasField("task") else event.status_update.status.state


def told(task: Task) -> str:
    """What its status says."""
    return "".join(each.text for each in task.status.message.parts)


async def test_a_card_says_what_a_team_takes_and_where(endpoint: str) -> None:
    """S-INT-70, S-INT-71: one card a team; of several teams the common path has none, and says where they are."""
    async with httpx.AsyncClient(base_url=endpoint) as http:
        one = (await http.get("/a2a/one/.well-known/agent-card.json")).json()
        two = (await http.get("/a2a/two/.well-known/agent-card.json")).json()
        common = await http.get("/.well-known/agent-card.json")
        none = await http.get("/a2a/none/.well-known/agent-card.json")
    assert one["supportedInterfaces"][0] == {
        "url": f"{endpoint}/a2a/one",
        "protocolBinding": "JSONRPC",
        "protocolVersion": "1.0",
    }
    assert one["capabilities"]["streaming"] is True
    assert (one["name"], one["defaultInputModes"]) == ("one", ["text/plain", "application/json"])
    assert "the input 'question'" in one["skills"][0]["description"]
    assert two["defaultInputModes"] == ["application/json"]
    assert '{"topic": ..., "reader": ...}' in two["skills"][0]["description"]
    assert "securitySchemes" not in one
    assert (common.status_code, none.status_code) == (404, 404)
    assert "/a2a/two/.well-known/agent-card.json" in common.json()["message"]


async def test_a_text_is_the_input_of_a_team_that_takes_one(endpoint: str) -> None:
    """S-INT-72, S-INT-73, S-INT-74: a task is a run of that id, and its artifact the output."""
    found = await task_of(f"{endpoint}/a2a/one", "kelp", context_id="talk")
    assert (found.status.state, text_of(found), found.context_id) == (S.TASK_STATE_COMPLETED, "about kelp", "talk")
    async with httpx.AsyncClient(base_url=endpoint) as http:
        run = (await http.get(f"/runs/{found.id}")).json()
    assert (run["status"], run["result"]["raw"], run["ensemble"]) == ("completed", "about kelp", "one")


async def test_a_data_part_has_the_inputs_of_a_team_that_takes_several(endpoint: str) -> None:
    """S-INT-72: whole numbers stay such; a text alone, a part that is no object, an input twice or missing: what to send is said."""
    url = f"{endpoint}/a2a/two"
    found = await task_of(url, {"topic": "tides", "reader": 3})
    assert text_of(found) == "two done"
    wrong: list[tuple[tuple[Any, ...], str]] = [
        (("tides",), r"Send its inputs as one data part. It needs: \[topic, reader\]"),
        (({"topic": "tides"},), r"Inputs are missing: \[reader\]"),
        (({"topic": "tides"}, {"topic": "kelp"}), r"parts\[1\].data: \[topic\] came before"),
        ((Part(data=Value(string_value="tides")),), r"parts\[0\].data: must be an object"),
        ((Part(raw=b"tides"),), r"parts\[0\]: a team takes texts and data, and no 'raw' part"),
    ]
    for parts, text in wrong:
        with pytest.raises(InvalidParamsError, match=text):
            await task_of(url, *parts)
    with pytest.raises(InvalidParamsError, match="'question' comes twice"):
        await task_of(f"{endpoint}/a2a/one", "kelp", {"question": "salt"})


async def test_a_typed_output_is_text_and_data(endpoint: str) -> None:
    """S-INT-74."""
    found = await task_of(f"{endpoint}/a2a/typed", "which?")
    text, data = found.artifacts[0].parts
    assert json.loads(text.text) == {"name": "ray", "fins": 2}
    assert MessageToDict(data.data) == {"name": "ray", "fins": 2}


async def test_the_same_message_again_is_the_same_task(endpoint: str) -> None:
    """S-INT-77: by its message_id; another one under it is refused. The card says so."""
    url = f"{endpoint}/a2a/one"
    async with httpx.AsyncClient() as http:
        card = (await http.get(f"{url}/.well-known/agent-card.json")).json()
    assert card["capabilities"]["extensions"][0]["uri"] == IDEMPOTENT_MESSAGES
    first = await task_of(url, "kelp", message_id="same")
    again = await task_of(url, "kelp", message_id="same")
    other = await task_of(url, "kelp", message_id="other")
    assert first.id == again.id != other.id
    with pytest.raises(InvalidParamsError, match="another request"):
        await task_of(url, "salt", message_id="same")


async def test_a_stream_tells_the_task_what_is_said_and_the_end(home: str) -> None:
    """S-INT-76: pieces of the answer while it is said, tasks that are done, and the artifact is the output."""
    gate = Gate("<think>e f</think>a b c d")  # S-LLM-4: reasoning is left out
    team = question(llm=ScriptedModel(otherwise=gate), stream=True)
    events: list[StreamResponse] = []
    with served_app(build_api(driven({"said": team}))) as endpoint:
        async with agent_at(f"{endpoint}/a2a/said") as client:
            async for event in client.send_message(said("kelp")):
                events.append(event)
                gate.open()
    kinds = [each.WhichOneof("payload") for each in events]
    assert kinds[0] == "task"
    assert events[-1].status_update.status.state == S.TASK_STATE_COMPLETED
    pieces = [each.artifact_update for each in events if each.HasField("artifact_update")]
    assert "".join(each.artifact.parts[0].text for each in pieces if each.append or each is pieces[0]) == "a b c d"
    done = [each.status_update.status for each in events if each.HasField("status_update")]
    assert any("Done by Answerer: Q:kelp" in each.message.parts[0].text for each in done if each.message.parts)


async def test_a_failure_is_a_failed_task_that_says_why(endpoint: str) -> None:
    """S-INT-74."""
    found = await task_of(f"{endpoint}/a2a/failing", "kelp")
    assert found.status.state == S.TASK_STATE_FAILED
    assert "TaskExecutionError" in told(found)
    assert not found.artifacts


async def test_a_review_is_input_that_the_next_message_gives(endpoint: str) -> None:
    """S-INT-75: the question is told with the gate; what is no decision is refused with what to send; an edit counts."""
    url = f"{endpoint}/a2a/asked"
    open_one = await task_of(url, "kelp")
    assert open_one.status.state == S.TASK_STATE_INPUT_REQUIRED
    text, data = open_one.status.message.parts
    assert "Right?" in text.text
    assert "about kelp" in text.text
    (gate,) = MessageToDict(data.data)["gates"]
    with pytest.raises(InvalidParamsError, match=r"this text is none\. Answer with a message on this task"):
        await task_of(url, "why not", task_id=open_one.id)
    with pytest.raises(InvalidParamsError, match="There are: "):
        await task_of(url, {"gate_id": "other", "decision": "approve"}, task_id=open_one.id)
    with pytest.raises(InvalidParamsError, match="text belongs to the decision 'edit'"):
        await task_of(url, {"decision": "edit"}, task_id=open_one.id)
    edit = {"gate_id": gate["gate_id"], "decision": "edit", "text": "by hand", "comment": "shorter"}
    decided = await task_of(url, edit, task_id=open_one.id)
    assert (decided.status.state, text_of(decided)) == (S.TASK_STATE_COMPLETED, "by hand")
    with pytest.raises(InvalidParamsError, match="asks nothing: it is completed"):
        await task_of(url, "approve", task_id=open_one.id)


async def test_an_edit_that_does_not_fit_is_refused_with_the_reason(home: str) -> None:
    """S-SRV-231, S-INT-75: the task asks still."""
    model = ScriptedModel(otherwise='{"name": "ray", "fins": 2}')
    team = question(llm=model, output_type=Fish, review=Review.required("Right?"), review_wait="detach")
    with served_app(build_api(driven({"asked": team}))) as endpoint:
        url = f"{endpoint}/a2a/asked"
        open_one = await task_of(url, "kelp")
        with pytest.raises(InvalidParamsError, match="The edit was refused, since it must fit Fish: Could not find"):
            await task_of(url, "edit: a shark", task_id=open_one.id)
        decided = await task_of(url, 'edit: {"name": "shark", "fins": 8}', task_id=open_one.id)
    assert decided.status.state == S.TASK_STATE_COMPLETED


@pytest.mark.parametrize(("word", "raw"), [("Approve.", "about kelp"), ("edit: other", "other")])
async def test_plain_words_decide_and_the_stream_goes_on(endpoint: str, word: str, raw: str) -> None:
    """S-INT-75, S-INT-76."""
    async with agent_at(f"{endpoint}/a2a/asked") as client:
        *_, asked = await ask(client, said("kelp"))
        assert last_state(asked) == S.TASK_STATE_INPUT_REQUIRED
        run = asked.task.id or asked.status_update.task_id
        *_, ended = await ask(client, said(word, task_id=run))
        assert last_state(ended) == S.TASK_STATE_COMPLETED
        assert text_of(await client.get_task(GetTaskRequest(id=run))) == raw


async def test_a_task_that_goes_on_is_got_followed_and_cancelled(home: str) -> None:
    """S-INT-73, S-INT-76, S-INT-78: by any client that asks with its id, also after the one that began it left."""
    gate = Gate("late")
    runs = driven({"slow": question(llm=ScriptedModel(otherwise=gate))})
    with served_app(build_api(runs)) as endpoint:
        url = f"{endpoint}/a2a/slow"
        async with agent_at(url, streams=False) as client:
            (begun,) = await ask(client, said("kelp", at_once=True))
            assert begun.task.status.state in {S.TASK_STATE_SUBMITTED, S.TASK_STATE_WORKING}
            run = begun.task.id
            await asyncio.wait_for(gate.is_asked.wait(), timeout=60)
            assert (await client.get_task(GetTaskRequest(id=run))).status.state == S.TASK_STATE_WORKING
        async with agent_at(url) as client:
            following = client.subscribe(SubscribeToTaskRequest(id=run))
            assert (await anext(following)).task.id == run  # type: ignore[call-overload]
            ended = await client.cancel_task(CancelTaskRequest(id=run))
            assert ended.status.state == S.TASK_STATE_CANCELED
            *_, last = [each async for each in following]
            assert last_state(last) == S.TASK_STATE_CANCELED
            with pytest.raises(TaskNotCancelableError):
                await client.cancel_task(CancelTaskRequest(id=run))
            with pytest.raises(UnsupportedOperationError, match="has ended"):
                _ = [each async for each in client.subscribe(SubscribeToTaskRequest(id=run))]
            with pytest.raises(TaskNotFoundError):
                await client.get_task(GetTaskRequest(id="never"))


async def test_a_task_is_there_after_a_restart(home: str) -> None:
    """S-INT-73: nothing of it lives in a replica; what drives runs goes on with it, under the same message as well."""
    ledger = Path(home) / "ledger.sqlite"
    team = {"t": teams()["asked"]}
    with served_app(build_api(driven(team, ledger=ledger))) as endpoint:
        begun = await task_of(f"{endpoint}/a2a/t", "kelp", message_id="m1")
    with served_app(build_api(driven(team, ledger=ledger))) as endpoint:
        again = await task_of(f"{endpoint}/a2a/t", "kelp", message_id="m1")
        decided = await task_of(f"{endpoint}/a2a/t", "approve", task_id=begun.id)
    assert again.status.state == begun.status.state == S.TASK_STATE_INPUT_REQUIRED
    assert (again.id, text_of(decided)) == (begun.id, "about kelp")


async def test_keys_and_rights_hold(home: str) -> None:
    """S-INT-79: without a key nothing, the card included; a right that lacks is 403; tasks of other teams are not there."""
    file = KeyFile(Path(home))
    all_teams = {"mine": question(), "theirs": question()}
    callers = CallerCache(file)
    with served_app(build_api(driven(all_teams), callers=callers, public_url="https://teams.example.org")) as endpoint:
        owner = make_key(file, "owner")
        mine = make_key(file, "mine", teams=["mine"], rights=[Right.RUN, Right.READ])
        reader = make_key(file, "reader", teams=["mine"], rights=[Right.READ])
        async with httpx.AsyncClient(base_url=endpoint, headers=reader) as http:
            card = (await http.get("/.well-known/agent-card.json")).json()
            assert card["supportedInterfaces"][0]["url"] == "https://teams.example.org/a2a/mine"
            assert card["securitySchemes"]["key"]["httpAuthSecurityScheme"]["scheme"] == "bearer"
            assert (await http.get("/a2a/theirs/.well-known/agent-card.json")).status_code == 404
            path = "/a2a/mine/.well-known/agent-card.json"
            assert (await http.get(path, headers={"authorization": ""})).status_code == 401

            async def rpc(team: str, method: str, params: Any, key: dict[str, str]) -> httpx.Response:
                body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
                return await http.post(f"/a2a/{team}", json=body, headers={**key, "a2a-version": "1.0"})

            message = {"message": {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "kelp"}]}}
            theirs = (await rpc("theirs", "SendMessage", message, owner)).json()["result"]["task"]["id"]
            assert (await rpc("theirs", "GetTask", {"id": theirs}, mine)).status_code == 404
            assert (await rpc("mine", "GetTask", {"id": theirs}, mine)).json()["error"]["code"] == -32001
            refused = await rpc("mine", "SendMessage", message, reader)
            assert (refused.status_code, refused.json()["code"]) == (403, "FORBIDDEN")
            begun = (await rpc("mine", "SendMessage", message, mine)).json()["result"]["task"]["id"]
            assert begun != theirs
            decide = {"message": {**message["message"], "taskId": begun}}
            assert "'review'" in (await rpc("mine", "SendMessage", decide, mine)).json()["message"]
            assert "'run'" in (await rpc("mine", "CancelTask", {"id": begun}, reader)).json()["message"]


async def test_a_queue_that_is_full_is_429_and_the_older_protocol_is_answered(home: str) -> None:
    """S-INT-70, S-INT-79: limits are those of every route; version 0.3 has the same tasks."""
    gate = Gate("late")
    limits = EndpointLimits(max_running=1, max_queued=0)
    with served_app(build_api(driven({"t": question(llm=ScriptedModel(otherwise=gate))}, limits=limits))) as endpoint:
        async with httpx.AsyncClient(base_url=endpoint) as http:

            async def send(name: str) -> httpx.Response:
                message = {
                    "messageId": name,
                    "role": "user",
                    "kind": "message",
                    "parts": [{"kind": "text", "text": "?"}],
                }
                params = {"message": message, "configuration": {"blocking": False}}
                body = {"jsonrpc": "2.0", "id": 7, "method": "message/send", "params": params}
                return await http.post("/a2a/t", json=body)

            begun = (await send("a")).json()
            assert (begun["id"], begun["result"]["kind"]) == (7, "task")
            full = await send("b")
            assert (full.status_code, full.json()["code"]) == (429, "QUEUE_FULL")
            await asyncio.wait_for(gate.is_asked.wait(), timeout=60)
            gate.open()
            body = {"jsonrpc": "2.0", "id": 8, "method": "tasks/get", "params": {"id": begun["result"]["id"]}}
            task = begun["result"]
            async with asyncio.timeout(60):
                while task["status"]["state"] != "completed":
                    await asyncio.sleep(0.05)
                    task = (await http.post("/a2a/t", json=body)).json()["result"]
            assert task["artifacts"][0]["parts"][0]["text"] == "late"
            for wrong in (b"{", b"[]", b"\xff", b"[" * 100_000):
                as_json = {"content-type": "application/json; charset=utf-8"}
                assert (await http.post("/a2a/t", content=wrong, headers=as_json)).json()["error"]["code"] == -32700
                refused = await http.post("/a2a/t", content=wrong, headers={"content-type": "text/plain"})
                assert (refused.status_code, refused.json()["code"]) == (415, "NOT_JSON")
            unknown = {"jsonrpc": "2.0", "id": 9, "method": "Nothing"}
            assert (await http.post("/a2a/t", json=unknown)).json()["error"]["code"] == -32601
