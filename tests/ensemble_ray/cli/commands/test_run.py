"""`ensemble-ray run`: output, progress, inputs, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ensemble_ray import File, Image, ValidationError
from ensemble_ray.cli.inputs.arguments import read_inputs
from tests.command_line import Call

INPUTS = ("-i", "topic=tides", "--input", "audience=children")


def test_output_and_progress_are_kept_apart_when_a_team_runs(call: Call, team: str) -> None:
    """The output alone on standard output; progress, counts and the record's place on standard error."""
    called = call("run", f"{team}:team", *INPUTS, "--run-id", "first")
    assert called.code == 0
    assert called.printed == "An article\n"
    told = called.said.splitlines()
    assert any("team_of_test:team on inline: 2 tasks, parallel" in line for line in told)
    assert [line.split()[2] for line in told if " s  " in line and "/2  " not in line][1:] == ["started", "started"]
    assert any("done     2/2  article (Writer)" in line for line in told)
    assert any(
        line.startswith("2 of 2 tasks in ") and "3 model calls" in line and "1 tool call" in line for line in told
    )
    assert told[-2].startswith("Record: ")
    assert Path(told[-2].removeprefix("Record: ")).is_dir()
    assert told[-1].endswith(" trace first")


def test_tasks_of_a_finished_run_count_as_recorded_when_it_is_run_again(call: Call, team: str) -> None:
    """S-SET-39: the recorded output; of no task is it said that it is not done."""
    command = ("run", f"{team}:team", *INPUTS, "--run-id", "first")
    assert call(*command).code == 0
    again = call(*command)
    assert (again.code, again.printed) == (0, "An article\n")
    assert "2 tasks from the record" in again.said
    assert "\n2 of 2 tasks in " in again.said
    assert "0 model calls" in again.said


def test_nothing_but_the_output_is_shown_when_quiet(call: Call, team: str) -> None:
    """For scripts."""
    called = call("run", f"{team}:team", *INPUTS, "--quiet")
    assert (called.code, called.printed, called.said) == (0, "An article\n", "")


def test_the_whole_output_is_data_when_json_is_asked_for(call: Call, team: str) -> None:
    """`--json`: one JSON value on standard output, also for a program."""
    data = json.loads(call("run", f"{team}:team", *INPUTS, "--json").printed)
    assert data["raw"] == "An article"
    assert data["exit_reason"] == "completed"
    assert [each["agent_role"] for each in data["task_outputs"]][1] == "Writer"
    assert data["metrics"]["total_llm_call_count"] == 3
    assert Path(data["record"]).name == data["run_id"]


def test_nothing_runs_when_the_trace_cannot_be_written(call: Call, team: str, folder: Path) -> None:
    """S-TRC-54: exit code 1 and why, before any model is asked."""
    (folder / "file").write_text("", encoding="utf-8")
    for place, why in ((".", "Is a directory"), ("file/trace.json", "exists")):
        called = call("run", f"{team}:team", *INPUTS, "--trace", place, "--run-id", "none")
        assert (called.code, called.printed) == (1, "")
        assert f"Error: --trace: '{place}' cannot be written: " in called.said
        assert why in called.said
        assert "Nothing was run" in called.said
        assert "none" not in call("runs").printed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a Linux device that takes nothing")
def test_the_output_is_printed_when_the_trace_cannot_be_written_in_the_end(call: Call, team: str) -> None:
    """S-TRC-54: what was paid for is given, and the exit code is 1."""
    called = call("run", f"{team}:team", *INPUTS, "--trace", "/dev/full")
    assert (called.code, called.printed) == (1, "An article\n")
    assert "Error: --trace: '/dev/full' cannot be written: No space left on device" in called.said


def test_a_trace_is_written_into_folders_that_are_made(call: Call, team: str, folder: Path) -> None:
    """S-TRC-54, S-TRC-50: looking whether it can be written leaves no trace."""
    assert call("run", f"{team}:team", *INPUTS, "--trace", "a/b/trace.json").code == 0
    assert json.loads((folder / "a" / "b" / "trace.json").read_text(encoding="utf-8"))["task_traces"]


@pytest.mark.parametrize("command", ["run", "plan"])
def test_inputs_without_effect_are_told(call: Call, team: str, command: str) -> None:
    """S-TPL-41, S-TPL-4: one line each; the run goes on, and its output is the same."""
    called = call(command, f"{team}:team", *INPUTS, "-i", "topic=moons", "-i", "audeince=sailors", "-i", "x=1")
    assert called.code == 0
    told = called.said.splitlines()
    assert "Input 'topic' occurs 2 times: the last value counts, 'moons'" in told
    assert "Input 'audeince' was given and no task uses it. Did you mean 'audience'?" in told
    assert "Input 'x' was given and no task uses it." in told
    assert all("Input" not in line for line in call(command, f"{team}:team", *INPUTS).said.splitlines())


def test_all_missing_inputs_are_named_at_once(call: Call, team: str) -> None:
    """Over all tasks, each with its users; nothing has run."""
    called = call("run", f"{team}:team", "-i", "topci=tides")
    assert called.code == 2
    assert "2 inputs are missing:" in called.said
    assert "topic (used by facts)" in called.said
    assert "audience (used by article)" in called.said
    assert "'topci' was given and no task uses it. Did you mean 'topic'?" in called.said
    assert "--input topic=... --input audience=..." in called.said
    assert "started" not in called.said


