"""`ensemble-ray map --delivery batch`: Ctrl-C and a kill while the provider works, the resume, and `cancel`."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ensemble_ray.testing import BatchScript, ModelServer
from tests.command_line import COMMAND, PATIENCE_S, environment_of, run_command
from tests.processes import own_directory, program


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for one test: items, rows, records."""
    with own_directory() as directory:
        rows = [json.dumps({"text": f"review-{number}."}) for number in range(12)]
        (directory / "reviews.jsonl").write_text("\n".join(rows), encoding="utf-8")
        yield directory


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_batches_go_on_without_the_command(place: Path, sign: signal.Signals) -> None:
    """S-BAT-6, S-BAT-42, S-BAT-51, S-BAT-52: the provider works on, and a resume reads its answers."""
    output = place / "rows.jsonl"
    with ModelServer("noted", batches=BatchScript(polls=None)) as server:
        environment = environment_of(place, server, ENSEMBLE_RAY_RUNTIME="inline")
        command = [*COMMAND, "map", "reviews.jsonl", "-p", "Sum {text}", "-o", "rows.jsonl", "--delivery", "batch"]
        with program([*command, "--run-id", "one"], log=place / "log", env=environment, cwd=place) as running:
            server.wait_batches(lambda batches: bool(batches) and batches[0].polls > 0, timeout_s=PATIENCE_S)
            running.until(lambda: "in_progress, 0 of 12 answered" in running.text, "the progress", timeout_s=PATIENCE_S)
            os.kill(running.process.pid, sign)
            code = running.process.wait(timeout=PATIENCE_S)
        if sign == signal.SIGINT:
            assert code == 130
            assert "Its batches stay at the provider" in running.text
        assert (len(server.batches), server.batch_calls["cancel"]) == (1, 0)
        shown = run_command(place / "records", environment, "trace", "one")
        assert "batch batch_0" in shown.stdout
        assert "[0 of 12 requests answered]" in shown.stdout
        server.finish_batches()
        ended = run_command(place / "records", environment, "resume", "one", "--quiet")
        assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
        assert (len(server.batches), len(server.requests)) == (1, 12)
    assert sorted(json.loads(row)["index"] for row in output.read_text().splitlines()) == list(range(12))


def test_batches_of_a_run_without_an_owner_are_named(place: Path) -> None:
    """S-BAT-54: `cancel` cannot reach the provider for a run whose process has ended."""
    with ModelServer("noted", batches=BatchScript(polls=None)) as server:
        environment = environment_of(place, server, ENSEMBLE_RAY_RUNTIME="inline")
        command = [*COMMAND, "map", "reviews.jsonl", "-p", "Sum {text}", "-o", "rows.jsonl", "--delivery", "batch"]
        with program([*command, "--run-id", "one"], log=place / "log", env=environment, cwd=place) as running:
            server.wait_batches(lambda batches: bool(batches) and batches[0].polls > 0, timeout_s=PATIENCE_S)
            os.kill(running.process.pid, signal.SIGKILL)
            running.process.wait(timeout=PATIENCE_S)
        ended = run_command(place / "records", environment, "cancel", "one")
        assert ended.returncode == 0, ended.stderr
        assert "1 batch is still open at the provider: batch_0" in ended.stderr
