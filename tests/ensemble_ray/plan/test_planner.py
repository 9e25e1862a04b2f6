"""From a definition and its inputs to a plan."""

from __future__ import annotations

import json
import logging
import pickle
from typing import Any

import pytest

from ensemble_ray import Agent, AgentTool, DynamicToolProvider, Plan, PromptTemplateError, ToolResult, tool
from ensemble_ray.definition import EnsembleDefinition
from ensemble_ray.plan.planner import Planned, needs_synthesis, plan_run, resolve_tasks
from ensemble_ray.plan.unit_plans import task_keys
from ensemble_ray.testing import ScriptedModel
from tests.builders import task_after as task

MODEL = ScriptedModel()
WRITER = Agent(role="Senior Writer", goal="Write", background="Calm", llm=MODEL)


def handle(context: Any) -> str:
    """A handler."""
    return "done"


def planned(definition: EnsembleDefinition, /, **inputs: object) -> Planned:
    """The plan without agents made for tasks."""
    return plan_run(definition, resolve_tasks(definition, inputs))


class Echo(AgentTool):
    name = "echo"
    description = "Repeats."

    def execute(self, text: str, /) -> ToolResult:
        return ToolResult.success(text)


class Desk:
    @tool
    def look(self, what: str) -> str:
        """Look."""
        return what

    @tool(name="write_down")
    def note(self, what: str) -> str:
        """Note."""
        return what


class Offers(DynamicToolProvider):
    def resolve(self) -> list[object]:
        raise AssertionError("asked while planning")


@tool
def count(text: str) -> int:
    """Count words."""
    return len(text.split())


def test_texts_are_resolved_and_the_tasks_unchanged_when_inputs_are_given() -> None:
    """S-TPL-9, S-DOM-38, S-DOM-41: both texts of every task; agent fields are no templates; ids stay."""
    agent = Agent(role="Expert on {topic}", goal="{topic}", background="{topic}", llm=MODEL)
    facts = task("Facts on {topic}", expected_output="In {form}", agent=agent)
    definition = EnsembleDefinition(tasks=[facts])
    resolved = resolve_tasks(definition, {"topic": "tides", "form": "prose"}).tasks[0]
    assert (resolved.description, resolved.expected_output) == ("Facts on tides", "In prose")
    assert (facts.description, facts.expected_output) == ("Facts on {topic}", "In {form}")
    assert resolved == facts
    assert resolved.agent is agent
    assert (
        plan_run(definition, resolve_tasks(definition, {"topic": "t", "form": "f"})).agents["expert-on-topic"].goal
        == "{topic}"
    )


def test_task_is_the_same_object_when_it_has_no_variables() -> None:
    """Planning copies nothing that did not change; an escaped variable is a change."""
    plain, escaped = task("plain"), task("{{x}}")
    resolved = resolve_tasks(EnsembleDefinition(tasks=[plain, escaped], llm=MODEL), {"x": "1"})
    assert resolved.tasks[0] is plain
    assert resolved.tasks[1].description == "{x}"


def test_inputs_of_the_run_win_when_the_ensemble_has_some_too() -> None:
    """S-DOM-66, S-DOM-70, S-TPL-4."""
    definition = EnsembleDefinition(tasks=[task("{a} {b} {c}")], llm=MODEL, inputs={"a": "ours", "b": 2, "unused": [1]})
    resolved = resolve_tasks(definition, {"a": "run's", "c": None})
    assert resolved.tasks[0].description == "run's 2 "
    assert resolved.inputs == {"a": "run's", "b": "2", "unused": "[1]", "c": ""}
    assert definition.inputs == {"a": "ours", "b": 2, "unused": [1]}


def test_first_failing_text_is_told_when_several_lack_values() -> None:
    """S-TPL-12: task order, description before expected output, whatever the dependencies are."""
    later = task("{c}")
    first = task("plain", later, expected_output="{b}")
    definition = EnsembleDefinition(tasks=[first, later], llm=MODEL, workflow="parallel")
    with pytest.raises(PromptTemplateError, match=r"\[b\]"):
        resolve_tasks(definition, {})
    both = EnsembleDefinition(tasks=[task("{a}", expected_output="{b}")], llm=MODEL)
    with pytest.raises(PromptTemplateError, match=r"\[a\]"):
        resolve_tasks(both)


