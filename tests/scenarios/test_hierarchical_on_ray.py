"""Delegations between processes: what a run shows is what it shows inline; whoever dies, hangs or is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from ensemble_ray import (
    AgentExecutionError,
    ChatMessage,
    ChatResponse,
    DelegationPolicyContext,
    DelegationPolicyResult,
    DelegationRequest,
    Ensemble,
    EnsembleError,
    Event,
    ExitReason,
    HierarchicalConstraints,
    Runtime,
    ValidationError,
    tool,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from ensemble_ray.values.ids import REDISPATCH_STEP, resend_step
from tests.builders import agent, call, task
from tests.scenarios.delegating import ask, asked_of, hand, run_of, team, told, worker
from tests.scenarios.dying import kill_first, marks_of, staying, until_recorded
from tests.scenarios.teams import PATIENCE_S, Marks, Watcher, task_of, until
from tests.scenarios.test_death import links
from tests.scenarios.test_same_on_both import as_data, plain


def of_the_run(value: object) -> object:
    """Plain data without the ids of delegations, which are made of the run's."""
    if isinstance(value, dict):
        return {name: of_the_run(each) for name, each in value.items() if name not in {"delegation_id", "task_id"}}
    return [of_the_run(each) for each in value] if isinstance(value, list) else value


def newsroom() -> Ensemble:
    """A manager under constraints, who asks in vain, twice at once, too early and too often."""
    manager = ScriptedModel(
        [hand("writer ", "write", number=1), hand("Researcher", "dig", number=2), hand("Nobody", "x", number=3)],
        hand("Researcher", "dig more"),
        [hand("Researcher", "dig yet more", number=1), hand("Writer", "write it", number=2)],
        "all done",
    )
    researcher = worker("Researcher", "found gold", "found more", stream=True)
    writer = worker("Writer", ask("Researcher", "help"), ValueError("no ink"), allow_delegation=True)
    rules = HierarchicalConstraints(
        required_workers=["Researcher"],
        required_stages=[["Researcher"], ["Writer"]],
        max_calls_per_worker={"Researcher": 2},
    )
    return team(manager, [researcher, writer], hierarchical_constraints=rules, max_delegation_depth=1)


def required() -> Ensemble:
    """A manager who never asks the one that he must ask."""
    rules = HierarchicalConstraints(required_workers=["Writer"])
    manager = ScriptedModel(hand("Digger"), "done", "done all the same")
    return team(manager, [worker("Writer"), worker("Digger")], hierarchical_constraints=rules)


def broken() -> Ensemble:
    """A manager whose model fails after one worker was done and one failed."""
    manager = ScriptedModel(hand("Writer"), hand("Digger"), OSError("model gone"))
    return team(manager, [worker("Writer"), worker("Digger", ValueError("no spade"))])


@pytest.mark.parametrize("ensemble", [newsroom, required, broken])
def test_hierarchical_run_is_the_same_on_both_runtimes(
    inline_runtime: Runtime, ray_runtime: Runtime, ensemble: object
) -> None:
    """S-CONV-32, S-HIER-6, S-HIER-7, S-HIER-24, S-HIER-50, S-HIER-60: output, events in order, trace and errors."""
    shown: list[dict[str, object]] = []
    for runtime in (inline_runtime, ray_runtime):
        run = ensemble().replace(capture_mode="full", trace_exporter=lambda _: None).start(runtime=runtime)  # type: ignore[operator]
        events = [plain(event.to_dict()) for event in run.events() if isinstance(event, Event)]
        found: dict[str, object] = {"events": of_the_run(events)}
        try:
            output = run.result()
        except EnsembleError as error:
            found["error"] = [(type(each).__name__, str(each)) for each in links(error)]
            found["trace"] = of_the_run(as_data(error.trace))
            completed = getattr(error, "completed_task_outputs", ())
            found["completed"] = [each.raw for each in completed]
        else:
            found["output"] = of_the_run(as_data(output))
        shown.append(found)
    inline, on_ray = shown
    for name, value in inline.items():
        assert on_ray[name] == value, name
    assert on_ray.keys() == inline.keys()


# Processes that die.


def nested(facts: Sequence[Fact], kind: str) -> list[Fact]:
    """Facts of delegated work."""
    return [fact for fact in facts if fact.kind == kind and "/delegate#0" in fact.name]


