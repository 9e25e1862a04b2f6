"""What memory reminds a task of, in its prompt."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from ensemble_ray import Task, TaskOutput, build_user_prompt
from ensemble_ray.values.memory import RecalledMemory

TASK = Task(description="Do it {now}", expected_output="Prose")
OUTPUT = TaskOutput(
    raw="Context",
    task_description="Read",
    agent_role="Reader",
    completed_at=datetime(2026, 5, 1, tzinfo=UTC),
    duration=timedelta(),
)
FULL = RecalledMemory(
    scopes=(("notes", ("first", "second {x}")), ("empty", ()), ("drafts", ("third",))),
    short_term=(("Writer", "Write", "text"), ("(deterministic)", "Count", "")),
    long_term=("long", "longer"),
    entities=(("Acme", "a firm"), ("Bolt", "a screw")),
)
WHOLE = """\
## Memory: notes
The memory scope "notes" has what follows. Use what helps you with your task.

---
first
---

---
second {x}
---

## Memory: drafts
The memory scope "drafts" has what follows. Use what helps you with your task.

---
third
---

## Short-Term Memory (Current Run)
Tasks of this run gave the results below. Use what helps you with your task.

---
### Writer: Write
text
---

---
### (deterministic): Count

---

## Long-Term Memory
Earlier runs left what follows. Use what helps you with your task.

- long
- longer

## Entity Knowledge
These facts are known.

- **Acme**: a firm
- **Bolt**: a screw

## Revision Instructions (Attempt 2)
A previous attempt at this task was not accepted. Take the feedback into account.

### Feedback
Shorter

## Task
Do it {now}

## Expected Output
Prose"""


def test_the_sections_stand_in_their_order() -> None:
    """S-MEM-50, S-MEM-21, S-MEM-31, S-MEM-42, S-MEM-73; S-TPL-50, S-TPL-51, S-TPL-53, S-TPL-54; texts as they are, S-TPL-37."""
    task = TASK.with_revision_feedback("Shorter", None, 1)
    assert build_user_prompt(task, (), FULL) == WHOLE


def test_short_term_memory_stands_in_place_of_the_context() -> None:
    """S-MEM-22, S-TPL-35, S-TPL-52: also where it is empty."""
    with_notes = build_user_prompt(TASK, (OUTPUT,), RecalledMemory(short_term=(("Writer", "Write", "text"),)))
    assert "## Context from Previous Tasks" not in with_notes
    assert with_notes.startswith("## Short-Term Memory (Current Run)\n")
    assert build_user_prompt(TASK, (OUTPUT,), RecalledMemory(short_term=())) == build_user_prompt(TASK)


def test_the_context_stands_behind_scopes_and_before_long_term_memory() -> None:
    """S-MEM-50, S-TPL-52: without short-term memory."""
    memory = RecalledMemory(scopes=(("notes", ("first",)),), long_term=("long",))
    prompt = build_user_prompt(TASK, (OUTPUT,), memory)
    places = [prompt.index(heading) for heading in ("## Memory: notes", "## Context", "## Long-Term", "## Task")]
    assert places == sorted(places)


def test_nothing_recalled_changes_nothing() -> None:
    """S-TPL-30, S-TPL-53, S-TPL-54: sections without content are left out."""
    assert build_user_prompt(TASK, (OUTPUT,), RecalledMemory(scopes=(("notes", ()),))) == build_user_prompt(
        TASK, (OUTPUT,)
    )
