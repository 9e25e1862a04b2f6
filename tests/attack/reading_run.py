"""A team that reads the web with every tool for it and whose process dies then; where its servers are stands in the environment."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ensemble_ray import Ensemble, HttpAgentTool, OpenAIChatModel, ToolCall, WebScraperTool, WebSearchTool, tool
from ensemble_ray.tools.builtin.web import SerpApiSearch
from tests.builders import agent, call, task
from tests.scenarios.teams import Marks

RUN_ID = "reading"
#: Environment variables: address of the model, of the web server, and the file for marks.
MODEL, WEB, MARKS = "READING_RUN_MODEL", "READING_RUN_WEB", "READING_RUN_MARKS"
DIED = 9
#: What is fetched, each once.
PATHS = ("/page", "/api", "/search.json")


@tool(effect="idempotent")  # what was read before it is committed when it begins
def think() -> str:
    """Think; the first time, the process ends in it."""
    marks = Marks(Path(os.environ[MARKS]))
    marks.add("thinking")
    if len(marks.lines) == 1:
        os._exit(DIED)
    return "thought"


def team() -> Ensemble:
    """One reader with all web tools."""
    web = os.environ[WEB]
    tools = [
        WebScraperTool(allow_private_hosts=True),
        HttpAgentTool.get("api", "Asks it", f"{web}/api"),
        WebSearchTool(SerpApiSearch("key", endpoint=f"{web}/search.json")),
        think,
    ]
    model = OpenAIChatModel("m", base_url=os.environ[MODEL], api_key="none")
    return Ensemble(tasks=[task("Read", agent(model, "Reader", tools=tools))], workflow="sequential")


def answers(web: str) -> list[object]:
    """What its model says: a turn of all web tools at once, the call that the process dies in, the end."""
    asked = (
        ("web_scrape", {"url": f"{web}/page"}),
        ("api", {"input": "tides"}),
        ("web_search", {"query": "tides"}),
    )
    turn = [ToolCall(f"call_{name}", name, json.dumps(arguments)) for name, arguments in asked]
    return [turn, call("think", "{}"), "read"]


def main() -> None:
    """Run it until it dies."""
    team().run(runtime="inline", run_id=RUN_ID)