def test_delegation_goes_on_when_the_workers_process_dies(ray_runtime: Runtime, home: str, tmp_path: Path) -> None:
    """S-DUR-31, S-DUR-37: in another process, under an epoch of its own; nothing that is recorded is asked again."""
    marks, watcher = Marks(tmp_path / "marks"), Watcher()
    model, writer = staying(marks)
    manager = ScriptedModel(hand("Writer"), "done")
    run = team(manager, [writer], delegation_retries=1, listeners=[watcher]).start(runtime=ray_runtime)
    until(lambda: marks.lines, "the tool")
    until_recorded(home, run)
    kill_first(marks)
    until(lambda: len(marks.lines) == 2, "the other process")
    marks.add("over")
    output = run.result(timeout_s=PATIENCE_S)
    assert [each.raw for each in output.task_outputs] == ["survived", "done"]
    assert (len(manager.calls), len(model.calls), told(model)) == (2, 2, ["stayed"])
    assert len(set(marks.lines)) == 3
    assert [method for method in watcher.methods if "delegation" in method] == [
        "on_delegation_started",
        "on_delegation_completed",
    ]
    (fact,) = nested(RunDirectory(Path(home), run.id).facts(), "output")
    assert fact.epoch == resend_step(1)


@pytest.mark.parametrize("fields", [{"delegation_retries": 0}, {"durability": "off"}])
def test_manager_is_told_when_a_workers_process_died_for_good(
    ray_runtime: Runtime, tmp_path: Path, fields: dict[str, object]
) -> None:
    """S-HIER-24, S-DEL-52, S-CONV-32: and goes on, with a fresh process of the same worker; no class of Ray's."""
    marks, watcher = Marks(tmp_path / "marks"), Watcher()
    writer = agent(
        ScriptedModel(call("stay", marks_of(marks)), "from the next one"),
        tools=staying(marks)[1].tools,
    )
    manager = ScriptedModel(hand("Writer"), hand("Writer", "again"), "done")
    run = team(manager, [writer], listeners=[watcher], **fields).start(runtime=ray_runtime)
    kill_first(marks)
    output = run.result(timeout_s=PATIENCE_S)
    assert [each.raw for each in output.task_outputs] == ["from the next one", "done"]
    first, second = told(manager)
    assert first.startswith("Error: Agent 'Writer': its process died (")
    assert second == "from the next one"
    (failed,) = [event for method, event in watcher.heard if method == "on_delegation_failed"]
    cause = failed.cause  # type: ignore[attr-defined]
    assert isinstance(cause, AgentExecutionError)
    assert (cause.agent_role, cause.task_description) == ("Writer", "do it")
    assert not [each for each in links(cause) if type(each).__module__.startswith("ray")]


class Manager:
    """A manager's model that tells its process, asks a worker, and repeats what that gave."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def chat(self, messages: Sequence[ChatMessage], tools: object = ()) -> ChatResponse:
        self._marks.add(os.getpid())
        if messages[-1].role == "tool":
            return ChatResponse(text=messages[-1].content or "")
        return ChatResponse(tool_calls=(hand("Writer"),))


def test_worker_goes_on_for_another_manager_when_the_managers_process_dies(
    ray_runtime: Runtime, home: str, tmp_path: Path
) -> None:
    """S-DUR-31, S-DUR-37: the new one takes up what is at work; manager and worker are asked once for each answer."""
    asked, marks, watcher = Marks(tmp_path / "manager"), Marks(tmp_path / "worker"), Watcher()
    model, writer = staying(marks)
    run = team(Manager(asked), [writer], listeners=[watcher]).start(runtime=ray_runtime)  # type: ignore[arg-type]  # a model of ours
    until(lambda: marks.lines, "the tool")
    kill_first(asked)
    until(lambda: watcher.methods.count("on_delegation_started") == 2, "the other manager")
    marks.add("over")
    output = run.result(timeout_s=PATIENCE_S)
    assert [each.raw for each in output.task_outputs] == ["survived", "survived"]
    assert len(model.calls) == 2
    assert len(marks.lines) == 2  # one call of the tool, and its end
    assert len(asked.lines) == len(set(asked.lines)) == 2
    facts = RunDirectory(Path(home), run.id).facts()
    assert [fact.epoch for fact in nested(facts, "output")] == [0]
    assert [fact.epoch for fact in facts if fact.name == "manager#0" and fact.kind == "output"] == [REDISPATCH_STEP]
    assert len([fact for fact in facts if fact.kind == "delegation"]) == 1


class TwiceAsking(Manager):
    """A manager's model that asks its worker two things, one after the other."""

    def chat(self, messages: Sequence[ChatMessage], tools: object = ()) -> ChatResponse:
        super().chat(messages)
        count = sum(message.role == "tool" for message in messages)
        return ChatResponse(text="done") if count == 2 else ChatResponse(tool_calls=(hand("Writer", f"task {count}"),))


