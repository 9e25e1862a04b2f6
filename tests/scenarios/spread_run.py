"""A recorded map over two nodes, and commands: `python -m tests.scenarios.spread_run FILE COMMANDS` writes what came of each.

One program joins the cluster for all of them. COMMANDS is JSON: a list of command lines, which are called here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import ray

from ensemble_ray import Agent, ChatMessage, ChatResponse, MapEnsemble, Task
from tests.command_line import call_command

COUNT = 60


class Placed:
    """A model that says on which node it is asked."""

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[object] = ()) -> ChatResponse:
        return ChatResponse(text=str(ray.get_runtime_context().get_node_id()))


def main() -> None:
    """Run it."""
    mapper = Agent(role="Mapper", goal="map", llm=Placed())
    ensemble = MapEnsemble(
        items=range(COUNT),
        map_agent=lambda _: mapper,
        map_task=lambda item, by: Task(description=f"map {item}", expected_output="a node", agent=by),
        replicas=2,
        durability="effects",
    )
    output = ensemble.run(runtime="ray", run_id="spread")
    here = str(ray.get_runtime_context().get_node_id())
    called = [call_command(Path.cwd(), os.environ, *command) for command in json.loads(sys.argv[2])]
    came = {
        "here": here,
        "nodes": [each.raw for each in output.task_outputs],
        "called": [[each.returncode, each.stdout, each.stderr] for each in called],
    }
    Path(sys.argv[1]).write_text(json.dumps(came), encoding="utf-8")


if __name__ == "__main__":
    main()
