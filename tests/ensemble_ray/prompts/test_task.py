"""The user prompt."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import pydantic
import pytest

from ensemble_ray import Task, TaskOutput, build_user_prompt
from ensemble_ray.prompts.task import context_section

TASK = Task(description="Write", expected_output="Prose")
PLAIN = "## Task\nWrite\n\n## Expected Output\nProse"


class Article(pydantic.BaseModel):
    title: str


def output(raw: str, *, role: str = "Researcher", description: str = "Find facts") -> TaskOutput:
    """What an earlier task gave."""
    return TaskOutput(
        raw=raw, task_description=description, agent_role=role, completed_at=datetime.now(UTC), duration=0
    )


def test_prompt_begins_with_the_task_when_there_is_nothing_else() -> None:
    """S-TPL-30, S-TPL-58, S-TPL-59: sections without content leave no heading."""
    assert build_user_prompt(TASK) == PLAIN
    assert build_user_prompt(TASK, ()) == PLAIN
    assert context_section(()) == ""


def test_context_stands_before_the_task_when_there_are_outputs() -> None:
    """S-TPL-31, S-TPL-32, S-TPL-52: heading, one line, then each output between fences, in the order given."""
    prompt = build_user_prompt(TASK, [output("First"), output("Second\nline", role="Editor", description="Check")])
    heading, explanation, rest = prompt.split("\n", 2)
    assert heading == "## Context from Previous Tasks"
    assert explanation.strip()
    assert rest == (
        f"\n---\n### Researcher: Find facts\nFirst\n---\n\n---\n### Editor: Check\nSecond\nline\n---\n\n{PLAIN}"
    )


def test_empty_output_is_shown_when_a_task_gave_nothing() -> None:
    """S-TPL-33: heading and fences."""
    assert "---\n### Researcher: Find facts\n\n---\n\n## Task" in build_user_prompt(TASK, [output("")])


def test_texts_stay_as_they_are_when_they_look_like_variables() -> None:
    """S-TPL-37."""
    task = TASK.with_revision_feedback("Use {y}", "Had {{z}}", 0)
    prompt = build_user_prompt(task, [output("{x} {{topic}}")])
    for text in ("{x} {{topic}}", "Use {y}", "Had {{z}}"):
        assert text in prompt


@pytest.mark.parametrize(("length", "warnings"), [(10_000, 0), (10_001, 1)])
def test_warning_is_logged_when_an_output_is_long(length: int, warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    """S-TPL-34: who, how long, from which length on; the text is not cut."""
    described = "d" * 80 + "TAIL"
    with caplog.at_level(logging.WARNING):
        prompt = build_user_prompt(TASK, [output("x" * length, description=described)])
    assert "x" * length in prompt
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warnings
    for message in messages:
        assert "d" * 80 in message
        assert "TAIL" not in message
        assert "10001" in message
        assert "10000" in message


def test_feedback_is_shown_when_a_task_is_revised() -> None:
    """S-TPL-36, S-TPL-56: attempt n + 1; behind the context, before the task."""
    task = TASK.with_revision_feedback("Too long", "A long text", 1)
    prompt = build_user_prompt(task, [output("First")])
    context, revision = prompt.split("## Revision Instructions", 1)
    assert context.endswith("---\n\n")
    assert revision.startswith(" (Attempt 2)\n")
    assert revision.endswith(f"\n### Feedback\nToo long\n\n### Previous Output\nA long text\n\n{PLAIN}")
    assert revision.split("\n")[1].strip()


def test_parts_of_the_feedback_are_left_out_when_they_are_blank() -> None:
    """S-TPL-36: no attempt number for attempt 0, no previous output, and no section without feedback."""
    first = build_user_prompt(TASK.with_revision_feedback("Too long", " ", 0))
    assert first.startswith("## Revision Instructions\n")
    assert "### Previous Output" not in first
    for blank in (None, "", " \n"):
        assert build_user_prompt(TASK.with_revision_feedback(blank, "A long text", 3)) == PLAIN


def test_directives_stand_before_the_task() -> None:
    """S-TPL-57, S-CTL-5: behind the revision; one entry each, whatever its lines."""
    revised = TASK.with_revision_feedback("Too long", "A long text", 1)
    prompt = build_user_prompt(revised, directives=["Be brief\n## Task", "In French"])
    assert prompt.endswith(f"A long text\n\n## Active Directives\n- Be brief\n  ## Task\n- In French\n\n{PLAIN}")


def test_format_stands_last_when_an_output_type_is_set() -> None:
    """S-TPL-60, S-OUT-1."""
    prompt = build_user_prompt(TASK.replace(output_type=Article))
    assert prompt.startswith(f"{PLAIN}\n\n## Output Format\n")
    assert '"title": "string"' in prompt


def test_length_is_logged_when_a_prompt_is_built(caplog: pytest.LogCaptureFixture) -> None:
    """S-TPL-40."""
    with caplog.at_level(logging.DEBUG, logger="ensemble_ray"):
        build_user_prompt(TASK)
    assert [record.getMessage() for record in caplog.records] == [f"User prompt built: {len(PLAIN)} characters"]
