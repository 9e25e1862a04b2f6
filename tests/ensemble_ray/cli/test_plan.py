"""`ensemble-ray plan`: what would run, without a model call."""

from __future__ import annotations

import json
from pathlib import Path

from ensemble_ray.cli.plan import levels_of
from ensemble_ray.plan.plan import Node, Plan
from tests.ensemble_ray.cli.conftest import Call


def test_levels_agents_tools_and_models_are_shown(call: Call, team: str) -> None:
    """And inputs that are missing stay in the texts; no model is called: the script would be used up."""
    called = call("plan", f"{team}:team", "-i", "topic=tides")
    assert called.code == 0
    lines = [line.strip() for line in called.printed.splitlines()]
    assert lines[0] == "team_of_test:team: parallel (fail_fast), 2 tasks, 1 agent"
    assert lines.index("Level 1") < next(at for at, line in enumerate(lines) if line.startswith("facts"))
    assert "facts    (synthesized): Find facts about tides" in lines
    assert "article  Writer <- facts: Write for {audience}" in lines
    assert any(line.startswith("model ScriptedModel") and line.endswith("tools [shout]") for line in lines)
    assert "--input audience=...  (used by article)" in lines
    assert call("run", f"{team}:team", "-i", "topic=x", "-i", "audience=y").printed == "An article\n"


def test_the_plan_is_data_when_json_is_asked_for(call: Call, team: str) -> None:
    """For programs."""
    data = json.loads(call("plan", f"{team}:team", "--json").printed)
    assert data["levels"] == [["facts"], ["article"]]
    assert data["missing_inputs"] == {"topic": ["facts"], "audience": ["article"]}
    assert data["agents"][0]["tools"] == ["shout"]
    assert [task["agent"] for task in data["tasks"]] == [None, "writer"]


def test_no_key_is_needed_and_none_is_shown(call: Call, folder: Path) -> None:
    """A plan can be looked at by everybody (S-CONV-22)."""
    text = "llm: {model: m, api_key_env: NOT_THERE}\ntasks: {t: {description: d}}\n"
    (folder / "team.yaml").write_text(text, encoding="utf-8")
    called = call("plan", "team.yaml")
    assert called.code == 0
    assert "model OpenAIChatModel('m')" in called.printed
    assert call("run", "team.yaml").code == 2


def test_a_team_that_cannot_run_has_no_plan(call: Call, folder: Path) -> None:
    """Exit code 2, with the reason."""
    (folder / "team.yaml").write_text("tasks: {t: {description: d}}\n", encoding="utf-8")
    called = call("plan", "team.yaml")
    assert called.code == 2
    assert "has no LLM available" in called.said


def _node(key: str, *context: str) -> Node:
    return Node(
        key=key,
        index=1,
        object_id=key,
        description=key,
        expected_output=key,
        agent_role="A",
        agent_key=None,
        context=context,
    )


def test_levels_follow_the_context_when_tasks_run_in_parallel() -> None:
    """A task stands one level below the deepest that it waits for, whatever the order of the list."""
    nodes = (_node("d", "b", "c"), _node("b", "a"), _node("a"), _node("c"))
    levels = levels_of(Plan(workflow="parallel", nodes=nodes))
    assert [[node.key for node in level] for level in levels] == [["a", "c"], ["b"], ["d"]]
    assert len(levels_of(Plan(workflow="sequential", nodes=nodes))) == 4
