"""Costs of runs by the prices of their models, on both runtimes: recorded, resumed, forked, and limited."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from ensemble_ray import (
    Agent,
    ChatResponse,
    CostConfiguration,
    Ensemble,
    EnsembleOutput,
    ExitReason,
    MapEnsemble,
    ModelPrice,
    OpenAIChatModel,
    RunOptions,
    Runtime,
    Task,
    TaskRequest,
    TokenUsage,
    ValidationError,
    fork,
    resume,
    tool,
)
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.llm.prices import named_price
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.record.trace import fold_trace
from ensemble_ray.record.view.tree import render_tree
from ensemble_ray.teamfile import load_runnable
from ensemble_ray.testing import ModelServer, Reply
from tests.builders import agent, call, task
from tests.readers import differences
from tests.scenarios.teams import Watcher

CHEAP = ModelPrice(input=1, output=4, cached_input="0.25")
DEAR = ModelPrice(input=10, output=40)
PRICES = {"cheap": CHEAP, "dear": DEAR}
USAGE = TokenUsage(1000, 100, -1, 600)
#: of a call with that usage, in millionths
OF_CHEAP, OF_DEAR = 400 + 150 + 400, 10_000 + 4000


class Servers:
    """The type of the fixture `model_server`."""

    def __call__(self, *args: object, **options: object) -> ModelServer:
        """Start a server."""
        raise NotImplementedError


@tool
def look() -> str:
    """Look."""
    return "seen"


def at(server: ModelServer, model: str) -> OpenAIChatModel:
    """A model of that name at a server of the tests."""
    return OpenAIChatModel(model, base_url=server.base_url, api_key="k")


def said(text: str = "done", usage: TokenUsage = USAGE) -> ChatResponse:
    """An answer with its usage."""
    return ChatResponse(text=text, usage=usage)


def dollars(output: EnsembleOutput) -> Decimal | None:
    """The cost of a run."""
    found = output.metrics.total_cost_estimate
    return None if found is None else found.total_cost


def millionths(number: int) -> Decimal:
    """An amount of money."""
    return Decimal(number) / 1_000_000


def facts_of(home: str, run_id: str) -> list[Fact]:
    """The record of a run."""
    return list(run_blocking(SqliteStore(Path(home)).facts(run_id)))


def header_of(facts: list[Fact]) -> PlanRecorded:
    """Its first fact."""
    return next(fact.data for fact in facts if isinstance(fact.data, PlanRecorded))


def test_each_model_has_its_own_price(runtime: Runtime, model_server: Servers, home: str) -> None:
    """S-PRC-10, S-PRC-12, S-PRC-14: of several calls, also with tools; what has no price is named beside the cost."""
    looked = Reply(tool_calls=(call("look"),), usage=USAGE)
    server = model_server([looked, said(), said(), said()])
    tasks = [
        task("one", agent(at(server, "cheap"), "Cheap", tools=[look])),
        task("two", agent(at(server, "dear"), "Dear")),
        task("three", agent(at(server, "own"), "Own")),
    ]
    output = Ensemble(tasks=tasks, prices=PRICES).run(runtime=runtime, run_id="priced")
    assert dollars(output) == millionths(2 * OF_CHEAP + OF_DEAR)
    costs = [each.metrics.cost_estimate for each in output.task_outputs]
    assert [None if each is None else each.total_cost for each in costs] == [
        millionths(2 * OF_CHEAP),
        millionths(OF_DEAR),
        None,
    ]
    assert [each.metrics.unpriced_calls for each in output.task_outputs] == [0, 0, 1]
    assert (output.metrics.total_unpriced_calls, output.metrics.total_cached_tokens) == (1, 2400)
    assert "0.01590000 USD, without 1 model call of unknown price" in render_tree(output.trace)
    facts = facts_of(home, "priced")
    assert header_of(facts).prices == {"127.0.0.1:cheap": CHEAP.to_data(), "127.0.0.1:dear": DEAR.to_data()}
    answers = [fact.data for fact in facts if isinstance(fact.data, ModelAnswered)]
    assert [each.price for each in answers] == [None, None, "127.0.0.1:dear", ""]
    assert [*differences(facts)] == []
    assert fold_trace(facts).metrics.total_cost_estimate == output.metrics.total_cost_estimate


def test_cost_comes_from_the_library(runtime: Runtime, model_server: Servers) -> None:
    """S-PRC-10, S-PRC-13: behind a gateway, by the name of the same model; max_cost works with it (S-BUD-10)."""
    price = named_price("openai:gpt-5")
    assert price is not None
    expected = price.estimate(USAGE)
    assert expected is not None
    server = model_server(lambda _request: said())
    by = agent(at(server, "our-gpt"))
    team = Ensemble(tasks=[task(f"step {number}", by) for number in range(6)], prices={"our-gpt": "openai:gpt-5"})
    output = team.run(runtime=runtime, max_cost=float(3.5 * float(expected.total_cost)))
    assert output.exit_reason is ExitReason.BUDGET_EXHAUSTED
    done = len(output.task_outputs)
    assert 1 <= done <= 3
    assert dollars(output) == done * expected.total_cost
    assert dollars(team.run(runtime=runtime)) == 6 * expected.total_cost


def test_resumed_run_counts_the_same_cost(runtime: Runtime, model_server: Servers, home: str) -> None:
    """S-PRC-14, S-BUD-6: by the recorded prices, whatever they are now; spent money stays spent."""
    server = model_server(lambda _request: said())
    by = agent(at(server, "cheap"))
    team = Ensemble(tasks=[task(f"step {number}", by) for number in range(8)], prices=PRICES)
    limit = 3.5 * OF_CHEAP / 1_000_000
    first = team.run(runtime=runtime, run_id="again", options=RunOptions(max_cost=limit))
    assert first.exit_reason is ExitReason.BUDGET_EXHAUSTED
    done = len(first.task_outputs)
    assert dollars(first) == millionths(done * OF_CHEAP)
    other = team.replace(prices={"cheap": ModelPrice(input=1000, output=1000)})
    with pytest.raises(ValidationError, match=rf"a cost of {done * OF_CHEAP / 1_000_000:.8g} (is|are) spent"):
        resume("again", other, runtime=runtime)
    last = resume("again", other, runtime=runtime, options=RunOptions(max_cost=1.0))
    assert (last.exit_reason, dollars(last)) == (ExitReason.COMPLETED, millionths(8 * OF_CHEAP))
    facts = facts_of(home, "again")
    assert [*differences(facts)] == []
    assert fold_trace(facts).metrics.total_cost_estimate == last.metrics.total_cost_estimate
    assert len(server.requests) == 8


def test_fork_keeps_the_prices_of_its_run(inline_runtime: Runtime, model_server: Servers, home: str) -> None:
    """S-PRC-14, S-BUD-9: of the tasks that it repeats, too."""
    server = model_server(lambda _request: said())
    by = agent(at(server, "cheap"))
    team = Ensemble(tasks=[task("a", by, name="a"), task("b", by, name="b")], prices=PRICES)
    whole = team.run(runtime=inline_runtime, run_id="whole")
    forked = fork("whole", "b", team.replace(prices={"cheap": DEAR}), runtime=inline_runtime, new_run_id="forked")
    assert dollars(forked) == dollars(whole) == millionths(2 * OF_CHEAP)
    assert header_of(facts_of(home, "forked")).prices == header_of(facts_of(home, "whole")).prices
    assert [*differences(facts_of(home, "forked"))] == []


def test_price_of_a_late_model_is_in_its_answers(runtime: Runtime, model_server: Servers, home: str) -> None:
    """S-PRC-14: a factory makes an agent with a model that the run did not know when it started."""
    server = model_server(lambda _request: said())
    model = at(server, "cheap")

    def of(item: int) -> Task:
        return task(f"Say {item}", agent(model))

    output = MapEnsemble(items=[1, 2], map_task=of, prices=PRICES).run(runtime=runtime, run_id="late")
    assert dollars(output) == millionths(2 * OF_CHEAP)
    facts = facts_of(home, "late")
    assert header_of(facts).prices is None
    answers = [fact.data for fact in facts if isinstance(fact.data, ModelAnswered)]
    assert [each.price for each in answers] == [CHEAP.to_data(), CHEAP.to_data()]
    assert [*differences(facts)] == []


def test_max_cost_is_refused_where_a_price_is_unknown(runtime: Runtime, model_server: Servers) -> None:
    """S-BUD-1: before any model call, with the model, its place and the way to give its price."""
    server = model_server(lambda _request: said())
    tasks = [task("a", agent(at(server, "cheap"), "Cheap")), task("b", agent(at(server, "own"), "Own"))]
    team = Ensemble(tasks=tasks, prices=PRICES, max_cost=2)
    expected = (
        r"max_cost needs cost_configuration: a limit of 2 needs .* that of 'own' at '127\.0\.0\.1' is unknown "
        r"\(Agent 'Own'\)\. Set prices=\{'own': ModelPrice\(input=\.\.\., output=\.\.\.\)\}"
    )
    with pytest.raises(ValidationError, match=expected):
        team.run(runtime=runtime)
    assert len(server.requests) == 0
    assert team.replace(prices={**PRICES, "own": CHEAP}).run(runtime=runtime).is_complete


class Own:
    """An agent of another framework."""

    model = "gpt-5"

    def run(self, _request: TaskRequest) -> str:
        """Answer."""
        return "never"


def test_max_cost_is_refused_for_a_runner(inline_runtime: Runtime) -> None:
    """S-BUD-1, S-PRC-10: the library does not see the model that it calls, so it has no price under any name."""
    own = Agent(role="Own", goal="g", runner=Own())
    team = Ensemble(tasks=[task("a", own)], prices={"gpt-5": CHEAP}, max_cost=2)
    with pytest.raises(ValidationError, match=r"that of 'gpt-5' is unknown \(Agent 'Own'\)"):
        team.run(runtime=inline_runtime)
    output = team.replace(max_cost=None).run(runtime=inline_runtime)
    assert (dollars(output), output.metrics.total_unpriced_calls) == (None, 0)


def test_map_of_a_model_without_a_price_is_not_limited_by_money(inline_runtime: Runtime, model_server: Servers) -> None:
    """S-BUD-1: before the call of a task whose agent has it."""
    server = model_server(lambda _request: said())
    team = MapEnsemble(
        items=[1], map_task=lambda item: task(f"Say {item}", agent(at(server, "own"))), max_cost=1, on_item_error="fail"
    )
    with pytest.raises(ValidationError, match=r"that of 'own' at '127\.0\.0\.1' is unknown"):
        team.run(runtime=inline_runtime)
    assert len(server.requests) == 0


def test_configuration_replaces_all_prices(inline_runtime: Runtime, model_server: Servers, home: str) -> None:
    """S-PRC-13: with its currency; nothing is recorded of prices then."""
    server = model_server(lambda _request: said())
    costs = CostConfiguration(input_token_rate=1, output_token_rate=2, currency="EUR")  # type: ignore[arg-type]  as users write it
    team = Ensemble(tasks=[task("a", agent(at(server, "cheap")))], prices=PRICES, cost_configuration=costs)
    output = team.run(runtime=inline_runtime, run_id="flat")
    assert output.metrics.total_cost_estimate == costs.estimate(1000, 100)
    facts = facts_of(home, "flat")
    assert header_of(facts).prices is None
    assert [*differences(facts)] == []


def test_team_file_has_prices(inline_runtime: Runtime, model_server: Servers, tmp_path: Path) -> None:
    """S-PRC-13: as rates, and as the name of another model."""
    server = model_server(lambda _request: said())
    path = tmp_path / "team.yaml"
    text = f"""
