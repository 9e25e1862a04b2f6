"""`ensemble-ray trace`: recorded runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ensemble_ray import RunState
from ensemble_ray.facts.fact import Fact
from ensemble_ray.ports import Persistence
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from tests.command_line import Call
from tests.ensemble_ray.record.facts_of_dynamic_runs import begun as dynamic
from tests.ensemble_ray.record.facts_of_dynamic_runs import pulled
from tests.ensemble_ray.record.facts_of_runs import RUN, ended, fact, output

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


async def _record(facts: Sequence[Fact]) -> None:
    """A run that recorded these facts."""
    owned = await store_at(StoreAddress.of()).begin(RUN)
    await owned.journal.append(facts, until=Persistence.COMMITTED)
    await owned.close(RunState.COMPLETED)


def test_a_dynamic_run_is_shown_by_its_levels(call: Call, folder: Path) -> None:
    """S-MR-161: however many items it has; one task of it as a tree of its own, by its key."""
    assert folder
    given = output("Sum up", "short")
    facts = [dynamic(), pulled(9), *(fact("output", f"map-{n}#0", 105.0, output=given) for n in range(9)), ended(106)]
    run_blocking(_record(facts))
    lines = call("trace", RUN).printed.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("└─ level 0: map  [9 of 9 tasks done]")
    assert json.loads(call("trace", RUN, "--json").printed)["items"] == 9
    assert "9/9 tasks" in call("runs").printed
    one = call("trace", RUN, "--task", "map-7").printed
    assert "Reader: Sum up" in one
    assert "[1 task]" in one.splitlines()[0]
    unknown = call("trace", RUN, "--task", "map-70")
    assert (unknown.code, "nothing of a task 'map-70'" in unknown.said) == (2, True)


def test_one_task_is_shown_when_it_is_named(call: Call, team: str) -> None:
    """Of any run."""
    call("run", f"{team}:team", *INPUTS, "--run-id", "one")
    printed = call("trace", "one", "--task", "facts").printed
    assert "ebb and flow" in printed
    assert "shout(" not in printed
