"""Runs in forked children, as of Celery, gunicorn and `multiprocessing`: after runs of the parent, and beside one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from ensemble_ray import (
    Ensemble,
    EnsembleError,
    IllegalStateError,
    InlineRuntime,
    MemoryEntry,
    RateLimit,
    RayRuntime,
    SqliteMemory,
    tool,
)
from ensemble_ray.llm.openai import OpenAIChatModel
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.testing import ModelServer, ScriptedModel
from tests.builders import agent, call, task
from tests.command_line import environment_of
from tests.forking import PATIENCE_S, call_in_child
from tests.template import run_forked

pytestmark = [pytest.mark.program, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]


def make_square() -> Callable[[int], int]:
    """Make a tool that travels by value: the processes that run it need not import this module, which takes them a second."""

    @tool(cpu=True)
    def square(number: int) -> int:
        """Square it."""
        return number * number

    return square


def kinds(home: Path, run_id: str) -> list[str]:
    """The kinds of a run's facts, in order."""
    return [fact.kind for fact in run_blocking(SqliteStore(home).facts(run_id))]


class Everything:
    """Runs what has state in its process: clients, streams, records, CPU-heavy tools, memory, rate limits."""

    def __init__(self, server: ModelServer, home: Path) -> None:
        self._home = home
        self._runtime = InlineRuntime(home=home)
        self._client = OpenAIChatModel("m", base_url=server.base_url, api_key="sk")
        self._limited = agent(
            ScriptedModel(otherwise="limited"), rate_limit=RateLimit(requests=1000, period=timedelta(seconds=1))
        )
        self._memory = SqliteMemory(home / "memory.db")

    def use(self) -> list[object]:
        """What came of each."""
        run_id = f"run-{os.getpid()}"
        streamed = list(agent(self._client).stream("Italy?", runtime=self._runtime))
        counter = agent(
            ScriptedModel(call("square", '{"number": 12}'), lambda asked: asked.text), tools=[make_square()]
        )
        counted = Ensemble(tasks=[task("count", counter)]).run(runtime=self._runtime, run_id=run_id)
        self._memory.store("a", MemoryEntry(content=run_id))
        return [
            Ensemble(tasks=[task("write", agent(self._client))]).run(runtime=self._runtime).raw,
            len(streamed) > 1,
            Ensemble(tasks=[task("wait", self._limited)]).run(runtime=self._runtime).raw,
            counted.raw,
            kinds(self._home, run_id)[-1],
            run_id in [entry.content for entry in self._memory.retrieve("a", "", 100)],
        ]


@pytest.fixture(autouse=True)
def one_process_of_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pool starts one, and not one for each processor."""
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")


@pytest.fixture
def everything(model_server: Callable[..., ModelServer], tmp_path: Path) -> Everything:
    """A server that stays the parent's, and what uses it."""
    return Everything(model_server(["a served answer"] * 100), tmp_path)


_ALL = ["a served answer", True, "limited", "144", "end", True]


def test_runs_work_in_children_after_runs_of_the_parent(everything: Everything) -> None:
    """S-ENG-80: also in a child of a child, in processes of `multiprocessing`, and in the parent afterwards.

    Those of its pool are daemons, which may not start processes of `multiprocessing`.
    """
    assert everything.use() == _ALL
    assert call_in_child(lambda: (everything.use(), call_in_child(everything.use))) == (_ALL, _ALL)
    _shared.append(everything)
    try:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.map_async(_use_shared, range(2), chunksize=1).get(timeout=PATIENCE_S) == [_ALL] * 2
            pool.close()
            pool.join()
        process = multiprocessing.get_context("fork").Process(target=everything.use)
        process.start()
        try:
            process.join(PATIENCE_S)
            assert process.exitcode == 0, "its end waits for no process of its tools"
        finally:
            process.kill()
            process.join()
    finally:
        _shared.clear()
    assert everything.use() == _ALL


_shared: list[Everything] = []


def _use_shared(_number: int) -> list[object]:
    return _shared[0].use()


