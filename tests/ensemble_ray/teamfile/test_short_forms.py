"""A single value in place of a list, and names of other frameworks, in a team file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import CalculatorTool, GraphEdge, GraphFork, GraphJoin
from tests.ensemble_ray.teamfile.conftest import Load, Refused

HEAD = "llm: local\n"


def test_a_single_value_stands_for_a_list_of_one(load: Load, folder: Path) -> None:
    """S-DOM-100."""
    (folder / "checks.py").write_text("def short(answer): return None\n", encoding="utf-8")
    team = load(
        HEAD
        + """\
agents:
  writer: {goal: Write, tools: calculator}
tasks:
  facts: {description: Find, memory_scopes: notes}
  draft: {description: Write, agent: writer, context: facts, output_guardrails: "checks:short"}
loops:
  refine:
    body: {again: {description: Again}}
    context: draft
    max_iterations: 2
hierarchical_constraints: {required_workers: Writer, required_stages: [Writer, [A, B]]}
"""
    )
    facts, draft = team.tasks
    assert draft.context == (facts,)
    assert len(draft.output_guardrails) == 1
    assert draft.agent is not None
    assert isinstance(draft.agent.tools[0], CalculatorTool)
    assert team.loops[0].context == (draft,)
    rules = team.hierarchical_constraints
    assert rules is not None
    assert (rules.required_workers, rules.required_stages) == (("Writer",), (("Writer",), ("A", "B")))


def test_a_single_name_stands_for_a_list_in_phases_and_graphs(load: Load) -> None:
    """S-DOM-100."""
    task = "{t: {description: d}}"
    phases = load(
        f"{HEAD}phases: {{one: {{tasks: {task}}}, two: {{tasks: {{u: {{description: d}}}}, after: one}}}}\n"
    ).phases
    assert phases[1].after == (phases[0],)
    states = "{a: {description: a}, b: {description: b}, c: {description: c}}"
    edges = "[{from_state: a, to_states: [b, c]}, {from_states: [b, c], to_state: END}, {from_state: b, to_state: END}]"
    graph = load(f"{HEAD}graph: {{name: g, start: a, states: {states}, edges: {edges}, no_feedback_states: a}}\n").graph
    assert graph is not None
    assert [type(each) for each in graph.edges] == [GraphFork, GraphJoin, GraphEdge]
    assert graph.no_feedback_states == {"a"}


def test_a_command_is_a_list(refused: Refused) -> None:
    """S-DOM-100: a text would be the name of a program with blanks in it."""
    tool = "{process: {name: n, description: d, command: ls -l}}"
    assert "command: must be a list" in refused(f"{HEAD}tasks: {{t: {{description: d, tools: {tool}}}}}\n")[0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "tasks: {t: {description: d, depends_on: x}}",
            "unknown key of task 't'. Here it is called 'context'. Known: [",
        ),
        ("tasks: {t: {description: d, human_input: true}}", "Here it is called 'review'."),
        ("agents: {a: {goal: g, backstory: b}}\ntasks: {t: {description: d}}", "Here it is called 'background'."),
        ("agents: {a: {instructions: g}}\ntasks: {t: {description: d}}", "Here it is called 'goal'."),
        ("process: sequential\ntasks: {t: {description: d}}", "unknown key of a team. Here it is called 'workflow'."),
        ("graph: {name: g, nodes: {}, edges: [], start: a}", "Here it is called 'states'."),
        (
            "tasks: {t: {description: d, async_execution: true}}",
            "Tasks run in parallel in an ensemble with the workflow",
        ),
    ],
)
def test_a_key_of_another_framework_is_named_as_ours(refused: Refused, text: str, told: str) -> None:
    """S-ERR-60."""
    assert any(told in line for line in refused(f"{HEAD}{text}\n"))
