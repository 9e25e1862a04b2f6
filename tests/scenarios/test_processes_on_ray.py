"""Where agents live on Ray: processes of their own, shared ones, replicas; what cannot be loaded there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ensemble_ray import (
    Agent,
    ChatResponse,
    Ensemble,
    ParallelExecutionError,
    RayRuntime,
    Runtime,
    Task,
    ToolMetrics,
    ValidationError,
    tool,
)
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.teams import PATIENCE_S, Marks, until


class Where:
    """A model that tells the process it is asked in."""

    def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        return ChatResponse(text=str(os.getpid()))


class Meeting:
    """A model whose calls wait until so many are under way; then each tells its process."""

    def __init__(self, marks: Marks, count: int) -> None:
        self._marks = marks
        self._count = count

    def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        self._marks.add("here")
        while len(self._marks.lines) < self._count:
            threading.Event().wait(0.005)
        return ChatResponse(text=str(os.getpid()))


def processes(runtime: Runtime, *agents: Agent) -> list[str]:
    """Where the agents live, each asked for one task."""
    tasks = [task(f"t{n}", by) for n, by in enumerate(agents)]
    output = Ensemble(tasks=tasks, workflow="parallel").run(runtime=runtime)
    found = {each.task_description: each.raw for each in output.task_outputs}
    return [found[f"t{n}"] for n in range(len(agents))]


@tool
def look() -> str:
    """Look."""
    return "seen"


@tool
def listen() -> str:
    """Listen."""
    return "heard"


def test_agents_with_different_tools_have_different_processes(ray_runtime: Runtime) -> None:
    """S-CLU-76: up to the cap; one that wants isolation has another one; the driver is none of them."""
    model = Where()
    found = processes(
        ray_runtime,
        agent(model, "Ann", tools=[look]),
        agent(model, "Bob", tools=[listen]),
        agent(model, "Cid", tools=[listen], isolation="process"),
    )
    assert len({*found, str(os.getpid())}) == 4


def test_agents_of_one_kind_live_together(ray_runtime: Runtime) -> None:
    """S-CLU-76: without tools, whatever their models; with the same tools and model."""

    class Other(Where):
        pass

    plain = processes(ray_runtime, agent(Where(), "Ann"), agent(Where(), "Bob"), agent(Other(), "Cid"))
    model = Where()
    alike = processes(ray_runtime, *(agent(model, name, tools=[look]) for name in ("Ann", "Bob")))
    assert [len(set(plain)), len(set(alike))] == [1, 1]


def test_tasks_of_one_agent_run_in_one_process(ray_runtime: Runtime) -> None:
    """S-SET-31, S-DOM-67: its tools' state is one."""
    worker = agent(Where())
    assert len(set(processes(ray_runtime, worker, worker, worker))) == 1


