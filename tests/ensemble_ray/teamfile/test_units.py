"""Loops, phases and graphs in a team file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import (
    Graph,
    GraphEdge,
    GraphFork,
    GraphJoin,
    Loop,
    LoopMemoryMode,
    MaxIterationsAction,
    PhaseReview,
    Task,
    Until,
    Workflow,
)
from ensemble_ray.definition import validate
from ensemble_ray.plan.planner import plan_run, resolve_tasks
from ensemble_ray.teamfile import load_ensemble
from ensemble_ray.testing import ScriptedModel
from tests.ensemble_ray.teamfile.conftest import Load, Refused
from tests.ensemble_ray.teamfile.test_json_schema import schema_errors

LOOPS = """
llm: local
agents: {writer: {goal: Write}}
tasks:
  facts: {description: Find facts}
  report: {description: Report, context: [facts, refine.output]}
loops:
  refine:
    body:
      draft: {description: Write, agent: writer}
      critic: {description: Criticise, context: [draft]}
    until: {text_contains: APPROVED, ignore_case: true}
    max_iterations: 3
    on_max_iterations: throw
    memory_mode: window
    memory_window_size: 2
    max_tokens: 9000
    context: [facts]
  polish:
    body: [{description: Polish}]
    until: unchanged
    context: [refine.output]
"""
PHASES = """
llm: local
phases:
  write:
    after: [research]
    workflow: parallel
    tasks: {draft: {description: Write, context: [find, research.output]}}
    loops: {refine: {body: {polish: {description: Polish}}}}
    review:
      task: {description: "Answer APPROVE, or RETRY: and why", context: [draft]}
      max_retries: 1
  research:
    tasks: {find: {description: Find}}
"""
GRAPH = """
llm: local
graph:
  name: triage
  start: classify
  max_steps: 9
  no_feedback_states: [classify]
  states:
    classify: {description: Classify}
    refine:
      body: {draft: {description: Write, context: []}}
      context: [classify]
    answer: {description: Answer, context: [classify, refine.output]}
  edges:
    - {from_state: classify, to_state: answer, condition: {text_contains: simple}, label: simple}
    - {from_state: classify, to_states: [refine, answer]}
    - {from_states: [refine, answer], to_state: END, count: 1}
