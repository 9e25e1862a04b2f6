"""The Batch API: the scripted server and the client, against the types of the `openai` package."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types import Batch, FileObject
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import BaseModel, TypeAdapter

from ensemble_ray import ChatMessage, JsonSchema, OpenAIChatModel
from ensemble_ray.llm.protocol.batches import BatchLine, request_line
from ensemble_ray.testing import BatchScript, Fault, ModelServer

Serve = Callable[..., ModelServer]
SCHEMA = JsonSchema(name="Label", schema={"type": "object", "properties": {}}, strict=False)


def model_of(server: ModelServer, **options: Any) -> OpenAIChatModel:
    return OpenAIChatModel("m", base_url=server.base_url, api_key="k", **options)


def line(model: OpenAIChatModel, number: int, schema: JsonSchema | None = None) -> bytes:
    messages = [ChatMessage(role="system", content="Be brief"), ChatMessage(role="user", content=f"item {number}")]
    return request_line(f"map-{number}#0/d", "/v1/chat/completions", model.request_body(messages, schema))


def strictly(kind: type[BaseModel], data: object) -> None:
    """Validate, which the package itself does not."""
    kind.model_validate(data, strict=True, extra="ignore")


@pytest.mark.parametrize("schema", [None, SCHEMA], ids=["plain", "with a schema"])
def test_line_has_the_form_of_the_package(schema: JsonSchema | None, model_server: Serve) -> None:
    """S-BAT-13: one line of JSON, whose body is a request of chat completions."""
    written = line(model_of(model_server(), temperature=0, max_tokens=5), 1, schema)
    assert written.count(b"\n") == 1
    data = json.loads(written)
    assert {name: data[name] for name in ("custom_id", "method", "url")} == {
        "custom_id": "map-1#0/d", "method": "POST", "url": "/v1/chat/completions",
    }  # fmt: skip
    TypeAdapter(CompletionCreateParamsNonStreaming).validate_python(data["body"])
    assert ("response_format" in data["body"]) is (schema is not None)


async def test_server_answers_the_package(model_server: Serve) -> None:
    """S-BAT-60: each object has the form of the package's type, and the calls of the package work."""
    server = model_server(
        lambda request: Fault(status=400) if "item 1" in request.text else "done", batches=BatchScript(polls=2, page=1)
    )
    model = model_of(server)
    async with AsyncOpenAI(api_key="k", base_url=server.base_url) as client:
        file = await client.files.create(
            file=("in.jsonl", b"".join(line(model, number) for number in range(3))), purpose="batch"
        )
        strictly(FileObject, file.model_dump())
        created = [
            await client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": str(n)}
            )
            for n in range(3)
        ]
        assert [each.status for each in created] == ["validating"] * 3
        listed = [batch async for batch in client.batches.list()]  # page by page
        assert [(batch.metadata or {})["a"] for batch in listed] == ["2", "1", "0"]
        assert (await client.batches.cancel(created[0].id)).status == "cancelling"
        assert (await client.batches.retrieve(created[0].id)).status == "cancelled"
        assert (await client.batches.retrieve(created[1].id)).status == "in_progress"
        ended = await client.batches.retrieve(created[1].id)
        assert ended.request_counts is not None
        assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == ("completed", 2, 1)
        for batch in (*listed, ended):
            strictly(Batch, batch.model_dump())
        assert ended.output_file_id is not None
        assert ended.error_file_id is not None
        output = [json.loads(each) for each in (await client.files.content(ended.output_file_id)).text.splitlines()]
        assert [each["custom_id"] for each in output] == ["map-0#0/d", "map-2#0/d"]
        for each in output:
            strictly(ChatCompletion, each["response"]["body"])
        (failed,) = (await client.files.content(ended.error_file_id)).text.splitlines()
        assert json.loads(failed)["response"]["status_code"] == 400


@pytest.mark.parametrize("options", [None, {"timeout": 30}], ids=["own", "client options"])
async def test_client_reads_what_the_server_writes(options: dict[str, object] | None, model_server: Serve) -> None:
    """S-BAT-11, S-BAT-32: with each transport of the model; a batch is found by its key, on any page."""
    server = model_server(
        lambda request: (
            Fault(kind="garbage")
            if "item 1" in request.text
            else Fault(status=429)
            if "item 2" in request.text
            else "done"
        ),
        batches=BatchScript(page=1),
    )
    model = model_of(server, client_options=options, extra_headers={"x-team": "a"})
    api = model.batches()
    file_id = await api.upload("in.jsonl", io.BytesIO(b"".join(line(model, number) for number in range(4))))
    made = [await api.create(file_id, key=f"key-{n}", window="24h", metadata={"run": "r"}) for n in range(3)]
    assert await api.find("key-0", since=0) == made[0]
    assert await api.find("key-9", since=0) is None
    assert server.batches[1].metadata == {"run": "r", "ensemble_ray_batch": "key-1"}
    ended = await api.get(made[1].id)
    assert (ended.status, ended.is_ended, ended.total, ended.completed, ended.failed) == ("completed", True, 4, 3, 1)
    found = [each async for each in api.lines(ended.output_file)]
    found += [each async for each in api.lines(ended.error_file)]
    assert [(each.custom_id, each.response and each.response.text) for each in found] == [
        ("map-0#0/d", "done"), ("", None), ("map-3#0/d", "done"), ("map-2#0/d", None),
    ]  # fmt: skip
    assert [each.problem for each in found if each.response is None][1] == "HTTP 429"


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (b"[1]", "the line is not a JSON object"),
        (b'{"custom_id": "a", "response": null, "error": {"code": "batch_expired"}}', "batch_expired"),
        (b'{"custom_id": "a"}', "the line has no response"),
        (b'{"custom_id": "a", "response": {"status_code": 500, "body": {}}}', "HTTP 500"),
        (b'{"custom_id": "a", "response": {"status_code": 200, "body": null}}', "it is not a JSON object: null"),
        (b'{"custom_id": "a", "response": {"status_code": 200, "body": {"choices": []}}}', "it has no choices"),
        (b'{"custom_id": "a", "response": {"status_code": "200"}}', "HTTP 200"),
    ],
)
def test_line_without_an_answer_says_why(written: bytes, problem: str, model_server: Serve) -> None:
    """S-BAT-32, S-BAT-35: whatever a provider writes."""
    found = model_of(model_server()).batches().read_line(written)
    assert isinstance(found, BatchLine)
    assert found.response is None
    assert found.problem.startswith(problem)


async def test_key_is_in_no_error(model_server: Serve) -> None:
    """S-ERR-31: also of the Batch API."""
    server = model_server(api_key="right")
    with pytest.raises(Exception, match="HTTP 401") as caught:
        await OpenAIChatModel("m", base_url=server.base_url, api_key="secret-key").batches().get("b")
    assert "secret-key" not in str(caught.value)
