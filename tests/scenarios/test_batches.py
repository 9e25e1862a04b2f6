"""Maps through a provider's Batch API: answers, faults, deaths of the driver, budgets, cancellation."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    Agent,
    AgentSynthesizer,
    BatchDelivery,
    BatchError,
    BatchProgressEvent,
    CostConfiguration,
    EnsembleOutput,
    ExitReason,
    GuardrailResult,
    Image,
    Loop,
    MapEnsemble,
    MapReduceEnsemble,
    ModelPrice,
    OpenAIChatModel,
    OpenAIResponsesModel,
    RateLimit,
    RateLimitedChatModel,
    Review,
    ReviewDecision,
    ReviewRequest,
    RunState,
    Runtime,
    Task,
    TaskCompleteEvent,
    TaskStartEvent,
    TokenUsage,
    ValidationError,
    resume,
    tool,
)
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.runs import BatchRecorded
from ensemble_ray.llm.protocol.batches import BatchEndpoint, BatchLine
from ensemble_ray.record.batches import RecordedBatches
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.runs.map_reduce import batches
from ensemble_ray.testing import BatchScript, Fault, ModelServer, RawAnswer, Reply, ScriptedModel, ServedRequest
from tests.scenarios.teams import PATIENCE_S, Watcher, recorded_state, until

Serve = Callable[..., ModelServer]


class Batches(Watcher):
    """Hears of batches, too."""

    def on_batch_progress(self, event: BatchProgressEvent) -> None:
        self._hear("on_batch_progress", event)


def answer(request: ServedRequest) -> str:
    """`<3>` for `map 3`, and for a reduce the number of its inputs."""
    if "join" in request.text:
        return f"joined {request.text.count('<')}"
    return f"<{item_of(request)}>"


def item_of(request: ServedRequest) -> str:
    return str(request.messages[-1]["content"]).partition("map ")[2].split("\n", maxsplit=1)[0]


def map_task(item: object) -> Task:
    return Task.of(f"map {item}")


def llm(server: ModelServer, **options: Any) -> OpenAIChatModel:
    return OpenAIChatModel("m", base_url=server.base_url, api_key="k", **options)


def delivery(**options: Any) -> BatchDelivery:
    return BatchDelivery(**{"poll_interval": 0.01, **options})


def team(server: ModelServer, items: object, **fields: Any) -> MapEnsemble:
    return MapEnsemble(**{"items": items, "map_task": map_task, "llm": llm(server), "delivery": delivery(), **fields})


def raws(output: EnsembleOutput) -> list[str]:
    return [each.raw for each in output.task_outputs]


def asked(server: ModelServer) -> Counter[str]:
    """How often each item was sent to the model, in batches and in calls."""
    return Counter(item_of(request) for request in server.requests)


def lines(server: ModelServer) -> Counter[str]:
    """How often each map was part of a batch."""
    return Counter(each.partition("/")[0] for batch in server.batches for each in batch.custom_ids)


def facts(home: str, run_id: str, kind: type[Any]) -> list[Any]:
    return [fact.data for fact in RunDirectory(Path(home), run_id).facts() if isinstance(fact.data, kind)]


# Answers.


def test_items_are_answered_by_batches(model_server: Serve, runtime: Runtime) -> None:
    """S-BAT-1, S-BAT-12, S-BAT-20, S-BAT-21, S-BAT-32, S-BAT-42: each item once, in any order; its events once."""
    server = model_server(answer, batches=BatchScript(polls=3, is_shuffled=True, unknown_lines=2))
    watcher = Batches()
    run = team(server, range(25), delivery=delivery(max_requests=10), listeners=[watcher]).start(runtime=runtime)
    output = run.result(PATIENCE_S)
    assert raws(output) == [f"<{number}>" for number in range(25)]
    assert sorted(len(batch.lines) for batch in server.batches) == [5, 10, 10]
    assert set(asked(server).values()) == {1}
    assert len(watcher.of(TaskStartEvent)) == len(watcher.of(TaskCompleteEvent)) == 25
    assert Counter(event.state for event in watcher.of(BatchProgressEvent))["collected"] == 3
    assert sorted((each.state, each.total, each.answered) for each in run.batches) == [
        ("collected", 5, 5), ("collected", 10, 10), ("collected", 10, 10),
    ]  # fmt: skip
    assert output.metrics.total_llm_call_count == 25


def test_request_is_that_of_a_call(model_server: Serve) -> None:
    """S-BAT-13: the body of a line is the body of the call, with options, roles and schema of the model."""
    server = model_server(lambda _: '{"label": "sea"}')
    model = llm(server, temperature=0, system_role="developer")
    agent = Agent(role="Reader", goal="read", llm=model)
    ensemble = team(server, ["tide"], map_task=lambda word: labelled(word, agent), llm=None)
    assert ensemble.run(runtime="inline").task_outputs[0].parsed_output == Label(label="sea")
    ensemble.replace(delivery=None).run(runtime="inline")
    (line, call) = server.requests
    assert line.body == call.body
    assert line.response_format is not None
    (batch,) = server.batches
    assert (batch.endpoint, batch.completion_window) == ("/v1/chat/completions", "24h")
    assert batch.lines[0]["method"] == "POST"


class Label(BaseModel):
    label: str


def labelled(word: str, agent: Agent | None = None) -> Task:
    return Task(description=f"map {word}", expected_output="a label", output_type=Label, agent=agent)


def test_reduces_and_corrections_are_calls(model_server: Serve, runtime: Runtime) -> None:
    """S-BAT-5, S-BAT-21: what follows the first answer of a map is asked directly."""

    def once_wrong(request: ServedRequest) -> str:
        if "join" in request.text:
            return "all"
        is_correction = "map" not in request.text
        return '{"label": "sea"}' if is_correction or "kelp" in request.text else "no label"

    server = model_server(once_wrong)
    ensemble = MapReduceEnsemble(
        items=["tide", "kelp", "salt"], map_task=labelled, llm=llm(server), delivery=delivery(),
        reduce_task=lambda group: Task(description="join", expected_output="a text", context=group),
    )  # fmt: skip
    output = ensemble.run(runtime=runtime)
    assert output.raw == "all"
    assert [each.parsed_output for each in output.task_outputs][:3] == [Label(label="sea")] * 3
    assert len(server.batches[0].lines) == 3
    assert len(server.requests) == 3 + 2 + 1


def test_guardrails_work_as_in_calls(model_server: Serve, runtime: Runtime) -> None:
    """S-BAT-20, S-BAT-21: an input guardrail comes before the batch, an output guardrail after it, each once."""
    server = model_server(answer)

    def refuse(checked: Any) -> GuardrailResult:
        return GuardrailResult.failure("too salty") if "salt" in checked.task_description else GuardrailResult.success()

    def guarded(word: str) -> Task:
        return map_task(word).replace(
            input_guardrails=[refuse] if word == "salt" else [], output_guardrails=[refuse] if word == "salty" else []
        )

    ensemble = team(server, ["tide", "salt", "salty"], map_task=guarded, on_item_error="collect")
    watcher = Watcher()
    output = ensemble.with_additional_listener(watcher).run(runtime=runtime)
    assert raws(output) == ["<tide>"]
    assert [each.item for each in output.failed_items] == ["salt", "salty"]
    assert asked(server) == {"tide": 1, "salty": 1}
    assert len(watcher.of(TaskStartEvent)) == 3


def test_gate_before_a_map_is_asked_once(model_server: Serve, runtime: Runtime) -> None:
    """S-BAT-20: a person decides before the request is collected, and the second task knows the decision."""
    server = model_server(answer)
    asked_for: list[str] = []

    def decide(request: ReviewRequest) -> ReviewDecision:
        asked_for.append(request.task_description)
        return ReviewDecision.continue_execution()

    ensemble = team(
        server, ["tide", "kelp"], map_task=lambda word: map_task(word).replace(before_review=Review.required())
    )
    output = ensemble.replace(review_handler=decide).run(runtime=runtime)
    assert raws(output) == ["<tide>", "<kelp>"]
    assert sorted(asked_for) == ["map kelp", "map tide"]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=429),
        Fault(status=400, message="too long"),
        Fault(kind="drop"),
        Fault(kind="garbage"),
        RawAnswer(body=b'{"choices": []}'),
    ],
    ids=["HTTP 429", "HTTP 400", "missing", "no JSON", "no answer"],
)
def test_failed_line_becomes_a_call(
    fault: Fault | RawAnswer, model_server: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """S-BAT-32, S-BAT-35: only these items are called; one warning says why."""

    def script(request: ServedRequest) -> Any:
        return fault if item_of(request) in {"2", "4"} and not request.headers else answer(request)

    server = model_server(script)
    with caplog.at_level(logging.WARNING):
        output = team(server, range(6)).run(runtime="inline")
    assert raws(output) == [f"<{number}>" for number in range(6)]
    assert asked(server) == {str(number): 2 if number in {2, 4} else 1 for number in range(6)}
    (warning,) = [each.getMessage() for each in caplog.records if "called one by one" in each.getMessage()]
    assert "2 of 6 requests have no answer" in warning


@pytest.mark.parametrize("end", ["expired", "failed", "cancelled"])
def test_rest_of_an_ended_batch_becomes_calls(end: Any, model_server: Serve, runtime: Runtime) -> None:
    """S-BAT-35: answers that it has are used."""
    answered = 0 if end == "failed" else 4
    server = model_server(answer, batches=BatchScript(end=end, answered=answered / 10))
    output = team(server, range(10)).run(runtime=runtime)
    assert raws(output) == [f"<{number}>" for number in range(10)]
    assert server.batches[0].answered == answered
    assert set(asked(server).values()) == {1}
    assert len([request for request in server.requests if request.headers]) == 10 - answered


def test_failed_item_of_a_call_is_a_dead_letter(model_server: Serve, tmp_path: Path) -> None:
    """S-BAT-35: it fails as any item, after a batch and a call."""
    server = model_server(lambda request: Fault(status=400) if "2" in request.text else answer(request))
    letters = tmp_path / "failed.jsonl"
    output = team(server, range(4), on_item_error="collect", dead_letters=letters).run(runtime="inline")
    assert [each.index for each in output.failed_items] == [2]
    assert len(letters.read_text().splitlines()) == 1
    assert asked(server)["2"] == 2


def test_incomplete_answer_is_asked_again(model_server: Serve) -> None:
    """S-BAT-33: with on_incomplete='retry' a call replaces a cut answer of a batch."""

    def cut(request: ServedRequest) -> Reply:
        return Reply(text="half", finish_reason="length") if not request.headers else Reply(text="whole")

    server = model_server(cut)
    output = team(server, ["tide"], on_incomplete="retry").run(runtime="inline")
    assert (raws(output), output.metrics.total_incomplete_answers) == (["whole"], 0)
    assert raws(team(server, ["tide"]).run(runtime="inline")) == ["half"]


def test_other_prompt_of_the_second_task_is_reported(model_server: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """S-BAT-22: a factory that does not make the same task twice."""
    server, numbers = model_server(answer), itertools.count()
    with caplog.at_level(logging.WARNING):
        team(server, ["tide"], map_task=lambda word: Task.of(f"map {word}\n{next(numbers)}")).run(runtime="inline")
    assert any("its prompt differs from the one in the batch" in each.getMessage() for each in caplog.records)


def test_agents_are_synthesized_once(model_server: Serve) -> None:
    """S-BAT-21: the calls that make the agent of a map are not repeated for its second task."""
    made = '{"role": "Reader", "goal": "read", "backstory": "old"}'
    server = model_server(lambda request: made if "backstory" in str(request.messages) else "done")
    output = team(server, ["tide", "kelp"], agent_synthesizer=AgentSynthesizer.llm_based()).run(runtime="inline")
    assert [(each.raw, each.agent_role) for each in output.task_outputs] == [("done", "Reader")] * 2
    assert Counter(bool(request.headers) for request in server.requests) == {True: 2, False: 2}


# Batches.


def test_batches_are_limited_by_size(model_server: Serve) -> None:
    """S-BAT-12, S-BAT-15: by bytes; a request that is too large for any batch is a call."""
    server = model_server(answer)
    items = [*("x" * 300 for _ in range(4)), "y" * 5000]
    output = team(server, items, delivery=delivery(max_bytes=3000)).run(runtime="inline")
    assert len(output.task_outputs) == 5
    assert [len(batch.lines) for batch in server.batches] == [2, 2]
    assert all(len(request.raw) <= 3000 for request in server.requests if not request.headers)


def test_each_model_has_its_own_batches(model_server: Serve) -> None:
    """S-BAT-12: a file has the requests of one model; a limit of calls does not apply to batches."""
    server = model_server(answer)
    limited = RateLimitedChatModel.of(llm(server, temperature=1), RateLimit.per_minute(1))
    agents = [Agent(role="First", goal="read", llm=llm(server)), Agent(role="Second", goal="read", llm=limited)]
    output = team(
        server,
        range(8),
        llm=None,
        map_agent=lambda item: agents[item % 2],
        map_task=lambda item, agent: Task.of(f"map {item}").replace(agent=agent),
    ).run(runtime="inline")
    assert raws(output) == [f"<{number}>" for number in range(8)]
    assert sorted(len(batch.lines) for batch in server.batches) == [4, 4]


def test_few_items_wait_at_the_same_time(model_server: Serve) -> None:
    """S-BAT-14: items are read as earlier ones are answered."""
    server = model_server(answer)
    pulled: list[int] = []

    def items() -> Iterator[int]:
        for number in range(30):
            done = sum(batch.answered for batch in server.batches)
            assert number - done < 10 + 1
            pulled.append(number)
            yield number

    output = team(server, items(), delivery=delivery(max_items=10), max_parallel_tasks=4).run(runtime="inline")
    assert len(output.task_outputs) == len(pulled) == 30
    assert all(len(batch.lines) <= 10 for batch in server.batches)


def test_full_queue_of_the_provider_is_waited_for(model_server: Serve) -> None:
    """S-BAT-36: the same requests are sent in another batch."""
    server = model_server(answer, batches=BatchScript(end="failed", code="token_limit_exceeded"))
    run = team(server, range(5)).start(runtime="inline")
    server.wait_batches(lambda batches: bool(batches) and batches[0].status == "failed")
    server.batch_script = BatchScript()
    assert raws(run.result(PATIENCE_S)) == [f"<{number}>" for number in range(5)]
    assert {batch.status for batch in server.batches} == {"failed", "completed"}
    assert set(asked(server).values()) == {1}


def test_old_batch_is_cancelled(model_server: Serve) -> None:
    """S-BAT-41: its open items become calls."""
    server = model_server(answer, batches=BatchScript(polls=None, answered=0.5))
    output = team(server, range(4), delivery=delivery(max_age=0.2)).run(runtime="inline")
    assert raws(output) == [f"<{number}>" for number in range(4)]
    assert (server.batches[0].status, server.batches[0].answered) == ("cancelled", 2)
    assert set(asked(server).values()) == {1}


# Faults of the Batch API.


@pytest.mark.parametrize("call", ["upload", "create", "get", "download"])
def test_failed_call_is_repeated(call: Any, model_server: Serve) -> None:
    """S-BAT-40: HTTP 500 of each call of the Batch API."""
    server = model_server(answer, batches=BatchScript(errors={call: 1}))
    assert len(team(server, range(3)).run(runtime="inline").task_outputs) == 3
    assert server.batch_calls[call] >= 2
    assert lines(server) == {f"map-{number}#0": 1 for number in range(3)}


def test_batch_of_a_lost_answer_is_found(model_server: Serve) -> None:
    """S-BAT-11: the batch was created, but the answer never came: it is not created again."""
    server = model_server(answer, batches=BatchScript(lost={"create": 1, "get": 1, "download": 1, "list": 1}, page=1))
    assert len(team(server, range(6), delivery=delivery(max_requests=3)).run(runtime="inline").task_outputs) == 6
    assert len(server.batches) == 2
    assert set(lines(server).values()) == set(asked(server).values()) == {1}


def test_refusal_ends_the_run_until_it_is_resumed(model_server: Serve, home: str) -> None:
    """S-BAT-40: a wrong key; nothing was sent, and the run goes on with the right one."""
    server = model_server(answer, api_key="right")
    wrong = OpenAIChatModel("m", base_url=server.base_url, api_key="wrong")
    with pytest.raises(BatchError, match=r"of 3 requests: .*HTTP 401.* leave out delivery='batch'"):
        team(server, range(3), llm=wrong).run(runtime="inline", run_id="refused")
    assert recorded_state(home, "refused") is RunState.INTERRUPTED
    right = OpenAIChatModel("m", base_url=server.base_url, api_key="right")
    output = resume("refused", team(server, range(3), llm=right), runtime="inline")
    assert raws(output) == ["<0>", "<1>", "<2>"]
    assert set(lines(server).values()) == {1}


# The end of the driver.


class Died(Exception):  # noqa: N818  no error: the death of a process
    pass


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", ["upload", "create", "get", "lines"])
def test_driver_that_ends_at_a_step_is_continued(  # noqa: PLR0917  fixtures
    step: str, moment: str, model_server: Serve, runtime: Runtime, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-BAT-10, S-BAT-11, S-BAT-51: the driver ends before or after each step; no request is paid twice."""
    server, is_after = model_server(answer, batches=BatchScript(polls=2)), moment == "after"
    ensemble = team(server, range(7), delivery=delivery(max_requests=4))
    real = getattr(BatchEndpoint, step)

    async def end(self: BatchEndpoint, *args: Any, **fields: Any) -> Any:
        if is_after:
            await real(self, *args, **fields)
        raise Died

    async def end_reading(self: BatchEndpoint, file_id: str) -> AsyncGenerator[BatchLine]:
        async for line in real(self, file_id):
            if is_after:
                yield line
            if not is_after or line.custom_id.startswith("map-1#"):
                raise Died

    monkeypatch.setattr(batches, "_ANSWERS", 1)
    monkeypatch.setattr(BatchEndpoint, step, end_reading if step == "lines" else end)
    with pytest.raises(Died):
        ensemble.run(runtime=runtime, run_id="died")
    assert recorded_state(home, "died") is RunState.INTERRUPTED
    monkeypatch.setattr(BatchEndpoint, step, real)
    output = resume("died", ensemble, runtime=runtime)
    assert raws(output) == [f"<{number}>" for number in range(7)]
    assert set(lines(server).values()) == set(asked(server).values()) == {1}
    assert len(server.batches) == 2
    answers = facts(home, "died", ModelAnswered)
    assert (len(answers), {each.delivery for each in answers}) == (7, {"batch"})


