"""Budgets on the command line and in team files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ensemble_ray.teamfile import load_ensemble
from tests.command_line import Call

TEAM = """
from ensemble_ray import Agent, CostConfiguration, Ensemble, Task
from ensemble_ray.values.messages import ChatResponse, TokenUsage
from ensemble_ray.testing import ScriptedModel

model = ScriptedModel(otherwise=lambda asked: ChatResponse(text=f"text {asked.number}", usage=TokenUsage(50, 50)))
writer = Agent(role="Writer", goal="Write", llm=model)
tasks = [Task(name=f"t{n}", description=f"Write {n}", expected_output="Prose", agent=writer) for n in range(4)]
team = Ensemble(tasks=tasks)
paid = team.replace(cost_configuration=CostConfiguration(input_token_rate=0.01, output_token_rate=0.01))
"""

FILE = """
max_tokens: 5000
max_cost: 2
agents: { writer: { role: Writer, goal: Write, llm: local } }
tasks: { one: { description: Write, expected_output: Prose, agent: writer } }
"""


@pytest.fixture
def dear(folder: Path) -> str:
    """The module of a team whose every answer has a hundred tokens."""
    (folder / "dear_of_test.py").write_text(TEAM, encoding="utf-8")
    return "dear_of_test"


def test_run_that_spent_its_budget_says_how_to_go_on(call: Call, dear: str) -> None:
    """S-BUD-4, S-BUD-6, S-BUD-11: exit code 1, what it gave is printed, and `runs` and `resume` know it."""
    called = call("run", f"{dear}:team", "--run-id", "spent", "--max-tokens", "420")
    assert (called.code, called.printed) == (1, "text 2\n")
    assert "The run ended early: budget_exhausted" in called.said
    assert called.said.splitlines()[-1].endswith("resume spent --max-tokens N")
    listed = call("runs", "--state", "budget_exhausted").printed.split()
    assert (listed[0], listed[1], listed[4]) == ("spent", "budget_exhausted", "3/4")
    again = call("resume", "spent")
    assert (again.code, "spent its budget (max_tokens 420): 300 tokens are spent" in again.said) == (2, True)
    further = call("resume", "spent", "--max-tokens", "5000", "--quiet")
    assert (further.code, further.printed) == (0, "text 3\n")


def test_money_is_limited_where_the_team_says_what_tokens_cost(call: Call, dear: str) -> None:
    """S-BUD-1, S-BUD-10."""
    refused = call("run", f"{dear}:team", "--max-cost", "5")
    assert (refused.code, "max_cost needs cost_configuration" in refused.said) == (2, True)
    assert call("run", f"{dear}:paid", "--max-cost", "100", "--quiet").code == 0
    assert call("run", f"{dear}:paid", "--max-cost", "0").code == 2


def test_price_of_a_model_is_printed(call: Call) -> None:
    """S-PRC-16: as lines and as JSON; with its source, and the way to name a model."""
    printed = call("models", "prices", "openai:gpt-5").printed.splitlines()
    assert [line.split(maxsplit=1)[1] for line in printed[:2]] == ["input", "output"]
    assert printed[-1].startswith("USD per million tokens; source: genai-prices ")
    data = json.loads(call("models", "prices", "openai:gpt-5", "--json").printed)
    assert float(data["input"]) == float(printed[0].split()[0])
    refused = call("models", "prices", "gpt-5")
    assert (refused.code, "has no price of 'gpt-5'. Name it as PROVIDER:MODEL" in refused.said) == (2, True)


def test_team_files_have_budgets(folder: Path) -> None:
    """S-BUD-1: `max_tokens` and `max_cost`, whole or not."""
    (folder / "team.yaml").write_text(FILE, encoding="utf-8")
    made = load_ensemble("team.yaml")
    assert (made.max_tokens, made.max_cost) == (5000, 2.0)
