"""The end of a program whose dashboard runs: it ends, and pages are told."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from websockets.sync.client import connect

from tests.processes import own_environment, program
from tests.scenarios.pages import Page

PROGRAM = """
from ensemble_ray import Ensemble, Task, WebDashboard
from ensemble_ray.testing import ScriptedModel

dashboard = WebDashboard.on_port(0)
dashboard.start()
print(f"port {dashboard.actual_port}", flush=True)
open(RELEASE).read()
ensemble = Ensemble(tasks=[Task.of("Write")], llm=ScriptedModel("done"), dashboard=dashboard)
print(ensemble.run(runtime="inline").raw, dashboard.is_running, flush=True)
"""


def test_a_program_ends_while_its_dashboard_runs(tmp_path: Path) -> None:
    """S-WEB-14: nothing holds it; the dashboard is stopped at exit, so that pages get what was sent, and hear of the end."""
    script, release = tmp_path / "program.py", tmp_path / "release"
    script.write_text(PROGRAM.replace("RELEASE", repr(str(release))))
    os.mkfifo(release)
    with program([sys.executable, str(script)], log=tmp_path / "log", env=own_environment(tmp_path)) as running:
        found = running.until(lambda: re.search(r"port (\d+)", running.text), "the port")
        url = f"localhost:{found[1]}"
        with connect(f"ws://{url}/ws", origin=f"http://{url}") as connection:  # type: ignore[arg-type]
            page = Page(connection)
            release.write_text("go")
            assert page.closed() == (1001, "The dashboard stops")
        assert running.process.wait(timeout=60) == 0
        assert "done True" in running.text
    assert page.heard[-1]["type"] == "ensemble_completed"
