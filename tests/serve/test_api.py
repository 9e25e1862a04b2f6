"""The HTTP interface over the inline runtime: what is asked, what is answered."""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Self

import pytest
from httpx import Response
from pydantic import BaseModel

from ensemble_ray import (
    Agent,
    ChatResponse,
    CostConfiguration,
    Ensemble,
    GuardrailOutput,
    GuardrailResult,
    ModelPrice,
    ParallelErrorStrategy,
    Task,
    TokenUsage,
    Workflow,
)
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, task
from tests.serve.conftest import Connect
from tests.serve.teams import INPUTS, pair, summaries


def error_of(response: Response) -> tuple[int, str, str]:
    """Status, class and message of a failure."""
    body = response.json()
    assert {"error", "message", "run_id"} <= set(body)
    return response.status_code, body["error"], body["message"]


async def test_the_tree_of_a_map_reduce_is_run_by_a_request(connect: Connect) -> None:
    """S-MR-165: as any parallel team; the last task is the final reduce."""
    async with connect(summaries().to_ensemble()) as client:
        response = await client.post("/runs?wait=60", json={"inputs": {"topic": "Ray"}})
    body = response.json()["result"]
    assert (response.status_code, body["raw"], body["metrics"]["llm_calls"]) == (200, "joined", 6)
    assert sorted(each["description"] for each in body["tasks"])[3:] == [
        f"Read {it} of Ray" for it in ("kelp", "salt", "tides")
    ]


async def test_a_run_is_answered_with_its_output(connect: Connect) -> None:
    """Texts and roles of all tasks, in order, with the run's id and metrics."""
    model = ScriptedModel(
        ChatResponse(text="a draft", usage=TokenUsage(7, 3)), ChatResponse(text="a line", usage=TokenUsage(5, 2))
    )
    ensemble = pair(model).replace(
        cost_configuration=CostConfiguration(input_token_rate=Decimal("0.5"), output_token_rate=Decimal(1))
    )
    async with connect(ensemble) as client:
        response = await client.post("/runs?wait=60", json={"inputs": INPUTS})
    body = response.json()["result"]
    assert response.status_code == 200
    assert (body["raw"], body["exit_reason"]) == ("a line", "completed")
    assert [(each["role"], each["description"], each["text"]) for each in body["tasks"]] == [
        ("Writer", "Write about Ray", "a draft"),
        ("Editor", "Shorten it for children", "a line"),
    ]
    assert body["run_id"]
    metrics = body["metrics"]
    assert (metrics["input_tokens"], metrics["output_tokens"], metrics["total_tokens"]) == (12, 5, 17)
    assert (metrics["llm_calls"], metrics["tool_calls"]) == (2, 0)
    assert metrics["cost"]["currency"] == "USD"
    assert float(metrics["cost"]["total"]) == 11.0
    assert body["duration_s"] >= body["tasks"][0]["duration_s"] >= 0


async def test_cost_names_the_calls_that_it_lacks(connect: Connect) -> None:
    """S-PRC-3, S-PRC-12: cached tokens, the cost of a priced model, and the number of other calls."""
    priced, other = (ScriptedModel(ChatResponse(text="a", usage=TokenUsage(1000, 0, -1, 600))) for _ in range(2))
    priced.model_name = "priced"  # type: ignore[attr-defined]  a name, as models have it
    ensemble = pair(priced)
    first, second = ensemble.tasks
    assert second.agent is not None
    team = ensemble.replace(
        tasks=[first, second.replace(agent=second.agent.replace(llm=other), context=[first])],
        prices={"priced": ModelPrice(input=1, output=1, cached_input=0)},
    )
    async with connect(team) as client:
        body = (await client.post("/runs?wait=60", json={"inputs": INPUTS})).json()["result"]
    assert (body["metrics"]["cost"]["total"], body["metrics"]["unpriced_calls"]) == ("0.00040000", 1)
    assert (body["metrics"]["cached_tokens"], "cache_write_tokens" in body["metrics"]) == (1200, False)
    assert "unpriced_calls" not in body["tasks"][0]["metrics"]
    assert (body["tasks"][1]["metrics"]["cost"], body["tasks"][1]["metrics"]["unpriced_calls"]) == (None, 1)


async def test_unknown_token_counts_are_null(connect: Connect) -> None:
    """No -1 travels over HTTP."""
    async with connect(pair(ScriptedModel(ChatResponse(text="a"), ChatResponse(text="b")))) as client:
        body = (await client.post("/runs?wait=60", json={"inputs": INPUTS})).json()["result"]
    assert body["metrics"]["total_tokens"] is None
    assert body["tasks"][0]["metrics"]["input_tokens"] is None


