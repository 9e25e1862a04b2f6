"""`ensemble-ray plan`: what would run, without a model call."""

from __future__ import annotations

import json
from pathlib import Path

from ensemble_ray import Node, Plan
from ensemble_ray.cli.commands.plan import levels_of
from tests.command_line import Call


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


def test_a_chain_is_shown_with_its_models(call: Call, folder: Path) -> None:
    """S-FBK-50: in their order, with its rules."""
    text = "llm: {models: [openai:a, openai:b], when: {budget_above: 0.8}}\ntasks: {t: {description: d}}\n"
    (folder / "team.yaml").write_text(text, encoding="utf-8")
    printed = call("plan", "team.yaml").printed
    assert "Fallback([OpenAIChatModel('a'), OpenAIChatModel('b')], when=[When(budget_above=0.8)])" in printed


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
    assert levels == [["a", "c"], ["b"], ["d"]]
    assert len(levels_of(Plan(workflow="sequential", nodes=nodes))) == 4


def test_model_that_a_task_names_beside_its_agent_is_shown(call: Call, folder: Path) -> None:
    """S-DOM-90: in a team file, too."""
    agents = "llm: {model: m}\nagents: {w: {role: Writer, goal: Write}}\n"
    text = agents + "tasks: {t: {description: d, agent: w, llm: {model: other}}, u: {description: e, agent: w}}\n"
    shown = [line.strip() for line in _lines(call, folder, text)]
    assert shown[shown.index("t       Writer: d") + 1] == "model OpenAIChatModel('other')"


HIERARCHY = """
workflow: hierarchical
llm: {model: m}
enforce_required: fail
manager_stall_turns: 0
delegation_timeout: 90
hierarchical_constraints:
  required_stages: [[Researcher], [Writer]]
  required_workers: [Writer]
  max_calls_per_worker: {Researcher: 2}
  global_max_delegations: 5
agents:
  writer: {role: Writer, goal: Write}
  researcher: {role: Researcher, goal: Dig, allow_delegation: true}
tasks:
  facts: {description: "Find {topic}", agent: researcher}
  article: {description: Write, agent: writer, context: [facts]}
"""


def test_a_manager_is_shown_with_its_rules_its_tasks_and_its_workers(call: Call, folder: Path) -> None:
    """S-HIER-1: tasks are the manager's to hand out, so that no order of theirs is shown."""
    (folder / "team.yaml").write_text(HIERARCHY, encoding="utf-8")
    called = call("plan", "team.yaml")
    assert called.code == 0
    assert [line for line in called.printed.splitlines() if line] == [
        "team.yaml: hierarchical, 2 tasks, 2 agents",
        "Manager",
        "  model OpenAIChatModel('m'), at most 20 tool calls",
        "Rules",
        "  stages       Researcher -> Writer",
        "  required     Writer (the manager is not reminded)",
        "  calls        Researcher at most 2",
        "  delegations  at most 5",
        "  stall        never ends the run",
        "  timeout      90 s",
        "Tasks of the manager",
        "  facts       Researcher: Find {topic}",
        "  article     Writer <- facts: Write",
        "Workers",
        "  writer      Writer: Write",
        "              model OpenAIChatModel('m')",
        "  researcher  Researcher: Dig",
        "              model OpenAIChatModel('m'), may delegate",
        "Missing inputs",
        "  --input topic=...  (used by facts)",
        "No model was called.",
    ]


def test_a_managers_rules_are_data_when_json_is_asked_for(call: Call, folder: Path) -> None:
    """For programs; the manager is none of the agents there."""
    (folder / "team.yaml").write_text(HIERARCHY, encoding="utf-8")
    data = json.loads(call("plan", "team.yaml", "--json").printed)
    assert data["levels"] == []
    assert data["manager"]["rules"]["required_stages"] == [["Researcher"], ["Writer"]]
    assert [agent["key"] for agent in data["agents"]] == ["writer", "researcher"]
    assert [(task["key"], task["agent"]) for task in data["tasks"]] == [("facts", "researcher"), ("article", "writer")]
    assert data["delegation"] == {
        "peers": ["Researcher"],
        "max_depth": 3,
        "policies": [],
        "timeout_s": 90,
        "retries": 2,
    }


def test_peers_who_may_delegate_are_shown(call: Call, folder: Path) -> None:
    """S-DEL-1, S-DEL-11: whose, and how deep; a team where nobody may says nothing of it."""
    text = HIERARCHY.replace("hierarchical\n", "sequential\n", 1)
    (folder / "team.yaml").write_text(text, encoding="utf-8")
    lines = call("plan", "team.yaml").printed.splitlines()
    at = lines.index("Delegation")
    assert [line.split("  ")[-1].strip() for line in lines[at + 1 : at + 4]] == ["Researcher", "at most 3", "90 s"]
    (folder / "team.yaml").write_text(text.replace(", allow_delegation: true", ""), encoding="utf-8")
    assert "Delegation" not in call("plan", "team.yaml").printed


