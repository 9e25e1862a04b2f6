"""`ensemble-ray runs`, `resume`, `cancel`, `delete`, `prune`, `fork`: what is done with recorded runs."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from ensemble_ray import RunState
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.process.config import home_directory
from ensemble_ray.record.head import read_head
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.record.stores import OwnedRun
from tests.command_line import Call

TEAM = """
from pathlib import Path
from ensemble_ray import Agent, Ensemble, Task
from ensemble_ray.testing import ScriptedModel

def note(name):
    def write(context):
        with Path("done.txt").open("a") as file:
            file.write(name)
        if name == "b" and Path("broken").exists():
            raise OSError("no disk")
        return name
    return write

one = Task(name="one", description="First", expected_output="a", handler=note("a"))
two = Task(name="two", description="Second", expected_output="b", handler=note("b"))
three = Task(name="three", description="Third", expected_output="c", handler=note("c"))
team = Ensemble(tasks=[one, two, three])
"""


@pytest.fixture
def steps(folder: Path) -> str:
    """A team of three tasks that note what they do; gives its target."""
    (folder / "steps_of_test.py").write_text(TEAM, encoding="utf-8")
    return "steps_of_test:team"


def _store() -> SqliteStore:
    return SqliteStore(home_directory())


def _cut(run_id: str, *, after: str) -> None:
    """Make a run of a completed one that was interrupted after a task: its first facts under another id."""

    async def copy() -> None:
        facts = await _store().facts(run_id)
        last = next(n for n, f in enumerate(facts) if f.kind == "output" and f.name == f"{after}#0")
        owned = await _store().begin("torn", origin=str(facts[0].data.to_data()["origin"]))
        copies = [
            read_fact(run="torn", kind=f.kind, name=f.name, at=f.at, data=f.data.to_data()) for f in facts[1 : last + 1]
        ]
        header = {**facts[0].data.to_data(), "ensemble_id": "torn"}
        await owned.journal.append([read_fact(run="torn", kind="plan", name="run", at=facts[0].at, data=header)])
        await owned.journal.append(copies)
        await owned.close(RunState.INTERRUPTED)

    run_blocking(copy())


def _done(folder: Path) -> str:
    return (folder / "done.txt").read_text(encoding="utf-8")


async def _running(run_id: str) -> OwnedRun:
    owned = await _store().begin(run_id)
    await owned.journal.append((read_fact(run=run_id, kind="plan", name="run", at=1.0, data={"plan": {"nodes": []}}),))
    await owned.write_state(RunState.RUNNING)
    return owned


def test_runs_are_listed_with_state_age_and_tasks_done(call: Call, steps: str, folder: Path) -> None:
    """S-DUR-50: newest first; those that can be resumed are pointed out."""
    assert "There are no runs" in call("runs").said
    call("run", steps, "--run-id", "whole")
    _cut("whole", after="two")
    called = call("runs")
    lines = [line.split() for line in called.printed.splitlines()]
    assert [(line[0], line[1], line[4], line[6]) for line in lines] == [
        ("torn", "interrupted", "2/3", "team"),
        ("whole", "completed", "3/3", "team"),
    ]
    assert {line[3] for line in lines} <= {"s", "min"}
    assert called.said.strip().endswith("resume RUN")
    assert folder.exists()


LED = """
import json
from ensemble_ray import Agent, Ensemble, Task, ToolCall
from ensemble_ray.testing import ScriptedModel

asks = ToolCall("c", "delegate_task", json.dumps({"agent_role": "Writer", "task_description": "Write it"}))
writer = Agent(role="Writer", goal="Write", llm=ScriptedModel("A text"))
team = Ensemble(
    tasks=[Task(description="Write", expected_output="Prose", agent=writer)],
    workflow="hierarchical",
    manager_llm=ScriptedModel(asks, "All done"),
)
"""


CUT = """
from ensemble_ray import Agent, ChatResponse, Ensemble, Loop, MapEnsemble, Task
from ensemble_ray.testing import ScriptedModel

