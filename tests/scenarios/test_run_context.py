"""Deps, inputs, tags and user of a run in the user's code, in every process that calls it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ensemble_ray import (
    AbstractAgentTool,
    AgentTool,
    ChatMessage,
    ChatResponse,
    CurrentRun,
    DelegationPolicyResult,
    DelegationRequest,
    Ensemble,
    EnsembleError,
    Graph,
    GraphEdge,
    GraphRoutingContext,
    GuardrailInput,
    GuardrailResult,
    InlineRuntime,
    Loop,
    LoopIterationContext,
    MapEnsemble,
    MapReduceEnsemble,
    OpenAIChatModel,
    OpenTelemetryListener,
    Review,
    ReviewDecision,
    ReviewRequest,
    RunState,
    Runtime,
    TaskHandlerContext,
    ToolContext,
    ToolResult,
    ToolSpec,
    ValidationError,
    current_run_context,
    decide,
    fork,
    provide,
    resume,
    tool,
)
from ensemble_ray.actors import spawn
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.testing import ModelServer, ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.delegating import ask, hand, told
from tests.scenarios.delegating import team as managed_team
from tests.scenarios.detached import gates_of
from tests.scenarios.dying import kill_actor, kill_first, until_recorded
from tests.scenarios.teams import PATIENCE_S, Marks, Watcher, recorded_state, until

SECRET = "s3cret-of-the-shop"  # noqa: S105  what no output may contain


@dataclass
class Shop:
    """What tools of these tests need."""

    prices: dict[str, int]
    key: str = SECRET
    place: str = ""  # where processes leave marks


@dataclass(slots=True)
class Locked:
    """Deps that cannot be pickled."""

    lock: object


def shop(place: Path | str = "") -> Shop:
    """A shop with one thing in it."""
    return Shop({"tea": 3}, place=str(place))


@tool(effect="none")
def price(context: ToolContext[Shop], name: str) -> str:
    """Return the price of a thing."""
    assert context.deps.key == SECRET
    assert current_run_context(Shop).deps is context.deps
    shown = [context.user, context.inputs.get("what", ""), context.tags.get("for", "")]
    return f"{name} {context.deps.prices[name]} {' '.join(shown)} {bool(context.run_id)} {os.getpid() == DRIVER}"


@tool(timeout=None, effect="none")
def wait_there(context: ToolContext[Shop]) -> str:
    """Leave a mark, and wait."""
    marks = Marks(Path(context.deps.place))
    marks.add(os.getpid())
    marks.wait("over")
    return f"waited for {context.deps.prices['tea']}"


DRIVER = os.getpid()
APPROVE = ReviewDecision.continue_execution()


def asking(*, role: str = "Seller", **fields: object) -> tuple[ScriptedModel, Ensemble]:
    """A team of one that asks for a price."""
    model = ScriptedModel(call("price", '{"name": "tea"}'), "done")
    return model, Ensemble(tasks=[task("sell {what}", agent(model, role, tools=[price]))], **fields)  # type: ignore[arg-type]


def count(context: TaskHandlerContext[Shop]) -> str:
    """A handler that reads the deps."""
    return f"{context.deps.prices['tea']} {context.user} {context.inputs['what']} {context.run_id != ''}"


def test_tools_have_the_context_of_their_run(runtime: Runtime) -> None:
    """S-CTX-1, S-CTX-2, S-CTX-10, S-CTX-60: the model sees neither the parameter nor the deps."""
    model, team = asking(deps_type=Shop)
    output = team.run({"what": "leaves"}, runtime=runtime, deps=shop(), user="ada", tags={"for": "tests"})
    assert output.raw == "done"
    (result,) = told(model)
    assert result.startswith("tea 3 ada leaves tests True")
    assert [list(each.parameters["properties"]) for each in model.calls[0].tools] == [["name"]]  # type: ignore[call-overload]


def guarded(subject: GuardrailInput) -> GuardrailResult:
    """Refuse a task without a price."""
    found = current_run_context(Shop).deps.prices
    return GuardrailResult.success() if found else GuardrailResult.failure(f"no price for {subject.task_description}")


def enough(context: LoopIterationContext) -> bool:
    """Whether a loop has done as many iterations as tea costs."""
    return context.iteration_number >= current_run_context(Shop).deps.prices["tea"]


def test_handlers_guardrails_and_predicates_have_the_context(runtime: Runtime) -> None:
    """S-CTX-3, S-CTX-4: also in a loop."""
    body = task("count", handler=count, input_guardrails=[guarded])
    team = Ensemble(loops=[Loop(name="counting", body=[body], until=enough, max_iterations=9)], inputs={"what": "x"})
    output = team.run(runtime=runtime, deps=shop(), user="ada")
    assert output.raw == "3 ada x True"
    assert output.trace is not None
    assert [len(each.iterations) for each in output.trace.loop_traces] == [3]


def test_delegated_workers_have_the_context(runtime: Runtime) -> None:
    """S-CTX-3: in whatever process they run; a policy reads the deps, too."""
    asked = ScriptedModel(call("price", '{"name": "tea"}'), "three")
    helper = agent(asked, "Helper", tools=[price], isolation="process")
    lead = agent(ScriptedModel(ask("Helper", "the price"), "done"), "Lead", allow_delegation=True)

    def allow(request: DelegationRequest, _context: object) -> DelegationPolicyResult:
        is_known = "tea" in current_run_context(Shop).deps.prices
        return DelegationPolicyResult.allow() if is_known else DelegationPolicyResult.reject(request.task_description)

    team = Ensemble(tasks=[task("lead", lead)], agents=[lead, helper], delegation_policies=[allow])
    assert team.run(runtime=runtime, deps=shop(), user="bob").raw == "done"
    assert told(asked)[0].startswith("tea 3 bob")


def test_items_have_the_context(runtime: Runtime) -> None:
    """S-CTX-3, S-CTX-21: handlers and tools of a map."""
    model = ScriptedModel(otherwise=lambda asked: "ok" if len(asked.messages) > 3 else call("price", '{"name": "tea"}'))
    seller = agent(model, "Seller", tools=[price])
    team = MapEnsemble(items=["a", "b", "c"], map_task=lambda item: task(f"sell {item}", seller), deps_type=Shop)
    with pytest.raises(ValidationError, match="declares deps_type=Shop, and the run has no deps"):
        team.run(runtime=runtime)
    output = team.run(runtime=runtime, deps=shop(), user="eve")
    assert [each.raw for each in output.task_outputs] == ["ok"] * 3
    results = {message.content for each in model.calls for message in each.messages if message.role == "tool"}
    assert all(str(each).startswith("tea 3 eve") for each in results)
    assert results


class Echo:
    """A model that answers with the price, once per process."""

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Read the deps."""
        del messages, tools
        run = current_run_context(Shop)
        return ChatResponse(text=f"{run.deps.prices['tea']} for {run.user}")