def test_agents_that_will_be_made_are_shown_with_a_manager_too(call: Call, folder: Path) -> None:
    """S-SET-46: a task without an agent is `(synthesized)` in a plan."""
    text = "workflow: hierarchical\nllm: {model: m}\ntasks: {t: {description: Find it}}\n"
    (folder / "team.yaml").write_text(text, encoding="utf-8")
    called = call("plan", "team.yaml")
    assert called.code == 0, called.said
    assert "  t  (synthesized): Find it" in called.printed.splitlines()


LOOPS = """
llm: local
tasks:
  facts: {description: Find facts}
  report: {description: Report, context: [facts, refine.output]}
loops:
  refine:
    body:
      draft: {description: Write}
      critic: {description: Criticise, context: [draft]}
    until: {text_contains: APPROVED}
    max_iterations: 3
    on_max_iterations: throw
    max_tokens: 9000
    context: [facts]
"""
PHASES = """
llm: local
phases:
  write:
    after: [research]
    tasks: {draft: {description: Write, context: [find]}}
    loops: {refine: {body: {polish: {description: Polish}}, until: unchanged}}
    review: {task: {name: judge, description: Judge}, max_retries: 1}
  research: {tasks: {find: {description: Find}}, workflow: parallel}
"""
GRAPH = """
llm: local
graph:
  name: triage
  start: classify
  on_max_steps: return_with_flag
  states:
    classify: {description: Classify}
    refine: {body: {draft: {description: Write}}, max_iterations: 1}
    answer: {description: Answer}
  edges:
    - {from_state: classify, to_state: answer, condition: {text_contains: simple}, label: simple}
    - {from_state: classify, to_states: [refine, answer]}
    - {from_states: [refine, answer], to_state: END, count: 1}
"""


def _lines(call: Call, folder: Path, text: str) -> list[str]:
    (folder / "team.yaml").write_text(text, encoding="utf-8")
    called = call("plan", "team.yaml")
    assert called.code == 0
    return called.printed.split("\nAgents")[0].rstrip().splitlines()


def test_loops_are_shown_with_cap_and_predicate(call: Call, folder: Path) -> None:
    """S-LOOP-172: in their place among the tasks, with the tasks of their bodies below them."""
    assert [line for line in _lines(call, folder, LOOPS) if " model " not in line] == [
        "team.yaml: sequential, 4 tasks, 0 agents",
        "",
        "In this order",
        "  facts        (synthesized): Find facts",
        "  loop:refine  at most 3 iterations, at most 9,000 tokens, until text contains 'APPROVED', fails at the cap <- facts",
        "    draft        (synthesized): Write",
        "    critic       (synthesized) <- draft: Criticise",
        "  report       (synthesized) <- facts, loop:refine: Report",
        "",
    ]
    parallel = LOOPS + "workflow: parallel\n"
    assert [line for line in _lines(call, folder, parallel) if "Level" in line] == ["Level 1", "Level 2", "Level 3"]


def test_phases_are_shown_with_what_comes_before_and_their_review(call: Call, folder: Path) -> None:
    """S-PHASE-115."""
    assert [line for line in _lines(call, folder, PHASES) if " model " not in line] == [
        "team.yaml: phases, 4 tasks, 0 agents",
        *("", "Level 1"),
        "  phase:research  parallel",
        "    find            (synthesized): Find",
        *("", "Level 2"),
        "  phase:write     sequential, after phase:research, reviewed by judge (at most 1 retry)",
        "    draft           (synthesized) <- find: Write",
        "    loop:refine     at most 5 iterations, until output unchanged",
        "      polish          (synthesized): Polish",
        "    judge           (synthesized): Judge",
        "",
    ]


def test_graph_is_shown_with_states_edges_and_forks(call: Call, folder: Path) -> None:
    """S-GRAPH-119: edges in declared order, with labels and conditions."""
    assert [line for line in _lines(call, folder, GRAPH) if " model " not in line] == [
        "team.yaml: graph, 3 tasks, 0 agents",
        *("", "In this order"),
        "  graph:triage  begins at classify, at most 50 steps, flagged at the cap",
        "    classify      (synthesized): Classify",
        "    loop:refine   at most 1 iteration",
        "      draft         (synthesized): Write",
        "    answer        (synthesized): Answer",
        "    classify -> answer (simple, if text contains 'simple')",
        "    classify -> refine, answer (side by side)",
        "    refine, answer -> END (after the first 1)",
        "",
    ]


def test_units_are_data_when_json_is_asked_for(call: Call, folder: Path) -> None:
    """S-LOOP-172, S-GRAPH-119: as the plan has them, with the names of what decides."""
    (folder / "team.yaml").write_text(LOOPS, encoding="utf-8")
    data = json.loads(call("plan", "team.yaml", "--json").printed)
    assert data["levels"] == [["facts"], ["loop:refine"], ["report"]]
    (unit,) = data["units"]
    assert (unit["key"], unit["max_iterations"], unit["until"]) == ("loop:refine", 3, "text contains 'APPROVED'")
    (folder / "team.yaml").write_text(GRAPH, encoding="utf-8")
    graph, _ = json.loads(call("plan", "team.yaml", "--json").printed)["units"]
    assert [entry.get("condition") for entry in graph["edges"]] == ["text contains 'simple'", None, None]