"""


def test_loops_are_made_of_the_tasks_below_them(load: Load) -> None:
    """S-LOOP-171: names are those of the whole file; `NAME.output` is what a loop gives."""
    team = load(LOOPS)
    facts, report = team.tasks
    refine, polish = team.loops
    draft, critic = refine.body
    assert (refine.name, draft.name, critic.name) == ("refine", "draft", "critic")
    assert (critic.context, refine.context, polish.context) == ((draft,), (facts,), (refine.output,))
    assert report.context == (facts, refine.output)
    assert draft.agent is not None
    assert (refine.until, polish.until) == (Until.text_contains("APPROVED", ignore_case=True), Until.unchanged())
    assert (refine.max_iterations, refine.on_max_iterations) == (3, MaxIterationsAction.THROW)
    assert (refine.memory_mode, refine.memory_window_size, refine.max_tokens) == (LoopMemoryMode.WINDOW, 2, 9000)
    assert validate(team) == []


def test_phases_are_made_of_the_tasks_below_them(load: Load) -> None:
    """S-PHASE-114: in any order, with loops and a review."""
    team = load(PHASES)
    write, research = team.phases
    (find,) = research.tasks
    (draft,) = write.tasks
    assert (write.after, write.workflow) == ((research,), Workflow.PARALLEL)
    assert draft.context == (find, research.output)
    assert [loop.name for loop in write.loops] == ["refine"]
    assert isinstance(write.review, PhaseReview)
    assert (write.review.max_retries, write.review.task.context) == (1, (draft,))
    assert validate(team) == []


def test_graph_is_made_of_the_states_below_it(load: Load) -> None:
    """S-GRAPH-118: a state with a body is a loop; an edge to or from several states is a fork or a join."""
    graph = load(GRAPH).graph
    assert graph is not None
    classify, refine, answer = graph.states.values()
    assert isinstance(classify, Task)
    assert isinstance(refine, Loop)
    assert isinstance(answer, Task)
    assert (list(graph.states), graph.start, graph.max_steps) == (["classify", "refine", "answer"], "classify", 9)
    assert answer.context == (classify, refine.output)
    assert graph.no_feedback_states == {"classify"}
    assert graph.edges == (
        GraphEdge(from_state="classify", to_state="answer", condition=Until.text_contains("simple"), label="simple"),
        GraphFork(from_state="classify", to_states=["refine", "answer"]),
        GraphJoin(from_states=["refine", "answer"], to_state=Graph.END, count=1),
    )


def test_predicates_are_code_of_the_user_when_they_are_named(load: Load, folder: Path) -> None:
    """S-LOOP-171: as `module:function`."""
    (folder / "deciding.py").write_text("def done(context):\n    return True\n\ndef good(report):\n    return True\n")
    team = load(
        "loops:\n"
        "  a: {body: {x: {description: d, llm: local}}, until: 'deciding:done'}\n"
        "  b: {body: {y: {description: d, llm: local, output_type: 'builtins:dict'}}, until: {parsed: 'deciding:good'}}\n"
    )
    first, second = team.loops
    assert getattr(first.until, "__name__", "") == "done"
    assert isinstance(second.until, Until)
    assert getattr(second.until.condition, "__name__", "") == "good"


@pytest.mark.parametrize("text", [LOOPS, PHASES, GRAPH])
def test_editor_takes_what_the_loader_takes(text: str) -> None:
    """S-LOOP-171, S-PHASE-114, S-GRAPH-118: the published schema knows the sections."""
    assert schema_errors(text) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("loops: {x: {until: unchanged}}", "team.yaml:2:12: loops.x: loop 'x' needs the key 'body'"),
        ("loops: {x: {body: {}}}", "there must be at least one task"),
        (
            "loops: {x: {body: {t: {descripton: d}}}}",
            "team.yaml:2:24: loops.x.body.t.descripton: unknown key of task 't'",
        ),
        ("loops: {x: {body: {t: {description: d, agent: a}}}}", "unknown agent 'a'"),
        (
            "loops: {x: {body: {t: {description: d}}, max_iterations: 0}}",
            "Loop 'x' max_iterations must be >= 1, got: 0",
        ),
        ("loops: {x: {body: {t: {description: d}}, output_mode: all}}", "unknown output mode 'all'"),
        ("loops: {x: {body: {t: {description: d}}, until: 5}}", "must be module:attribute, `unchanged`"),
        (
            "loops: {x: {body: {t: {description: d}}, until: changed}}",
            "must be module:attribute, `unchanged`, {text_contains: TEXT}",
        ),
        ("loops: {x: {body: {t: {description: d}}, until: {text_contain: x}}}", "Did you mean 'text_contains'?"),
        ("loops: {x: {body: {t: {description: d}}, context: [y.output]}}", "unknown task 'y.output'"),
        ("loops: {x: {body: {t: {description: d, context: [x.output]}}}}", "wait for each other in a circle"),
        (
            "tasks: {t: {description: d}}\nloops: {x: {body: {t: {description: d}}}}",
            "two tasks are named 't'; the first is in line 2",
        ),
        ("phases: {p: {tasks: {t: {description: d}}, after: [q]}}", "unknown phase 'q'"),
        ("phases: {p: {workflow: parallel}}", "Phase 'p' must contain at least one task"),
        ("phases: {p: {tasks: {t: {description: d}}, review: {max_retries: 1}}}", "the review needs the key 'task'"),
        (
            "phases: {p: {tasks: {t: {description: d}}, after: [q]}, q: {tasks: {u: {description: d}}, after: [p]}}",
            "the phases wait for each other in a circle: p -> q -> p",
        ),
        ("graph: {name: g, start: a, states: {a: {description: d}, a: {description: e}}}", "duplicate key"),
        ("graph: {name: g, start: a, states: {a: {description: d}}}", "the graph needs the key 'edges'"),
        ("graph: {name: g, start: a, states: {a: {description: d}}, edges: []}", "no outgoing edges: [a]"),
        (
            "graph: {name: g, start: a, states: {a: {description: d}}, edges: [{from_state: a, to_stat: END}]}",
            "Did you mean 'to_state'?",
        ),
        (
            "graph: {name: g, start: a, states: {a: {description: d}}, edges: [{from_state: a, to_state: x}]}",
            "Graph 'g' edge[0] 'to' = 'x' is neither Graph.END nor a declared state. Known: [a]",
        ),
    ],
)
def test_mistake_is_told_with_its_place(refused: Refused, text: str, told: str) -> None:
    """S-LOOP-171, S-PHASE-114, S-GRAPH-118: as elsewhere in the file; S-GRAPH-17: a state that is there twice."""
    (line,) = refused(f"llm: local\n{text}\n")
    assert told in line
    assert line.startswith("team.yaml:")


def test_model_takes_the_place_of_every_other_in_units_too(folder: Path) -> None:
    """`--llm`: bodies, phases, reviewers and states; the plan stays the same."""
    for number, text in enumerate((LOOPS, PHASES, GRAPH)):
        (folder / "team.yaml").write_text(text)
        (folder / f"making{number}.py").write_text(
            "from ensemble_ray.teamfile import load_ensemble\n\ndef team():\n    return load_ensemble('team.yaml')\n"
        )
        model = ScriptedModel()
        chosen, plain = load_ensemble(f"making{number}:team", llm=model), load_ensemble(f"making{number}:team")
        assert all(task.agent is None or task.agent.llm is model for task in chosen.all_tasks)
        plans = [plan_run(each, resolve_tasks(each)).plan for each in (chosen, plain)]
        assert plans[0] == plans[1]
        assert validate(chosen) == []