def test_replicas_share_the_tasks_of_their_agent(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-SET-41: two processes, four tasks at the same time, two each."""
    worker = agent(Meeting(Marks(tmp_path / "marks"), 4), replicas=2)
    found = processes(ray_runtime, *[worker] * 4)
    assert sorted(found.count(pid) for pid in set(found)) == [2, 2]


def test_many_agents_need_no_more_processes_than_allowed(ray_runtime: Runtime) -> None:
    """S-SET-41: twenty declared agents of two kinds; no task waits for a process."""
    one, two = Where(), ScriptedModel(otherwise="x")
    agents = [agent(one if n % 2 else two, f"Agent {n}") for n in range(20)]
    found = [pid for pid in processes(ray_runtime, *agents) if pid != "x"]
    assert len(found) == 10
    assert len(set(found)) <= 4


def test_processes_serve_the_next_run_of_a_warm_runtime(ray_runtime: Runtime) -> None:
    """S-SET-42: starting them costs a second each."""
    worker = agent(Where())
    with RayRuntime() as another:
        ended = processes(another, worker)[0]
    first, second = (processes(ray_runtime, worker)[0] for _ in range(2))
    assert first == second != ended  # leaving a runtime ends all that was kept for a next run


def is_gone(pid: int) -> bool:
    """Whether there is no such process any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_cold_runtime_keeps_its_processes_for_seconds(ray_cluster: str) -> None:
    """S-CONV-36, S-CLU-75: on a cluster that others use, for the next run of this program; the cluster goes on."""
    import ray

    worker = agent(Where())
    cold = RayRuntime()
    first, second = (processes(cold, worker)[0] for _ in range(2))
    assert first == second
    run_blocking(cold.close())
    until(lambda: is_gone(int(first)), "the end of the process")
    assert ray.is_initialized()


# What cannot be loaded in a worker, though it could be packed.


def _refuse_to_load(owner: int) -> object:
    if os.getpid() != owner:
        raise ImportError("No module named 'only_here'")
    return Unloadable()


class Unloadable:
    """Packs well, and cannot be loaded anywhere else; as a model, a handler, or a part of them."""

    def __reduce__(self) -> tuple[object, ...]:
        return (_refuse_to_load, (os.getpid(),))

    def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        return ChatResponse(text="here")

    def __call__(self, _context: object) -> str:
        return "here"


@pytest.mark.parametrize("first", [True, False])
def test_agent_that_cannot_be_loaded_is_a_clear_error(ray_runtime: Runtime, *, first: bool) -> None:
    """S-CONV-34: neither can a handler; never a hang, also when its task is the second; inline it works."""
    before = task("before", agent(ScriptedModel(otherwise="x"), "Other"))
    culprits = (task("go", agent(Unloadable())), task("go", handler=Unloadable()))
    ensembles = [Ensemble(tasks=[culprit, before] if first else [before, culprit]) for culprit in culprits]
    for run in [ensemble.start(runtime=ray_runtime) for ensemble in ensembles]:
        with pytest.raises(ValidationError) as caught:
            run.result(timeout_s=PATIENCE_S)
        assert "cannot be loaded in a worker process: No module named 'only_here'" in str(caught.value)
        assert "runtime='inline'" in str(caught.value)
    for ensemble in ensembles:
        assert ensemble.run(runtime="inline").task_outputs


def test_agent_that_cannot_be_loaded_leaves_others_alone(ray_runtime: Runtime) -> None:
    """S-PAR-24, S-CONV-34."""
    tasks = [task("bad", agent(Unloadable(), "Bad")), task("good", agent(ScriptedModel("fine"), "Good"))]
    with pytest.raises(ParallelExecutionError) as caught:
        Ensemble(tasks=tasks, workflow="parallel", parallel_error_strategy="continue_on_error").start(
            runtime=ray_runtime
        ).result(timeout_s=PATIENCE_S)
    assert [each.raw for each in caught.value.completed_task_outputs] == ["fine"]
    assert isinstance(caught.value.failed_task_causes["bad"], ValidationError)


# What only the driver has.


class Counts:
    """A monitoring system's counters, with a lock that could not travel."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seen: list[tuple[str, str, str]] = []

    def _count(self, what: str, tool_name: str, agent_role: str) -> None:
        with self.lock:
            self.seen.append((what, tool_name, agent_role))

    def increment_success(self, tool_name: str, agent_role: str) -> None:
        self._count("success", tool_name, agent_role)

    def increment_failure(self, tool_name: str, agent_role: str) -> None:
        self._count("failure", tool_name, agent_role)

    def increment_error(self, tool_name: str, agent_role: str) -> None:
        self._count("error", tool_name, agent_role)

    def record_duration(self, tool_name: str, agent_role: str, duration_s: float) -> None:
        assert duration_s >= 0
        self._count("duration", tool_name, agent_role)


def test_tool_metrics_count_in_the_driver(runtime: Runtime) -> None:
    """S-TOOL-42, S-CONV-33: one count and one duration per call, all there when `run` returns."""
    from tests.scenarios.test_tool_loop import Role

    counts = Counts()
    assert isinstance(counts, ToolMetrics)
    model = ScriptedModel(call("role"), call("role"), "done")
    Ensemble(tasks=[task("go", agent(model, tools=[Role()]))], tool_metrics=counts).run(runtime=runtime)
    assert sorted(counts.seen) == [("duration", "role", "Writer")] * 2 + [("success", "role", "Writer")] * 2


def test_state_of_a_tool_is_its_agents(runtime: Runtime) -> None:
    """S-SET-31, S-SET-29: one copy per agent's process, kept from call to call and task to task of a run."""

    class Memory:
        def __init__(self) -> None:
            self.kept: list[str] = []

        @tool
        def keep(self, what: str) -> str:
            """Keep something."""
            self.kept.append(what)
            return ",".join(self.kept)

    def reply(asked: ScriptedCall) -> object:
        last = asked.messages[-1]
        return last.content if last.role == "tool" else call("keep", f'{{"what": "{asked.number}"}}')

    memory = Memory()
    worker = agent(ScriptedModel(otherwise=reply), tools=[memory])
    output = Ensemble(tasks=[task("a", worker), task("b", worker)]).run(runtime=runtime)
    assert [each.raw for each in output.task_outputs] == ["0", "0,2"]


def test_made_agents_share_processes(ray_runtime: Runtime) -> None:
    """S-DET-20, S-SET-41: agents made for tasks never ask for a process of their own."""
    tasks = [Task.of(f"Write {n}") for n in range(6)]
    output = Ensemble(tasks=tasks, llm=Where(), workflow="parallel").run(runtime=ray_runtime)
    assert len({each.raw for each in output.task_outputs}) == 1