class Price(AbstractAgentTool):
    """A tool as a class."""

    name = "price"
    description = "The price of a thing"
    effect = "none"

    def do_execute(self, text: str, /) -> ToolResult:
        """Read the deps of the call."""
        context: ToolContext = self.context
        shop = context.deps
        assert isinstance(shop, Shop)
        return ToolResult.success(f"{text} {shop.prices['tea']} {context.user} {context.run.run_id == context.run_id}")


class Plain(AgentTool):
    """A tool without a context of its own."""

    name = "plain"
    description = "The price of a thing"
    effect = "none"

    def execute(self, text: str, /) -> ToolResult:
        """Read the deps of the run."""
        return ToolResult.success(f"{text} {current_run_context(Shop).deps.prices['tea']}")


def test_models_and_tools_of_classes_have_the_context(runtime: Runtime) -> None:
    """S-CTX-1, S-CTX-4, S-CTX-20: of a question to an agent, too; and tools as handlers."""
    assert agent(Echo()).run("How much?", runtime=runtime, deps=shop(), user="ada").text == "3 for ada"
    model = ScriptedModel([call("price", '{"input": "tea"}'), call("plain", '{"input": "x"}', number=1)], "done")
    seller = agent(model, tools=[Price(), Plain()])
    team = Ensemble(tasks=[task("sell", seller), task("tea", handler=Price()), task("go on", handler=Plain())])
    output = team.run(runtime=runtime, deps=shop(), user="ada")
    assert told(model) == ["tea 3 ada True", "x 3"]
    assert [each.raw for each in output.task_outputs[1:]] == ["tea 3 ada True", "go on 3"]


def cheap(context: GraphRoutingContext) -> bool:
    """Whether an edge of a graph is taken."""
    return f"{current_run_context(Shop).deps.prices['tea']}" in context.last_output.raw


