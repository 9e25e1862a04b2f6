"""The demo with a page beside it."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from ensemble_ray import Ensemble, InlineRuntime, Task
from ensemble_ray.cli import demo as studio
from ensemble_ray.cli.app import invoke
from ensemble_ray.cli.demo import show_in_studio


def test_a_run_is_shown_while_it_goes_on_and_until_somebody_stops_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-STU-85: the address before the run begins, the run in the page while it goes on and after it; then nobody listens."""
    monkeypatch.setattr(studio, "_PORT", 0)
    seen: list[str] = []
    address: list[str] = []

    def look(_: object = None) -> str:
        address[:] = re.findall(r"http://\S+/", "".join([*address, capsys.readouterr().err]))
        (run,) = httpx.get(f"{address[0]}api/studio/runs", trust_env=False).json()["runs"]
        seen.append(run["status"])
        return "looked"

    def stop() -> None:
        look()
        raise KeyboardInterrupt

    def run(team: Ensemble) -> int:
        assert team.run(runtime=InlineRuntime(home=tmp_path), run_id="shown").raw == "looked"
        return 0

    team = Ensemble(tasks=[Task(description="Look", expected_output="x", handler=look)])
    assert show_in_studio(team, run, stop) == 0
    assert seen == ["running", "completed"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(address[0], trust_env=False)


def test_one_demonstration_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    """S-STU-85: two of them are refused, and named."""
    assert invoke(["demo", "--studio", "--serve"]) == 2
    assert "choose one" in capsys.readouterr().err
