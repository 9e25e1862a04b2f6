"""A team whose process dies in the middle of its run, and the program that runs it.

`python -c "from tests.scenarios.dying_run import main; main(...)"`: by name, so that the team is the same in the process
that goes on with the run. Where its model is and where it leaves marks stands in the environment.
"""

from __future__ import annotations

import os
from pathlib import Path

from ensemble_ray import ChatModel, Ensemble, Fallback, OpenAIChatModel, RunOptions, TaskHandlerContext, tool
from ensemble_ray.definition.fields import Origin
from ensemble_ray.teamfile import load_source
from tests.builders import agent, call, task
from tests.scenarios.teams import Marks

RUN_ID = "dying"
#: Where the team is found again.
PLACE = "tests.scenarios.dying_run:team"
#: Environment variables of the model's address, of the file for marks, and of a model that is asked before the other one.
MODEL, MARKS, FIRST = "DYING_RUN_MODEL", "DYING_RUN_MARKS", "DYING_RUN_FIRST"
#: Exit status of the process that dies.
DIED = 9


@tool(effect="idempotent")
def measure(word: str) -> str:
    """Measure a word; the first time, the process ends in it."""
    marks = Marks(Path(os.environ[MARKS]))
    marks.add("measuring")
    if len(marks.lines) == 1:
        os._exit(DIED)
    return f"{len(word)} letters"


def conclude(context: TaskHandlerContext) -> str:
    """What the others said, as one text."""
    return " + ".join(output.raw for output in context.context_outputs)


def team(llm: str = "", *, goal: str = "be exact") -> Ensemble:
    """Names a word, measures it with a tool, concludes without a model."""
    url = llm or os.environ[MODEL]
    model: ChatModel = OpenAIChatModel("m", base_url=url, api_key="none")
    if first := os.environ.get(FIRST):
        model = Fallback([OpenAIChatModel(first, base_url=url, api_key="none"), model])
    naming = task("Name a word about {topic}", agent(model, "Namer"))
    measuring = task("Measure it", agent(model, "Measurer", tools=[measure], goal=goal), context=[naming])
    concluding = task("Conclude", handler=conclude, context=[naming, measuring])
    return Ensemble(tasks=[naming, measuring, concluding], workflow="sequential")


def answers() -> list[object]:
    """What its model says: the call that the process dies in, and what comes after it."""
    return ["actor", call("measure", '{"word": "actor"}'), "five"]


def main(*, is_placed: bool = False) -> None:
    """Run it until it dies; `is_placed`: with a definition that knows where it came from."""
    ensemble = load_source(Origin(place=PLACE)) if is_placed else team()
    options = RunOptions(max_tool_output_length=3)
    ensemble.run({"topic": "Ray"}, runtime="inline", run_id=RUN_ID, options=options)
