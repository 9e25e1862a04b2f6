"""A program with a cluster of several nodes: `python -m tests.scenarios.nodes_run FILE STEP...` writes what came of the steps.

The cluster and its driver are one process, so that a step can take a node away, or add one, while its run goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import Any, cast

import ray
from ray.cluster_utils import Cluster
from ray.util import list_named_actors

from ensemble_ray import Agent, ChatMessage, ChatResponse, Ensemble, MapEnsemble, Task, ValidationError
from ensemble_ray.runtime import ray_runtime_class

_PATIENCE_S = 200.0


def node_here() -> str:
    """Id of the node of this process."""
    return str(ray.get_runtime_context().get_node_id())


class Placed:
    """A model that answers with the node on which it is asked."""

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[object] = ()) -> ChatResponse:
        return ChatResponse(text=node_here())


class Stuck(Placed):
    """The same, but whoever asks it first has no answer: it says in a file that it was asked, and waits."""

    def __init__(self, file: Path) -> None:
        self.file = file

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[object] = ()) -> ChatResponse:
        if not self.file.exists():
            self.file.write_text(node_here(), encoding="utf-8")
            await asyncio.Event().wait()
        return await super().chat(messages, tools)


class Slow(Placed):
    """The same, after a second."""

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[object] = ()) -> ChatResponse:
        await asyncio.sleep(1)
        return await super().chat(messages, tools)


def _numbers_until(file: Path) -> Iterator[int]:
    """Yield numbers until the file is there."""
    return takewhile(lambda _: not file.exists(), count())


class Lines(logging.Handler):
    """What the library logs here."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def until(is_so: Callable[[], object], what: str) -> None:
    """Wait for a state that nobody announces."""
    deadline = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.1)


class Steps:
    """What can be done; each step gives what a test asserts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Nobody reads logs, and nobody adds nodes but the steps.
        head = {"num_cpus": 2, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.head = str(cast("Any", self.cluster).head_node.node_id)
        self.desk = self.add(resources={"desk": 1}, labels={"zone": "a"})
        self.runtime = ray_runtime_class()(self.cluster.address, init_options={"namespace": "mine"})
        self.lines = Lines()
        logging.getLogger("ensemble_ray").addHandler(self.lines)

    def add(self, **options: object) -> Any:
        """Add a node."""
        return cast("Any", self.cluster).add_node(num_cpus=2, **options)

    def ask(self, *agents: Agent, name: str) -> list[str]:
        """Have each agent do a task, all at the same time; give the answers."""
        tasks = [Task(description=f"task {n}", expected_output="a node", agent=by) for n, by in enumerate(agents)]
        output = Ensemble(tasks=tasks, workflow="parallel").run(runtime=self.runtime, run_id=name)
        return [output[task].raw for task in tasks]

    @contextmanager
    def running(self, work: Callable[[], None]) -> Iterator[None]:
        """Do work in a thread meanwhile; returns when it is done."""
        thread = threading.Thread(target=work, daemon=True)  # a step that fails ends the program
        thread.start()
        yield
        thread.join(_PATIENCE_S)
        assert not thread.is_alive()

    # The steps.

    def placed(self) -> dict[str, object]:
        """Agents with requirements and without."""
        asking = Agent(role="Asking", goal="g", llm=Placed(), resources={"desk": 0.5}, labels={"zone": "in(a, b)"})
        away = Agent(role="Away", goal="g", llm=Placed(), labels={"zone": "!a"}, num_cpus=1)
        plain = [Agent(role=f"Plain {n}", goal="g", llm=Placed(), isolation="process") for n in range(2)]
        answers = self.ask(asking, away, *plain, name="placed")
        named = cast("list[dict[str, str]]", cast("Any", list_named_actors)(all_namespaces=True))
        schedulers = [each["namespace"] for each in named if each["name"] == "scheduler"]
        return {"answers": answers, "head": self.head, "desk": self.desk.node_id, "schedulers": schedulers}

    def refused(self) -> dict[str, object]:
        """Agents that the cluster has nothing for."""
        model, texts, began = Placed(), [], time.monotonic()
        lacking = Agent(role="Lacking", goal="g", llm=model, num_gpus=1)
        greedy = [Agent(role=f"Greedy {n}", goal="g", llm=model, resources={"desk": 1}) for n in range(2)]
        for number, agents in enumerate(((lacking,), greedy)):
            try:
                self.ask(*agents, name=f"refused-{number}")
            except ValidationError as error:
                texts.append(str(error))
        mapped = MapEnsemble(
            items=[1],
            map_agent=lambda _: lacking,
            map_task=lambda item, by: Task(description=f"map {item}", expected_output="a node", agent=by),
        )
        try:
            mapped.run(runtime=self.runtime, run_id="refused-map")
        except Exception as error:  # noqa: BLE001  its text is what is asserted
            texts.append(f"{error} {error.__cause__}")
        return {"texts": texts, "seconds": time.monotonic() - began}

    def lost(self) -> dict[str, object]:
        """The node of an agent is lost, and its run waits until there is another that has what it asks for."""
        file, answers = self.directory / "asked", list[str]()
        waiting = "Agent 'Clerk': its process waits for a node"  # others may have waited in an earlier step, on a busy machine
        agent = Agent(role="Clerk", goal="g", llm=Stuck(file), resources={"desk": 1})
        with self.running(lambda: answers.extend(self.ask(agent, name="lost"))):
            until(lambda: file.exists() and file.read_text(), "the question")
            before = file.read_text()
            cast("Any", self.cluster).remove_node(self.desk, allow_graceful=False)
            until(lambda: any(waiting in text for text in self.lines.texts), "the warning")
            self.desk = self.add(resources={"desk": 1}, labels={"zone": "b"})
        warning = next(text for text in self.lines.texts if waiting in text)
        return {"before": before, "after": answers[0], "new": self.desk.node_id, "warning": warning}

    def added(self) -> dict[str, object]:
        """A node comes while a map goes on that has more to do than its processes."""
        file, answers = self.directory / "go", list[str]()
        mapper = Agent(role="Mapper", goal="g", llm=Slow())
        mapping = MapEnsemble(
            items=_numbers_until(file),
            map_agent=lambda _: mapper,
            map_task=lambda item, by: Task(description=f"map {item}", expected_output="a node", agent=by),
            max_parallel_tasks=100,
        )

        def work() -> None:
            output = mapping.run(runtime=self.runtime, run_id="added")
            answers.extend(each.raw for each in output.task_outputs)

        with self.running(work):
            until(lambda: len(_agents()) >= 2, "the first processes")
            new = self.add()
            until(lambda: new.node_id in _agents(), "a process on the new node")
            file.touch()
        return {"nodes": sorted(set(answers)), "new": new.node_id}


def _agents() -> list[str]:
    """Nodes of the agents' processes that live now."""
    known = cast("dict[str, dict[str, Any]]", cast("Any", ray)._private.state.actors())
    alive = [each for each in known.values() if each["State"] == "ALIVE" and "AgentActor" in each["ActorClassName"]]
    return [str(each["Address"]["NodeID"]) for each in alive]


def main() -> None:
    """Do the steps that are named."""
    file, names = Path(sys.argv[1]), sys.argv[2:]
    steps = Steps(file.parent)
    came = {name: getattr(steps, name)() for name in names}
    part = file.with_suffix(".part")
    part.write_text(json.dumps(came), encoding="utf-8")
    part.replace(file)


if __name__ == "__main__":
    main()
