"""Workers of a local Ray that are forked from a template: when they are, and how they start when they are not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

import ensemble_ray
from ensemble_ray import Agent, Ensemble, Task, ToolCall, tool
from ensemble_ray.actors.driver import worker_client, worker_template
from ensemble_ray.process.private_files import find_cluster
from ensemble_ray.testing import ScriptedModel
from tests.processes import own_directory

if TYPE_CHECKING:
    from ensemble_ray import RayRuntime

#: Generous: a program of the test imports Ray.
_LIMIT_S = 120.0
#: What the raylet of a first driver sets for its workers.
_OF_FIRST_DRIVER = {"RAY_JOB_ID": "01000000", "RAY_LD_PRELOAD_ON_WORKERS": "0"}


class Template:
    """A template without a Ray instance: another process plays its raylet."""

    def __init__(self, session: Path) -> None:
        self.session = session
        self.log = session / "log"
        (session / worker_client.DIRECTORY).mkdir(parents=True)
        self.raylet = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        address = session / worker_client.DIRECTORY / worker_client.SOCKET
        root = Path(str(ensemble_ray.__file__)).parents[1]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603  our own program
                [
                    sys.executable, worker_template.__file__,
                    f"--socket={address}", f"--raylet-pid={self.raylet.pid}", f"--root={root}",
                ],
                env=self._environment(), stdout=log, stderr=log,
            )  # fmt: skip
        while not address.exists():
            assert self.process.poll() is None, self.log.read_text()

    @staticmethod
    def _environment() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}

    def start_worker(self, *arguments: str, **variables: str) -> str:
        """Run the client as the raylet does, to its end; return what the worker printed."""
        env = self._environment() | _OF_FIRST_DRIVER | {"RAY_RAYLET_PID": str(self.raylet.pid)} | variables
        raylet_name = f"--raylet-name={self.session / 'sockets' / 'raylet'}"
        done = subprocess.run(  # noqa: S603  our own program
            [sys.executable, worker_client.__file__, raylet_name, *arguments],
            env=env, cwd=self.session, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S, check=False,
        )  # fmt: skip
        return done.stdout

    def refusals(self) -> str:
        """Return what the template said of workers that it did not fork."""
        return self.log.read_text(encoding="utf-8")

    def close(self) -> None:
        for process in (self.raylet, self.process):
            process.kill()
            process.wait(_LIMIT_S)


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with own_directory() as directory:
        made = Template(directory / "session")
        yield made
        made.close()


@pytest.mark.program
def test_a_worker_is_forked_with_the_streams_of_its_client(template: Template) -> None:
    """S-SET-42: Ray's own program runs in the fork, and prints where its client would have printed."""
    assert "--raylet-name" in template.start_worker("--help")
    assert template.refusals() == ""


@pytest.mark.program
def test_a_worker_of_another_job_is_not_forked(template: Template) -> None:
    """S-SET-42: Ray reads the job's id when it is imported, so that a fork would belong to the wrong job."""
    before = template.refusals()
    assert "--raylet-name" in template.start_worker("--help", RAY_JOB_ID="02000000")
    assert template.refusals().removeprefix(before) == "Not forked: other values of RAY_JOB_ID\n"


@pytest.mark.parametrize("option", ["--runtime-env-hash=5", "--worker-type=SPILL_WORKER"])
def test_a_worker_with_an_environment_of_its_own_does_not_ask_the_template(option: str, tmp_path: Path) -> None:
    """S-SET-42: it may have another interpreter or container; workers that spill objects are Ray's own business."""
    (tmp_path / worker_client.DIRECTORY / worker_client.SOCKET).mkdir(parents=True)  # connecting would fail loudly
    assert not worker_client.is_forked([f"--raylet-name={tmp_path}/sockets/raylet", option])


def test_a_worker_starts_in_rays_own_way_when_there_is_no_template(tmp_path: Path) -> None:
    """S-SET-42: the client becomes Ray's program when it finds no socket."""
    assert not worker_client.is_forked([f"--raylet-name={tmp_path}/sockets/raylet"])


@pytest.mark.program
def test_the_template_ends_when_its_raylet_ends() -> None:
    """S-SET-42: also when the raylet is killed."""
    with own_directory() as directory:
        template = Template(directory / "session")
        try:
            template.raylet.kill()
            assert template.process.wait(_LIMIT_S) == 0
        finally:
            template.close()


@tool
def describe_process(name: str) -> str:
    """Return what tells this process from another one."""
    import random

    process = psutil.Process()
    parent = " ".join(process.parent().cmdline())  # type: ignore[union-attr]  it has one
    return f"{name} {worker_template.__file__ in parent} {os.getpgid(0)} {os.getpid()} {random.random()}"  # noqa: S311


def test_agents_of_a_local_ray_are_forked(ray_runtime: RayRuntime, ray_cluster: str) -> None:
    """S-SET-42, S-STU-35: each has a process group and random numbers of its own, and its cluster is found."""
    agents = [
        Agent(
            role=role, goal="g", tools=[describe_process], isolation="process",
            llm=ScriptedModel(ToolCall("1", "describe_process", f'{{"name": "{role}"}}'), "done"),
        )
        for role in ("first", "second")
    ]  # fmt: skip
    tasks = [Task(description=agent.role, expected_output="e", agent=agent) for agent in agents]
    output = Ensemble(tasks=tasks, workflow="parallel").run(runtime=ray_runtime)

    called = [trace.llm_interactions[0].tool_calls[0] for trace in output.trace.task_traces]
    results = sorted(call.result.split() for call in called if call.result is not None)
    assert [result[:2] for result in results] == [["first", "True"], ["second", "True"]]
    (_, _, group, pid, number), (_, _, other_group, other_pid, other_number) = results
    assert (group, other_group) == (pid, other_pid)
    assert number != other_number
    cluster = find_cluster(int(pid))
    assert cluster is not None
    assert cluster.address == ray_cluster


@tool
def slice_table() -> str:
    """Return what is imported before pyarrow is, and how many bytes Ray sends of one row of many."""
    import sys

    before = sorted({"numpy", "pyarrow"} & sys.modules.keys())
    import pyarrow as pa
    import ray

    context = ray._private.worker.global_worker.get_serialization_context()
    row = pa.table({"number": range(100_000)}).slice(0, 1)
    return f"{before} {context.serialize(row).total_bytes}"


def test_ray_sends_arrow_tables_when_pyarrow_is_imported_late(ray_runtime: RayRuntime) -> None:
    """S-SET-42: a worker imports pyarrow when it is used, and then has Ray's serializer, which does not send the other rows."""
    agent = Agent(
        role="W", goal="g", tools=[slice_table], llm=ScriptedModel(ToolCall("1", "slice_table", "{}"), "done")
    )
    output = Ensemble(tasks=[Task(description="d", expected_output="e", agent=agent)]).run(runtime=ray_runtime)

    imported, _, size = str(output.trace.task_traces[0].llm_interactions[0].tool_calls[0].result).rpartition(" ")
    assert imported == "[]"
    assert int(size) < 10_000