async def test_reused_answers_have_numbers_of_their_own(connect: Connect) -> None:
    """S-USE-40: left out where there are none."""
    model = ScriptedModel(ChatResponse(text="a", usage=TokenUsage(7, 3)))
    async with connect(Ensemble(tasks=[task("say", agent(model), reuse="1d")])) as client:
        answers = [await client.post("/runs?wait=60", json={}) for _ in range(2)]
    found = [each.json()["result"]["metrics"] for each in answers]
    assert (found[0]["llm_calls"], found[0]["total_tokens"], "reused_calls" in found[0]) == (1, 10, False)
    assert (found[1]["llm_calls"], found[1]["total_tokens"]) == (0, 0)
    assert (found[1]["reused_calls"], found[1]["reused_tokens"]) == (1, 10)


class Note(BaseModel):
    """A typed answer."""

    title: str
    words: int


async def test_a_typed_answer_is_data_beside_its_text(connect: Connect) -> None:
    """`structured` is null for the task without a type."""
    ensemble = pair(ScriptedModel("a draft", '{"title": "Ray", "words": 3}'), output_type=Note)
    async with connect(ensemble) as client:
        body = (await client.post("/runs?wait=60", json={"inputs": INPUTS})).json()["result"]
    assert [each["structured"] for each in body["tasks"]] == [None, {"title": "Ray", "words": 3}]


async def test_an_input_that_the_team_does_not_know_is_refused(connect: Connect) -> None:
    """S-SRV-215: with the known ones; those that have a value in the team may be given."""
    model = ScriptedModel(otherwise="text")
    async with connect(pair(model).replace(inputs={"reader": "Ann", "style": "dry"})) as client:
        refused = await client.post("/runs", json={"inputs": {"topik": "Ray", "topic": "Ray"}})
        kept = (await client.get("/runs")).json()["runs"]
        given = {"topic": "Ray", "reader": "Bob", "style": "wet"}
        taken = await client.post("/runs?wait=60", json={"inputs": given})
    assert error_of(refused)[:2] == (422, "InvalidRequest")
    assert (refused.json()["code"], kept) == ("INPUTS_UNKNOWN", [])
    assert refused.json()["message"] == "Unknown inputs: [topik]. Known: [reader, style, topic]"
    assert taken.json()["status"] == "completed"


async def test_a_repeated_request_with_an_unknown_input_gets_its_run(connect: Connect, tmp_path: Path) -> None:
    """S-SRV-14, S-SRV-215: it was accepted when the team knew that input; a new one is refused."""
    asked = {"inputs": {**INPUTS, "style": "wet"}, "run_id": "first"}
    before, now = pair(ScriptedModel(otherwise="text")), pair(ScriptedModel(otherwise="text"))
    async with connect(before.replace(inputs={"style": "dry"}), ledger=tmp_path / "ledger") as client:
        await client.post("/runs?wait=60", json=asked)
    async with connect(now, ledger=tmp_path / "ledger") as client:
        again = await client.post("/runs?wait=60", json=asked)
        other = await client.post("/runs", json={**asked, "run_id": "second"})
    assert (again.status_code, again.json()["status"]) == (200, "completed")
    assert (other.status_code, other.json()["code"]) == (422, "INPUTS_UNKNOWN")


async def test_inputs_that_items_of_a_request_name_are_taken(connect: Connect) -> None:
    """S-SRV-215: texts made of them are not known before."""
    async with connect(summaries()) as client:
        asked = {"items": ["{place}"], "inputs": {"topic": "Ray", "place": "here"}}
        taken = await client.post("/runs?wait=60", json=asked)
    assert (taken.status_code, taken.json()["status"]) == (200, "completed")


async def test_all_missing_inputs_are_named(connect: Connect) -> None:
    """S-TPL-6, S-SRV-12: 422 with every missing name, of all texts; no model was asked."""
    model = ScriptedModel()
    async with connect(pair(model)) as client:
        response = await client.post("/runs?wait=60", json={})
    assert error_of(response)[:2] == (422, "PromptTemplateError")
    assert response.json()["missing"] == ["topic", "reader"]
    assert response.json()["code"] == "INPUTS_MISSING"
    assert not model.calls


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b"{", "JSON"),
        (b"[]", "body"),
        (b'{"input": {}}', "body.input"),
        (b'{"inputs": []}', "body.inputs"),
        (b'{"run_id": 7}', "body.run_id"),
    ],
)
async def test_a_body_that_is_no_run_is_refused(connect: Connect, body: bytes, place: str) -> None:
    """The answer says where it is wrong and what a run looks like."""
    async with connect(pair(ScriptedModel())) as client:
        response = await client.post("/runs", content=body, headers={"content-type": "application/json"})
    status, kind, message = error_of(response)
    assert (status, kind) == (422, "InvalidRequest")
    assert place in message
    assert '{"inputs": {"topic": "Ray"}' in message


@pytest.mark.parametrize("headers", [{"content-type": "text/plain"}, {}])
async def test_a_body_that_is_not_declared_as_json_is_refused(connect: Connect, headers: dict[str, str]) -> None:
    """A page of another site can make a browser send such requests without asking; none may begin a run."""
    model = ScriptedModel()
    async with connect(pair(model)) as client:
        response = await client.post("/runs", content=json.dumps({"inputs": INPUTS}), headers=headers)
    assert error_of(response)[:2] == (422, "InvalidRequest")
    assert not model.calls


