"""`ensemble-ray actors`: the tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ensemble_ray.cli.app import invoke
from ensemble_ray.cli.commands.studio import actor_lines
from ensemble_ray.studio.schemas import (
    Actors,
    BreakerSchema,
    LimiterSchema,
    NodeActors,
    ProcessInfo,
    ProcessRun,
    ProcessTask,
)


def test_processes_limits_and_endpoints_are_tables() -> None:
    """S-STU-38: what somebody else wrote is one line without control characters; what is left out is counted."""
    worker = ProcessInfo(
        pid=7,
        name="agent-1",
        kind="agent",
        state="silent",
        runs=[ProcessRun(run_id="r", agents=["Ann\x1b[2J", "Bob", "Cid", "Dee"], more_agents=2)],
        queue=1,
        in_flight=[ProcessTask(run_id="r", step="a#0", since=1), ProcessTask(run_id="r", step="b#0")],
        restarts=2,
        memory_mb=12.4,
    )
    found = Actors(
        nodes=[NodeActors(node="alpha", address="10.0.0.1", processes=[worker])],
        limiters=[LimiterSchema(name="shared", requests=5, period_s=60.0, queue=3, permits=0)],
        breakers=[BreakerSchema(name="http://h m", state="half_open", processes=1, queue=2, sent=1)],
    )
    assert [re.split(r"  +", line.strip()) for line in actor_lines(found)] == [
        ["alpha 10.0.0.1"],
        ["kind", "process", "pid", "agents", "doing", "waiting", "restarts", "memory"],
        ["agent (silent)", "agent-1", "7", r"Ann\x1b[2J, Bob, Cid, +3", "a#0, b#0 (waits)", "1", "2", "12 MB"],
        [""],
        ["limit", "allows", "waiting", "permits"],
        ["shared", "5 in 60 s", "3", "0"],
        [""],
        ["endpoint", "breaker", "waiting", "on their way"],
        ["http://h m", "half open", "2", "1"],
    ]
    assert actor_lines(Actors()) == []


def test_nothing_is_listed_where_no_run_goes_on(home: str, capsys: pytest.CaptureFixture[str]) -> None:
    """S-STU-38: and standard error says so; with `--json` standard output has the data alone."""
    assert Path(home).is_dir()
    assert invoke(["actors"]) == 0
    printed = capsys.readouterr()
    assert (printed.out, "No run is active" in printed.err) == ("", True)
    assert invoke(["actors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"] == []
    assert invoke(["actors", "nowhere"]) == 2