def test_child_beside_a_run_of_its_parent_leaves_it_alone(
    model_server: Callable[..., ModelServer], tmp_path: Path
) -> None:
    """S-ENG-81: it runs what it likes; the parent's run, its stream and its record are its parent's, and it ends once."""
    everything = Everything(model_server(["a served answer"] * 100), tmp_path)
    asked, go_on = threading.Event(), threading.Event()

    def wait(_seen: object) -> str:
        asked.set()
        assert go_on.wait(PATIENCE_S)
        return "late"

    client = OpenAIChatModel("m", base_url=model_server(wait).base_url, api_key="sk")
    waiting = agent(ScriptedModel(call("square", '{"number": 3}'), "counted"), tools=[make_square()])
    team = Ensemble(tasks=[task("count", waiting), task("ask", agent(client))])
    run = team.start(runtime=InlineRuntime(home=tmp_path), run_id="of-the-parent")

    def use() -> tuple[object, bool]:
        gc.collect()
        with pytest.raises(IllegalStateError, match="in the process that started it"):
            run.result()
        run.cancel()
        done = everything.use()
        gc.collect()
        return done, "end" in kinds(tmp_path, "of-the-parent")

    try:
        assert asked.wait(PATIENCE_S)
        assert call_in_child(use) == (_ALL, False)
    finally:
        go_on.set()
    assert run.result().raw == "late"
    assert kinds(tmp_path, "of-the-parent").count("end") == 1


#: Forks while it runs; the child ends as programs do, with all that they do at their end.
_PROGRAM = """
import os, sys, threading, warnings
from ensemble_ray import Agent, Ensemble, Task, tool
from ensemble_ray.llm.openai import OpenAIChatModel
from ensemble_ray.testing import ModelServer, ScriptedModel
from tests.builders import agent, call, task

@tool(cpu=True)
def wait(path: str) -> str:
    \"\"\"Read it.\"\"\"
    with open(path) as pipe:
        return pipe.read()

def answer(served):
    asked.set()
    assert go_on.wait(60)
    return "late"

asked, go_on = threading.Event(), threading.Event()
os.mkfifo("pipe")
with ModelServer(answer) as server:
    by_url = agent(OpenAIChatModel("m", base_url=server.base_url, api_key="sk"))
    slow = agent(ScriptedModel(call("wait", '{"path": "pipe"}'), lambda asked: asked.text), tools=[wait])
    run = Ensemble(tasks=[task("a", slow), task("b", by_url)], workflow="parallel").start()
    assert asked.wait(60)
    writing = open("pipe", "w")  # returns when the tool reads
    warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # this process has threads
    if not (child := os.fork()):
        os.close(writing.fileno())
        print("child", Ensemble(tasks=[task("x")], llm=ScriptedModel("mine")).run().raw, flush=True)
        sys.exit()
    os.waitpid(child, 0)
    writing.write("counted")
    writing.close()
    go_on.set()
    print("parent", sorted(each.raw for each in run.result().task_outputs), flush=True)
"""


def test_child_that_ends_as_programs_do_ends_nothing_of_its_parent(tmp_path: Path) -> None:
    """S-ENG-81: neither its clients and their connections, nor the processes of its tools."""
    command = [sys.executable, "-c", _PROGRAM]
    ended = run_forked(
        command, env=environment_of(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (ended.stdout, ended.stderr) == ("child mine\nparent ['counted', 'late']\n", "")


def test_ray_is_refused_after_a_fork_and_inline_works(ray_runtime: RayRuntime) -> None:
    """S-ENG-82: the error says what to do; the parent's connection stays."""
    team = Ensemble(tasks=[task("x")], llm=ScriptedModel(otherwise="ok"))
    assert team.run(runtime=ray_runtime).raw == "ok"

    def use() -> tuple[list[str], str]:
        refused: list[str] = []
        for runtime in (ray_runtime, RayRuntime(), "ray"):
            with pytest.raises(EnsembleError) as caught:
                team.run(runtime=runtime)
            refused.append(str(caught.value))
        return refused, team.run(runtime="inline").raw

    refused, raw = call_in_child(use)
    assert raw == "ok"
    assert all("was forked from a process that was connected to Ray" in each for each in refused)
    assert all("runtime='inline'" in each for each in refused)
    assert team.run(runtime=ray_runtime).raw == "ok"