def test_context_points_at_resolved_tasks_when_it_was_a_template() -> None:
    """S-TPL-11, S-DET-22: through a chain, and whatever the list's order."""
    facts = task("Facts on {topic}")
    draft = task("Draft", facts)
    article = task("Article", draft, facts)
    definition = EnsembleDefinition(tasks=[article, draft, facts], llm=MODEL, workflow="parallel")
    resolved = resolve_tasks(definition, {"topic": "tides"}).tasks
    assert resolved == (article, draft, facts)
    assert resolved[0].context[1].description == "Facts on tides"
    assert resolved[0].context[0].context[0].description == "Facts on tides"
    assert draft.context[0].description == "Facts on {topic}"


def test_nodes_hold_what_will_run_when_planned() -> None:
    """S-PAR-15, S-ENG-18, S-PAR-13, S-SET-46: a place for each task; what is outside the list is told apart."""
    outside = task("Outside {x}")
    facts = task("Facts on {topic}", name="facts")
    check = task("Check", facts, handler=handle)
    article = task("Article", outside, check, facts, agent=WRITER, name="article")
    definition = EnsembleDefinition(
        tasks=[facts, check, article],
        llm=MODEL,
        workflow="parallel",
        parallel_error_strategy="continue_on_error",
        max_parallel_tasks=2,
    )
    plan = planned(definition, topic="tides").plan
    assert (plan.workflow, plan.error_strategy, plan.max_parallel_tasks) == ("parallel", "continue_on_error", 2)
    assert plan.inputs == {"topic": "tides"}
    assert [(node.key, node.index, node.agent_role, node.agent_key) for node in plan.nodes] == [
        ("facts", 1, "(synthesized)", None),
        ("task-2", 2, "(deterministic)", None),
        ("article", 3, "Senior Writer", "senior-writer"),
    ]
    assert [node.object_id for node in plan.nodes] == [facts.object_id, check.object_id, article.object_id]
    assert plan.nodes[0].description == "Facts on tides"
    assert [node.context for node in plan.nodes] == [(), ("facts",), ("task-2", "facts")]
    assert plan.nodes[2].context_outside == ("Outside {x}",)
    assert not MODEL.calls


def test_plan_is_data_when_written_and_read() -> None:
    """A plan holds no callables: what it was made of is found through its keys."""
    plan = planned(EnsembleDefinition(tasks=[task("a", agent=WRITER), task("b", handler=handle)])).plan
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_agents_stand_in_order_of_first_use_when_none_are_listed() -> None:
    """S-DOM-65, S-DOM-67: each once; roles alike get keys apart; listed but idle agents take no part."""
    twin = WRITER.replace()
    idle = Agent(role="Idle", goal="g", llm=MODEL)
    strange = Agent(role="!?", goal="g", llm=MODEL)
    tasks = [task("a", agent=twin), task("b", agent=WRITER), task("c", agent=twin), task("d", agent=strange)]
    for agents in (None, [idle, WRITER, twin, strange]):
        made = planned(EnsembleDefinition(tasks=tasks, agents=agents))
        assert made.agents == {"senior-writer": twin, "senior-writer~2": WRITER, "agent": strange}
        assert [entry.key for entry in made.plan.agents] == list(made.agents)
        assert [node.agent_key for node in made.plan.nodes] == [
            "senior-writer", "senior-writer~2", "senior-writer", "agent",
        ]  # fmt: skip
    entry = made.plan.agents[1]
    assert (entry.role, entry.goal, entry.background, entry.is_synthesized) == ("Senior Writer", "Write", "Calm", False)


