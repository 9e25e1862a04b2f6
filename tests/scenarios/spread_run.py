"""A recorded map over two nodes: `python -m tests.scenarios.spread_run FILE` joins the cluster and writes what came."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import ray

from ensemble_ray import Agent, ChatMessage, ChatResponse, MapEnsemble, Task

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
        replicas=4,
        durability="effects",
    )
    output = ensemble.run(runtime="ray", run_id="spread")
    here = str(ray.get_runtime_context().get_node_id())
    Path(sys.argv[1]).write_text(json.dumps({"here": here, "nodes": [each.raw for each in output.task_outputs]}))


if __name__ == "__main__":
    main()
