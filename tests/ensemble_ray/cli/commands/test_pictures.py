"""`ensemble-ray plan` and `ensemble-ray trace` as graphs (S-VIZ-87)."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

from ensemble_ray import DagModel
from ensemble_ray.cli.view.terminal import own_command
from tests.command_line import Call

INPUTS = ("-i", "topic=tides", "-i", "audience=children")


def test_a_plan_is_written_in_each_form_that_is_asked_for_and_asks_no_model(
    call: Call, team: str, folder: Path
) -> None:
    """S-VIZ-87, S-VIZ-10: folders are made; the text of the plan is left out; the script is not used up."""
    files = ("--svg", "out/team.svg", "--mermaid", "out/team.mmd", "--dag", "out/team.dag.json")
    called = call("plan", f"{team}:team", "-i", "topic=tides", *files)
    assert (called.code, called.printed) == (0, "")
    assert called.said.count("Wrote ") == 3
    picture = ET.fromstring((folder / "out" / "team.svg").read_text(encoding="utf-8"))  # noqa: S314  our own text
    assert picture.attrib["aria-label"] == f"{team}:team"
    mermaid = (folder / "out" / "team.mmd").read_text(encoding="utf-8")
    assert "Find facts about tides" in mermaid
    assert "Write for #123;audience#125;" in mermaid
    dag = DagModel.model_validate_json((folder / "out" / "team.dag.json").read_text(encoding="utf-8"))
    assert [(node.key, node.depends_on) for node in dag.tasks] == [("facts", ()), ("article", ("0",))]
    assert call("run", f"{team}:team", *INPUTS).printed == "An article\n"


def test_a_dash_is_standard_output(call: Call, team: str) -> None:
    """S-VIZ-87."""
    assert call("plan", f"{team}:team", "--mermaid", "-").printed.startswith("flowchart TB\n")
    assert json.loads(call("plan", f"{team}:team", "--dag", "-").printed)["type"] == "dag"
    assert call("plan", f"{team}:team", "--svg", "-").printed.startswith("<svg ")


def test_a_run_is_written_as_it_ran(call: Call, team: str) -> None:
    """S-VIZ-87, S-VIZ-84: a failed task is marked, what did not begin is left out."""
    call("run", f"{team}:team", *INPUTS, "--run-id", "run-one")
    mermaid = call("trace", "run-one", "--mermaid", "-").printed
    assert "Find facts about tides" in mermaid
    assert "  n0 --> n1" in mermaid.splitlines()
    dag = DagModel.model_validate_json(call("trace", "run-one", "--dag", "-").printed)
    assert [node.description for node in dag.tasks] == ["Find facts about tides", "Write for children"]
    call("run", f"{team}:broken", "--run-id", "other")
    picture = call("trace", "latest", "--svg", "-").printed
    assert 'class="failed"' in picture
    assert "Run other" in picture


def test_a_manager_is_drawn_with_the_tasks_that_it_is_given(call: Call, team: str) -> None:
    """S-VIZ-82, S-VIZ-87."""
    mermaid = call("plan", f"{team}:team", "--workflow", "hierarchical", *INPUTS, "--mermaid", "-").printed
    assert "Find facts about tides" in mermaid
    assert '{{"Manager' in mermaid


def test_a_map_reduce_whose_tasks_are_made_while_it_runs_is_drawn_before_and_after(call: Call, folder: Path) -> None:
    """S-VIZ-87: its graph as data is that of a run."""
    lines = "".join(json.dumps({"text": f"row {at}"}) + "\n" for at in range(3))
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    text = (
        "from ensemble_ray import MapReduceEnsemble, Task\n"
        "from ensemble_ray.testing import ScriptedModel\n"
        "team = MapReduceEnsemble(items='rows.jsonl', llm=ScriptedModel(otherwise='x'), target_token_budget=1000,\n"
        "    map_task=lambda row: Task.of(f'Summarise {row}'),\n"
        "    reduce_task=lambda chunk: Task.of('Join').replace(context=chunk))\n"
    )
    (folder / "rows_team.py").write_text(text, encoding="utf-8")
    planned = call("plan", "rows_team:team", "--mermaid", "-").printed
    assert 'n0["items<br/><small>MAP</small>"]' in planned
    assert "groups of 1,000 tokens" in planned
    refused = call("plan", "rows_team:team", "--dag", "-")
    assert refused.code == 2
    assert f"Of a run: {own_command()} trace RUN --dag FILE" in refused.said
    assert call("run", "rows_team:team", "--run-id", "mapped").code == 0
    ran = call("trace", "mapped", "--mermaid", "-").printed
    assert "MAP 3 tasks" in ran
    assert "AGGREGATE 1 task<" in ran
