"""A map-reduce whose process is killed, and the program that runs it.

`python -c "from tests.scenarios.dying_map import main; main()"`. Where its model, its items and its results are stands in
the environment, so that it is the same in the process that goes on with the run.
"""

from __future__ import annotations

import os
from typing import Literal, cast

from ensemble_ray import Agent, MapReduceEnsemble, OpenAIChatModel, Task
from tests.scenarios.mapping import reduce_task

RUN_ID = "dying-map"
#: Environment variables of the model's address, of the items, of the results, and of the order of work.
MODEL, ITEMS, RESULTS, MODE = "DYING_MAP_MODEL", "DYING_MAP_ITEMS", "DYING_MAP_RESULTS", "DYING_MAP_MODE"
#: Environment variable of the model's key, by which its server knows who asks.
KEY = "DYING_MAP_KEY"


def team() -> MapReduceEnsemble:
    """Maps the lines of a file, and brings three answers together at a time."""
    llm = OpenAIChatModel("m", base_url=os.environ[MODEL], api_key=os.environ[KEY])
    worker = Agent(role="Worker", goal="work", llm=llm)
    return MapReduceEnsemble(
        items=os.environ[ITEMS],
        map_agent=lambda _: worker,
        map_task=lambda item, _: Task.of(f"map {item}"),
        reduce_agent=lambda: worker,
        reduce_task=lambda chunk, _: reduce_task(chunk),
        target_token_budget=30,
        mode=cast("Literal['levels', 'pipelined']", os.environ[MODE]),
        results=os.environ[RESULTS],
        max_parallel_tasks=4,
    )


def main() -> None:
    """Run it."""
    team().run(runtime="inline", run_id=RUN_ID)
