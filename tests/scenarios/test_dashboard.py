"""Dashboards beside real runs, on both runtimes: what pages are told of runs of every kind, what late joiners find."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import httpx
import pytest

from ensemble_ray import (
    Ensemble,
    Graph,
    GraphEdge,
    Loop,
    MapEnsemble,
    MapReduceEnsemble,
    Runtime,
    Task,
    TaskExecutionError,
    TaskHandlerContext,
    WebDashboard,
    tool,
)
from ensemble_ray.studio.dashboard import app as app_module
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, answer, call, task
from tests.scenarios.pages import Background, kinds, opened, stored, url_of
from tests.scenarios.teams import Watcher


@tool
def look(what: str) -> str:
    """Look."""
    return f"saw {what}"


def fail(context: TaskHandlerContext) -> str:
    """Raise."""
    raise ValueError("broke")


def test_what_pages_are_told_of_a_run(runtime: Runtime) -> None:
    """S-WEB-10, S-WEB-15, S-WEB-30, S-WEB-32, S-WEB-33, S-WEB-34, S-WEB-36: every event as it fires, beside listeners of the user."""
    watcher = Watcher()
    writer = agent(
        ScriptedModel(answer("", 3, 1, calls=[call("look", '{"what": "x"}')]), answer("found", 5, 2)), tools=[look]
    )
    first = task("a", writer)
    second = task("b", agent(ScriptedModel(answer("done", 2, 2)), "Editor"), context=[first])
    with WebDashboard.on_port(0) as dashboard, opened(dashboard) as page:
        ensemble = Ensemble(tasks=[first, second], listeners=[watcher], dashboard=dashboard)
        output = ensemble.run(runtime=runtime, run_id="shown")
        told = page.until_end()
    of_model = ["llm_iteration_started", "llm_iteration_completed"]
    assert kinds(told) == [
        "ensemble_started",
        *("task_started", "task_input", *of_model, "tool_called", *of_model, "task_completed"),
        *("task_started", "task_input", *of_model, "task_completed"),
        "ensemble_completed",
    ]
    assert {each["run_id"] for each in told} == {"shown"}
    begun, called, ended = told[0], told[5], told[-1]
    assert (begun["ensemble_id"], begun["total_tasks"], begun["workflow"]) == ("shown", 2, "sequential")
    assert called == {
        "type": "tool_called",
        "run_id": "shown",
        "agent_role": "Writer",
        "task_index": 1,
        "tool_name": "look",
        "duration_ms": called["duration_ms"],
        "outcome": "success",
        "tool_arguments": '{"what": "x"}',
        "tool_result": "saw x",
        "structured_result": None,
        "instance": called["instance"],
    }
    completed = [each for each in told if each["type"] == "task_completed"]
    assert [(each["task_index"], each["token_count"], each["tool_call_count"]) for each in completed] == [
        (1, 11, 1),
        (2, 4, 0),
    ]
    assert (ended["exit_reason"], ended["total_tokens"], ended["total_tool_calls"]) == ("completed", 15, 1)
    assert output.metrics.total_tokens == 15
    assert watcher.methods.count("on_task_start") == 2


def test_delegations_on_pages(inline_runtime: Runtime) -> None:
    """S-WEB-32, S-WEB-36: the three events of delegations; a manager's work is task 1."""
    manager = ScriptedModel(
        answer("", calls=[call("delegate_task", '{"agent_role": "Writer", "task_description": "Write it"}')]),
        answer("", calls=[call("delegate_task", '{"agent_role": "Nobody", "task_description": "Write it"}')]),
        "all done",
    )
    writer = agent(ScriptedModel("written"))
    with WebDashboard.on_port(0) as dashboard, opened(dashboard) as page:
        ensemble = Ensemble(
            agents=[writer],
            tasks=[task("a", writer)],
            workflow="hierarchical",
            manager_llm=manager,
            dashboard=dashboard,
        )
        ensemble.run(runtime=inline_runtime)
        told = page.until_end()
    delegations = [each for each in told if each["type"].startswith("delegation_")]
    assert kinds(delegations) == ["delegation_started", "delegation_completed", "delegation_failed"]
    assert delegations[0]["delegation_id"] == delegations[1]["delegation_id"]
    assert (delegations[0]["worker_role"], delegations[0]["task_description"]) == ("Writer", "Write it")
    assert "Nobody" in delegations[2]["reason"]


