"""Teams with fallback chains behind a real endpoint, on both runtimes: who answers, what is recorded, what is resumed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path

import openai
import pytest

from ensemble_ray import (
    Agent,
    AgentExecutionError,
    AgentSynthesizer,
    AllModelsFailedError,
    Ensemble,
    EnsembleError,
    Fallback,
    Image,
    InlineRuntime,
    InMemoryReflectionStore,
    MapReduceEnsemble,
    ModelPrice,
    OpenAIChatModel,
    ReflectionConfig,
    RetryPolicy,
    Runtime,
    Task,
    TokenUsage,
    ValidationError,
    When,
    resume,
    tool,
)
from ensemble_ray.facts.effects import ModelAnswered, ReflectionRecorded
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.testing import Fault, ModelServer, Reply, ScriptedModel, ServedRequest, replay
from tests.builders import agent, call, task
from tests.command_line import calling
from tests.scenarios.delegating import hand
from tests.scenarios.dying import kill_first, marks_of, stay, until_recorded
from tests.scenarios.dying_run import DIED, FIRST, MARKS, MODEL, RUN_ID, answers, team
from tests.scenarios.teams import PATIENCE_S, Marks, until
from tests.template import run_forked

ROOT = Path(__file__).resolve().parents[2]
BROKE = Fault(status=429, message="You exceeded your current quota", code="insufficient_quota")
TOO_LONG = Fault(status=400, message="This model's maximum context length is 10 tokens", code="context_length_exceeded")
QUICK = RetryPolicy(max_attempts=2, first_delay=0.001, max_delay=0.002)
Servers = Callable[..., ModelServer]


def served(servers: Servers, by_model: Mapping[str, object]) -> ModelServer:
    """A server with several models: each has one answer, or a function of the request."""

    def script(request: ServedRequest) -> object:
        answer = by_model[request.model]
        return answer(request) if callable(answer) else answer

    return servers(script)


def chain(server: ModelServer, *names: str, **options: object) -> Fallback:
    """The models of a server, in that order."""
    models = [OpenAIChatModel(name, base_url=server.base_url, api_key="none") for name in names]
    return Fallback(models, **options)  # type: ignore[arg-type]  options of the test


def asked(server: ModelServer) -> list[str]:
    """The models that were asked, in order."""
    return [request.model for request in server.requests]


def recorded(home: str, run_id: str) -> list[ModelAnswered]:
    """The answers in a run's record."""
    facts = RunDirectory(Path(home), run_id).facts()
    return [fact.data for fact in facts if isinstance(fact.data, ModelAnswered)]


