"""`ensemble-ray demo --serve`, which `make serve-demo` runs, as a user calls it."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys

import psutil
import pytest

from ensemble_ray.llm.local_engine.weights import find_weights
from ensemble_ray.testing import ModelServer, Reply
from tests.command_line import ROOT, run_command
from tests.processes import own_directory, own_environment, program

pytestmark = pytest.mark.extended

#: Generous: an endpoint and a model start on two cores while other tests run.
PATIENCE_S = 900.0


@pytest.mark.skipif(
    find_weights() is None or importlib.util.find_spec("xllamacpp") is None,
    reason="the embedded model is not installed: ensemble-ray models install",
)
def test_an_endpoint_is_started_asked_reviewed_and_stopped() -> None:
    """S-SRV-62: on the embedded model; each step is said, and the key is not."""
    with own_directory() as place:
        environment = own_environment(place, PYTHONPATH=str(ROOT))
        ended = run_command(place, environment, "demo", "--serve", timeout_s=PATIENCE_S)
        assert not (place / "records").exists(), "it has a home of its own"
    assert ended.returncode == 0, ended.stderr
    said = ended.stderr
    assert "client.models.list(): answer, letter" in said
    assert re.search(r"run [0-9A-Za-z-]+, \d+ tokens", said)
    pieces = re.findall(r"(\d+) pieces, the first after", said)
    assert int(pieces[0]) > 1
    assert "waiting: it holds no process" in said
    events = said.partition("/events\n")[2].partition("\n\n")[0].split()
    assert (events[0], events[-1]) == ("ensemble_started", "ensemble_completed")
    assert "review_decided" in events
    assert "The letter:\n  " in said
    assert re.findall(r"erk_\S+", said) == [f"erk_...{said.partition('erk_...')[2][:4]}"]
    assert said.rstrip().endswith("Stopped. Nothing of it is left.")


def test_ctrl_c_stops_all_of_it() -> None:
    """S-SRV-62: in the middle of an answer that does not come."""
    with own_directory() as place, ModelServer(lambda _: Reply(text="late", latency_s=PATIENCE_S)) as server:
        environment = own_environment(
            place, PYTHONPATH=str(ROOT), OPENAI_BASE_URL=server.base_url, OPENAI_API_KEY="sk-1"
        )
        command = [sys.executable, "-m", "ensemble_ray.cli", "demo", "--serve", "--llm", "openai:m"]
        with program(command, log=place / "log", env=environment, cwd=place) as running:
            running.until(lambda: server.requests, "the first question", timeout_s=PATIENCE_S)
            started = psutil.Process(running.process.pid).children(recursive=True)
            assert len(started) > 3
            running.process.send_signal(signal.SIGINT)
            assert running.process.wait(timeout=PATIENCE_S) == 130, running.text
            assert "Stopping the endpoint." in running.text
            _, left = psutil.wait_procs(started, timeout=60)
            assert left == []
