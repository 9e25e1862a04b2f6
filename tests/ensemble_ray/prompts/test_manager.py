"""What the manager of a hierarchical run is told."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from ensemble_ray import Agent, DefaultManagerPromptStrategy, ManagerPromptContext, Task, TaskOutput
from ensemble_ray.prompts.task import manager_prompts
from ensemble_ray.testing import ScriptedModel

MODEL = ScriptedModel()
RESEARCHER = Agent(role="Researcher", goal="Find facts", background="Ten years at a library", llm=MODEL)
WRITER = Agent(role="Writer", goal="Write well", background=" \n", llm=MODEL)
FACTS = Task(description="Find facts on {tides}", expected_output="A list")
ARTICLE = Task(description="Write the article", expected_output="Prose", context=[FACTS], agent=WRITER)
CONTEXT = ManagerPromptContext(agents=[WRITER, RESEARCHER], tasks=[FACTS, ARTICLE])
DEFAULT = DefaultManagerPromptStrategy()


@dataclass
class Fixed:
    """A strategy that says the same whatever it is given."""

    system: object = "Be brief"
    user: object = "Do it"

    def build_system_prompt(self, context: ManagerPromptContext) -> object:
        return self.system

    def build_user_prompt(self, context: ManagerPromptContext) -> object:
        return self.user


def test_workers_are_listed_in_order_when_the_default_strategy_writes() -> None:
    """S-HIER-11, S-SET-24: numbered from 1, with role and goal, and a background that is not blank; names the tool."""
    text = DEFAULT.build_system_prompt(CONTEXT)
    assert (
        "\n\n1. Writer\n   Goal: Write well\n\n"
        "2. Researcher\n   Goal: Find facts\n   Background: Ten years at a library\n\n"
    ) in text
    assert text.count("Background:") == 1
    assert "delegate_task" in text


def test_tasks_are_listed_when_the_default_strategy_writes() -> None:
    """S-HIER-12: every task with its expected output, as they are; ends by asking for one answer from the results."""
    text = DEFAULT.build_user_prompt(CONTEXT)
    assert "\n\nTask 1: Find facts on {tides}\nExpected output: A list\n\n" in text
    assert "\n\nTask 2: Write the article\nExpected output: Prose\n" in text
    closing = text.split("\n\n")[-1]
    assert "delegate" in closing
    assert "final answer" in closing
    assert "brings the results together" in closing


def test_ties_of_a_task_are_told_when_it_has_an_agent_and_context() -> None:
    """S-HIER-12: context outside the list has no number and is not told."""
    outside = Task(description="Elsewhere", expected_output="e")
    tasks = [FACTS, ARTICLE.replace(context=[outside, FACTS]), FACTS.replace(context=[outside])]
    text = DEFAULT.build_user_prompt(ManagerPromptContext(agents=[WRITER], tasks=tasks))
    assert "Expected output: Prose\nSuggested agent: Writer\nNeeds the results of: Task 1\n\nTask 3" in text
    assert text.count("Needs the results") == 1
    assert text.count("Suggested agent") == 1


def test_purpose_and_earlier_outputs_are_told_when_there_are_any() -> None:
    """S-HIER-10: the whole context is used; without them no heading is left."""
    output = TaskOutput(
        raw="Two tides a day", task_description="Look", agent_role="Reader", completed_at=datetime.now(UTC), duration=0
    )
    context = CONTEXT.replace(previous_outputs=[output], workflow_description="A school paper")
    assert "What this is for: A school paper" in DEFAULT.build_system_prompt(context)
    assert DEFAULT.build_user_prompt(context).startswith("## Context from Previous Tasks\n")
    assert "Two tides a day" in DEFAULT.build_user_prompt(context)
    assert "What this is for" not in DEFAULT.build_system_prompt(CONTEXT.replace(workflow_description=" "))
    assert "##" not in DEFAULT.build_user_prompt(CONTEXT)


def test_own_texts_are_taken_when_a_strategy_is_given() -> None:
    """S-HIER-10; without one it is the default's."""
    assert manager_prompts(Fixed(), CONTEXT) == ("Be brief", "Do it")
    assert manager_prompts(None, CONTEXT) == (DEFAULT.build_system_prompt(CONTEXT), DEFAULT.build_user_prompt(CONTEXT))


@pytest.mark.parametrize("blank", ["", " \n", None])
def test_fixed_sentence_takes_its_place_when_the_user_text_is_blank(blank: str | None) -> None:
    """S-HIER-10: a blank system text stays as it is."""
    system, user = manager_prompts(Fixed(system=blank, user=blank), CONTEXT)
    assert system == (blank or "")
    assert user.startswith("Coordinate the agents")


async def coroutine() -> str:
    """What an async method gives when it is called."""
    return "text"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"system": 3}, "Fixed.build_system_prompt must return text, got: int"),
        ({"user": ["a"]}, "Fixed.build_user_prompt must return text, got: list"),
    ],
)
def test_strategy_is_refused_when_it_returns_no_text(fields: dict[str, object], message: str) -> None:
    """S-HIER-13: what it did wrong is told by name."""
    with pytest.raises(TypeError) as caught:
        manager_prompts(Fixed(**fields), CONTEXT)
    assert str(caught.value) == message


def test_strategy_is_told_to_be_plain_when_it_is_async() -> None:
    """S-HIER-13: and its coroutine is not left unawaited, which would be a warning."""
    with pytest.raises(TypeError, match=r"got: coroutine; it must not be async"):
        manager_prompts(Fixed(user=coroutine()), CONTEXT)


def test_error_of_a_strategy_leaves_as_it_is_when_it_raises() -> None:
    """S-HIER-13: whoever runs the manager makes the run's error of it."""

    class Broken(Fixed):
        def build_user_prompt(self, context: ManagerPromptContext) -> object:
            raise LookupError("no words")

    with pytest.raises(LookupError, match="no words"):
        manager_prompts(Broken(), CONTEXT)