def writer():
    answers = ScriptedModel(otherwise=ChatResponse("half an ans", finish_reason="length"))
    return Agent(role="Writer", goal="Write", llm=answers)

draft = Task(name="draft", description="Draft", expected_output="Prose", agent=writer())
team = Ensemble(loops=[Loop(name="refine", body=[draft], max_iterations=2)])
typed = Task(description="Count", expected_output="A number", agent=writer(), output_type=int, max_output_retries=0)
failing = Ensemble(tasks=[Task(description="Write", expected_output="Prose", agent=writer()), typed])
thrown = Ensemble(loops=[Loop(name="refine", body=[draft], max_iterations=2, until=lambda done: False,
    on_max_iterations="throw")])
mapped = MapEnsemble(items=[*range(30)], map_task=lambda item, agent: Task(
    description=f"Item {item}", expected_output="Prose", agent=agent), map_agent=lambda item: writer())
"""


def test_cut_answers_and_caps_are_told_in_lists_and_at_the_end(call: Call, folder: Path) -> None:
    """S-MR-205, S-LOOP-191: in the last line, in `runs`, in `trace` and as data."""
    (folder / "cut_of_test.py").write_text(CUT, encoding="utf-8")
    told = "2 incomplete answers"
    said = call("run", "cut_of_test:team", "--run-id", "cut").said
    assert any(line.endswith(f"; {told}; loop:refine ended at its cap") for line in said.splitlines())
    assert call("runs").printed.rstrip().endswith(f"{told}, loop:refine ended at its cap")
    (data,) = json.loads(call("runs", "--json").printed)
    assert (data["incomplete_answers"], data["capped"]) == (2, ["loop:refine"])
    assert f"[{told}]" in call("trace", "cut").printed.splitlines()[0]
    assert told in call("attach", "cut").said


def test_cut_answers_and_caps_of_failed_runs_are_in_the_last_line(call: Call, folder: Path) -> None:
    """S-MR-205, S-LOOP-191: those of failed tasks too, as in `runs`."""
    (folder / "cut_of_test.py").write_text(CUT, encoding="utf-8")
    said = call("run", "cut_of_test:failing", "--run-id", "cut").said.splitlines()
    assert any(line.endswith("; 2 incomplete answers") for line in said)
    assert "  2 incomplete answers  OutputParsingError: " in call("runs").printed
    said = call("run", "cut_of_test:thrown", "--run-id", "thrown").said.splitlines()
    assert any(line.endswith("; 2 incomplete answers; loop:refine ended at its cap") for line in said)


def test_cut_answers_of_a_map_are_one_warning_and_a_count(call: Call, folder: Path) -> None:
    """S-MR-205, S-MR-206: warnings that differ in numbers alone are counted; levels have the number of answers."""
    (folder / "cut_of_test.py").write_text(CUT, encoding="utf-8")
    said = call("run", "cut_of_test:mapped", "--run-id", "cut").said.splitlines()
    warnings = [line for line in said if "was cut off" in line]
    assert len(warnings) == 2
    assert warnings[0].startswith("  warning: Task 'map-")
    assert warnings[1].startswith("  warning: 29 more like: Task 'map-")
    assert any(line.endswith("; 30 incomplete answers") for line in said)
    assert call("runs").printed.rstrip().endswith("30 incomplete answers")
    assert "[30 incomplete answers]" in call("trace", "cut").printed


def test_work_that_was_handed_on_is_no_task_of_a_run(call: Call, folder: Path) -> None:
    """S-HIER-7, S-DUR-50: a led run has one task; progress tells of the worker, the list counts it nowhere."""
    (folder / "led_of_test.py").write_text(LED, encoding="utf-8")
    called = call("run", "led_of_test:team", "--run-id", "led")
    assert called.printed == "All done\n"
    lines = [line.split(" s  ", 1)[-1] for line in called.said.splitlines()]
    assert "asks       Manager -> Writer: Write it" in lines
    assert any(line.startswith("answered   Manager <- Writer in ") and line.endswith(": A text") for line in lines)
    assert any(
        line.startswith("1 of 1 tasks in ") and line.endswith("1 delegation") for line in called.said.splitlines()
    )
    assert " 1/1 tasks " in call("runs").printed


def test_runs_are_filtered_and_given_as_data(call: Call, steps: str) -> None:
    """S-DUR-50: `--state` is repeatable, `--json` prints data."""
    call("run", steps, "--run-id", "whole")
    _cut("whole", after="one")
    data = json.loads(call("runs", "--json", "--state", "interrupted").printed)
    assert [(run["run_id"], run["tasks_done"], run["tasks"]) for run in data] == [("torn", 1, 3)]
    both = json.loads(call("runs", "--json", "--state", "interrupted", "--state", "completed").printed)
    assert len(both) == 2
    none = call("runs", "--state", "failed")
    assert "is failed" in none.said
    wrong = call("runs", "--state", "sleeping")
    assert (wrong.code, "Known: [pending, running," in wrong.said) == (2, True)


def test_older_runs_are_left_out_unless_all_are_asked_for(call: Call, folder: Path) -> None:
    """S-DUR-50: `--all`."""

    async def many() -> None:
        for number in range(22):
            await (await _store().begin(f"r{number:02}")).close(RunState.COMPLETED)

    run_blocking(many())
    called = call("runs")
    assert len(called.printed.splitlines()) == 20
    assert "and 2 older ones" in called.said
    assert len(call("runs", "--all").printed.splitlines()) == 22
    assert folder.exists()


def test_interrupted_run_goes_on_when_it_is_resumed(call: Call, steps: str, folder: Path) -> None:
    """S-DUR-51, S-DUR-34, S-DUR-35: with the team from its origin; what is recorded is not done again."""
    call("run", steps, "--run-id", "whole")
    _cut("whole", after="two")
    (folder / "done.txt").unlink()
    called = call("resume", "latest", "--trace", "trace.json")
    assert (called.code, called.printed) == (0, "c\n")
    assert _done(folder) == "c"
    assert called.said.splitlines()[-1].endswith(" trace torn")
    assert len(json.loads((folder / "trace.json").read_text(encoding="utf-8"))["task_traces"]) == 3
    again = call("resume", "torn", "--quiet")
    assert (again.code, again.printed, again.said) == (0, "c\n", "")
    assert _done(folder) == "c"


def test_changed_team_is_refused_unless_it_is_allowed(call: Call, steps: str, folder: Path) -> None:
    """S-DUR-51, S-DUR-36: each difference by its path, and what to do."""
    call("run", steps, "--run-id", "whole")
    _cut("whole", after="two")
    changed = TEAM.replace('"Third"', '"Last"')
    (folder / "steps_later.py").write_text(changed, encoding="utf-8")
    (folder / "steps_of_test.py").write_text("from steps_later import *", encoding="utf-8")
    import sys

    del sys.modules["steps_of_test"]
    refused = call("resume", "torn")
    assert refused.code == 2
    assert "plan.nodes.2.description: 'Third' -> 'Last'" in refused.said
    assert "--allow-changes" in refused.said
    assert call("resume", "torn", "--allow-changes").printed == "c\n"


def test_run_of_a_program_is_not_resumed_from_the_command_line(call: Call, steps: str) -> None:
    """S-DUR-51, S-DUR-35, S-DUR-154: only the program has its definition."""
    call("run", steps, "--run-id", "whole")

    async def copy() -> None:
        first, *rest = await _store().facts("whole")
        owned = await _store().begin("torn")
        data = {**first.data.to_data(), "origin": ""}
        told = [read_fact(run="torn", kind=f.kind, name=f.name, at=f.at, data=f.data.to_data()) for f in rest[:1]]
        await owned.journal.append([read_fact(run="torn", kind="plan", name="run", at=first.at, data=data), *told])
        await owned.close(RunState.INTERRUPTED)

    run_blocking(copy())
    called = call("resume", "torn")
    assert called.code == 2
    assert "ensemble_ray.resume('torn', ensemble)" in called.said
    assert "ensemble_ray.resume('RUN', ensemble), in the program that began it" in call("runs").said


def test_resume_is_named_when_a_run_was_ended_early(call: Call, steps: str) -> None:
    """S-DUR-51: `run` tells how it goes on; `trace` shows it as far as it went."""
    call("run", steps, "--run-id", "whole")
    _cut("whole", after="one")
    refused = call("run", steps, "--run-id", "torn")
    assert refused.code == 2
    assert "ensemble-ray resume torn" in refused.said
    assert call("trace", "torn").printed.startswith("Run torn: sequential, interrupted")


def test_running_run_ends_when_it_is_cancelled(call: Call, folder: Path) -> None:
    """S-DUR-52: wherever its owner is; here a thread that looks as an owner does."""
    owned = run_blocking(_running("far"))
    asked = threading.Event()

    async def own() -> None:
        while not await owned.is_cancel_asked():  # noqa: ASYNC110  the store is asked, as every owner does
            await asyncio.sleep(0.01)
        asked.set()
        await owned.close(RunState.CANCELLED)

    owner = threading.Thread(target=lambda: run_blocking(own()))
    owner.start()
    called = call("cancel", "far")
    owner.join()
    assert (called.code, called.printed) == (0, "Run far: cancelled\n")
    assert asked.is_set()
    assert folder.exists()


def test_interrupted_run_is_marked_when_it_is_cancelled(call: Call, steps: str, folder: Path) -> None:
    """S-DUR-52: and can be resumed all the same."""
    call("run", steps, "--run-id", "whole")
    _cut("whole", after="one")
    assert call("cancel", "torn").printed == "Run torn: cancelled\n"
    assert json.loads(call("runs", "--json").printed)[0]["state"] == "cancelled"
    ended = call("cancel", "torn")
    assert (ended.code, "has ended: it is cancelled" in ended.said) == (2, True)
    (folder / "done.txt").unlink()
    assert call("resume", "torn").printed == "c\n"
    assert _done(folder) == "bc"


def test_id_stays_free_when_a_run_is_cancelled_that_never_began(call: Call, steps: str) -> None:
    """S-DUR-52, S-SET-39: with nothing recorded there is nothing to resume, and nothing in the way of a run."""

    async def died_early() -> None:
        await (await _store().begin("early")).close(RunState.INTERRUPTED)

    run_blocking(died_early())
    assert call("cancel", "early").printed == "Run early: cancelled\n"
    assert "Run it again" in call("resume", "early").said
    assert call("run", steps, "--run-id", "early").printed == "c\n"


def test_records_are_removed_when_they_are_named(call: Call, steps: str) -> None:
    """S-DUR-53: several at once; never that of a running run, and then none."""
    call("run", steps, "--run-id", "one")
    call("run", steps, "--run-id", "two")
    owned = run_blocking(_running("busy"))
    refused = call("delete", "one", "busy")
    assert refused.code == 2
    assert "'busy' is running" in refused.said
    assert "ensemble-ray cancel busy" in refused.said
    assert call("delete", "one", "two").printed == "Removed one\nRemoved two\n"
    run_blocking(owned.close(RunState.COMPLETED))
    assert [run["run_id"] for run in json.loads(call("runs", "--json").printed)] == ["busy"]


def test_old_records_are_removed_when_asked_for(call: Call, steps: str) -> None:
    """S-DUR-53: an age is needed; `--dry-run` says what would go."""
    call("run", steps, "--run-id", "one")
    assert call("prune").code == 2
    assert "is no age" in call("prune", "--older-than", "soon").said
    assert "Nothing is that old" in call("prune", "--older-than", "30d").said
    assert call("prune", "--older-than", "0d", "--state", "failed").printed == ""
    assert call("prune", "--older-than", "0d", "--keep", "1").printed == ""
    assert call("prune", "--older-than", "0d", "--dry-run").printed.startswith("Would remove one  completed")
    assert call("prune", "--older-than", "0d").printed.startswith("Removed one  completed")
    assert json.loads(call("runs", "--json").printed) == []


@pytest.mark.parametrize("command", ["run", "resume", "fork"])
def test_a_failed_run_is_data_when_json_is_asked_for(call: Call, steps: str, folder: Path, command: str) -> None:
    """S-DUR-155: id, state, error and place; the error is also said, and the exit code is that of a failed run."""
    call("run", steps, "--run-id", "whole")
    _cut("whole", after="one")
    (folder / "broken").touch()
    words = {
        "run": ("run", steps, "--run-id", "new"),
        "resume": ("resume", "torn"),
        "fork": ("fork", "whole", "--from", "two", "--run-id", "new"),
    }
    failed = call(*words[command], "--json")
    data = json.loads(failed.printed)
    assert (failed.code, "Error: task 'two'" in failed.said) == (1, True)
    assert data["run_id"] == ("torn" if command == "resume" else "new")
    assert data["state"] == "failed"
    assert data["error"]["type"] == "TaskExecutionError"
    assert "Task 'two' failed" in data["error"]["message"]
    assert Path(data["record"]).name == data["run_id"]
    shown = json.loads(call("attach", data["run_id"], "--json").printed)
    assert (shown["state"], shown["error"]["type"]) == ("failed", "AgentExecutionError")


def test_a_refused_run_is_data_when_json_is_asked_for(call: Call, steps: str) -> None:
    """S-DUR-155: it never began, so it has no id."""
    call("run", steps, "--run-id", "whole")
    _cut("whole", after="one")
    refused = call("run", steps, "--run-id", "torn", "--json")
    data = json.loads(refused.printed)
    assert (refused.code, data["run_id"], data["state"], data["record"]) == (2, None, "failed", None)
    assert "was interrupted and is not begun again" in data["error"]["message"]


def test_fork_says_what_is_done_again_and_does_it(call: Call, steps: str, folder: Path) -> None:
    """S-DUR-54: after a failure, with what was done before it; the other run stays as it is."""
    (folder / "broken").touch()
    failed = call("run", steps, "--run-id", "first")
    assert failed.code == 1
    assert failed.said.count(" fork first --from two\n") == 1
    assert " resume first" not in failed.said
    assert call("resume", "first").said.count("ensemble-ray fork first --from two") == 1
    (folder / "broken").unlink()
    (folder / "done.txt").unlink()
    dry = call("fork", "first", "--from", "two", "--dry-run")
    assert dry.code == 0
    assert dry.printed.splitlines() == [
        "Fork of run first from task 'two'",
        "Used as recorded:",
        "  one  First",
        "Done again:",
        "  two    Second",
        "  three  Third",
    ]
    assert not (folder / "done.txt").exists()
    called = call("fork", "first", "--from", "two", "--run-id", "second")
    assert (called.code, called.printed) == (0, "c\n")
    assert _done(folder) == "bc"
    assert "Done again:" in called.said
    assert call("trace", "first").printed.startswith("Run first: sequential, failed")
    assert call("trace", "second").printed.startswith("Run second: sequential, completed, fork of first from two")
    parent = {"run": "first", "task": "two"}
    assert json.loads(call("trace", "second", "--json").printed)["metadata"]["forked_from"] == parent
    assert {run["run_id"]: run.get("forked_from") for run in json.loads(call("runs", "--json").printed)} == {
        "first": None,
        "second": parent,
    }


def test_fork_takes_other_inputs(call: Call, team: str) -> None:
    """S-DUR-92: `-i` in what is done again; inputs that change what would be used are refused, and the task is named."""
    assert call("run", f"{team}:team", "-i", "topic=tides", "-i", "audience=sailors", "--run-id", "first").code == 0
    dry = call("fork", "first", "--from", "article", "-i", "audience=children", "--dry-run")
    assert dry.code == 0
    assert "Write for children" in dry.printed
    refused = call("fork", "first", "--from", "article", "-i", "topic=moons")
    assert refused.code == 2
    assert "'facts'. Fork from 'facts' or an earlier task" in refused.said


def test_fork_of_an_unknown_task_names_the_nearest(call: Call, steps: str) -> None:
    """S-DUR-54."""
    call("run", steps, "--run-id", "first")
    called = call("fork", "first", "--from", "tow")
    assert called.code == 2
    assert "Nearest: [two" in called.said


@pytest.mark.heavy
def test_a_fork_has_a_budget_of_its_own(call: Call, steps: str, folder: Path) -> None:
    """S-DUR-54: as a run that is resumed."""
    assert call("run", steps, "--run-id", "first").code == 0
    forked = call("fork", "first", "--from", "three", "--run-id", "forked", "--max-tokens", "500")
    assert forked.code == 0
    budget = run_blocking(read_head(_store(), "forked")).header.budget
    assert budget is not None
    assert budget.max_tokens == 500


@pytest.mark.heavy
def test_runs_are_found_by_their_tags(call: Call, steps: str, folder: Path) -> None:
    """S-DUR-143: given to run, resume and fork; `runs --tag` takes a name, or name and value, and all of several; trace shows them."""
    assert call("run", steps, "--run-id", "first", "--tag", "for=docs", "--tag", "urgent").code == 0
    assert call("run", steps, "--run-id", "second", "--tag", "for=tests").code == 0
    assert call("fork", "first", "--from", "three", "--run-id", "forked", "--tag", "try=2").code == 0
    listed = {run["run_id"]: run["tags"] for run in json.loads(call("runs", "--json").printed)}
    assert listed == {"first": {"for": "docs", "urgent": ""}, "second": {"for": "tests"}, "forked": {"try": "2"}}
    assert "[for=docs urgent]" in call("runs").printed

    def found(*tags: str) -> set[str]:
        words = [word for tag in tags for word in ("--tag", tag)]
        return {run["run_id"] for run in json.loads(call("runs", "--json", *words).printed)}

    assert found("for") == {"first", "second"}
    assert found("for=docs") == found("for", "urgent") == {"first"}
    assert found("for=docs", "try") == set()
    assert "has the tag for=docs and try" in call("runs", "--tag", "for=docs", "--tag", "try").said
    assert "tags  [for=docs]  [urgent]" in call("trace", "first").printed
    assert json.loads(call("trace", "first", "--json").printed)["metadata"]["tags"] == {"for": "docs", "urgent": ""}
    for wrong in ("=x", ""):
        refused = call("run", steps, "--tag", wrong)
        assert (refused.code, "has no name" in refused.said) == (2, True)
    twice = call("run", steps, "--tag", "a=1", "--tag", "a=2")
    assert (twice.code, "'a' occurs twice" in twice.said) == (2, True)
    assert folder.exists()


@pytest.mark.heavy
def test_only_so_many_runs_are_read_for_a_tag(call: Call, folder: Path) -> None:
    """S-DUR-143: the newest that have it; what was not looked at is said."""
    header = {"plan": {"nodes": []}, "options": {"tags": {"a": "1"}}}

    async def many() -> None:
        for number in range(45):
            owned = await _store().begin(f"r{number:02}")
            data = header if number % 2 else {"plan": {"nodes": []}}
            await owned.journal.append([read_fact(run=f"r{number:02}", kind="plan", name="run", at=1.0, data=data)])
            await owned.close(RunState.COMPLETED)

    run_blocking(many())
    called = call("runs", "--tag", "a")
    assert [line.split()[0] for line in called.printed.splitlines()] == [f"r{number:02}" for number in range(43, 4, -2)]
    assert "older ones were not looked at" in called.said
    assert len(call("runs", "--tag", "a", "--all").printed.splitlines()) == 22
    assert folder.exists()