def test_open_batches_are_read_without_delivery(model_server: Serve) -> None:
    """S-BAT-53: what is paid for is used; later items are calls."""
    server = model_server(answer, batches=BatchScript(polls=None))
    ensemble = team(server, iter(range(6)), delivery=delivery(max_items=4), max_parallel_tasks=4)
    run = ensemble.start(runtime="inline", run_id="changed")
    server.wait_batches(lambda batches: len(batches) == 1 and batches[0].polls > 0)
    run.detach()
    assert run.result(PATIENCE_S).exit_reason is ExitReason.CANCELLED
    server.finish_batches()
    output = resume("changed", team(server, iter(range(6)), delivery=None), runtime="inline")
    assert raws(output) == [f"<{number}>" for number in range(6)]
    assert (len(server.batches), set(asked(server).values())) == (1, {1})


def test_cancelled_run_cancels_its_batches(model_server: Serve, runtime: Runtime, home: str) -> None:
    """S-BAT-50: also at the provider; a resume uses the answers so far, and sends the rest again."""
    server = model_server(answer, batches=BatchScript(polls=None, answered=0.5))
    ensemble = team(server, range(8))
    run = ensemble.start(runtime=runtime, run_id="cancelled")
    server.wait_batches(lambda batches: len(batches) == 1 and batches[0].polls > 0)
    run.cancel()
    assert run.result(PATIENCE_S).exit_reason is ExitReason.CANCELLED
    assert server.batch_calls["cancel"] == 1
    assert facts(home, "cancelled", BatchRecorded)[-1].state == "cancelled"
    server.finish_batches("cancelled")
    server.batch_script = BatchScript()
    output = resume("cancelled", ensemble, runtime=runtime)
    assert raws(output) == [f"<{number}>" for number in range(8)]
    assert set(asked(server).values()) == {1}
    assert len(server.batches) == 2