def test_managed_workers_reduces_and_edges_have_the_context(runtime: Runtime) -> None:
    """S-CTX-3."""
    asked = ScriptedModel(call("price", '{"name": "tea"}'), "three")
    helper = agent(asked, "Helper", tools=[price])
    managed = managed_team(ScriptedModel(hand("Helper", "the price"), "done"), [helper])
    assert managed.run(runtime=runtime, deps=shop(), user="bob").raw == "done"
    assert told(asked)[0].startswith("tea 3 bob")
    reduced = MapReduceEnsemble(
        items=["a", "b"],
        map_task=lambda item: task(item, handler=count),
        reduce_task=lambda group: task("join", handler=count, context=group),
        inputs={"what": "x"},
    )
    assert reduced.run(runtime=runtime, deps=shop(), user="bob").raw == "3 bob x True"
    graph = Graph(
        name="g",
        states={"ask": task("ask", handler=count), "sell": task("sell", handler=lambda _: "sold")},
        edges=[GraphEdge("ask", "sell", cheap), GraphEdge("ask", "ask"), GraphEdge("sell", Graph.END)],
        start="ask",
        max_steps=3,
    )
    assert Ensemble(graph=graph, inputs={"what": "x"}).run(runtime=runtime, deps=shop()).raw == "sold"


class Counted:
    """Deps that leave a mark when they are unpickled."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        Marks(Path(self.place)).add(os.getpid())


def test_a_value_is_unpickled_once_per_process(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-CTX-22: however many tasks a process has."""

    def used(_context: TaskHandlerContext[Counted]) -> str:
        return f"{os.getpid()} {current_run_context(Counted).deps.place != ''}"

    marks = Marks(tmp_path / "marks")
    team = Ensemble(tasks=[task(f"task {n}", handler=used) for n in range(4)])
    output = team.run(runtime=ray_runtime, deps=Counted(str(marks.path)))
    (process,) = {each.raw for each in output.task_outputs}
    assert marks.lines.count(process.partition(" ")[0]) == 1


@pytest.mark.parametrize("deps", [None, Locked(1), "shop"], ids=["missing", "other", "text"])
def test_deps_of_another_class_are_refused_before_any_model_call(inline_runtime: InlineRuntime, deps: object) -> None:
    """S-CTX-21: the message names the classes, and no value."""
    model, team = asking(deps_type=Shop)
    with pytest.raises(ValidationError, match=r"Ensemble declares deps_type=Shop, and the "):
        team.run({"what": "x"}, runtime=inline_runtime, deps=deps)
    assert model.calls == ()


def test_unpicklable_deps_are_refused_before_any_model_call(ray_runtime: Runtime) -> None:
    """S-CTX-23: the message names the attribute, and the ways out."""
    model, team = asking()
    with pytest.raises(ValidationError) as caught:
        team.run({"what": "x"}, runtime=ray_runtime, deps=Locked(threading.Lock()))
    assert str(caught.value).startswith("deps -> lock cannot travel to a worker process: ")
    assert "deps=provide(open_deps)" in str(caught.value)
    assert "deps_place='driver'" in str(caught.value)
    assert model.calls == ()


@contextmanager
def opened(run: CurrentRun) -> Generator[Shop]:
    """Deps that leave marks when they are opened and closed."""
    marks = Marks(Path(run.inputs["what"]))
    marks.add(f"open {os.getpid()}")
    yield shop()
    marks.add(f"close {os.getpid()}")


@asynccontextmanager
async def opened_async(run: CurrentRun) -> AsyncGenerator[Shop]:
    """The same, for async code."""
    marks = Marks(Path(run.inputs["what"]))
    marks.add(f"open {os.getpid()}")
    await asyncio.sleep(0)
    yield shop()
    marks.add(f"close {os.getpid()}")


