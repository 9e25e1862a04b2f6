"""A team that looks at pictures and whose process dies between two answers, and the program that runs it.

By name, so that the team is the same in the process that goes on with the run. The environment has its model and its files.
"""

from __future__ import annotations

import os
from pathlib import Path

from ensemble_ray import Ensemble, Image, OpenAIChatModel, tool
from tests.builders import agent, call, task
from tests.scenarios.teams import Marks

RUN_ID = "looking"
#: Environment variables of the model's address, and of the directory with pictures and marks.
MODEL, PLACE = "LOOKING_MODEL", "LOOKING_PLACE"
DIED = 9
PNG = b"\x89PNG\r\n\x1a\n"


@tool(effect="idempotent")
def measure(word: str) -> str:
    """Measure a word; the first time, the process ends in it."""
    marks = Marks(Path(os.environ[PLACE]) / "marks")
    marks.add("measuring")
    if len(marks.lines) == 1:
        os._exit(DIED)
    return f"{len(word)} letters"


def answers() -> list[object]:
    """What its model says: the last one after the death."""
    return ["a map", call("measure", '{"word": "map"}'), "three"]


def team() -> Ensemble:
    """Names what is in a picture, then compares it with another one."""
    model = OpenAIChatModel("m", base_url=os.environ[MODEL], api_key="none")
    picture = Image(Path(os.environ[PLACE]) / "{name}.png")
    naming = task("Name what you see", agent(model, "Namer"), attachments=picture)
    comparing = task("Compare with {photo}", agent(model, "Comparer", tools=[measure]), attachments=[picture])
    return Ensemble(tasks=[naming, comparing], workflow="sequential")


def main() -> None:
    """Run it until it dies."""
    team().run({"name": "a", "photo": Image(PNG + b"photo", name="photo.png")}, runtime="inline", run_id=RUN_ID)
