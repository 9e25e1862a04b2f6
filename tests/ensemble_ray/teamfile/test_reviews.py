"""Review gates in a team file."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from ensemble_ray import Ensemble, Review, ReviewDecision, ReviewPolicy, ReviewRequest, ReviewTiming, ValidationError
from tests.ensemble_ray.teamfile.conftest import Load

REQUEST = ReviewRequest(task_description="Draft", timing=ReviewTiming.AFTER_EXECUTION)


def team_of(load: Load, text: str) -> Ensemble:
    """A team of one task; the text continues it, or says more of the team."""
    return cast("Ensemble", load(f"llm: local\ntasks:\n  draft:\n    description: Draft it\n{text}"))


@pytest.mark.parametrize(
    ("written", "review"),
    [
        ("required", Review.required()),
        ("skip", Review.skip()),
        ("{prompt: 'Polite?'}", Review.required("Polite?")),
        (
            "{timeout: 0, on_timeout: fail, required_role: editor}",
            Review(timeout=timedelta(), on_timeout="fail", required_role="editor"),
        ),
    ],
)
@pytest.mark.parametrize("key", ["review", "before_review"])
def test_gates_of_a_task(load: Load, key: str, written: str, review: Review) -> None:
    """S-REV-100."""
    (task,) = team_of(load, f"    {key}: {written}\n").tasks
    assert getattr(task, key) == review


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("requierd", "unknown word 'requierd'. Did you mean 'required'? Known: [required, skip]"),
        ("[a]", "must be `required`, `skip`, or a mapping with keys such as 'prompt'"),
        ("{promt: x}", "unknown key of a review. Did you mean 'prompt'?"),
        ("{timeout: -1}", "timeout must not be negative"),
        ("{on_timeout: exit}", "unknown word 'exit'. Known: [continue, exit_early, fail]"),
    ],
)
def test_gates_that_are_refused(load: Load, written: str, text: str) -> None:
    """S-REV-3, S-REV-100: with their place."""
    with pytest.raises(ValidationError) as refused:
        team_of(load, f"    review: {written}\n")
    assert text in str(refused.value)
    assert ":5:" in str(refused.value)


def test_policy_of_a_team(load: Load) -> None:
    """S-REV-101."""
    assert team_of(load, "").review_policy is ReviewPolicy.NEVER
    assert team_of(load, "review_policy: after_last_task\n").review_policy is ReviewPolicy.AFTER_LAST_TASK
    with pytest.raises(ValidationError, match="unknown review policy 'after_last'"):
        team_of(load, "review_policy: after_last\n")


async def test_handlers_of_a_team(load: Load, folder: Path) -> None:
    """S-REV-102: by a word or as module:attribute."""
    assert team_of(load, "").review_handler is None
    approving: Any = team_of(load, "review_handler: auto_approve\n").review_handler
    assert await approving.review(REQUEST) == ReviewDecision.Continue()
    console: Any = team_of(load, "review_handler: console\n").review_handler
    assert type(console).__name__ == "ConsoleReviewHandler"
    (folder / "crew.py").write_text(
        "from ensemble_ray import ReviewDecision\n\n"
        "def shout(request):\n    return ReviewDecision.edit(request.task_description.upper())\n",
        encoding="utf-8",
    )
    own: Any = team_of(load, "review_handler: crew:shout\n").review_handler
    assert own(REQUEST) == ReviewDecision.Edit("DRAFT")


def test_a_handler_that_is_no_known_word_is_told_with_the_words(load: Load) -> None:
    """S-REV-102."""
    with pytest.raises(
        ValidationError,
        match=r"must be `console`, `auto_approve`, or module:attribute, got: 'consol'\. Did you mean 'console'\?",
    ):
        team_of(load, "review_handler: consol\n")


def test_tools_that_ask(load: Load) -> None:
    """S-REV-105: a question of the model, and approvals of built-in tools."""
    written = "[{human_input: {timeout: 0, on_timeout: fail}}, {file_write: {base_dir: ., require_approval: true}}]"
    (task,) = team_of(load, f"    tools: {written}\n").tasks
    asking, writing = cast("tuple[Any, Any]", task.tools)
    assert (asking.name, writing.require_approval) == ("human_input", True)


def test_the_dashboard_of_a_team(load: Load, tmp_path: Path) -> None:
    """S-WEB-18: as module:attribute; another object is none."""
    module = "from ensemble_ray import WebDashboard\nboard = WebDashboard(port=0)\nother = 7329\n"
    (tmp_path / "shown_team.py").write_text(module, encoding="utf-8")
    assert team_of(load, "dashboard: shown_team:board\n").dashboard is not None
    with pytest.raises(ValidationError, match="a WebDashboard"):
        team_of(load, "dashboard: shown_team:other\n")
