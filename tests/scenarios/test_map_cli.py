"""`ensemble-ray map` as a user meets it: a process, an endpoint, Ctrl-C, a kill, and the resume; once from Ray."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ensemble_ray import TokenUsage
from ensemble_ray.testing import Fault, ModelServer, Reply, ServedRequest
from ensemble_ray.testing.model_server import Answer
from tests.command_line import COMMAND, PATIENCE_S, call_command, environment_of, run_command
from tests.processes import own_directory, program

ITEMS = 30
#: Items that are answered before a run is ended.
FIRST = 10
#: How many are asked about at the same time.
AT_ONCE = 4


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for one test, with a short path: items, rows, records, Ray's files."""
    with own_directory() as directory:
        rows = [json.dumps({"id": number, "text": f"review-{number}."}) for number in range(ITEMS)]
        (directory / "reviews.jsonl").write_text("\n".join(rows), encoding="utf-8")
        yield directory


def _rows(path: Path) -> list[dict[str, object]]:
    """Whole lines of a file that may still be written."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _text_of(request: ServedRequest) -> str:
    """The item that a request is about."""
    return next(f"review-{number}." for number in range(ITEMS) if f"review-{number}." in request.text)


@pytest.mark.parametrize(
    ("runtime", "sign"), [("inline", signal.SIGINT), ("ray", signal.SIGINT), ("inline", signal.SIGKILL)]
)
def test_a_run_that_was_ended_goes_on_where_it_was(place: Path, runtime: str, sign: signal.Signals) -> None:
    """S-MR-184, S-MR-186, S-MR-187: one row per item, and nothing that was answered is asked again."""
    output, has_ended = place / "rows.jsonl", threading.Event()

    def script(request: ServedRequest) -> Answer:
        """Until the run has ended the first items are answered and no others, so that it ends between them."""
        return Reply(text="noted", latency_s=0.0 if request.number < FIRST or has_ended.is_set() else 3600.0)

    with ModelServer(script) as server:
        environment = environment_of(place, server, ENSEMBLE_RAY_RUNTIME=runtime)
        options = ("-p", "Sum {text}", "-o", "rows.jsonl", "-c", str(AT_ONCE), "--run-id", "one")
        command = [*COMMAND, "map", "reviews.jsonl", *options]
        with program(command, log=place / "log", env=environment, cwd=place) as running:
            running.until(lambda: len(_rows(output)) >= FIRST, "the first rows", timeout_s=PATIENCE_S)
            server.wait_in_flight(AT_ONCE, timeout_s=PATIENCE_S)
            os.kill(running.process.pid, sign)
            code = running.process.wait(timeout=PATIENCE_S)
        text = running.text
        assert len(_rows(output)) == FIRST, text
        if sign == signal.SIGINT:
            assert code == 130, text
            assert f"rows.jsonl has {FIRST} rows" in text
            assert text.rstrip().endswith("resume one")
        has_ended.set()
        # On the other runtime than the one that it began with, where that was Ray: starting it costs the most here.
        elsewhere = ("--runtime", "inline") if runtime == "ray" else ()
        ended = run_command(place / "records", environment, "resume", "one", "--quiet", *elsewhere)
        assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
        asked = Counter(map(_text_of, server.requests))
    assert sorted(row["index"] for row in _rows(output)) == list(range(ITEMS))  # type: ignore[type-var]  # numbers
    assert len(asked) == ITEMS
    assert sum(asked.values()) == ITEMS + AT_ONCE, "those that were on their way are asked again, and no others"


def test_standard_input_is_read_again_by_a_resume(place: Path) -> None:
    """S-MR-180, S-MR-184: a pipe cannot be; its copy can, and goes with the run's record."""
    given = (place / "reviews.jsonl").read_text(encoding="utf-8")
    with ModelServer(Reply(text="noted", usage=TokenUsage(input_tokens=1500, output_tokens=500))) as server:
        environment = environment_of(place, server)
        command = ("map", "-", "-p", "Sum {text}", "-o", "rows.jsonl", "--run-id", "piped", "-c", "1")
        ended = run_command(place, environment, *command, "--max-tokens", "30000", given=given)
        assert ended.returncode == 1, ended.stderr
        assert "budget" in ended.stderr
        done = len(_rows(place / "rows.jsonl"))
        assert 0 < done < ITEMS
        ended = call_command(place, environment, "resume", "piped", "--max-tokens", "1000000")
        assert ended.returncode == 0, ended.stderr
        assert len(_rows(place / "rows.jsonl")) == ITEMS
        assert len(server.requests) <= ITEMS + 1
        (copy,) = (place / "records" / "items").iterdir()
        assert call_command(place, environment, "delete", "piped").returncode == 0
        assert not copy.exists()


def test_answers_are_brought_together_and_failures_left_out(place: Path) -> None:
    """S-MR-180, S-MR-181, S-MR-187: the text on standard output, exit code 3, dead letters that are tried again."""

    def script(request: ServedRequest) -> Answer:
        if "Find the themes" in request.text:
            return f"themes of {request.text.count('noted')}"
        return Fault(status=400, message="no") if "review-7." in request.text and not mended else "noted"

    mended: list[int] = []
    with ModelServer(script) as server:
        environment = environment_of(place, server)
        command = ("map", "reviews.jsonl", "-p", "Sum {text}", "--dead-letters", "dead.jsonl")
        ended = call_command(place, environment, *command, "--reduce", "Find the themes", "--chunk-size", "30")
        assert (ended.returncode, ended.stdout) == (3, "themes of 29\n"), ended.stderr
        assert "29/30 items, 1 failed, 1 reduced in" in ended.stderr
        mended.append(1)
        again = call_command(
            place, environment, "map", "--retry-dead", "dead.jsonl", "-p", "Sum {text}", "-o", "more.jsonl"
        )
        assert again.returncode == 0, again.stderr
    assert [row["index"] for row in _rows(place / "more.jsonl")] == [7]