def test_cancelled_run_before_its_batch_is_sent(model_server: Serve, home: str) -> None:
    """S-BAT-50: nothing is left at the provider."""
    server = model_server(answer, batches=BatchScript(errors={"upload": 1}))
    run = team(server, range(3)).start(runtime="inline", run_id="early")
    until(lambda: server.batch_calls["upload"], "an upload")
    run.cancel()
    assert run.result(PATIENCE_S).exit_reason is ExitReason.CANCELLED
    assert server.batch_calls["cancel"] == len(server.batches)


def test_detached_run_leaves_its_batches(model_server: Serve, home: str) -> None:
    """S-BAT-52: nothing is cancelled at the provider, and a resume reads the answers."""
    server = model_server(answer, batches=BatchScript(polls=None))
    ensemble = team(server, range(8))
    run = ensemble.start(runtime="inline", run_id="detached")
    server.wait_batches(lambda batches: len(batches) == 1 and batches[0].polls > 0)
    run.detach()
    assert run.result(PATIENCE_S).exit_reason is ExitReason.CANCELLED
    assert (server.batch_calls["cancel"], recorded_state(home, "detached")) == (0, RunState.CANCELLED)
    server.finish_batches()
    assert len(resume("detached", ensemble, runtime="inline").task_outputs) == 8
    assert (len(server.batches), set(asked(server).values())) == (1, {1})