def test_replica_goes_on_for_another_manager_when_the_managers_process_dies(
    ray_runtime: Runtime, tmp_path: Path
) -> None:
    """S-DUR-31, S-SET-41: the one that is at work, whose turn it is not; none of the others begins the same beside it."""
    asked, marks, watcher = Marks(tmp_path / "manager"), Marks(tmp_path / "worker"), Watcher()
    model = ScriptedModel("fine", call("stay", marks_of(marks)), "survived")
    writer = agent(model, tools=staying(marks)[1].tools, isolation="process", replicas=2)
    run = team(TwiceAsking(asked), [writer], listeners=[watcher]).start(runtime=ray_runtime)  # type: ignore[arg-type]  # a model of ours
    until(lambda: marks.lines, "the tool")
    kill_first(asked)
    until(lambda: watcher.methods.count("on_delegation_started") == 4, "the other manager")
    marks.add("over")
    output = run.result(timeout_s=PATIENCE_S)
    assert [each.raw for each in output.task_outputs] == ["fine", "survived", "done"]
    assert (len(model.calls), len(marks.lines)) == (3, 2)


def test_worker_is_stopped_when_its_manager_died_with_the_run(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-PAR-34: nothing is recorded, so the run fails; what was at work for it ends with it."""
    asked, marks = Marks(tmp_path / "manager"), Marks(tmp_path / "worker")
    writer = worker("Writer", call("hang", marks_of(marks)), tools=[hang])
    run = team(Manager(asked), [writer], durability="off").start(runtime=ray_runtime)  # type: ignore[arg-type]  # a model of ours
    marks.wait("here")
    kill_first(asked)
    with pytest.raises(EnsembleError, match="Hierarchical workflow manager failed: Agent 'Manager': its process"):
        run.result(timeout_s=PATIENCE_S)
    marks.wait("stopped")


def test_delegation_of_a_colleague_goes_on_when_the_process_below_dies(
    ray_runtime: Runtime, home: str, tmp_path: Path
) -> None:
    """S-DUR-31, S-DEL-12: two levels deep; who asked is not concerned."""
    marks = Marks(tmp_path / "marks")
    model, digger = staying(marks, "Digger")
    writer = worker("Writer", ask("Digger"), "written", allow_delegation=True)
    manager = ScriptedModel(hand("Writer"), "done")
    run = team(manager, [writer, digger]).start(runtime=ray_runtime)
    until(lambda: marks.lines, "the tool")
    until_recorded(home, run)
    kill_first(marks)
    until(lambda: len(marks.lines) == 2, "the other process")
    marks.add("over")
    assert run.result(timeout_s=PATIENCE_S).raw == "done"
    assert [len(each.calls) for each in (manager, writer.llm, model)] == [2, 2, 2]  # type: ignore[attr-defined]
    facts = nested(RunDirectory(Path(home), run.id).facts(), "output")
    assert [fact.epoch for fact in facts] == [resend_step(2), 0]


# Workers that are stopped.


@tool(timeout=None, effect="none")
async def hang(path: str) -> str:
    """Tell that this began, and that it was stopped; it never ends by itself."""
    marks = Marks(Path(path))
    marks.add("here")
    try:
        await asyncio.Event().wait()
    finally:
        marks.add("stopped")
    return "never"


def test_worker_that_hangs_is_stopped_in_its_process(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-DEL-5: after the ensemble's time; its only place is free for the next task then."""
    marks = Marks(tmp_path / "marks")
    model = ScriptedModel(otherwise=lambda asked: call("hang", marks_of(marks)) if task_of(asked) == "hang" else "fine")
    writer = agent(model, tools=[hang], max_concurrency=1)

    def insist(asked: ScriptedCall) -> object:
        if asked.text == "fine":
            return "done"
        # On a slow machine the time may end before the tool has begun, or before the next task is done.
        return hand("Writer", "go" if "stopped" in marks.lines else "hang")

    manager = ScriptedModel(otherwise=insist)
    limits = {"delegation_timeout": 1, "manager_stall_turns": 0, "manager_max_iterations": 100}
    ran = run_of(team(manager, [writer], **limits), ray_runtime)
    assert ran.given.raw == "done"
    *stopped, last = told(manager)
    assert last == "fine"
    assert stopped
    assert set(stopped) == {"Error: Agent 'Writer' was stopped, since it did not finish within 1 s"}


def test_cancelled_run_stops_workers_in_their_processes(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-SET-27: also those that a worker asked."""
    marks = Marks(tmp_path / "marks")
    digger = worker("Digger", call("hang", marks_of(marks)), tools=[hang])
    writer = worker("Writer", ask("Digger"), allow_delegation=True)
    run = team(ScriptedModel(hand("Writer")), [writer, digger]).start(runtime=ray_runtime)
    marks.wait("here")
    run.cancel()
    output = run.result(timeout_s=PATIENCE_S)
    assert output.exit_reason is ExitReason.CANCELLED
    marks.wait("stopped")
    assert asked_of(digger) == ["help me"]


def test_agents_that_ask_each_other_at_the_same_time_come_to_an_end(runtime: Runtime) -> None:
    """S-DEL-12: A asks B while B asks A, and both have their only place at that moment."""
    both_at_work = threading.Barrier(2)

    def entry(own: str, other: str) -> object:
        def answer(asked: ScriptedCall) -> object:
            if task_of(asked) != f"task of {own}":
                return f"help from {own}"
            if asked.messages[-1].role == "tool":
                return asked.text
            both_at_work.wait(PATIENCE_S)
            return ask(other)

        return answer

    agents = [
        agent(ScriptedModel(otherwise=entry(own, other)), own, allow_delegation=True, max_concurrency=1)  # type: ignore[arg-type]  # an entry
        for own, other in (("A", "B"), ("B", "A"))
    ]
    tasks = [task(f"task of {each.role}", each) for each in agents]
    output = Ensemble(tasks=tasks, workflow="parallel").start(runtime=runtime).result(timeout_s=PATIENCE_S)
    assert sorted(each.raw for each in output.task_outputs) == ["help from A", "help from B"]


class Asking:
    """A model that asks a colleague in a task of the plan, and tells its process in delegated work."""

    def chat(self, messages: Sequence[ChatMessage], tools: object = ()) -> ChatResponse:
        if messages[-1].role == "tool":
            return ChatResponse(text=f"{os.getpid()} {messages[-1].content}")
        is_delegated = "help me" in (messages[-1].content or "")
        return ChatResponse(text=str(os.getpid())) if is_delegated else ChatResponse(tool_calls=(ask("Bob"),))


def test_agents_of_one_house_ask_each_other(ray_runtime: Runtime) -> None:
    """S-SET-41, S-DEL-12: a process that calls itself waits for nothing."""
    model = Asking()
    ann, bob = (agent(model, role, isolation="shared", allow_delegation=True) for role in ("Ann", "Bob"))
    run = Ensemble(tasks=[task("go", ann)], agents=[ann, bob]).start(runtime=ray_runtime)
    asker, asked = run.result(timeout_s=PATIENCE_S).raw.split()
    assert asker == asked


# Policies.


class Counting:
    """A policy that counts what it is asked, and tells its process."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._count = 0

    def evaluate(self, request: DelegationRequest, context: DelegationPolicyContext) -> DelegationPolicyResult:
        self._count += 1
        self._marks.add(f"{os.getpid()} {self._count} {context.delegating_agent_role} {request.agent_role}")
        return DelegationPolicyResult.allow()


def test_policies_keep_their_state_in_one_process(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-SET-31, S-DEL-40, S-DEL-45: asked from the manager's process and a worker's, they count on."""
    marks = Marks(tmp_path / "marks")
    writer = worker("Writer", ask("Digger"), "written", allow_delegation=True)
    manager = ScriptedModel([hand("Writer", number=1), hand("Digger", number=2)], "done")
    ran = run_of(team(manager, [writer, worker("Digger")], delegation_policies=[Counting(marks)]), ray_runtime)
    assert ran.given.raw == "done"
    pids, counted = zip(*(line.split(maxsplit=1) for line in marks.lines), strict=True)
    assert counted == ("1 Manager Writer", "2 Manager Digger", "3 Writer Digger")
    assert len({*pids, str(os.getpid())}) == 2


def test_policy_that_cannot_travel_is_named(ray_runtime: Runtime) -> None:
    """S-CONV-34: with its place, before anything is asked."""
    lock = threading.Lock()

    def guarded(request: object, context: object) -> DelegationPolicyResult:
        with lock:
            return DelegationPolicyResult.allow()

    manager = ScriptedModel()
    ensemble = team(manager, [worker("Writer")], delegation_policies=[Counting(Marks(Path("unused"))), guarded])
    with pytest.raises(ValidationError) as caught:
        ensemble.run(runtime=ray_runtime)
    assert "Ensemble -> delegation_policies[1] -> closure variable 'lock' cannot travel" in str(caught.value)
    assert manager.calls == ()


def test_policy_is_asked_again_when_its_process_died(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-DUR-31: in the new host; the manager is not concerned."""
    marks = Marks(tmp_path / "marks")

    def weigh(_request: object, _context: object) -> DelegationPolicyResult:
        marks.add(os.getpid())
        if len(marks.lines) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return DelegationPolicyResult.allow()

    manager = ScriptedModel(hand("Writer"), "done")
    ran = run_of(team(manager, [worker("Writer")], delegation_policies=[weigh]), ray_runtime)
    assert (ran.given.raw, told(manager)) == ("done", ["by Writer"])
    assert len(set(marks.lines)) == 2
