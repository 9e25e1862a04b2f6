"""Texts of reflections: notes in a prompt, the request to a model, its answer."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray import Task, TaskReflection, build_user_prompt
from ensemble_ray.prompts.task import ReflectionParts, build_reflection_request, parse_reflection

TASK = Task(description="Write {x}", expected_output="Prose")
NOTES = TaskReflection(
    refined_description="Write it well",
    refined_expected_output="Short prose",
    observations=["too long", "dull"],
    suggestions=["cut it"],
)
HEADINGS = ("REFINED_DESCRIPTION", "REFINED_EXPECTED_OUTPUT", "OBSERVATIONS", "SUGGESTIONS")


_WHOLE = """\
REFINED_DESCRIPTION:
 Do it
well

REFINED_EXPECTED_OUTPUT: Prose
OBSERVATIONS:
- a
* b
-
-\x20
c
SUGGESTIONS:
  - d"""


def test_notes_stand_before_the_task_which_is_as_it_was() -> None:
    """S-REFL-8, S-TPL-55: headings, lists, the original texts after them."""
    prompt = build_user_prompt(TASK, notes=NOTES)
    section, _, rest = prompt.partition("\n\n## Task\n")
    lines = section.split("\n")
    assert lines[0] == "## Task Improvement Notes (from prior executions)"
    assert "\n".join(lines[2:]) == (
        "\n### Refined Instructions\nWrite it well\n\n### Output Guidance\nShort prose\n\n"
        "### Observations\n- too long\n- dull\n\n### Suggestions\n- cut it"
    )
    assert rest == "Write {x}\n\n## Expected Output\nProse"


def test_empty_lists_have_no_headings() -> None:
    """S-REFL-8."""
    bare = TaskReflection(refined_description="a", refined_expected_output="b")
    prompt = build_user_prompt(TASK, notes=bare)
    assert "### Observations" not in prompt
    assert "### Suggestions" not in prompt
    assert build_user_prompt(TASK) == build_user_prompt(TASK, notes=None)


def test_notes_come_behind_memory_and_before_a_revision() -> None:
    """S-TPL-55, S-TPL-56."""
    again = TASK.with_revision_feedback("shorter", None, 1)
    headings = re.findall(r"^## .*", build_user_prompt(again, notes=NOTES), flags=re.MULTILINE)
    assert headings == [
        "## Task Improvement Notes (from prior executions)",
        "## Revision Instructions (Attempt 2)",
        "## Task",
        "## Expected Output",
    ]


def test_the_request_has_all_that_is_needed() -> None:
    """S-REFL-11: description, expected output, output, prior notes, the answer's sections in their order."""
    request = build_reflection_request(TASK, "An {output}", NOTES)
    for text in ("Write {x}", "Prose", "An {output}", "Write it well", "Short prose", "- dull", "- cut it"):
        assert text in request
    places = [request.index(f"\n{heading}:\n") for heading in HEADINGS]
    assert places == sorted(places)
    first = build_reflection_request(TASK, "o", None)
    assert "There are none" in first
    assert "### Refined Instructions" not in first


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            _WHOLE,
            ReflectionParts("Do it\nwell", "Prose", ("a", "b"), ("d",)),
        ),
        ("**REFINED_DESCRIPTION:** x\n## SUGGESTIONS:\n- y", ReflectionParts("x", "", (), ("y",))),
        ("SUGGESTIONS:\n- y\nREFINED_DESCRIPTION:\nx", ReflectionParts("x", "", (), ("y",))),
        ("I would rather not.", ReflectionParts()),
        ("REFINED_DESCRIPTION:\n\nOBSERVATIONS:\nnone", ReflectionParts()),
        ("The word OBSERVATIONS: within a line\nSUGGESTIONS:\n- a", ReflectionParts("", "", (), ("a",))),
        ("OBSERVATIONS:\n- a\nOBSERVATIONS:\n- b", ReflectionParts("", "", ("a",), ())),
    ],
)
def test_an_answer_is_read(text: str, parts: ReflectionParts) -> None:
    """S-REFL-12: sections stripped, bullets alone, blank ones dropped, what is missing is empty."""
    assert parse_reflection(text) == parts


_LINE = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp", "Zs"], exclude_characters="#*:-"), min_size=1)


@pytest.mark.heavy
@given(_LINE, _LINE, st.lists(_LINE, max_size=5), st.lists(_LINE, max_size=5), st.sampled_from(["- ", "* "]))
def test_what_is_written_in_the_format_is_read_again(
    description: str, expected_output: str, observations: list[str], suggestions: list[str], bullet: str
) -> None:
    """S-REFL-12: whatever the texts are."""
    text = "\n".join(
        [
            "REFINED_DESCRIPTION:", description,
            "REFINED_EXPECTED_OUTPUT:", expected_output,
            "OBSERVATIONS:", *(bullet + each for each in observations),
            "SUGGESTIONS:", *(bullet + each for each in suggestions),
        ]
    )  # fmt: skip
    assert parse_reflection(text) == ReflectionParts(
        description.strip(), expected_output.strip(), tuple(observations), tuple(suggestions)
    )


@given(st.text())
def test_any_answer_can_be_read(text: str) -> None:
    """S-REFL-12: nothing that a model writes raises."""
    assert all(item.strip() for item in (*parse_reflection(text).observations, *parse_reflection(text).suggestions))