def test_calls_share_the_limits_of_a_map(model_server: Serve) -> None:
    """S-BAT-23: a batch without answers does not make all its items call at the same time."""
    server = model_server(
        lambda request: Reply(text=answer(request), latency_s=0.01), batches=BatchScript(end="expired", answered=0)
    )
    assert len(team(server, range(20), max_parallel_tasks=3).run(runtime="inline").task_outputs) == 20
    assert 1 < server.max_in_flight <= 3


def test_answer_is_recorded_with_its_delivery_and_times(model_server: Serve, home: str) -> None:
    """S-BAT-30: from the plan of the batch until it is read."""
    server = model_server(answer, batches=BatchScript(polls=3))
    output = team(server, ["tide"]).run(runtime="inline", run_id="timed")
    (found,) = facts(home, "timed", ModelAnswered)
    (batch,) = fold_batches(home, "timed")
    assert (found.delivery, found.text, found.request_digest != "") == ("batch", "<tide>", True)
    assert found.started_at == batch.planned_at
    assert found.started_at + found.latency_s <= batch.changed_at
    assert output.trace.task_traces[0].llm_interactions[0].latency.total_seconds() == pytest.approx(
        found.latency_s, abs=1e-5
    )


def fold_batches(home: str, run_id: str) -> RecordedBatches:
    batches = RecordedBatches()
    batches.apply_all(RunDirectory(Path(home), run_id).facts())
    return batches