def test_a_run_that_fails(inline_runtime: Runtime) -> None:
    """S-WEB-33, S-WEB-35, S-WEB-12: pages hear of the end all the same, and why the task failed; the server is stopped."""
    dashboard = WebDashboard.on_port(0)
    ensemble = Ensemble(tasks=[task("a", handler=fail)], dashboard=dashboard)
    with dashboard, opened(dashboard) as page:
        with pytest.raises(TaskExecutionError):
            ensemble.run(runtime=inline_runtime)
        told = page.until_end()
    assert kinds(told) == ["ensemble_started", "task_started", "task_failed", "ensemble_completed"]
    assert "broke" in told[2]["reason"]
    assert told[3]["exit_reason"] == "error"
    with pytest.raises(TaskExecutionError):
        ensemble.run(runtime=inline_runtime)
    assert not dashboard.is_running


def test_wiring_by_hand(inline_runtime: Runtime) -> None:
    """S-WEB-4, S-WEB-5, S-WEB-33: before the start messages are only kept; the end of a run that fails is told, too."""
    dashboard = WebDashboard.on_port(0)
    ensemble = Ensemble(tasks=[task("a", handler=fail)], listeners=[dashboard.streaming_listener])
    with pytest.raises(TaskExecutionError):
        ensemble.run(runtime=inline_runtime)
    assert not dashboard.is_running
    with dashboard, opened(dashboard) as page:
        assert kinds(stored(page)) == ["ensemble_started", "task_started", "task_failed", "ensemble_completed"]
        assert page.hello["ensemble_id"] == stored(page)[0]["run_id"]
        assert page.hello["started_at"] == stored(page)[0]["started_at"]


def test_joining_while_a_run_goes_on(inline_runtime: Runtime) -> None:
    """S-WEB-40, S-WEB-41, S-WEB-44, S-WEB-45: `hello` and what comes after it are what another page was told from the beginning."""
    writer = agent(ScriptedModel(answer("", calls=[call("look", '{"what": "x"}')]), "found"), tools=[look])
    tasks = [task(f"t{number}", agent(ScriptedModel("done"), f"W{number}")) for number in range(4)]
    with WebDashboard.on_port(0) as dashboard, opened(dashboard) as early:
        ensemble = Ensemble(tasks=[task("first", writer), *tasks], dashboard=dashboard)
        running = Background(lambda: ensemble.run(runtime=inline_runtime))
        early.until("task_completed")
        with opened(dashboard) as late:
            early.until_end()
            if late.hello["snapshot_trace"][-1]["type"] != "ensemble_completed":
                late.until_end()
            running.result()
        with opened(dashboard) as last:
            past = stored(last)
    of_iterations = {"llm_iteration_started", "llm_iteration_completed"}
    of_moment = of_iterations | {"hello"}
    everything = [each for each in early.heard if each["type"] not in of_moment]
    assert [*stored(late), *[each for each in late.heard if each["type"] not in of_moment]] == everything
    assert past == everything
    pairs = last.hello["recent_iterations"]
    assert len(pairs) == 6
    assert all(list(pair) == ["started", "completed"] for pair in pairs)
    assert [pair["started"]["iteration_index"] for pair in pairs[:2]] == [0, 1]
    tokens = [each for each in early.heard if each["type"] in of_iterations]
    assert [message for pair in pairs for message in pair.values()] == tokens


def test_tokens_on_pages(runtime: Runtime) -> None:
    """S-WEB-32, S-WEB-42: fragments as they come; they are in no snapshot."""
    with WebDashboard.on_port(0) as dashboard, opened(dashboard) as page:
        writer = agent(ScriptedModel("one two three"), stream=True)
        Ensemble(tasks=[task("a", writer)], dashboard=dashboard).run(runtime=runtime)
        told = page.until_end()
        with opened(dashboard) as late:
            assert "token" not in kinds(stored(late))
    assert "".join(each["token"] for each in told if each["type"] == "token") == "one two three"


