"""Map-reduces whose process is killed, and that go on in another one."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ensemble_ray import (
    RunState,
    TokenUsage,
    resume,
)
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.testing import ModelServer, Reply
from tests.scenarios.dying_map import ITEMS, KEY, MODE, MODEL, RESULTS, RUN_ID
from tests.scenarios.dying_map import team as dying_team
from tests.scenarios.mapping import (
    trace_of,
)
from tests.scenarios.teams import recorded_state, until
from tests.template import ForkedProgram

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def last() -> int:
    """Number of the request from which on the one that is killed gets no answers."""
    return random.randint(2, 44)  # noqa: S311  no secret


@pytest.fixture
def server(
    model_server: Callable[..., ModelServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, last: int
) -> ModelServer:
    """The model of the map-reduce that dies; it falls silent on the way, so that nobody ends before being killed."""

    def reply(asked: Any) -> Reply:
        is_silent = asked.number >= last and asked.headers["authorization"] == "Bearer killed"
        return replace(_reply(asked), latency_s=3600.0 if is_silent else 0.005)

    server = model_server(reply)
    items = tmp_path / "items.jsonl"
    items.write_text("".join(f"{number}\n" for number in range(40)), encoding="utf-8")
    monkeypatch.setenv(MODEL, server.base_url)
    monkeypatch.setenv(ITEMS, str(items))
    monkeypatch.setenv(RESULTS, str(tmp_path / "results.jsonl"))
    return server


def _reply(asked: Any) -> Reply:
    said = str(asked.messages[-1]["content"]).partition("## Task\n")[2].partition("\n")[0]
    kind, _, rest = said.partition(" ")
    return Reply(text=rest if kind == "map" else f"({rest})", usage=TokenUsage(3, 10))


@pytest.mark.parametrize("mode", ["levels", "pipelined"])
def test_killed_run_goes_on_in_another_process(
    server: ModelServer, last: int, monkeypatch: pytest.MonkeyPatch, *, mode: str, tmp_path: Path, home: str
) -> None:
    """S-MR-161, S-MR-164, S-MR-130, S-DUR-34: killed at random moments; no answer on record is asked for again."""
    monkeypatch.setenv(MODE, mode)
    monkeypatch.setenv(KEY, "killed")
    _killed("from tests.scenarios.dying_map import main; main()", server, last + 1)
    assert recorded_state(home, RUN_ID) is RunState.INTERRUPTED
    recorded = _recorded(home)
    monkeypatch.setenv(KEY, "resumed")
    output = resume(RUN_ID, dying_team(), runtime="inline")
    assert sorted(output.raw.replace("(", "").replace(")", "").split("+"), key=int) == [f"{n}" for n in range(40)]
    tasks = len(output.task_outputs)
    # By who asked: what the killed one sent last may be read after its end.
    by = [asked.headers["authorization"] for asked in server.requests]
    assert by.count("Bearer resumed") == tasks - recorded
    assert by.count("Bearer killed") - recorded <= 4  # what was in flight when it was killed
    rows = [json.loads(line)["index"] for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert sorted(rows) == list(range(40))
    assert len(trace_of(output).agents) == 1


def _recorded(home: str) -> int:
    """How many answers are on record."""
    return sum(fact.kind == "model" for fact in RunDirectory(Path(home), RUN_ID).facts())


def _killed(script: str, server: ModelServer, asked: int) -> None:
    """Run a program until the model got so many requests, then kill it, which waits for an answer then."""
    with ForkedProgram[bytes]([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE) as process:
        try:
            until(lambda: len(server.requests) >= asked or process.poll() is not None, f"{asked} requests")
            assert process.poll() is None, process.communicate()[1].decode()
        finally:
            process.send_signal(signal.SIGKILL)
