"""The system prompt."""

from __future__ import annotations

import logging

import pytest

from ensemble_ray import Agent, build_system_prompt
from ensemble_ray.testing import ScriptedModel

MODEL = ScriptedModel()


def agent(**fields: object) -> Agent:
    """An agent with these fields."""
    return Agent(**{"role": "Writer", "goal": "Write plainly", "llm": MODEL, **fields})


def instruction() -> str:
    """The fixed paragraph: the last line of a prompt without a response format."""
    return build_system_prompt(agent()).splitlines()[-1]


def test_all_parts_stand_in_order_when_the_agent_has_them() -> None:
    """S-TPL-13 to S-TPL-17."""
    prompt = build_system_prompt(agent(background="Ten years of news.", response_format="Markdown"))
    assert prompt == (
        "You are Writer.\n"
        "Ten years of news.\n"
        "\n"
        "Your personal goal is: Write plainly\n"
        "\n"
        f"{instruction()}\n"
        "Output format instructions: Markdown"
    )


@pytest.mark.parametrize("blank", [None, "", "  \n"])
def test_parts_leave_no_trace_when_they_are_blank(blank: str | None) -> None:
    """S-TPL-14, S-TPL-17, S-TPL-21: no blank line, no `None`, no white space at the end."""
    prompt = build_system_prompt(agent(background=blank, response_format=blank))
    assert prompt == f"You are Writer.\n\nYour personal goal is: Write plainly\n\n{instruction()}"
    assert "None" not in prompt
    assert "null" not in prompt
    assert prompt == prompt.rstrip()


def test_end_is_bare_when_a_text_ends_in_white_space() -> None:
    """S-TPL-21."""
    assert build_system_prompt(agent(response_format="JSON \n")).endswith("Output format instructions: JSON")


def test_paragraph_is_the_same_when_agents_differ() -> None:
    """S-TPL-16, S-TPL-20: constant; answer, expected output, quality, accuracy, no preamble, no postscript."""
    paragraph = instruction()
    assert paragraph.startswith("You must produce a final answer")
    for word in ("expected output", "accurate", "quality", "preamble", "postscript"):
        assert word in paragraph
    assert paragraph in build_system_prompt(agent(role="Chef", background="Cook", response_format="x"))


def test_role_stands_as_it_is_when_it_needs_an_article() -> None:
    """S-TPL-22."""
    assert build_system_prompt(agent(role="{x} analyst")).startswith("You are {x} analyst.\n")


def test_length_is_logged_when_a_prompt_is_built(caplog: pytest.LogCaptureFixture) -> None:
    """S-TPL-40."""
    with caplog.at_level(logging.DEBUG, logger="ensemble_ray"):
        prompt = build_system_prompt(agent())
    assert [record.getMessage() for record in caplog.records] == [f"System prompt built: {len(prompt)} characters"]
