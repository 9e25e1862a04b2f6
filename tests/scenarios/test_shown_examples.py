"""Examples whose runs are looked at, in a browser and as pictures."""

from __future__ import annotations

import re
from pathlib import Path

from ensemble_ray import Agent, Ensemble, Task
from ensemble_ray.serve.api import build_api
from ensemble_ray.testing import ScriptedModel, ServedRequest
from ensemble_ray.testing.model_server import Answer
from tests.scenarios.running_examples import EXAMPLES, run_example
from tests.serve.driving import driven
from tests.serve.http_server import served_app


def test_live_dashboard_runs(tmp_path: Path) -> None:
    """Nobody decides about its draft in time, and it goes on."""
    printed, server = run_example(
        "live_dashboard.py",
        lambda request: f"answer {len(request.messages)}",
        tmp_path,
        "openai:some-model",
        "0",
        "0.005",
    )
    assert "Open http://localhost:" in printed
    assert len(server.requests) == 3


def test_drawing_runs(tmp_path: Path) -> None:
    """A team and its run as pictures; those of the page on graphs say the same (S-VIZ-63)."""
    answers = iter(["Too long", "APPROVED"])

    def script(request: ServedRequest) -> Answer:
        asked = str(request.messages[-1].get("content"))
        if "Say what is weak" in asked:
            return next(answers)
        return "APPROVE" if "May it be printed?" in asked else "Some text"

    printed, _ = run_example("drawing.py", script, tmp_path, "openai:some-model", str(tmp_path / "drawn"))
    assert [Path(line).name for line in printed.splitlines()] == ["team.svg", "run.svg"]
    for path in map(Path, printed.splitlines()):
        drawn, shown = (
            re.findall(r"<text[^>]*>([^<]+)", (folder / path.name).read_text(encoding="utf-8"))
            for folder in (path.parent, EXAMPLES.parent / "docs" / "pictures")
        )
        assert drawn == shown, f"draw docs/pictures/{path.name} anew"


def test_remote_agent_runs(tmp_path: Path) -> None:
    """S-INT-80, S-INT-84: its agent is a team behind an endpoint, whose card says its name."""
    far = Agent(role="Analyst", goal="Know", llm=ScriptedModel(otherwise="Green tea, 42 kg"))
    team = Ensemble(tasks=[Task(description="{question}", expected_output="A figure", agent=far)])
    with served_app(build_api(driven({"far": team}))) as url:
        printed, server = run_example(
            "remote_agent.py", lambda _: "Green tea won.", tmp_path, f"{url}/a2a/far", "openai:some-model"
        )
    assert printed == "Green tea won.\n"
    assert "Green tea, 42 kg" in server.requests[0].text
