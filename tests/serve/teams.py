"""Teams that run behind an endpoint or as a job: as values, and as files that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import JsonValue

from ensemble_ray import Agent, ChatModel, Ensemble, MapReduceEnsemble, Task
from ensemble_ray.testing import Fault, ScriptedModel, ServedRequest


def pair(llm: ChatModel, **fields: Any) -> Ensemble:
    """A writer and an editor, one after the other, about {topic}."""
    writer = Agent(role="Writer", goal="Write plainly", llm=llm)
    editor = Agent(role="Editor", goal="Cut", llm=llm)
    draft = Task(name="draft", description="Write about {topic}", expected_output="A text", agent=writer)
    final = Task(
        name="final",
        description="Shorten it for {reader}",
        expected_output="A line",
        agent=editor,
        context=[draft],
        **fields,
    )
    return Ensemble(tasks=[draft, final])


def summaries() -> MapReduceEnsemble:
    """Three maps about {topic}, two reduces and the final one."""
    return MapReduceEnsemble(
        items=["tides", "kelp", "salt"],
        map_task=lambda item: Task(description=f"Read {item} of {{topic}}", expected_output="A text"),
        reduce_task=lambda group: Task(description="Join", expected_output="A text", context=group),
        chunk_size=2,
        llm=ScriptedModel(otherwise=lambda call: "joined" if "Join" in call.text else "read"),
    )


def mapped(llm: ChatModel) -> MapReduceEnsemble:
    """A map-reduce whose tasks are made while it runs, over one item unless told otherwise."""
    return MapReduceEnsemble(
        items=["salt"],
        map_task=lambda item: Task(
            description=f"Read {item}".replace("{", "(").replace("}", ")"), expected_output="A text"
        ),
        reduce_task=lambda group: Task(description="Join", expected_output="A text", context=group),
        mode="pipelined",
        llm=llm,
    )


INPUTS: dict[str, JsonValue] = {"topic": "Ray", "reader": "children"}

#: The key that the models of the team file ask for, and the environment variable that holds it.
KEY, KEY_VARIABLE = "k-3kf9", "KEY_OF_THE_TEAM"
_MODEL = '{{model: "openai:any", base_url: "{url}", api_key_env: KEY_OF_THE_TEAM, max_retries: 0}}'
_TEAM = f"""
agents:
  - {{{{name: writer, role: Writer, goal: Write, tools: ["team_tools:shout"], llm: {_MODEL}}}}}
  - {{{{name: editor, role: Editor, goal: Cut, llm: {_MODEL}}}}}
tasks:
  - {{{{name: draft, description: "Write about {{{{topic}}}}", expected_output: A text, agent: writer}}}}
  - {{{{name: final, description: Shorten it, expected_output: A line, agent: editor, context: [draft]}}}}
"""
_TOOLS = '''
from ensemble_ray import tool

@tool
def shout(text: str) -> str:
    """Say it louder."""
    return text.upper()
'''


def write_team(directory: Path, url: str) -> Path:
    """Write a team file, and the module of its tool beside it; gives the file."""
    (directory / "team_tools.py").write_text(_TOOLS, encoding="utf-8")
    team = directory / "team.yaml"
    team.write_text(_TEAM.format(url=url), encoding="utf-8")
    return team


def write_asking_team(directory: Path, url: str) -> Path:
    """Write a team file with a gate behind its first task, at which runs wait in their records; gives the file."""
    gate = "agent: writer, review: {prompt: Right or wrong, timeout: 0}}"
    team = directory / "asking.yaml"
    team.write_text(f"{_TEAM.format(url=url).replace('agent: writer}', gate)}review_wait: detach\n", encoding="utf-8")
    return team


_MAP_REDUCE = f"""
llm: {_MODEL}
map_reduce:
  items: items.jsonl
  map: {{{{description: "Write about {{{{topic}}}}", expected_output: A text}}}}
  reduce: {{{{description: Shorten them, expected_output: A line}}}}
  chunk_size: 2
  results: rows.jsonl
"""


def write_map_reduce(directory: Path, url: str) -> Path:
    """Write a team file that maps over three lines of a file beside it; gives the team file."""
    (directory / "items.jsonl").write_text("".join(f'{{"topic": "{topic}"}}\n' for topic in ("tides", "kelp", "salt")))
    team = directory / "many.yaml"
    team.write_text(_MAP_REDUCE.format(url=url), encoding="utf-8")
    return team


def script(request: ServedRequest) -> str | Fault:
    """What the model answers the team of the file; one topic is too much for it."""
    if "Write about failure" in request.text:
        return Fault(status=400, message="too much")
    return "a line" if "Shorten" in request.text else "a draft"