@pytest.mark.parametrize("factory", [opened, opened_async])
def test_each_process_opens_provided_deps_once_and_closes_them(
    runtime: Runtime, tmp_path: Path, factory: Callable[..., object]
) -> None:
    """S-CTX-40, S-CTX-41: at the end of the run."""
    marks = Marks(tmp_path / "marks")
    sellers = [
        agent(ScriptedModel(call("price", '{"name": "tea"}'), "done"), f"Seller {n}", tools=[price]) for n in range(3)
    ]
    team = Ensemble(
        tasks=[*[task(f"sell {each.role}", each) for each in sellers], task("count {what}", handler=count)],
        workflow="parallel",
        deps_type=Shop,
        deps=provide(factory),
    )
    assert team.run({"what": str(marks.path)}, runtime=runtime).raw
    until(lambda: sum(line.startswith("close") for line in marks.lines) == len(marks.lines) // 2, "the closing")
    processes = [line.removeprefix("open ") for line in marks.lines if line.startswith("open")]
    assert len(processes) == len(set(processes)) >= 1
    assert sorted(line.removeprefix("close ") for line in marks.lines if line.startswith("close")) == sorted(processes)


def refused() -> Shop:
    """Deps that cannot be opened."""
    raise ConnectionError("no shop")


def other() -> object:
    """Deps of another class."""
    return Locked(1)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (refused, r"The deps of the run cannot be opened: provide\(refused\) raised ConnectionError: no shop"),
        (other, r"provide\(other\) opened a Locked, and deps_type is Shop"),
    ],
)
def test_deps_that_cannot_be_opened_fail_the_task_before_its_model_call(
    runtime: Runtime, factory: Callable[..., object], text: str
) -> None:
    """S-CTX-42."""
    model, team = asking(deps_type=Shop)
    with pytest.raises(Exception, match=text):
        team.run({"what": "x"}, runtime=runtime, deps=provide(factory))
    assert model.calls == ()


def test_driver_held_deps_stay_in_the_driver(runtime: Runtime) -> None:
    """S-CTX-30 to S-CTX-32: deps that cannot be pickled, in the process that started the run, on both runtimes."""
    held = threading.Lock()

    @tool
    def lock(context: ToolContext[Locked]) -> str:
        """Take the lock."""
        with context.deps.lock:  # type: ignore[attr-defined]
            return f"{os.getpid()} {context.tool_name} {context.agent_role}"

    def done(context: TaskHandlerContext[Locked]) -> str:
        with context.deps.lock:  # type: ignore[attr-defined]
            return f"handled in {os.getpid()}"

    def checked(_subject: GuardrailInput) -> GuardrailResult:
        with current_run_context(Locked).deps.lock:  # type: ignore[attr-defined]
            return GuardrailResult.success()

    model = ScriptedModel(call("lock"), "done")
    team = Ensemble(
        tasks=[
            task("lock it", agent(model, "Keeper", tools=[lock]), input_guardrails=[checked]),
            task("handle", handler=done),
        ],
        deps_type=Locked,
        deps_place="driver",
    )
    output = team.run(runtime=runtime, deps=Locked(held))
    assert told(model) == [f"{os.getpid()} lock Keeper"]
    assert output.raw == f"handled in {os.getpid()}"


def test_items_reach_deps_of_the_driver(runtime: Runtime) -> None:
    """S-CTX-31, S-CTX-32: of a map, whose tasks are made while it runs."""

    def done(context: TaskHandlerContext[Locked]) -> str:
        with context.deps.lock:  # type: ignore[attr-defined]
            return f"{context.description} {os.getpid()}"

    team = MapEnsemble(items=["a", "b"], map_task=lambda item: task(item, handler=done), deps_place="driver")
    output = team.run(runtime=runtime, deps=Locked(threading.Lock()))
    assert [each.raw for each in output.task_outputs] == [f"a {os.getpid()}", f"b {os.getpid()}"]


def test_a_worker_says_how_to_reach_deps_of_the_driver(ray_runtime: Runtime) -> None:
    """S-CTX-33."""

    @tool
    def without() -> str:
        """Read deps that are elsewhere."""
        return str(current_run_context().deps)

    team = Ensemble(
        tasks=[task("read", agent(ScriptedModel(call("without"), "done"), tools=[without]))], deps_place="driver"
    )
    with pytest.raises(Exception, match="Declare the context as the first parameter of the tool"):
        team.run(runtime=ray_runtime, deps=Locked(1))


def test_errors_of_tools_in_the_driver_reach_the_model(ray_runtime: Runtime) -> None:
    """S-CTX-31."""

    @tool
    def fail(context: ToolContext[Locked]) -> str:
        """Fail."""
        raise ValueError(f"no {context.deps.lock}")

    model = ScriptedModel(call("fail"), "done")
    team = Ensemble(tasks=[task("read", agent(model, tools=[fail]))], deps_place="driver")
    assert team.run(runtime=ray_runtime, deps=Locked(1)).raw == "done"
    assert told(model) == ["Tool error: ValueError: no 1"]


