"""Runs that take answers from the records of earlier runs: what is asked again, what is counted, and what they leave."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    Agent,
    CostConfiguration,
    Ensemble,
    EnsembleOutput,
    GuardrailOutput,
    GuardrailResult,
    InlineRuntime,
    LlmIterationCompletedEvent,
    Loop,
    MapEnsemble,
    MapReduceEnsemble,
    OpenAIChatModel,
    RateLimit,
    RateLimitedChatModel,
    Runtime,
    TaskExecutionError,
    TokenEvent,
    TokenUsage,
    TryAgain,
    ValidationError,
    fork,
    resume,
    tool,
)
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.record.trace import fold_output
from ensemble_ray.record.view.tree import render_tree
from ensemble_ray.testing import ModelServer, Reply, ScriptedModel, replay
from tests.builders import agent, call, task
from tests.ensemble_ray.record.unit_teams import write_torn
from tests.scenarios.teams import Watcher

Servers = Callable[..., ModelServer]

USAGE = TokenUsage(10, 5)
COST = CostConfiguration(input_token_rate=Decimal("0.001"), output_token_rate=Decimal("0.01"))
SEEN: list[str] = []


@tool
def look(place: str) -> str:
    """Look.

    Args:
        place: Where.
    """
    SEEN.append(place)
    return f"seen {place}"


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    """Forget what was seen."""
    SEEN.clear()


def model_at(server: ModelServer, **options: object) -> OpenAIChatModel:
    """The model behind a server."""
    return OpenAIChatModel("m", base_url=server.base_url, api_key="sk-of-a-test", **options)  # type: ignore[arg-type]  options


def answers_of(run_id: str) -> list[ModelAnswered]:
    """The recorded answers of a run."""
    facts = run_blocking(store_at(StoreAddress.of()).facts(run_id))
    return [fact.data for fact in facts if isinstance(fact.data, ModelAnswered)]


def counts(output: EnsembleOutput) -> tuple[int, int, int, int]:
    """Model calls, tokens, reused answers, and their tokens."""
    found = output.metrics
    return found.total_llm_call_count, found.total_tokens, found.total_reused_calls, found.total_reused_tokens


def looking(server: ModelServer, **fields: object) -> Ensemble:
    """A team whose agent looks with a tool before it answers, and whose second task uses the answer."""
    writer = agent(model_at(server), tools=[look])
    first = task("find", writer, name="find", **{"reuse": "7d", **fields})
    return Ensemble(tasks=[first, task("write", writer, name="write", context=[first], reuse="7d")])


SCRIPT = (
    Reply(tool_calls=[call("look", '{"place": "here"}')], usage=USAGE),
    Reply(text="found", usage=USAGE),
    Reply(text="written", usage=USAGE),
)


def test_second_run_asks_the_model_nothing(runtime: Runtime, model_server: Servers) -> None:
    """S-USE-20, S-USE-21, S-USE-24, S-USE-40: the same answers, turn by turn; tools are called again; counted apart."""
    server = model_server(list(SCRIPT))
    first = looking(server).run(runtime=runtime)
    second = looking(server).run(runtime=runtime)
    assert len(server.requests) == 3
    assert (
        [each.raw for each in second.task_outputs] == [each.raw for each in first.task_outputs] == ["found", "written"]
    )
    assert counts(first) == (3, 45, 0, 0)
    assert counts(second) == (0, 0, 3, 45)
    calls = [each for trace in second.trace.task_traces for each in trace.llm_interactions]
    assert [(each.reused, each.reused_tokens, each.input_tokens) for each in calls] == [(first.run_id, 15, 0)] * 3
    assert [each.tool_calls[0].result for each in calls if each.tool_calls] == ["seen here"]
    text = render_tree(second.trace)
    assert f"reused from run {first.run_id} (15 tokens)" in text
    assert "3 reused answers (45 tokens)" in text
    assert "0 model calls, 0 tokens, 3 reused answers" in str(second)


def test_reuse_is_off_by_default(inline_runtime: Runtime, model_server: Servers) -> None:
    """S-USE-1, S-USE-20: neither taken nor offered."""
    server = model_server(["one", "two", "three"])
    for reuse, raw in ((None, "one"), ("1d", "two"), (None, "three"), ("1d", "two")):
        team = Ensemble(tasks=[task("go", agent(model_at(server)), reuse=reuse)])
        assert team.run(runtime=inline_runtime).raw == raw


def test_answer_is_taken_within_its_age(inline_runtime: Runtime, model_server: Servers) -> None:
    """S-USE-21: the newest answer counts, and its own age."""
    server = model_server(["one", "two"])
    ages = [timedelta(microseconds=1), timedelta(microseconds=1), timedelta(weeks=1)]
    outputs = [
        Ensemble(tasks=[task("go", agent(model_at(server)), reuse=age)]).run(runtime=inline_runtime) for age in ages
    ]
    assert [each.raw for each in outputs] == ["one", "two", "two"]


def test_stores_share_no_answers(model_server: Servers, tmp_path: Path) -> None:
    """S-USE-50."""
    server = model_server(["one", "two"])
    homes = [tmp_path / "a", tmp_path / "b", tmp_path / "a"]
    outputs = [
        Ensemble(tasks=[task("go", agent(model_at(server)), reuse="1d")]).run(runtime=InlineRuntime(home=home))
        for home in homes
    ]
    assert [each.raw for each in outputs] == ["one", "two", "one"]


def test_items_of_a_map_are_reused_and_duplicates_asked_once_each(runtime: Runtime, model_server: Servers) -> None:
    """S-USE-21: no answer of the same run is taken; the second run pays for none."""
    server = model_server(lambda _: Reply(text="read", usage=USAGE))

    def mapped() -> MapEnsemble:
        clerk = agent(model_at(server), "Clerk")
        return MapEnsemble(items=["a", "b", "b", "b"], map_task=lambda item: task(f"read {item}", clerk, reuse="1d"))

    first, second = (mapped().run(runtime=runtime) for _ in range(2))
    assert len(server.requests) == 4
    assert (counts(first), counts(second)) == ((4, 60, 0, 0), (0, 0, 4, 60))


def test_reduces_group_reused_outputs_as_the_first_run_did(inline_runtime: Runtime, model_server: Servers) -> None:
    """S-USE-42: by the tokens that the provider counted then, so that the requests of the reduces are the same."""
    server = model_server(lambda _: Reply(text="read", usage=TokenUsage(10, 40)))

    def reduced() -> MapReduceEnsemble:
        clerk = agent(model_at(server), "Clerk")
        return MapReduceEnsemble(
            items=list("abcdef"),
            map_task=lambda item: task(f"read {item}", clerk, reuse="1d"),
            reduce_task=lambda tasks: task("join", clerk, context=tasks, reuse="1d"),
            target_token_budget=100,
        )

    first, second = (reduced().run(runtime=inline_runtime) for _ in range(2))
    assert first.metrics.total_llm_call_count == len(server.requests) > 7
    assert counts(second) == (0, 0, first.metrics.total_llm_call_count, first.metrics.total_tokens)


def test_dynamic_run_without_a_record_is_refused(inline_runtime: Runtime) -> None:
    """S-USE-3: when its factory makes the task, before any call."""
    model = ScriptedModel()
    mapped = MapEnsemble(items=iter("ab"), map_task=lambda item: task(item, agent(model), reuse="1d"))
    with pytest.raises(ValidationError, match=r"^Task 'a' reuses answers from the records of earlier runs"):
        mapped.run(runtime=inline_runtime, durability="off")
    assert model.calls == ()


def never(output: GuardrailOutput) -> GuardrailResult:
    """Refuse the first answer of a script."""
    return GuardrailResult.failure("no") if output.raw_response == "bad" else GuardrailResult.success()


def better(output: GuardrailOutput) -> GuardrailResult:
    """Ask again after the first answer of a script."""
    if output.raw_response == "bad":
        raise TryAgain("Better, please")
    return GuardrailResult.success()


def test_answers_of_a_failed_task_are_not_taken(runtime: Runtime, model_server: Servers) -> None:
    """S-USE-20: a refused answer comes never again."""
    server = model_server(["bad", "good"])

    def team() -> Ensemble:
        return Ensemble(tasks=[task("go", agent(model_at(server)), output_guardrails=[never], reuse="1d")])

    with pytest.raises(TaskExecutionError):
        team().run(runtime=runtime)
    assert [team().run(runtime=runtime).raw for _ in range(2)] == ["good", "good"]


class City(BaseModel):
    """A typed answer."""

    name: str


@pytest.mark.parametrize(
    ("fields", "script"),
    [
        ({"output_guardrails": [better]}, ["bad", "good"]),
        ({"output_type": City}, ["Bern it is", '{"name": "Bern"}']),
    ],
    ids=["guardrail", "correction"],
)
def test_answers_that_were_asked_for_again_are_taken_in_turn(
    inline_runtime: Runtime, model_server: Servers, fields: dict[str, object], script: list[str]
) -> None:
    """S-USE-20: the refused one, and then the one that followed."""
    server = model_server(script)

    def team() -> Ensemble:
        writer = agent(model_at(server, structured_outputs=False))
        return Ensemble(tasks=[task("go", writer, reuse="1d", **fields)])

    outputs = [team().run(runtime=inline_runtime) for _ in range(2)]
    first, second = (
        [each.response_text for each in output.trace.task_traces[0].llm_interactions] for output in outputs
    )
    assert first == second == script
    assert outputs[1].metrics.total_reused_calls == len(server.requests) == 2


def test_incomplete_answer_is_not_taken(inline_runtime: Runtime, model_server: Servers) -> None:
    """S-USE-20: neither cut off nor empty."""
    cut = Reply(text="half an ans", finish_reason="length")
    server = model_server([cut, Reply(text=None), "whole"])
    outputs = [
        Ensemble(tasks=[task("go", agent(model_at(server)), reuse="1d")]).run(runtime=inline_runtime) for _ in range(4)
    ]
    assert [each.raw for each in outputs] == ["half an ans", "", "whole", "whole"]


def test_answer_that_was_completed_is_taken_whole(inline_runtime: Runtime, model_server: Servers) -> None:
    """S-USE-20: with the tokens of both requests."""
    cut = Reply(text="half an ans", finish_reason="length", usage=USAGE)
    server = model_server([cut, Reply(text="whole", usage=USAGE)])
    for expected in ((1, 30, 0, 0), (0, 0, 1, 30)):
        writer = agent(model_at(server), on_incomplete="retry")
        assert counts(Ensemble(tasks=[task("go", writer, reuse="1d")]).run(runtime=inline_runtime)) == expected


def test_iterations_with_equal_requests_are_asked_and_taken_one_by_one(
    inline_runtime: Runtime, model_server: Servers
) -> None:
    """S-USE-12: a loop never goes on with the same stored answer."""
    server = model_server(["tails", "tails", "heads"])

    def team() -> Ensemble:
        toss = task("toss", agent(model_at(server)), name="toss", reuse="1d")
        return Ensemble(
            loops=[Loop(name="tossing", body=[toss], until=lambda context: "heads" in context.last_body_output.raw)]
        )

    for _ in range(2):
        assert team().run(runtime=inline_runtime).raw == "heads"
    assert len(server.requests) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_stored_answer_streams_as_one_piece(runtime: Runtime, model_server: Servers, *, stream: bool) -> None:
    """S-USE-30: its reasoning first; a listener knows the run that it came from."""
    reply = Reply(text="forty two", fragments=["forty", " two"], reasoning="Perhaps.", usage=USAGE)
    server = model_server([reply])
    said: list[list[tuple[str, bool]]] = []
    ended: list[str] = []
    for _ in range(2):
        watcher = Watcher()
        team = Ensemble(tasks=[task("go", agent(model_at(server)), stream=stream, reuse="1d")], listeners=[watcher])
        output = team.run(runtime=runtime)
        said.append([(each.token, each.is_reasoning) for each in watcher.of(TokenEvent)])
        ended += [each.reused for each in watcher.of(LlmIterationCompletedEvent)]
    assert "".join(text for text, is_reasoning in said[0] if not is_reasoning) == ("forty two" if stream else "")
    assert said[1] == ([("Perhaps.", True), ("forty two", False)] if stream else [])
    assert ended[0] == ""
    assert ended[1] not in {"", output.run_id}
    assert output.trace.task_traces[0].llm_interactions[0].reasoning == "Perhaps."


def test_neither_budget_nor_limit_nor_cost_is_charged(runtime: Runtime, model_server: Servers) -> None:
    """S-USE-41: a run with a budget for nothing completes; the one permit of the limit went to the first run."""
    server = model_server([Reply(text="done", usage=USAGE)])
    model = RateLimitedChatModel.of(
        model_at(server), RateLimit.of(1, timedelta(hours=1)), wait_timeout=timedelta(milliseconds=1)
    )
    team = Ensemble(tasks=[task("go", agent(model), reuse="1d")], cost_configuration=COST)
    first = team.run(runtime=runtime)
    second = team.replace(max_tokens=1, max_cost=0.00000001).run(runtime=runtime)
    costs = [each.metrics.total_cost_estimate for each in (first, second)]
    assert [each and each.total_cost for each in costs] == [Decimal("0.06"), 0]
    assert second.is_complete
    assert second.raw == "done"


def test_run_is_resumed_with_the_answers_it_took_when_their_run_is_gone(
    runtime: Runtime, model_server: Servers
) -> None:
    """S-USE-31, S-USE-22: and replayed; its record has them whole."""
    server = model_server(list(SCRIPT))
    store = SqliteStore(Path(StoreAddress.of().home))
    looking(server).run(runtime=runtime, run_id="first")
    looking(server).run(runtime=runtime, run_id="second")
    facts = run_blocking(store.facts("second"))
    last = max(place for place, fact in enumerate(facts) if isinstance(fact.data, ModelAnswered))
    run_blocking(write_torn(store, facts[: last + 1], "killed"))
    run_blocking(store.delete("first"))
    output = resume("killed", looking(server), runtime=runtime)
    assert output.raw == "written"
    assert len(server.requests) == 3
    assert [each.reused for each in answers_of("killed")] == ["first"] * 3
    assert counts(fold_output(run_blocking(store.facts("killed")))) == counts(output) == (0, 0, 3, 45)
    assert replay("killed", looking(server)).is_same


def test_fork_asks_for_new_answers(runtime: Runtime, model_server: Servers) -> None:
    """S-USE-23: of the tasks that it repeats; later runs take these."""
    server = model_server([*SCRIPT, Reply(text="written anew", usage=USAGE)])
    looking(server).run(runtime=runtime)
    second = looking(server).run(runtime=runtime)
    forked = fork(second.run_id, "write", looking(server), runtime=runtime)
    assert forked.raw == "written anew"
    assert counts(forked) == (1, 15, 2, 30)
    assert looking(server).run(runtime=runtime).raw == "written anew"
    assert len(server.requests) == 4


def test_delegated_work_is_reused_with_its_task(runtime: Runtime, model_server: Servers) -> None:
    """S-USE-32."""
    lead = model_server([Reply(tool_calls=[call("delegate", '{"agent_role": "Worker", "task": "dig"}')]), "led"])
    worker = model_server(["dug"])

    def team() -> Ensemble:
        boss = agent(model_at(lead), "Boss", allow_delegation=True)
        return Ensemble(agents=[boss, agent(model_at(worker), "Worker")], tasks=[task("lead", boss, reuse="1d")])

    outputs = [team().run(runtime=runtime) for _ in range(2)]
    assert [each.raw for each in outputs] == ["led", "led"]
    assert (len(lead.requests), len(worker.requests)) == (2, 1)


def test_changed_requests_are_asked(inline_runtime: Runtime, model_server: Servers) -> None:
    """S-USE-10: another option, another goal of the agent, or another text."""
    server = model_server(lambda _: "x")
    variants: list[tuple[dict[str, object], dict[str, object], str]] = [
        ({}, {}, "go"),
        ({"temperature": 0.5}, {}, "go"),
        ({}, {"goal": "be another"}, "go"),
        ({}, {}, "go on"),
    ]
    for _ in range(2):
        for options, fields, text in variants:
            writer: Agent = agent(model_at(server, **options), **fields)
            Ensemble(tasks=[task(text, writer, reuse="1d")]).run(runtime=inline_runtime)
    assert len(server.requests) == len(variants)


def test_removed_runs_take_their_answers_along(inline_runtime: Runtime, model_server: Servers) -> None:
    """S-USE-22."""
    server = model_server(["one", "two"])

    def run() -> EnsembleOutput:
        return Ensemble(tasks=[task("go", agent(model_at(server)), reuse="1d")]).run(runtime=inline_runtime)

    first = run()
    run_blocking(store_at(StoreAddress.of()).delete(first.run_id))
    assert [run().raw for _ in range(2)] == ["two", "two"]


@pytest.fixture
def in_database(postgres: object) -> str:
    """The URL of an empty database."""
    return postgres.empty_database()  # type: ignore[attr-defined]  of tests.postgres_server


def test_answers_are_reused_from_a_database(
    runtime: Runtime, in_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-USE-50: by processes of any node."""
    monkeypatch.setenv("ENSEMBLE_RAY_STORE", in_database)
    model = ScriptedModel(otherwise="read")

    def mapped() -> MapEnsemble:
        clerk = agent(model, "Clerk")
        return MapEnsemble(items=list(range(30)), map_task=lambda item: task(f"read {item}", clerk, reuse="1d"))

    outputs = [mapped().run(runtime=runtime) for _ in range(2)]
    assert len(model.calls) == 30
    assert outputs[1].metrics.total_reused_calls == 30
