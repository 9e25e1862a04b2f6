"""`ensemble-ray demo --serve`, which `make serve-demo` runs, as a user calls it."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from ensemble_ray.cli import demo as serving
from ensemble_ray.cli.app import invoke
from ensemble_ray.testing import ModelServer
from tests.command_line import ROOT, run_command
from tests.processes import own_directory, own_environment

pytestmark = pytest.mark.extended

#: Generous: an endpoint starts on two cores while other tests run.
PATIENCE_S = 900.0


def test_an_endpoint_is_started_asked_reviewed_and_stopped() -> None:
    """S-SRV-62: each step is said, and the key is not. The embedded model, in agents' processes: `tests/scenarios/test_demo.py`."""
    with own_directory() as place, ModelServer("The moon is a ball of rock.") as server:
        environment = own_environment(
            place, PYTHONPATH=str(ROOT), OPENAI_BASE_URL=server.base_url, OPENAI_API_KEY="sk-1"
        )
        ended = run_command(place, environment, "demo", "--serve", "--llm", "openai:m", timeout_s=PATIENCE_S)
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
    assert "The letter:\n  The moon is" in said
    assert re.findall(r"erk_\S+", said) == [f"erk_...{said.partition('erk_...')[2][:4]}"]
    assert said.rstrip().endswith("Stopped. The temporary files are removed.")


#: Stands for `ensemble-ray`: makes a key, or "serves" at an address that accepts a connection and never answers.
_PROGRAM = """
import pathlib, signal, socket, sys

place = pathlib.Path(sys.argv[1])
if sys.argv[2] == "keys":
    print("erk_key")
    sys.exit()
listening = socket.create_server(("127.0.0.1", 0))
print(f"Serving [answer] at http://127.0.0.1:{listening.getsockname()[1]} (Ctrl-C stops)", flush=True)
try:
    connection, _ = listening.accept()
    (place / "asked").touch()
    signal.pause()
except KeyboardInterrupt:
    (place / "stopped").touch()
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_the_endpoint_is_stopped_when_the_demo_is_interrupted(
    sign: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """S-SRV-62: in the middle of an answer that does not come. What `serve` stops then: `tests/serve/test_starting.py`."""
    stub, asked = tmp_path / "program.py", tmp_path / "asked"
    stub.write_text(_PROGRAM, encoding="utf-8")
    monkeypatch.setattr(serving, "OUR_PROGRAM", (sys.executable, str(stub), str(tmp_path)))
    main = threading.get_ident()

    def interrupt() -> None:
        while not asked.exists():
            time.sleep(0.01)
        signal.pthread_kill(main, sign)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        assert invoke(["demo", "--serve", "--llm", "openai:m"]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "Stopping the endpoint." in capsys.readouterr().err
    assert (tmp_path / "stopped").exists()