def test_tool_names_are_listed_when_an_agent_has_tools() -> None:
    """S-TRC-1: as far as declared; a provider is not asked before a task begins (S-TOOL-32)."""
    desk = Desk()
    agent = Agent(role="r", goal="g", llm=MODEL, tools=[count, desk, desk.look, Echo(), Offers()])
    plan = planned(EnsembleDefinition(tasks=[task("a", agent=agent)])).plan
    assert plan.agents[0].tool_names == ("count", "look", "write_down", "look", "echo")


def test_keys_are_names_or_positions_when_planned() -> None:
    """A task's key: repeated ones get a number, and what parts the steps of an instance's path is not in them."""
    names = ["facts", None, "facts", "task-2", "task-2", "facts~2", "a/b#0", "facts"]
    tasks = [task("d", name=name) for name in names]
    assert task_keys(tasks) == (
        "facts", "task-2", "facts~2", "task-2~2", "task-2~3", "facts~2~2", "a_b_0", "facts~3",
    )  # fmt: skip


def test_streaming_follows_the_first_that_says_anything_when_planned() -> None:
    """S-STR-1: agent, task, ensemble; a handler streams nothing."""
    quiet, loud = WRITER.replace(stream=False), WRITER.replace(stream=True)
    tasks = [
        task("a", agent=quiet, stream=True),
        task("b", agent=loud, stream=False),
        task("c", agent=WRITER, stream=True),
        task("d", agent=WRITER),
        task("e", handler=handle),
    ]
    for ensemble_streams in (False, True):
        plan = planned(EnsembleDefinition(tasks=tasks, stream=ensemble_streams)).plan
        assert [node.is_streaming for node in plan.nodes] == [False, True, True, ensemble_streams, False]


def test_inferred_workflow_is_logged_when_none_was_chosen(caplog: pytest.LogCaptureFixture) -> None:
    """S-DET-40, S-DET-42: at INFO; S-DET-41: a chosen one is kept and not mentioned."""
    facts = task("Facts")
    listed = [task("Article", facts), facts]
    with caplog.at_level(logging.INFO, logger="ensemble_ray"):
        assert planned(EnsembleDefinition(tasks=listed, llm=MODEL, workflow=None)).plan.workflow == "parallel"
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
            ("INFO", "Workflow inferred: parallel")
        ]
        caplog.clear()
        assert planned(EnsembleDefinition(tasks=[facts], llm=MODEL)).plan.workflow == "sequential"
        assert not caplog.records


def test_tasks_travel_alone_when_planned() -> None:
    """Without context and agent: links of a chain, each inside the next, would grow with the square of its length."""
    chain = [task("d{x}", name="t0", agent=WRITER)]
    for number in range(1, 2000):
        chain.append(task(f"d{number}", chain[-1], name=f"t{number}", agent=WRITER, output_type=dict))
    made = planned(EnsembleDefinition(tasks=chain), x="0")
    travelling = made.tasks["t1999"]
    assert (travelling.context, travelling.agent, travelling.output_type) == ((), None, dict)
    assert travelling == chain[-1]
    assert made.plan.nodes[1999].context == ("t1998",)
    assert made.tasks["t0"].description == "d0"
    copy = pickle.loads(pickle.dumps(made))  # noqa: S301  our own bytes
    assert copy.tasks["t1999"] == chain[-1]


def test_same_task_runs_twice_when_it_stands_in_the_list_twice() -> None:
    """Two places, two keys; as context it is the first one."""
    facts = task("Facts", name="facts")
    plan = planned(EnsembleDefinition(tasks=[facts, facts, task("b", facts)], llm=MODEL)).plan
    assert [(node.key, node.context) for node in plan.nodes] == [
        ("facts", ()), ("facts~2", ()), ("task-3", ("facts",)),
    ]  # fmt: skip


def test_only_tasks_without_agent_and_handler_need_one_made() -> None:
    """S-DET-20, S-DET-7: handler tasks, agent tasks and agentless tasks mix."""
    bare = task("a")
    assert needs_synthesis([bare, task("b", agent=WRITER), task("c", handler=handle)]) == (bare,)
