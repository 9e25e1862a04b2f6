"""`ensemble-ray import crewai`: a crew's files as a team file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import Ensemble
from ensemble_ray.teamfile import load_ensemble
from tests.command_line import Call

AGENTS = """
researcher:
  role: >
    {topic} Researcher
  goal: Find what is new
  backstory: A seasoned one
  llm: openai/gpt-4o
  tools: [search_tool]
  max_rpm: 30
analyst:
  role: Analyst
  goal: Judge
  backstory: A careful one
  llm: ollama/llama3
  max_iter: 5
  allow_delegation: true
"""
TASKS = """
find:
  description: Research {topic}
  expected_output: A list
  agent: researcher
check:
  description: Check it
  expected_output: OK or not
  agent: analyst
  context: []
report:
  description: |
    Review it

    and expand it
  expected_output: A report
  agent: analyst
  human_input: true
  output_file: report.md
"""


def _crew(folder: Path, agents: str = AGENTS, tasks: str = TASKS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agents.yaml").write_text(agents)
    (folder / "tasks.yaml").write_text(tasks)
    return folder


def _imported(call: Call, folder: Path, *options: str) -> Ensemble:
    called = call("import", "crewai", str(folder), "--output", "team.yaml", *options)
    assert called.code == 0, called.said
    team = load_ensemble("team.yaml", needs_keys=False)
    assert isinstance(team, Ensemble)
    return team


def test_crew_becomes_a_team(call: Call, folder: Path) -> None:
    """S-INT-60: roles, goals, backstories, limits and models go over, and the file can be run."""
    team = _imported(call, _crew(folder / "src/news/config"), "--llm", "openai:small")
    find, check, report = team.tasks
    assert find.agent is not None
    assert (find.agent.role, find.agent.background) == ("{topic} Researcher", "A seasoned one")
    assert "gpt-4o" in repr(find.agent.llm)
    assert "30 requests" in repr(find.agent.llm)
    assert check.agent is not None
    assert (check.agent.max_iterations, check.agent.allow_delegation) == (5, True)
    assert "llama3" in repr(check.agent.llm)
    assert report.description == "Review it\n\nand expand it"
    assert team.workflow == "sequential"
    assert team.review_handler is not None


def test_context_is_what_a_sequential_crew_gives(call: Call, folder: Path) -> None:
    """S-INT-61: a task without a context has all outputs before it, one with an empty list none."""
    find, check, report = _imported(call, _crew(folder)).tasks
    assert list(find.context) == []
    assert list(check.context) == []
    assert list(report.context) == [find, check]


def test_what_is_left_is_told(call: Call, folder: Path) -> None:
    """S-INT-62: nothing is left out silently: it is said, and stands at the head of the file."""
    called = call("import", "crewai", str(_crew(folder)))
    assert called.code == 0
    for told in ("tools search_tool are Python there", "role has {topic}", "wrote report.md", "crew.py: is not read"):
        assert told in called.said
        assert told in called.printed


def test_notes_stay_in_comments(call: Call, folder: Path) -> None:
    """S-INT-62: a value with line ends in a note cannot put keys into the file."""
    agents = 'researcher:\n  role: R\n  goal: G\n  mood: "good\\ninputs: {a: b}"\n'
    called = call("import", "crewai", str(_crew(folder, agents, "find: {description: Find, agent: researcher}")))
    assert "'mood: good inputs: {a: b}' has no key here" in called.said
    assert not any(line.startswith("inputs") for line in called.printed.splitlines())


@pytest.mark.parametrize(
    ("agents", "tasks", "told"),
    [
        ("researcher: {role: [", TASKS, "agents.yaml:1:21: not valid YAML"),
        ("- researcher", TASKS, "agents.yaml:1:1: it must be a mapping"),
        (AGENTS, "find: Research", "tasks.yaml:1:7: find: it must be a mapping"),
        (AGENTS, "find: {description: Find, agent: nobody}", "there is no agent 'nobody' in agents.yaml"),
    ],
)
def test_wrong_files_are_named(call: Call, folder: Path, agents: str, tasks: str, told: str) -> None:
    """S-INT-63: what is wrong is said with its file and place, and nothing is written."""
    called = call("import", "crewai", str(_crew(folder, agents, tasks)), "--output", "team.yaml")
    assert called.code == 2
    assert told in called.said
    assert not Path("team.yaml").exists()


def test_folder_is_looked_for_below(call: Call, folder: Path) -> None:
    """S-INT-63: none or several projects below the folder are refused, with where they are."""
    assert "there are in" in call("import", "crewai", str(folder)).said
    _crew(folder / "one")
    _crew(folder / "two")
    said = call("import", "crewai", str(folder)).said
    assert "several" in said
    assert str(folder / "one") in said


def test_no_file_is_written_over(call: Call, folder: Path) -> None:
    """S-INT-63: an output that is there stays as it is."""
    _crew(folder)
    Path("team.yaml").write_text("mine")
    called = call("import", "crewai", ".", "--output", "team.yaml")
    assert called.code == 2
    assert "is there already" in called.said
    assert Path("team.yaml").read_text() == "mine"


def test_model_of_another_provider_is_told(call: Call, folder: Path) -> None:
    """S-INT-62: a provider whose endpoint is not known keeps the team's model."""
    agents = "researcher: {role: R, goal: G, llm: anthropic/claude}"
    called = call("import", "crewai", str(_crew(folder, agents, "find: {description: Find, agent: researcher}")))
    assert "model 'anthropic/claude': give its endpoint" in called.said
    assert "claude" not in called.printed.split("llm: openai", 1)[1]


def test_keys_without_a_value_say_nothing(call: Call, folder: Path) -> None:
    """S-INT-60, S-INT-61: the file loads; a context without a value is none that was chosen."""
    agents = "researcher: {role: R, goal: G, llm: , backstory: null, max_rpm: null, max_iter: , verbose: , tools: ''}"
    tasks = (
        "find: {description: Find, expected_output: A list, agent: researcher}\n"
        "report: {description: Say, expected_output: A text, agent: researcher, context: null, guardrail_max_retries: }\n"
    )
    find, report = _imported(call, _crew(folder, agents, tasks)).tasks
    assert find.agent is not None
    assert not find.agent.background
    assert list(report.context) == [find]
    assert "None" not in Path("team.yaml").read_text(encoding="utf-8")


def test_a_file_in_another_encoding_is_named(call: Call, folder: Path) -> None:
    """S-INT-63: with what it should be."""
    _crew(folder)
    (folder / "agents.yaml").write_bytes("chef: {role: Maître, goal: G}".encode("latin-1"))
    called = call("import", "crewai", str(folder))
    assert called.code == 2
    assert "agents.yaml: it cannot be read as a text in UTF-8" in called.said