# Budgets and costs.

PRICES = CostConfiguration(input_token_rate=Decimal(1), output_token_rate=Decimal(1))


def test_answers_of_batches_cost_half(model_server: Serve, runtime: Runtime) -> None:
    """S-BAT-34: 15 tokens each; a call after a batch costs the full price."""
    server = model_server(
        lambda request: Fault(status=429) if "3" in request.text and not request.headers else answer(request)
    )
    output = team(server, range(4), cost_configuration=PRICES).run(runtime=runtime)
    assert output.metrics.total_cost_estimate is not None
    assert output.metrics.total_cost_estimate.total_cost == 3 * 7.5 + 15
    free = team(server, range(2), cost_configuration=PRICES.replace(batch_share=Decimal(0))).run(runtime="inline")
    assert free.metrics.total_cost_estimate is not None
    assert free.metrics.total_cost_estimate.total_cost == 0


def test_budget_counts_the_price_of_batches(model_server: Serve, runtime: Runtime, home: str) -> None:
    """S-BAT-31: the budget covers some items at half the price; the rest runs with a larger one."""
    server = model_server(answer)
    model = llm(server, max_tokens=5)
    ensemble = team(server, range(12), llm=model, cost_configuration=PRICES)
    output = ensemble.replace(max_cost=80.0).run(runtime=runtime, run_id="spent")
    done = len(output.task_outputs)
    assert output.exit_reason is ExitReason.BUDGET_EXHAUSTED
    assert 0 < done < 12
    sent = sum(lines(server).values())
    spent = sum(each.input_tokens + each.output_tokens for each in facts(home, "spent", ModelAnswered)) / 2
    assert spent <= 80
    whole = resume("spent", ensemble, runtime=runtime)
    assert len(whole.task_outputs) == 12
    assert set(asked(server).values()) == {1}
    assert sent < 12


