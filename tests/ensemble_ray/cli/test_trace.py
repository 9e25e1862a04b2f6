"""`ensemble-ray trace`: recorded runs."""

from __future__ import annotations

import json

from tests.ensemble_ray.cli.conftest import Call

INPUTS = ("-i", "topic=tides", "-i", "audience=children")


def test_a_run_is_shown_as_a_tree_when_it_is_named_or_the_latest(call: Call, team: str) -> None:
    """Tasks, model calls, tool calls with times and tokens; the beginning of an id is enough."""
    call("run", f"{team}:team", *INPUTS, "--run-id", "run-one")
    call("run", f"{team}:broken", "--run-id", "other")
    called = call("trace", "run-o")
    assert called.code == 0
    assert called.printed.startswith("Run run-one: parallel, completed  [")
    assert 'shout({"text": "a"}) -> A' in called.printed
    assert "model call 2: answered" in called.printed
    latest = call("trace", "latest").printed
    assert latest.startswith("Run other: sequential, failed")
    assert "no disk" in latest


def test_a_run_is_data_when_json_is_asked_for(call: Call, team: str) -> None:
    """The trace in its own JSON form."""
    call("run", f"{team}:team", *INPUTS, "--run-id", "run-one")
    data = json.loads(call("trace", "run-one", "--json").printed)
    assert data["ensemble_id"] == "run-one"
    assert len(data["task_traces"]) == 2


def test_runs_are_listed_when_none_is_named(call: Call, team: str) -> None:
    """Newest first, with state and origin."""
    assert "There are no runs" in call("trace").said
    call("run", f"{team}:team", *INPUTS, "--run-id", "one")
    call("run", f"{team}:broken", "--run-id", "two")
    lines = [line.split() for line in call("trace").printed.splitlines()]
    assert [(line[0], line[3], line[4]) for line in lines] == [
        ("two", "failed", "team_of_test:broken"),
        ("one", "completed", "team_of_test:team"),
    ]
    data = json.loads(call("trace", "--json").printed)
    assert [run["run_id"] for run in data] == ["two", "one"]


def test_the_nearest_is_named_when_a_run_is_unknown(call: Call, team: str) -> None:
    """Exit code 2, also where there are no runs at all."""
    assert "There are no runs" in call("trace", "latest").said
    call("run", f"{team}:team", *INPUTS, "--run-id", "morning")
    called = call("trace", "mornign")
    assert called.code == 2
    assert "Nearest: [morning]" in called.said
