"""`ensemble-ray reviews` and `review`: gates that wait, over all runs, and decisions at them."""

from __future__ import annotations

import getpass
import io
import json
import re
import sys
from pathlib import Path

import pytest

from ensemble_ray import OpenReview, RunState, pending_reviews
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.process.config import home_directory
from ensemble_ray.record.sqlite.store import SqliteStore
from tests.command_line import Call

TEAM = """
from ensemble_ray import Ensemble, Review, Task

def write(context):
    with open("done.txt", "a") as file:
        file.write(context.description + "\\n")
    return context.context_outputs[0].raw if context.context_outputs else "We are\\nsorry."

draft = Task(name="draft", description="Apologise", expected_output="A letter", handler=write,
             review=Review(prompt="Is it polite?", timeout=7200, required_role="legal"))
send = Task(name="send", description="Send it", expected_output="A receipt", handler=write, context=[draft],
            before_review=Review(timeout=0))
team = Ensemble(tasks=[draft, send], review_wait="detach")
"""


@pytest.fixture
def waiting(folder: Path, call: Call) -> OpenReview:
    """A run `apology` that waits at its first gate."""
    (folder / "asking_team.py").write_text(TEAM, encoding="utf-8")
    call("run", "asking_team:team", "--run-id", "apology")
    (review,) = pending_reviews()
    return review


def _lines(text: str) -> list[str]:
    return text.rstrip("\n").splitlines()


def test_nothing_is_listed_where_nothing_waits(call: Call, folder: Path) -> None:
    """S-REV-131: and it is said where that was looked for."""
    del folder
    called = call("reviews")
    assert (called.code, called.printed) == (0, "")
    assert called.said.startswith("No review waits in ")
    assert json.loads(call("reviews", "--json").printed) == []


def test_gates_are_listed_with_the_time_that_is_left(call: Call, waiting: OpenReview) -> None:
    """S-REV-131: for people, and as data with the fields of `pending_reviews`."""
    called = call("reviews")
    (line,) = _lines(called.printed)
    expected = rf"apology  {waiting.gate_id[:8]}  after  \d+ s ago  1 h left  Apologise: Is it polite\?"
    assert re.fullmatch(expected, line)
    assert "review RUN GATE approve | edit FILE | exit" in called.said
    (data,) = json.loads(call("reviews", "--json").printed)
    assert data == waiting.model_dump(mode="json")
    assert (data["run_id"], data["required_role"], data["on_timeout"]) == ("apology", "legal", "exit_early")


def test_gate_is_shown_whole_to_whoever_is_to_decide(call: Call, waiting: OpenReview) -> None:
    """S-REV-132: without a verdict nothing is decided."""
    called = call("review", "apo", waiting.gate_id[:6])
    assert called.code == 0
    assert waiting.expires_at is not None
    assert _lines(called.printed) == [
        "Run:    apology",
        f"Gate:   {waiting.gate_id} (after the task)",
        "Task:   Apologise",
        "Prompt: Is it polite?",
        "Role:   legal",
        f"Until:  {waiting.expires_at:%Y-%m-%d %H:%M:%S} UTC, then exit_early",
        "",
        "We are",
        "sorry.",
    ]
    assert pending_reviews() == (waiting,)


def test_run_goes_on_by_resume_when_somebody_decided(call: Call, waiting: OpenReview, folder: Path) -> None:
    """S-REV-132, S-REV-133: the command is said, and by `reviews` again; `trace` shows who decided, why, and what changed."""
    (folder / "better.txt").write_text("We are\nvery sorry.\n", encoding="utf-8")
    called = call(
        "review",
        "apology",
        waiting.gate_id,
        "edit",
        "better.txt",
        "--role",
        "legal",
        "--comment",
        "warmer",
        "--by",
        "Ann",
    )
    assert (called.code, called.printed) == (0, f"Decided gate {waiting.gate_id} of run apology: edit\n")
    assert _lines(called.said) == ["Go on with: ensemble-ray resume apology"] or called.said.endswith(
        "resume apology\n"
    )
    listed = call("reviews")
    assert listed.printed == ""
    assert "Run apology has its decisions. Resume it:" in listed.said
    shown = call("review", "apology", waiting.gate_id)
    assert "Decided: edit, by Ann" in _lines(shown.printed)
    call("resume", "apology")
    (gate,) = pending_reviews()
    assert (gate.task_description, gate.timing, gate.expires_at) == ("Send it", "before_execution", None)
    assert re.search(r"before  \d+ s ago  no limit  Send it$", call("reviews").printed.rstrip())
    called = call("review", "apology", gate.gate_id, "approve", "--resume", "--by", "Bob")
    assert called.code == 0
    assert _lines(called.printed)[1:] == ["We are", "very sorry."]
    assert _lines((folder / "done.txt").read_text(encoding="utf-8")) == ["Apologise", "Send it"]
    trace = call("trace", "apology").printed
    assert "review after: edited, asked: Is it polite?  [Ann]  [warmer]" in trace
    assert "-sorry." in trace
    assert "+very sorry." in trace
    assert "review before: approved  [Bob]" in trace


