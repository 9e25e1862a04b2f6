"""The newsroom of the examples, with models that follow a script: every refusal, and a run that ends well all the same."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ensemble_ray import InlineRuntime, ManagerStalledError, TaskExecutionError, ToolCallEvent
from ensemble_ray.teamfile import load_ensemble
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.testing.scripted import ScriptEntry
from tests.builders import call
from tests.scenarios.delegating import Ran, hand, run_of, told

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TOPIC = {"topic": "the flood in the harbour"}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example, as a module; other tests have modules of that name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "newsroom", raising=False)
    yield importlib.import_module("newsroom")
    del sys.modules["newsroom"]


def run(example: ModuleType, runtime: InlineRuntime, *manager: ScriptEntry) -> tuple[Ran, ScriptedModel]:
    """A run of the team under a manager's script, whose workers do what they should."""
    lead = ScriptedModel(*manager)
    search = call("search_archive", '{"words": "the flood in the harbour, boats"}')
    finder = ScriptedModel(search, "Eleven boats were damaged (Fishers' union)")
    team = example.newsroom(lead, finder, ScriptedModel("It was the lower wall."), ScriptedModel(otherwise="A flood."))
    return run_of(team.replace(inputs=TOPIC), runtime), lead


def test_every_refusal_is_told_and_the_run_ends_well(example: ModuleType, inline_runtime: InlineRuntime) -> None:
    """All that a manager can be refused, in one run, with what its model reads.

    S-HIER-21, S-HIER-25, S-HIER-41, S-HIER-61, S-HIER-71 to S-HIER-74, S-HIER-80, S-HIER-81, S-HIER-83, S-DEL-41.
    """
    ran, lead = run(
        example,
        inline_runtime,
        [
            hand("Writer", "write at once", number=1),
            hand("Columnist", "say something", number=2),
            hand("Photographer", "take a picture", number=3),
            hand(" ", "find something", number=4),
            hand("Researcher", "", number=5),
            call("delegate_task", '{"agent_role": "Researcher", ', number=6),
            hand("Researcher", "collect the rumours", number=7),
        ],
        [hand("researcher ", "find what is on record", number=8), hand("Researcher", "find more", number=9)],
        "I think that is all.",
        hand("Analyst", "say why", number=10),
        hand("Writer", "write it up", number=11),
        hand("Writer", "write it  up", number=12),
        [hand("Writer", "make it shorter", number=13), hand("Analyst", "look again", number=14)],
        "The article: a flood.",
    )
    texts = told(lead)
    reasons = [text.partition("\n")[0] for text in texts]
    assert reasons[0] == "Delegation rejected by policy: Cannot delegate to 'Writer': stage 1 is not yet complete"
    assert reasons[1] == "Delegation rejected by policy: Agent 'Columnist' is not in the allowed_workers list"
    assert reasons[2] == (
        "No agent found with role 'Photographer'. Available roles: [Writer, Analyst, Researcher, Columnist]"
    )
    assert reasons[3].startswith("Error: agent_role must not be None or blank.")
    assert reasons[4].startswith("Error: task_description must not be None or blank.")
    assert reasons[5].startswith("Error: the arguments are no valid JSON")
    assert reasons[6] == "Delegation rejected by policy: this paper prints no rumours; ask for what can be checked"
    assert reasons[7] == "Eleven boats were damaged (Fishers' union)"
    assert reasons[8] == "Delegation rejected by policy: Agent 'Researcher' has reached its delegation cap of 2"
    assert reasons[9:11] == ["It was the lower wall.", "A flood."]
    assert texts[11].startswith("A flood.\n\nNotice: 'Writer' was given this same task before")
    assert reasons[12:] == ["A flood.", "Delegation rejected by policy: Global delegation cap of 6 has been reached"]
    # What is refused by a rule comes with what is possible instead.
    assert "'Researcher' (2 left)" in texts[0]
    assert "those still to come" in texts[8]  # the researcher is still at it

    assert ran.given.raw == "The article: a flood."
    assert [each.agent_role for each in ran.given.task_outputs] == [
        *("Researcher", "Analyst", "Writer", "Writer", "Writer"),
        "Manager",
    ]
    attempts = ran.attempts("Manager")
    assert [each.succeeded for each in attempts].count(True) == 5
    assert len(attempts) == len(texts) - 3  # the blank ones and the malformed one asked for nothing
    assert [event.failure_reason for event in ran.failed] == [reasons[place] for place in (0, 1, 2, 6, 8, 13)]


def test_reminder_is_given_once_when_the_article_is_missing(example: ModuleType, inline_runtime: InlineRuntime) -> None:
    """S-HIER-82: the manager hears who is missing and what that waits for, and gets another turn."""
    _, lead = run(
        example,
        inline_runtime,
        hand("Researcher", "find it"),
        "That is all.",
        hand("Analyst", "say why", number=1),
        hand("Writer", "write it", number=2),
        "The article.",
    )
    (reminder,) = [message.content or "" for message in lead.calls[-1].messages[2:] if message.role == "user"]
    assert "'Writer'" in reminder
    assert "Stage 2 is not complete: 'Analyst'" in reminder


def test_researcher_searches_the_archive(example: ModuleType, inline_runtime: InlineRuntime) -> None:
    """A worker's own tool works as in every other task."""
    ran, _ = run(
        example,
        inline_runtime,
        hand("Researcher"),
        hand("Analyst", number=1),
        hand("Writer", number=2),
        "The article.",
    )
    (found,) = [event for event in ran.watcher.of(ToolCallEvent) if event.tool_name == "search_archive"]
    assert found.tool_result.startswith("Fishers' union: Eleven boats")
    assert "Theatre" not in found.tool_result
    assert example.search_archive("quantum").startswith("Nothing on that.")


def test_stubborn_manager_is_ended(example: ModuleType, inline_runtime: InlineRuntime) -> None:
    """S-HIER-84: five turns that bring nothing, and what was done is kept."""
    early = [hand("Writer", "write at once", number=n) for n in range(6)]
    ran, lead = run(example, inline_runtime, hand("Researcher", number=9), *early, "never said")
    assert isinstance(ran.error, TaskExecutionError)
    assert isinstance(ran.error.__cause__, ManagerStalledError)
    assert [each.agent_role for each in ran.error.completed_task_outputs] == ["Researcher"]
    assert lead.remaining == 2  # five of the six were asked for


def test_team_without_models_that_call_tools_gets_there(
    example: ModuleType, inline_runtime: InlineRuntime, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the embedded model needs around it: the rules bring order into a manager that has none."""
    writer = ScriptedModel("The lower wall did it.", "The article.")
    finder = ScriptedModel("Eleven boats were damaged.")
    team = example.newsroom(example.Impatient(), example.ToolFirst(finder), writer, writer)
    output = team.run(TOPIC, runtime=inline_runtime)
    assert output.raw == "The article."
    assert "Fishers' union: " in finder.calls[0].text  # what the tool found
    assert "Eleven boats were damaged.\nThe lower wall did it." in writer.calls[1].text
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == [
        *("!! Writer refused", "!! Analyst refused", "-> Researcher", "<- Researcher"),
        *("!! Writer refused", "-> Analyst", "<- Analyst", "-> Writer", "<- Writer"),
    ]


def test_file_says_the_same_team(example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The YAML form plans what the program plans."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-test")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    written = load_ensemble(str(EXAMPLES / "teams" / "newsroom.yaml")).plan(TOPIC)
    assert written == example.team().plan(TOPIC)
