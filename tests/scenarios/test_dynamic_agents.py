"""Agents and tasks that are made in a loop, and what tools count."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import pytest

from ensemble_ray import (
    AbstractAgentTool,
    CustomToolMetrics,
    DynamicToolProvider,
    Ensemble,
    NoOpToolMetrics,
    Runtime,
    ToolMetrics,
    ToolResult,
    current_tool_context,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.teams import prompt_of, task_of


def echo(asked: ScriptedCall) -> str:
    """Answer with the task, as its own agent."""
    role = (asked.messages[0].content or "").partition("\n")[0]
    return f"{task_of(asked)} by {role}"


@pytest.mark.parametrize("count", [0, 1, 100])
def test_a_fan_out_of_any_width_needs_nothing_special(count: int) -> None:
    """S-DYN-1, S-DYN-2: a last task with all as its context, in their order; with none it runs alone."""
    model = ScriptedModel(*[echo] * (count + 1))
    leaves = [task(f"read {number}", agent(model, f"Reader {number}")) for number in range(count)]
    last = task("sum up", agent(model, "Editor"), context=leaves)
    output = Ensemble(tasks=[*leaves, last], workflow="parallel").run(runtime="inline")
    assert len(output.task_outputs) == count + 1
    assert output[last].raw == "sum up by You are Editor."
    (prompt,) = [prompt_of(asked) for asked in model.calls if task_of(asked) == "sum up"]
    found = [line for line in prompt.splitlines() if line.startswith("read ")]
    assert found == [f"read {number} by You are Reader {number}." for number in range(count)]
    for leaf in leaves:
        assert output[leaf].agent_role == leaf.agent.role  # type: ignore[union-attr]  each has one


def test_agents_of_one_role_are_two(runtime: Runtime) -> None:
    """S-DYN-3, S-DYN-1: each does its own tasks with its own model, made in a loop or not."""
    models = [ScriptedModel(f"from {number}") for number in range(3)]
    tasks = [task(f"do {number}", agent(model, "Worker")) for number, model in enumerate(models)]
    output = Ensemble(tasks=tasks, workflow="parallel").run(runtime=runtime)
    assert [output[each].raw for each in tasks] == ["from 0", "from 1", "from 2"]
    assert [len(model.calls) for model in models] == [1, 1, 1]


class Probe(AbstractAgentTool):
    """Counts its own calls, and fails as it is told."""

    name = "probe"
    description = "Probes."

    def do_execute(self, text: str, /) -> ToolResult:
        """Count, then do as told."""
        metrics = current_tool_context().metrics
        metrics.increment_counter("probes", self.name, {"what": text})
        metrics.record_value("depth", self.name, 2.5)
        if "raise" in text:
            raise RuntimeError("deep")
        return ToolResult.failure("no") if "fail" in text else ToolResult.success("yes")


class Menu(DynamicToolProvider):
    """Brings the tool when a task begins."""

    def resolve(self) -> Sequence[object]:
        """Return it."""
        return [Probe()]


class Counts:
    """Metrics with a lock, which does not travel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seen: list[tuple[object, ...]] = []

    def _keep(self, *seen: object) -> None:
        with self._lock:
            self.seen.append(seen)

    def increment_success(self, tool_name: str, agent_role: str) -> None:
        """Count it."""
        self._keep("success", tool_name, agent_role)

    def increment_failure(self, tool_name: str, agent_role: str) -> None:
        """Count it."""
        self._keep("failure", tool_name, agent_role)

    def increment_error(self, tool_name: str, agent_role: str) -> None:
        """Count it."""
        self._keep("error", tool_name, agent_role)

    def record_duration(self, tool_name: str, agent_role: str, duration_s: float) -> None:
        """Count it."""
        assert duration_s >= 0
        self._keep("duration", tool_name, agent_role)

    def increment_counter(self, metric: str, tool_name: str, tags: Mapping[str, str] | None = None) -> None:
        """Count it."""
        self._keep(metric, tool_name, tags)

    def record_value(self, metric: str, tool_name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Count it."""
        self._keep(metric, tool_name, value, tags)


def _calls() -> ScriptedModel:
    asked = [
        call("probe", f'{{"input": "{text}"}}', number=number) for number, text in enumerate(("go", "fail", "raise"))
    ]
    return ScriptedModel(*asked, "done")


def test_the_users_metrics_see_every_call(runtime: Runtime) -> None:
    """S-TM-1, S-TM-2, S-TM-4, S-DYN-4: one of success, failure and error, and a duration; what the tool counts itself."""
    counts = Counts()
    with_metrics: ToolMetrics = counts
    Ensemble(tasks=[task("go", agent(_calls(), tools=[Menu()]))], tool_metrics=with_metrics).run(runtime=runtime)
    assert [seen[:2] for seen in counts.seen if seen[0] in {"success", "failure", "error"}] == [
        ("success", "probe"), ("failure", "probe"), ("error", "probe"),
    ]  # fmt: skip
    assert counts.seen.count(("duration", "probe", "Writer")) == 3
    assert [seen for seen in counts.seen if seen[0] == "probes"] == [
        ("probes", "probe", {"what": text}) for text in ("go", "fail", "raise")
    ]
    assert counts.seen.count(("depth", "probe", 2.5, {})) == 3


class Broken(Counts):
    """Metrics of which nothing works."""

    def _keep(self, *seen: object) -> None:
        raise OSError("no monitor")


class Four:
    """Metrics that only count calls."""

    def __init__(self) -> None:
        self.calls = 0

    def increment_success(self, tool_name: str, agent_role: str) -> None:
        """Count it."""
        self.calls += 1

    increment_failure = increment_error = increment_success

    def record_duration(self, tool_name: str, agent_role: str, duration_s: float) -> None:
        """Count nothing."""


def test_metrics_that_raise_change_no_call(caplog: pytest.LogCaptureFixture) -> None:
    """S-TM-3: neither the library's counts nor the tool's own."""
    model = _calls()
    output = Ensemble(tasks=[task("go", agent(model, tools=[Probe()]))], tool_metrics=Broken()).run(runtime="inline")
    assert output.raw == "done"
    told = [message.content for message in model.calls[-1].messages if message.role == "tool"]
    assert told == ["yes", "Error: no", "Error: RuntimeError: deep"]
    assert len([line for line in caplog.messages if line.startswith("ToolMetrics failed in ")]) == 12


def test_metrics_without_the_tools_own_are_enough() -> None:
    """S-TM-6: a tool's own counts go nowhere then."""
    counts = Four()
    output = Ensemble(tasks=[task("go", agent(_calls(), tools=[Probe()]))], tool_metrics=counts).run(runtime="inline")
    assert (output.raw, counts.calls) == ("done", 3)


def test_the_default_counts_nothing() -> None:
    """S-TM-1, S-TM-5: an exporter is any object of that shape."""
    nothing: CustomToolMetrics = NoOpToolMetrics()
    nothing.increment_counter("m", "t", {})
    nothing.record_value("m", "t", 1.0)
    assert isinstance(nothing, ToolMetrics)
    assert isinstance(Counts(), ToolMetrics)