def test_inputs_come_from_a_file_when_one_is_given(call: Call, team: str, folder: Path) -> None:
    """A JSON object; pairs on the command line win."""
    (folder / "in.json").write_text('{"topic": "tides", "audience": "all"}', encoding="utf-8")
    called = call("run", f"{team}:team", "--inputs-file", "in.json", "--json", "-i", "audience=children")
    data = json.loads(called.printed)
    assert [each["task_description"] for each in data["task_outputs"]] == [
        "Find facts about tides",
        "Write for children",
    ]


@pytest.mark.parametrize(
    ("pairs", "content", "expected"),
    [
        (["topic"], None, "--input 'topic' is not of the form name=value"),
        (["=x"], None, "is not of the form name=value"),
        ([], '{"a": 1,}', "in.json:1:9: not valid JSON"),
        ([], "[1]", "must hold a JSON object"),
        ([], "[" * 200_000, "nested too deeply"),
        ([], "9" * 5000, "cannot read 'in.json'"),
        ([], None, "there is no file 'in.json'"),
    ],
)
def test_inputs_are_explained_when_they_are_wrong(
    folder: Path, pairs: list[str], content: str | None, expected: str
) -> None:
    """Forms of pairs and files."""
    if content is not None:
        (folder / "in.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValidationError, match=expected.replace("(", r"\(")):
        read_inputs(pairs, None if pairs else Path("in.json"))


def test_a_value_may_hold_equals_signs() -> None:
    """Only the first one parts name and value."""
    assert read_inputs(["formula=a=b"], None) == {"formula": "a=b"}


def test_input_attaches_a_file(folder: Path) -> None:
    """S-ATT-14: the suffix decides the kind; `@@` begins a text with `@`."""
    (folder / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert read_inputs(["photo=@a.png", "page=@https://example.com/a.pdf", "handle=@@ada", "mail=a@b"], None) == {
        "photo": Image("a.png"),
        "page": File("https://example.com/a.pdf"),
        "handle": "@ada",
        "mail": "a@b",
    }
    with pytest.raises(ValidationError) as refused:
        read_inputs(["handle=@ada"], None)
    assert str(refused.value) == (
        "--input handle: there is no file 'ada'. A text that begins with @ is written with @@: handle=@@ada"
    )


def test_what_happened_where_is_told_when_a_task_fails(call: Call, team: str, folder: Path) -> None:
    """Exit code 1; the task, the reason once, what was completed, the record; no traceback, but a trace if asked for."""
    called = call("run", f"{team}:broken", "--trace", "out/trace.json")
    assert called.code == 1
    assert called.printed == ""
    assert "Traceback" not in called.said
    assert "task 'second' (agent '(deterministic)') failed:" in called.said
    error = called.said[called.said.index("Error:") :]
    assert error.count("no disk") == 1
    assert "1 task was completed before" in error
    assert " trace " in called.said
    assert json.loads((folder / "out" / "trace.json").read_text(encoding="utf-8"))["errors"]


def test_a_finished_run_is_answered_from_its_record_when_it_is_named_again(call: Call, team: str) -> None:
    """The same id and inputs: the recorded output, and no model call (S-SET-39)."""
    first = call("run", f"{team}:team", *INPUTS, "--run-id", "named", "-q")
    again = call("run", f"{team}:team", *INPUTS, "--run-id", "named", "-q")
    assert (first.printed, again.printed) == ("An article\n", "An article\n")
    other = call("run", f"{team}:team", "-i", "topic=x", "-i", "audience=y", "--run-id", "named")
    assert other.code == 2
    assert "is finished, and was of another definition or other inputs" in other.said


def test_the_teams_workflow_is_replaced_when_one_is_given(call: Call, team: str) -> None:
    """`--workflow` in place of the team's own."""
    called = call("run", f"{team}:team", *INPUTS, "--workflow", "sequential")
    assert "2 tasks, sequential" in called.said
    assert called.code == 0


#: A map-reduce with a plan, whose agents are made by a factory.
KEYLESS_MAP = """
from ensemble_ray import Agent, MapReduceEnsemble, OpenAIChatModel, Task

def map_agent(item):
    return Agent(role="Reader", goal="g", llm=OpenAIChatModel("gpt-none"))

def map_task(item, agent):
    return Task(description=f"Read {item}", expected_output="x", agent=agent)

def reduce_task(group):
    return Task(description="Join", expected_output="x", handler=lambda _: "y", context=group)

team = MapReduceEnsemble(items=[1], map_agent=map_agent, map_task=map_task, reduce_task=reduce_task)
"""


def test_a_model_without_its_key_is_refused_before_the_run(
    call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-SRV-217: nothing is recorded; with the key it is not asked for."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    (folder / "team.yaml").write_text(
        "llm: 'openai:gpt-none'\ntasks: {write: {description: Write}}\n", encoding="utf-8"
    )
    called = call("run", "team.yaml")
    assert (called.code, "llm: OpenAIChatModel('gpt-none'): no API key" in called.said) == (2, True)
    assert "Team 'team.yaml': llm: OpenAIChatModel('gpt-none'): no API key" in call("mcp", "team.yaml").said
    (folder / "mapped.py").write_text(KEYLESS_MAP, encoding="utf-8")
    called = call("run", "mapped:team")
    assert (called.code, "Agent 'Reader': OpenAIChatModel('gpt-none'): no API key" in called.said) == (2, True)
    assert call("runs", "--json").printed.strip() == "[]"