def test_reviewers_have_the_context(runtime: Runtime) -> None:
    """S-CTX-4: in the process that started the run."""

    def review(request: ReviewRequest) -> ReviewDecision:
        run = current_run_context(Shop)
        return ReviewDecision.edit(f"{request.task_output} {run.deps.prices['tea']} {run.user}")

    team = Ensemble(tasks=[task("go", handler=lambda _: "cost", review=Review.required())], review_handler=review)
    assert team.run(runtime=runtime, deps=shop(), user="ada").raw == "cost 3 ada"


def test_a_new_process_has_the_deps_of_a_killed_one(ray_runtime: Runtime, home: str, tmp_path: Path) -> None:
    """S-CTX-24, S-DUR-31."""
    marks = Marks(tmp_path / "marks")
    model = ScriptedModel(call("wait_there"), "survived")
    worker = agent(model, tools=[wait_there], isolation="process")
    run = Ensemble(tasks=[task("go", worker)], deps_type=Shop).start(runtime=ray_runtime, deps=shop(marks.path))
    until(lambda: marks.lines, "the tool")
    until_recorded(home, run)
    kill_first(marks)
    until(lambda: len(marks.lines) == 2, "the other process")
    marks.add("over")
    assert run.result(timeout_s=PATIENCE_S).raw == "survived"
    assert told(model) == ["waited for 3"]


def test_a_new_scheduler_has_the_deps(ray_runtime: Runtime, home: str, tmp_path: Path) -> None:
    """S-CTX-51, S-DUR-32."""
    marks = Marks(tmp_path / "marks")
    model = ScriptedModel(call("wait_there"), "survived")
    team = Ensemble(tasks=[task("go", agent(model, tools=[wait_there], isolation="process"))], deps_type=Shop)
    run = team.start(runtime=ray_runtime, deps=shop(marks.path))
    until(lambda: marks.lines, "the tool")
    until_recorded(home, run)
    kill_actor(spawn.SCHEDULER)
    until(lambda: len(marks.lines) == 2, "the other process")
    marks.add("over")
    assert run.result(timeout_s=PATIENCE_S).raw == "survived"
    assert told(model) == ["waited for 3"]


def test_a_resumed_run_needs_its_deps_again(runtime: Runtime) -> None:
    """S-CTX-50: they are not in the record; inputs, tags and user are."""
    first = task("a", handler=lambda _: "a", review=Review.required())
    second = task("count {what}", handler=count, context=[first])
    team = Ensemble(tasks=[first, second], review_wait="detach", deps_type=Shop, deps_place="driver")
    output = team.run({"what": "x"}, runtime=runtime, deps=shop(), user="ada")
    run_id = str(output.run_id)
    assert output.state is RunState.WAITING
    decide(run_id, gates_of(output)["a"], APPROVE, runtime=runtime)
    with pytest.raises(ValidationError, match="the run has no deps"):
        resume(run_id, team, runtime=runtime)
    assert resume(run_id, team, runtime=runtime, deps=shop()).raw == "3 ada x True"
    assert resume(run_id, team, runtime=runtime).raw == "3 ada x True"  # its recorded output
    forked = fork(run_id, from_task="task-2", ensemble=team, runtime=runtime, deps=shop(), user="bob")
    assert forked.raw == "3 bob x True"


def test_inputs_are_the_same_texts_in_a_resumed_run(inline_runtime: InlineRuntime) -> None:
    """S-CTX-5, S-CTX-26: whatever the values were; another place of the deps is no other definition."""
    seen: list[dict[str, str]] = []

    def note(_context: TaskHandlerContext) -> str:
        seen.append(dict(current_run_context().inputs))
        return "noted"

    before = task("look at {what}", handler=note, review=Review.required())
    after = task("go on", handler=note, context=[before])
    team = Ensemble(tasks=[before, after], review_wait="detach", inputs={"more": "own"}, deps_type=Shop)
    inputs = {"what": {"a": [1]}, "number": 3}
    output = team.run(inputs, runtime=inline_runtime, deps=shop())
    decide(str(output.run_id), gates_of(output)["look at {'a': [1]}"], APPROVE, runtime=inline_runtime)
    team = team.replace(deps_type=None, deps_place="driver")
    assert resume(str(output.run_id), team, runtime=inline_runtime).raw == "noted"
    assert seen == [{"what": "{'a': [1]}", "number": "3", "more": "own"}] * 2


