"""Review gates in the tree of a trace."""

from __future__ import annotations

from ensemble_ray.record.trace import fold_trace
from ensemble_ray.record.view.tree import review_lines, tree_rows
from tests.ensemble_ray.record.facts_of_runs import begun, fact, node


def test_an_edit_is_shown_as_the_difference_that_it_made() -> None:
    """S-REV-91: what was taken away and what was brought, with who did it."""
    edit = {
        "timing": "after_execution",
        "prompt": "Polite?",
        "verdict": "edit",
        "by": "Ann",
        "comment": "shorter",
        "original": "Dear Sir,\nyou are wrong.\nYours",
        "text": "Dear Sir,\nwe disagree.\nYours",
    }
    assert list(review_lines({"reviews": [edit]})) == [
        ("review after: edited, asked: Polite?", ("Ann", "shorter")),
        (" Dear Sir,", ()),
        ("-you are wrong.", ()),
        ("+we disagree.", ()),
        (" Yours", ()),
    ]


def test_a_long_difference_is_cut() -> None:
    """S-REV-91: after 20 lines."""
    edit = {"verdict": "edit", "original": "", "text": "\n".join(map(str, range(30)))}
    lines = [title for title, _ in review_lines({"reviews": [edit]})]
    assert (len(lines), lines[-1]) == (22, "... 10 more lines")


def test_gates_stand_in_the_tree_of_a_run() -> None:
    """S-REV-85, S-REV-91: a gate that is open as well; one that timed out says so."""
    gate = {"review_id": "g", "task_description": "Read Ray", "on_timeout": "exit_early", "ends_run": True}
    facts = [
        *begun(node("read", "Read Ray")),
        fact("review", "read#0/0/before-review", 103, timing="before_execution", **gate),
        fact("review_decision", "read#0/0/before-review", 104, verdict="exit", timed_out=True, by="(timeout)"),
        fact("review", "read#0/0/after-review", 105, timing="after_execution", **gate),
    ]
    rows = [row for row in tree_rows(fold_trace(facts)) if row.kind == "review"]
    assert [(row.title, row.details) for row in rows] == [
        ("review before: ended the run", ("(timeout)", "timed out")),
        ("review after: waits", ()),
    ]