@pytest.mark.parametrize(
    ("method", "path", "status"), [("PUT", "/runs", 405), ("POST", "/run", 404), ("GET", "/docs", 404)]
)
async def test_other_paths_and_methods_are_answered_as_json(
    connect: Connect, method: str, path: str, status: int
) -> None:
    """The answer names what is served; pages that load scripts from elsewhere are not."""
    async with connect(pair(ScriptedModel())) as client:
        response = await client.request(method, path)
    assert error_of(response)[:2] == (status, "InvalidRequest")
    assert "/openapi.json" in response.json()["message"]


async def test_a_run_id_that_cannot_name_a_record_is_refused(connect: Connect) -> None:
    """It would be a path."""
    async with connect(pair(ScriptedModel())) as client:
        response = await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "../up"})
    assert error_of(response)[:2] == (400, "ValidationError")
    assert response.json()["run_id"] == "../up"


async def test_asking_again_under_a_finished_id_answers_from_the_record(connect: Connect) -> None:
    """S-SET-39, S-SRV-14: the same output without a model call; other inputs under that id are refused."""
    model = ScriptedModel("a draft", "a line")
    async with connect(pair(model)) as client:
        first = await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "first"})
        again = await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "first"})
        other = await client.post("/runs?wait=60", json={"inputs": {**INPUTS, "topic": "Rust"}, "run_id": "first"})
    assert first.json()["run_id"] == "first"
    assert [each["text"] for each in again.json()["result"]["tasks"]] == ["a draft", "a line"]
    assert error_of(other)[:2] == (409, "RunExistsError")
    assert len(model.calls) == 2


async def test_a_model_failure_is_a_bad_gateway_and_keeps_what_was_done(connect: Connect) -> None:
    """S-ENG-13: 502 with our errors' texts, the run's id, and the outputs of before; no text of a foreign library."""
    async with connect(pair(ScriptedModel("a draft", OSError("socket 7 of host db1")))) as client:
        response = await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "broken"})
    status, kind, message = error_of(response)
    assert (status, kind) == (502, "TaskExecutionError")
    assert message.startswith("Task 'final' failed: Agent ")
    body = response.json()
    assert body["run_id"] == "broken"
    assert [each["text"] for each in body["tasks"]] == ["a draft"]
    assert [cause.partition(":")[0] for cause in body["causes"]] == ["AgentExecutionError"]
    assert "Traceback" not in response.text


def refuse(_output: GuardrailOutput) -> GuardrailResult:
    """Say no."""
    return GuardrailResult.failure("names a person")


async def test_a_guardrail_that_says_no_is_not_the_models_failure(connect: Connect) -> None:
    """S-GRD-7: 422, with what the guardrail said."""
    async with connect(pair(ScriptedModel("a draft", "a line"), output_guardrails=[refuse])) as client:
        response = await client.post("/runs?wait=60", json={"inputs": INPUTS})
    assert response.status_code == 422
    assert "names a person" in response.json()["causes"][0]


async def test_every_failed_task_of_a_parallel_run_is_told(connect: Connect) -> None:
    """S-PAR-25: causes of all failures, outputs of the rest."""
    models = [ScriptedModel(ValueError("one")), ScriptedModel("fine"), ScriptedModel(ValueError("two"))]
    workers = [Agent(role=f"Worker {n}", goal="Work", llm=model) for n, model in enumerate(models)]
    ensemble = Ensemble(
        tasks=[Task(description=f"Do {n}", expected_output="it", agent=each) for n, each in enumerate(workers)],
        workflow=Workflow.PARALLEL,
        parallel_error_strategy=ParallelErrorStrategy.CONTINUE_ON_ERROR,
    )
    async with connect(ensemble) as client:
        response = await client.post("/runs?wait=60", json={})
    body = response.json()
    assert error_of(response)[:2] == (502, "ParallelExecutionError")
    assert sorted(cause.rpartition(": ")[2] for cause in body["causes"]) == ["one (ValueError)", "two (ValueError)"]
    assert [each["text"] for each in body["tasks"]] == ["fine"]


class BrokenRuntime:
    """A runtime with a defect."""

    name = "broken"

    @property
    def store_address(self) -> StoreAddress:
        return StoreAddress.of()

    async def submit(self, *_: object) -> object:
        raise LookupError("secret of the inside")

    async def close(self) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


async def test_a_defect_is_told_without_its_text(connect: Connect) -> None:
    """What an unforeseen error says is for the operator's log."""
    async with connect(pair(ScriptedModel()), BrokenRuntime()) as client:
        response = await client.post("/runs?wait=60", json={"inputs": INPUTS})
    assert error_of(response)[:2] == (500, "InternalError")
    assert "secret" not in response.text


def test_the_interface_is_built_without_ray() -> None:
    """`ensemble_ray.serve.api` and what it imports know no Ray; only `ensemble_ray.serve.app` does."""
    import subprocess

    code = "import sys, serve.api; sys.exit('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False)  # noqa: S603  our own interpreter
    assert done.returncode == 0