llm: {{model: cheap, base_url: "{server.base_url}"}}
prices:
  cheap: {{input: 1, output: 4, cached_input: 0.25, above: {{5000: {{input: 2}}}}, batch: {{input: 0.5}}}}
  other: openai:gpt-5
tasks:
  say: {{description: Say it}}
"""
    path.write_text(text, encoding="utf-8")
    team = load_runnable(str(path))
    assert isinstance(team, Ensemble)
    batch = ModelPrice(input="0.5")
    assert team.prices == {
        "cheap": CHEAP.replace(above={5000: ModelPrice(input=2)}, batch=batch),
        "other": "openai:gpt-5",
    }
    assert dollars(team.run(runtime=inline_runtime)) == millionths(OF_CHEAP)


@pytest.mark.parametrize(
    ("prices", "problem"),
    [
        ("{m: {inputs: 1}}", "unknown key of a price. Did you mean 'input'?"),
        ("{m: {input: much}}", "must be a number"),
        ("{m: [1]}", "must be a mapping with keys such as 'input', or the name of a model"),
        ("{m: {input: -1}}", "ModelPrice input must be a number >= 0"),
        ("7", "must be a mapping of models to prices"),
    ],
)
def test_damaged_price_in_a_team_file_is_refused_with_its_place(prices: str, problem: str, tmp_path: Path) -> None:
    """S-PRC-13."""
    path = tmp_path / "team.yaml"
    path.write_text(f"prices: {prices}\ntasks:\n  say: {{description: Say it}}\n", encoding="utf-8")
    with pytest.raises(ValidationError) as caught:
        load_runnable(str(path))
    assert "team.yaml:1:" in str(caught.value)
    assert problem in str(caught.value)


def test_streamed_answers_have_cached_tokens(inline_runtime: Runtime, model_server: Servers) -> None:
    """S-PRC-1, S-PRC-2, S-PRC-3: in metrics, event and trace."""
    server, watcher = model_server([said()]), Watcher()
    team = Ensemble(tasks=[task("a", agent(at(server, "cheap"), stream=True))], listeners=[watcher])
    output = team.run(runtime=inline_runtime)
    assert output.metrics.total_cached_tokens == 600
    (interaction,) = output.trace.task_traces[0].llm_interactions
    assert (interaction.cached_tokens, interaction.cache_write_tokens) == (600, -1)
    (event,) = [event for _, event in watcher.heard if getattr(event, "cached_tokens", None) is not None]
    assert getattr(event, "cached_tokens", None) == 600
    assert "1,000 + 100 tokens, 600 of them cached" in render_tree(output.trace)