# Refusals.


@tool
def look(word: str) -> str:
    """Look a word up."""
    return word


def _task(**fields: Any) -> Task:
    return Task(description="map tide", expected_output="a text", **fields)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda _: _task(handler=lambda _: "done"), "has a handler"),
        (lambda _: _task(tools=[look]), "has tools"),
        (
            lambda _: _task(agent=Agent(role="R", goal="g", llm=ScriptedModel("a"), allow_delegation=True)),
            "has delegation",
        ),
        (lambda _: _task(agent=Agent(role="R", goal="g", llm=ScriptedModel("a"))), "has the model ScriptedModel"),
        (lambda _: _task(llm=ScriptedModel("a")), "has the model ScriptedModel"),
        (lambda _: Loop(name="again", body=[_task()], max_iterations=2), "map_task returned a loop"),
    ],
    ids=["handler", "tools", "delegation", "model", "model of the task", "loop"],
)
def test_map_that_no_batch_can_deliver_is_refused(
    make: Callable[[object], Task], told: str, model_server: Serve, runtime: Runtime
) -> None:
    """S-BAT-3: before any request."""
    server = model_server(answer)
    with pytest.raises(ValidationError, match=rf"delivery='batch': .*{told}.* or leave out delivery"):
        team(server, iter(["tide"]), map_task=make).run(runtime=runtime)
    assert (len(server.requests), server.batch_calls) == (0, {})