def test_a_run_goes_on_with_the_next_model(
    runtime: Runtime, model_server: Servers, home: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """S-FBK-3, S-FBK-10, S-FBK-12, S-FBK-31, S-FBK-41: trace, metrics and record name the model that answered, on both runtimes."""
    replies = {"big": BROKE, "long": TOO_LONG, "bad": Fault(status=503), "small": "ok"}
    server = served(model_server, replies)
    model = chain(server, "big", "long", "bad", "small")
    tasks = [task("a", name="a"), task("b", name="b")]
    ensemble = Ensemble(tasks=tasks, llm=model, retry=QUICK)
    output = ensemble.run(runtime=runtime, run_id="chained")
    assert asked(server) == ["big", "long", "bad", "bad", "small"] * 2
    assert output.metrics.answers_by_model == {"small": 2}
    assert output.trace is not None
    interactions = [each.llm_interactions[0] for each in output.trace.task_traces]
    assert {each.model for each in interactions} == {"small"}
    assert [len(each.waits) for each in interactions] == [4, 4]
    assert [answer.model for answer in recorded(home, "chained")] == ["small", "small"]
    shown = calling(capsys)("trace", "chained").printed
    assert "[2 by small]" in shown
    assert "4 waits, the last: bad: HTTP 503" in shown
    as_data = json.loads(calling(capsys)("trace", "chained", "--json").printed)
    assert as_data["task_traces"][0]["llm_interactions"][0]["model"] == "small"
    assert replay(output, ensemble).difference is None


def test_all_models_failed(runtime: Runtime, model_server: Servers) -> None:
    """S-FBK-14: the error crosses processes with its parts, and its cause is the last provider's."""
    server = served(model_server, {"big": BROKE, "small": Fault(status=401, message="Bad key")})
    with pytest.raises(EnsembleError) as failed:
        Ensemble(tasks=[task("a", agent(chain(server, "big", "small")))], retry=QUICK).run(runtime=runtime)
    assert isinstance(failed.value.__cause__, AgentExecutionError)
    error = failed.value.__cause__.__cause__
    assert isinstance(error, AllModelsFailedError)
    assert list(error.failures) == ["big", "small"]
    assert isinstance(error.__cause__, openai.AuthenticationError)
    assert "big: " in str(failed.value)


def test_items_of_a_map_reduce_use_the_chain(runtime: Runtime, model_server: Servers, home: str) -> None:
    """S-FBK-1, S-FBK-31, S-FBK-41: agents that are made during the run, too."""
    server = served(model_server, {"big": BROKE, "small": "ok"})
    output = MapReduceEnsemble(
        items=["x", "y"],
        map_task=lambda item: Task.of(f"Read {item}"),
        reduce_task=lambda chunk: Task(description="Join", context=chunk),
        llm=chain(server, "big", "small"),
    ).run(runtime=runtime, run_id="mapped")
    assert output.raw == "ok"
    assert output.metrics.answers_by_model == {"small": 3}
    assert {answer.model for answer in recorded(home, "mapped")} == {"small"}


def test_managers_synthesizers_and_reflections_use_the_chain(
    inline_runtime: InlineRuntime, model_server: Servers, home: str
) -> None:
    """S-FBK-1, S-FBK-5, S-FBK-41: every place of a model."""
    made = '{"role": "Maker", "goal": "make", "backstory": "made"}'
    server = served(model_server, {"big": BROKE, "small": made})
    model = chain(server, "big", "small")
    reflected = task("Write", name="w", reflection_config=ReflectionConfig(model=model))
    output = Ensemble(
        tasks=[reflected],
        llm=model,
        agent_synthesizer=AgentSynthesizer.llm_based(),
        reflection_store=InMemoryReflectionStore(),
    ).run(runtime=inline_runtime, run_id="made")
    assert output.task_outputs[0].agent_role == "Maker"
    facts = [fact.data for fact in RunDirectory(Path(home), "made").facts()]
    assert [each.model for each in facts if isinstance(each, ModelAnswered | ReflectionRecorded)] == ["small"] * 3

    def manage(request: ServedRequest) -> object:
        is_first = len(request.messages) == 2
        return hand("Writer", "Write it") if is_first and request.tools else "done"

    managed = served(model_server, {"big": BROKE, "small": manage})
    boss = chain(managed, "big", "small")
    led = Ensemble(
        tasks=[task("Lead")], agents=[agent(boss, "Writer")], manager_llm=boss, llm=boss, workflow="hierarchical"
    ).run(runtime=inline_runtime)
    assert led.raw == "done"
    assert led.metrics.answers_by_model == {"small": 3}


def test_an_answer_is_streamed_by_the_next_model(runtime: Runtime, model_server: Servers) -> None:
    """S-FBK-6, S-FBK-15: before the first piece; a cut stream ends the call."""
    cut = Reply(fragments=("One ", "two"), cut_after=1)
    server = served(model_server, {"big": BROKE, "small": "A streamed answer", "cut": cut})
    pieces: list[str] = []
    Ensemble(
        tasks=[task("a", agent(chain(server, "big", "small")))],
        stream=True,
        on_token=lambda event: pieces.append(event.token),
    ).run(runtime=runtime)
    assert "".join(pieces) == "A streamed answer"
    with pytest.raises(EnsembleError, match="Streaming failed"):
        Ensemble(tasks=[task("a", agent(chain(server, "cut", "small")))], stream=True, retry=QUICK).run(runtime=runtime)
    assert asked(server) == ["big", "small", "cut"]


def test_a_rule_looks_at_the_spending_of_all_processes(runtime: Runtime, model_server: Servers) -> None:
    """S-FBK-20, S-FBK-21: the share of the whole run's budget, also where an agent has a process of its own."""
    large = Reply(text="ok", usage=TokenUsage(400, 100))
    server = served(model_server, {"big": large, "small": large})
    model = chain(server, "big", "small", when=When(budget_above=0.2))
    writers = [agent(model, f"Writer {number}", isolation="process") for number in range(3)]
    tasks = [task(f"t{number}", writer) for number, writer in enumerate(writers)]
    output = Ensemble(tasks=tasks, max_tokens=2000, workflow="sequential").run(runtime=runtime)
    assert asked(server) == ["big", "small", "small"]
    assert output.metrics.answers_by_model == {"big": 1, "small": 2}


def test_a_resumed_run_asks_no_model_again(
    model_server: Servers, home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-FBK-42: recorded answers are used, and the task that was interrupted continues with the model it had."""
    left = answers()
    server = served(model_server, {"broke": BROKE, "m": lambda _: left.pop(0)})
    monkeypatch.setenv(MODEL, server.base_url)
    monkeypatch.setenv(MARKS, str(tmp_path / "marks"))
    monkeypatch.setenv(FIRST, "broke")
    script = "from tests.scenarios.dying_run import main; main()"
    done = run_forked([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == DIED, done.stderr
    assert asked(server) == ["broke", "m", "broke", "m"]
    output = resume(RUN_ID, team(), runtime="inline")
    assert output.raw == "actor + five"
    assert asked(server)[4:] == ["m"]
    assert output.metrics.answers_by_model == {"m": 3}
    assert max(server.requests_by_key().values()) == 1


def test_a_task_stays_with_its_model_when_its_process_died(
    ray_runtime: Runtime, model_server: Servers, home: str, tmp_path: Path
) -> None:
    """S-FBK-42: as in a resumed run."""
    marks = Marks(tmp_path / "marks")
    left: list[object] = [call("stay", marks_of(marks)), "answered"]
    server = served(model_server, {"broke": BROKE, "m": lambda _: left.pop(0)})
    writer = agent(chain(server, "broke", "m"), tools=[stay], isolation="process")
    run = Ensemble(tasks=[task("go", writer)]).start(runtime=ray_runtime)
    until(lambda: marks.lines, "the tool")
    until_recorded(home, run)
    marks.add("over")
    kill_first(marks)
    assert run.result(timeout_s=PATIENCE_S).raw == "answered"
    assert asked(server) == ["broke", "m", "m"]


@tool(effect="none")
def find_process() -> str:
    """Name this process."""
    return str(os.getpid())


def test_agents_with_equal_chains_share_a_process(ray_runtime: Runtime, model_server: Servers) -> None:
    """S-FBK-3: placement compares chains as it compares models."""

    def reply(request: ServedRequest) -> object:
        last = request.messages[-1]
        return last["content"] if last["role"] == "tool" else call("find_process")

    server = served(model_server, dict.fromkeys(("big", "small", "other"), reply))
    chains = (chain(server, "big", "small"), chain(server, "big", "small"), chain(server, "big", "other"))
    tasks = [task(f"t{number}", agent(each, tools=[find_process])) for number, each in enumerate(chains)]
    first, second, third = (
        each.raw for each in Ensemble(tasks=tasks, workflow="sequential").run(runtime=ray_runtime).task_outputs
    )
    assert first == second != third


def test_the_next_model_is_asked_if_one_does_not_read_an_attachment(runtime: Runtime) -> None:
    """S-FBK-10, S-ATT-23: on both runtimes; the first model is not asked."""
    blind, seeing = ScriptedModel(otherwise="blind"), ScriptedModel(otherwise="a pier", reads=["image"])
    picture = Image(b"\x89PNG\r\n\x1a\n...", name="pier.png")
    viewer = Agent(role="Viewer", goal="Look", llm=[blind, seeing])
    look = Task(description="Look", expected_output="A place", attachments=[picture], agent=viewer)
    output = Ensemble(tasks=[look]).run(runtime=runtime)
    assert output.raw == "a pier"
    assert [len(each.calls) for each in (blind, seeing)] == [0, 1]


def test_each_model_of_a_chain_has_its_price(model_server: Callable[..., ModelServer], runtime: Runtime) -> None:
    """S-PRC-17: the answer costs as the model that gave it."""
    server = model_server(
        lambda request: (
            Fault(status=403) if request.body["model"] == "dear" else Reply(text="x", usage=TokenUsage(100, 50))
        )
    )
    chain = [OpenAIChatModel(name, base_url=server.base_url, api_key="k") for name in ("dear", "cheap")]
    writer = Agent(role="Writer", goal="Write", llm=chain)
    prices = {"dear": ModelPrice(input=100, output=100), "cheap": ModelPrice(input=10, output=20)}
    team = Ensemble(
        tasks=[Task(description="Write", expected_output="A word", agent=writer)], prices=prices, max_cost=1
    )
    cost = team.run(runtime=runtime).metrics.total_cost_estimate
    assert cost is not None
    assert cost.total_cost == Decimal("0.002")
    with pytest.raises(ValidationError, match="that of 'cheap'"):
        team.replace(prices={"dear": prices["dear"]}).run(runtime=runtime)