def test_a_run_that_goes_on_without_its_driver_has_travelled_deps(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-CTX-51: after a decision, no program passes them again."""
    marks = Marks(tmp_path / "marks")

    def note(context: TaskHandlerContext[Shop]) -> str:
        marks.add(f"{context.deps.prices['tea']} {context.user}")
        return "noted"

    first = task("a", handler=lambda _: "a", review=Review.required())
    team = Ensemble(tasks=[first, task("b", handler=note, context=[first])], review_wait="detach", deps_type=Shop)
    output = team.run(runtime=ray_runtime, deps=shop(), user="ada")
    decide(str(output.run_id), gates_of(output)["a"], APPROVE, runtime=ray_runtime)
    until(lambda: marks.lines, "the task behind the gate")
    assert marks.lines == ["3 ada"]


@tool(timeout=None, effect="none")
def hold(path: str) -> str:
    """Leave a mark, and wait."""
    marks = Marks(Path(path))
    marks.add("held")
    marks.wait("over")
    return "held"


async def lose_driver(run_id: str) -> None:
    """Do what the event hub does when it has not heard of a driver for too long."""
    await spawn.existing("event_hub").mark_driver_gone.remote(run_id)


def test_a_run_that_lost_its_deps_is_interrupted_and_resumed(
    ray_runtime: Runtime, home: str, tmp_path: Path, model_server: Callable[..., ModelServer]
) -> None:
    """S-CTX-52, S-DUR-33: the driver is gone, as the hub sees it, and the next call of a tool needs its deps."""
    marks = Marks(tmp_path / "marks")
    server = model_server([call("hold", f'{{"path": "{marks.path}"}}'), call("price", '{"name": "tea"}'), "done"])
    seller = agent(OpenAIChatModel("m", base_url=server.base_url, api_key="none"), "Seller", tools=[hold, price])
    team = Ensemble(tasks=[task("sell {what}", seller)], deps_type=Shop, deps_place="driver")
    run = team.start({"what": "x"}, runtime=ray_runtime, deps=shop(), user="ada")
    until(lambda: marks.lines, "the first tool")
    run_blocking(lose_driver(run.id))
    marks.add("over")
    with pytest.raises(EnsembleError, match="its driver is gone"):
        run.result(timeout_s=PATIENCE_S)
    assert run.state is RunState.INTERRUPTED
    assert recorded_state(home, run.id) is RunState.INTERRUPTED
    with pytest.raises(ValidationError, match="the run has no deps"):
        resume(run.id, team, runtime=ray_runtime)
    assert resume(run.id, team, runtime=ray_runtime, deps=shop()).raw == "done"
    assert marks.lines.count("held") == 1


def test_deps_are_nowhere_but_in_user_code(
    runtime: Runtime, home: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """S-CTX-25: not in the record, prompts, events, traces, logs, messages of errors or representations."""
    caplog.set_level(logging.DEBUG)
    watcher, spans, traces = Watcher(), InMemorySpanExporter(), list[str]()
    telemetry = OpenTelemetryListener(span_processor=SimpleSpanProcessor(spans), meter_provider=MeterProvider())
    model, team = asking(
        deps_type=Shop,
        listeners=[watcher, telemetry],
        capture_mode="full",
        trace_exporter=lambda trace: traces.append(trace.to_json()),
        verbose=True,
        deps=shop(),
    )
    output = team.run({"what": "x"}, runtime=runtime, user="ada")
    run = CurrentRun(deps=shop())
    assert traces
    assert spans.get_finished_spans()
    texts = [
        repr(team), str(team.model_dump()), repr(run), repr(ToolContext(run=run)), repr(output), str(output.trace), *traces,
        *(span.to_json() for span in spans.get_finished_spans()), repr(watcher.heard), repr(model.calls), caplog.text,
        *capfd.readouterr(),
    ]  # fmt: skip
    with pytest.raises(ValidationError) as caught:
        team.run({"what": "x"}, runtime=runtime, deps=shop(), max_tokens=-1)
    texts.append(str(caught.value))
    assert [text for text in texts if SECRET in text] == []
    files = [each for each in Path(home).rglob("*") if each.is_file()]
    assert files
    assert [each for each in files if SECRET.encode() in each.read_bytes()] == []