def test_streaming_is_refused(model_server: Serve) -> None:
    """S-BAT-3."""
    with pytest.raises(ValidationError, match="streams its answer"):
        team(model_server(answer), ["tide"], stream=True).run(runtime="inline")


def test_unrecorded_run_is_refused(model_server: Serve) -> None:
    """S-BAT-4: an answer could not be found again."""
    with pytest.raises(ValidationError, match="delivery='batch' needs a record"):
        team(model_server(answer), ["tide"], durability="off").run(runtime="inline")


def test_batch_delivery_of_a_list_makes_tasks_during_the_run(model_server: Serve) -> None:
    """S-BAT-5: a static tree over a list is made of calls; with batches its tasks are made as their items are read."""
    server = model_server(answer)
    ensemble = MapReduceEnsemble(
        items=["a", "b", "c"], map_task=map_task, llm=llm(server), delivery="batch",
        reduce_task=lambda group: Task(description="join", expected_output="a text", context=group),
    )  # fmt: skip
    assert not ensemble.is_planned
    assert ensemble.delivery == BatchDelivery()
    assert ensemble.replace(delivery="calls").is_planned


def test_run_without_batches_defers_nothing(model_server: Serve) -> None:
    """S-BAT-1: calls are the default."""
    server = model_server(answer)
    output = team(server, range(3), delivery="calls").run(runtime="inline")
    assert raws(output) == ["<0>", "<1>", "<2>"]
    assert (server.batch_calls, len(server.requests)) == ({}, 3)


# Beside other features.


def test_an_answer_of_an_earlier_run_is_in_no_batch(model_server: Serve) -> None:
    """S-BAT-55: and answers of a batch are offered to later runs."""
    server = model_server(answer)

    def reusing(item: object) -> Task:
        return Task(description=f"map {item}", expected_output="A number", reuse="1h")

    first = team(server, [1, 2], map_task=reusing).run()
    assert (raws(first), lines(server).total()) == (["<1>", "<2>"], 2)
    second = team(server, [1, 2, 3], map_task=reusing).run()
    assert (raws(second), asked(server)) == (["<1>", "<2>", "<3>"], {"1": 1, "2": 1, "3": 1})
    assert second.metrics.total_reused_calls == 2


def test_requests_of_the_responses_api_have_attachments(model_server: Serve, home: str, runtime: Runtime) -> None:
    """S-BAT-56: with contents, and the answer counts as one of a batch."""
    server = model_server(lambda request: f"{len(request.attachments)} in {request.path}")
    picture = Image(b"\x89PNG\r\n\x1a\n...", name="a.png")

    def look(item: object) -> Task:
        return Task(description=f"map {item}", expected_output="A place", attachments=[picture])

    model = OpenAIResponsesModel("m", base_url=server.base_url, api_key="k")
    output = team(server, [1], map_task=look, llm=model).run(runtime=runtime)
    assert raws(output) == ["1 in /v1/responses"]
    (answered,) = facts(home, output.run_id, ModelAnswered)
    assert answered.delivery == "batch"


def test_cost_of_a_batch_has_the_price_of_batches(model_server: Serve) -> None:
    """S-BAT-30, S-PRC-10: of the given price, in the metrics of the task and of the run, and after a resume."""
    price = ModelPrice(input=10, output=20, batch=ModelPrice(input=4, output=8))
    output = team(
        model_server(lambda _: Reply(text="x", usage=TokenUsage(100, 50))), [1], prices={"m": price}, max_cost=1
    ).run()
    assert output.metrics.total_cost_estimate is not None
    assert output.metrics.total_cost_estimate.total_cost == Decimal("0.0008")