def test_role_that_a_gate_requires_is_stated(call: Call, waiting: OpenReview) -> None:
    """S-QUO-54: without it nothing is decided, and the command says which; it is recorded with the author."""
    for stated in ([], ["--role", "lead"]):
        refused = call("review", "apology", waiting.gate_id, "approve", *stated)
        assert refused.code == 2
        assert "requires the role 'legal'" in refused.said
        assert "add --role legal" in refused.said
    assert pending_reviews() == (waiting,)
    assert call("review", "apology", waiting.gate_id, "approve", "--role", "lead", "--role", "legal").code == 0
    facts = run_blocking(SqliteStore(home_directory()).gates_of("apology"))
    assert [fact.data.to_data().get("role") for fact in facts if fact.kind == "review_decision"] == ["legal"]


def test_text_of_an_edit_comes_from_standard_input(
    call: Call, waiting: OpenReview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-REV-132: as it is, but for its last line break; the user decides where nobody is named."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Sorry, über alles.\n\n".encode())))
    assert call("review", "apology", waiting.gate_id, "edit", "-", "--role", "legal").code == 0
    (fact,) = [
        fact for fact in run_blocking(SqliteStore(home_directory()).facts("apology")) if fact.kind == "review_decision"
    ]
    data = fact.data.to_data()
    assert (data["verdict"], data["text"], data["by"]) == ("edit", "Sorry, über alles.\n", getpass.getuser())


def test_exit_ends_the_run(call: Call, waiting: OpenReview, folder: Path) -> None:
    """S-REV-132: with what is done."""
    called = call("review", "latest", waiting.gate_id, "exit", "--resume", "--role", "legal")
    assert called.code == 0
    assert (folder / "done.txt").read_text(encoding="utf-8") == "Apologise\n"
    assert pending_reviews() == ()


def test_second_decision_is_refused_with_the_first(call: Call, waiting: OpenReview) -> None:
    """S-REV-128, S-REV-132: exit code 1, and the first one counts."""
    call("review", "apology", waiting.gate_id, "approve", "--role", "legal", "--by", "Ann", "--comment", "fine")
    called = call("review", "apology", waiting.gate_id, "exit")
    assert (called.code, called.printed) == (1, "")
    expected = (
        rf"Error: Gate '{waiting.gate_id}' of run 'apology' has been decided: approve, by Ann at .* UTC \(\"fine\"\)\."
    )
    assert re.match(expected, called.said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("apology", "zzz", "approve"), "Error: Run 'apology' has no gate 'zzz'. Open gates: ["),
        (("other", "zzz", "approve"), "Error: Unknown run 'other' in "),
        (("apology", "GATE", "edit"), "Error: edit needs the file with the new text, or - for standard input"),
        (("apology", "GATE", "edit", "none.txt"), "Error: cannot read 'none.txt': No such file or directory"),
        (("apology", "GATE", "edit", "latin.txt"), "Error: 'latin.txt' is not UTF-8 text"),
        (("apology", "GATE", "approve", "x.txt"), "Error: approve takes no file, got: 'x.txt'"),
        (("apology", "GATE", "maybe"), "Error: Invalid value for 'verdict': "),
    ],
)
def test_what_is_wrong_is_told(
    call: Call, waiting: OpenReview, folder: Path, arguments: tuple[str, ...], said: str
) -> None:
    """S-REV-132: exit code 2, and nothing is decided."""
    (folder / "latin.txt").write_bytes("größer".encode("latin-1"))
    given = [waiting.gate_id if each == "GATE" else each for each in arguments]
    called = call("review", *given)
    assert (called.code, called.printed) == (2, "")
    assert called.said.startswith(said)
    assert pending_reviews() == (waiting,)


def test_foreign_text_is_shown_safely(call: Call, folder: Path) -> None:
    """S-SEC-60: what a model wrote moves no cursor."""
    text = TEAM.replace("Is it polite?", "\\x1b[2J polite?").replace("sorry.", "\\x1b]0;x")
    (folder / "evil_team.py").write_text(text, encoding="utf-8")
    call("run", "evil_team:team", "--run-id", "evil")
    (review,) = pending_reviews()
    for printed in (call("reviews").printed, call("review", "evil", review.gate_id).printed):
        assert "\x1b" not in printed
        assert "\\x1b" in printed


def test_run_at_work_is_named_with_its_process(call: Call, waiting: OpenReview) -> None:
    """S-REV-129, S-REV-132: its gate is decided, and it goes on when its call has ended."""
    owned = run_blocking(SqliteStore(home_directory()).claim("apology"))
    run_blocking(owned.write_state(RunState.RUNNING))
    called = call("review", "apology", waiting.gate_id, "approve", "--role", "legal")
    assert called.code == 0
    assert re.match(r"The run is at work in process \d+ on .*\. When its call has ended, resume it: ", called.said)
    run_blocking(owned.close(RunState.INTERRUPTED))