def test_rounds_of_units_on_pages(inline_runtime: Runtime) -> None:
    """S-WEB-32: iterations of loops and steps of graphs, outputs as raw text."""
    body = task("write", agent(ScriptedModel("draft 1", "draft 2")))
    loop = Loop(name="refine", body=[body], max_iterations=2)
    states = {"check": task("check", agent(ScriptedModel("fine")))}
    graph = Graph(name="g", states=states, start="check", edges=[GraphEdge(from_state="check", to_state=Graph.END)])
    with WebDashboard.on_port(0) as dashboard, opened(dashboard) as page:
        Ensemble(loops=[loop], dashboard=dashboard).run(runtime=inline_runtime)
        looped = page.until_end()
        Ensemble(graph=graph, dashboard=dashboard).run(runtime=inline_runtime)
        stepped = page.until_end()
    rounds = [each for each in looped if each["type"] == "loop_iteration_completed"]
    assert [(each["iteration_number"], list(each["iteration_outputs"].values())) for each in rounds] == [
        (1, ["draft 1"]),
        (2, ["draft 2"]),
    ]
    (step,) = (each for each in stepped if each["type"] == "graph_state_completed")
    assert (step["state_name"], step["output"], step["next_state"]) == ("check", "fine", Graph.END)


def mapped(item: str) -> Task:
    """Make the task of an item."""
    return Task.of(f"Map {item}")


def reduced(group: list[Task]) -> Task:
    """Make the task over a group."""
    return Task(description="Join", expected_output="a text", context=group)


def test_map_reduces_on_pages(inline_runtime: Runtime) -> None:
    """S-WEB-10: also of ensembles whose tasks are made of items, planned and while they run."""
    dashboard = WebDashboard.on_port(0)
    planned = MapReduceEnsemble(
        items=["a", "b"],
        map_task=mapped,
        reduce_task=reduced,
        llm=ScriptedModel(otherwise="done"),
        dashboard=dashboard,
    )
    items = MapEnsemble(items=["a", "b"], map_task=mapped, llm=ScriptedModel(otherwise="done"), dashboard=dashboard)
    with dashboard, opened(dashboard) as page:
        planned.run(runtime=inline_runtime)
        assert kinds(page.until_end()).count("task_completed") == 3
        items.run(runtime=inline_runtime)
        assert kinds(page.until_end()).count("task_completed") == 2
    items.run(runtime=inline_runtime)
    assert not dashboard.is_running


def test_status_and_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-WEB-20, S-WEB-37, S-WEB-38: `pong` to who asked alone; a heartbeat to all, which nobody finds later."""
    monkeypatch.setattr(app_module, "HEARTBEAT_S", 0.05)
    with WebDashboard.on_port(0) as dashboard, opened(dashboard) as one, opened(dashboard) as other:
        status = httpx.get(f"{url_of(dashboard)}/api/status").json()
        assert status == {"status": "running", "clients": 2, "port": dashboard.actual_port}
        one.log("ping")
        assert one.until("pong") == {"type": "pong"}
        assert isinstance(other.until("heartbeat")["server_time_ms"], int)
        other.until("heartbeat")
        assert "pong" not in kinds(other.heard)
        with opened(dashboard) as late:
            assert late.hello == {"type": "hello"}


def test_what_pages_say_that_nobody_understands(caplog: pytest.LogCaptureFixture) -> None:
    """S-WEB-31: logged at WARN, answered with nothing, and the connection stays."""
    sent = ['{"type": "dance"}', "no json", "[]", "{}", b"\xff\x00", '{"type": "review_decision"}']
    with WebDashboard.on_port(0) as dashboard, opened(dashboard) as page, caplog.at_level(logging.WARNING):
        for each in sent:
            page.send(each)
        page.send('{"type": "ping", "unknown": {"key": 1}}')
        assert page.next() == {"type": "pong"}
    said = [each.getMessage() for each in caplog.records if each.name == "ensemble_ray.studio.dashboard.app"]
    assert len(said) == len(sent)
    assert "unknown type: 'dance'" in said[0]


def test_traces_beside_the_page(tmp_path: Path) -> None:
    """S-WEB-10: `trace_export_dir` has the trace of each run whose ensemble has no exporter of its own."""
    dashboard = WebDashboard(port=0, trace_export_dir=tmp_path / "traces")
    ensemble = Ensemble(tasks=[task("a", agent(ScriptedModel("done", "done")))], dashboard=dashboard)
    ensemble.run(runtime="inline", run_id="traced")
    assert json.loads((tmp_path / "traces" / "traced.json").read_text())["ensemble_id"] == "traced"
    taken: list[object] = []
    ensemble.replace(trace_exporter=taken.append).run(runtime="inline", run_id="mine")
    assert len(taken) == 1
    assert [each.name for each in (tmp_path / "traces").iterdir()] == ["traced.json"]
