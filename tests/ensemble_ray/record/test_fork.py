"""What a fork of a run uses of its record, and what it does again."""

import pytest

from ensemble_ray import Node, Plan, ValidationError
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.record.resume.fork import ForkPlan, asked_agents, copied_facts, plan_fork, reused_differences

from .facts_of_runs import begun, completed, ended, fact, failed, header, intent, model, node, output, result


def _plan(workflow: str, **context: tuple[str, ...]) -> Plan:
    nodes = [
        Node(
            key=key,
            index=index,
            description=key,
            expected_output="x",
            agent_role="Reader",
            agent_key="reader",
            context=needed,
        )
        for index, (key, needed) in enumerate(context.items(), start=1)
    ]
    return Plan(workflow=workflow, nodes=tuple(nodes))


def _using(*keys: str) -> ForkPlan:
    instances = frozenset(f"{key}#0" for key in keys)
    return ForkPlan(reused=keys, again=(), keys=keys, instances=instances)


DIAMOND = {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c"), "e": ()}
ALL = set(DIAMOND)


def test_all_later_tasks_are_done_again_when_the_run_is_sequential() -> None:
    """S-DUR-54: whether or not they depend on it."""
    found = plan_fork(_plan("sequential", **DIAMOND), ALL, "c")
    assert (found.reused, found.again) == (("a", "b"), ("c", "d", "e"))


def test_dependents_are_done_again_when_the_run_is_parallel() -> None:
    """S-DUR-54: transitively, and nothing else."""
    found = plan_fork(_plan("parallel", **DIAMOND), ALL, "a")
    assert (found.reused, found.again) == (("e",), ("a", "b", "c", "d"))
    assert plan_fork(_plan("parallel", **DIAMOND), ALL, "b").reused == ("a", "c", "e")


@pytest.mark.parametrize(("workflow", "again"), [("parallel", ("c", "d", "e")), ("sequential", ("c", "d", "e"))])
def test_unfinished_tasks_run_too(workflow: str, again: tuple[str, ...]) -> None:
    """S-DUR-54: with what comes after them."""
    assert plan_fork(_plan(workflow, **DIAMOND), {"a", "b", "d"}, "e").again == again


def test_nearest_task_is_named_when_there_is_none_of_that_name() -> None:
    """S-DUR-54."""
    with pytest.raises(ValidationError, match=r"Unknown task 'raed'. Nearest: \[read\]"):
        plan_fork(_plan("parallel", read=(), write=()), set(), "raed")
    with pytest.raises(ValidationError, match=r"Unknown task 'zzz'. Tasks: \[read, edit\]"):
        plan_fork(_plan("parallel", read=(), edit=()), set(), "zzz")


READ, EDIT = node("read", "Read Ray", agent_key="reader"), node("edit", "Edit", agent_key="editor")


def _header(*nodes: dict[str, object], **agents: dict[str, object]) -> PlanRecorded:
    return header(*nodes, definition={"agents": agents, "tasks": {"read": {"output_type": {"title": "R"}}}})


def test_difference_counts_only_in_what_is_reused() -> None:
    """S-DUR-54: what is done again may be another task."""
    old = _header(READ, EDIT, reader={"max_iterations": 3}, editor={"max_iterations": 3})
    new = _header(READ, {**EDIT, "description": "Write"}, reader={"max_iterations": 3}, editor={"max_iterations": 9})
    assert reused_differences(old, new, ["read"]) == []
    assert reused_differences(old, new, ["read", "edit"]) == [
        "agents.editor.max_iterations: 3 -> 9",
        "tasks.edit.description: 'Edit' -> 'Write'",
    ]


def test_place_of_a_reused_task_is_no_difference() -> None:
    """S-DUR-54: a task may be put before it."""
    assert reused_differences(_header(READ), _header(EDIT, {**READ, "index": 2}), ["read"]) == []


def test_agent_that_is_not_made_yet_is_no_difference() -> None:
    """S-DUR-54, S-SET-46: who does a task is known when its agent is made."""
    made = {**READ, "agent_role": "Researcher", "agent_key": "researcher"}
    unmade = {**READ, "agent_role": "(synthesized)", "agent_key": None}
    assert reused_differences(header(made), header(unmade), ["read"]) == []


def test_workflow_is_a_difference_when_anything_is_reused() -> None:
    """S-DUR-54: it decides what comes before what."""
    plan = {"workflow": "sequential", "nodes": [READ], "agents": []}
    assert reused_differences(header(READ), header(READ, plan=plan), ["read"]) == [
        "plan.workflow: 'parallel' -> 'sequential'"
    ]


def test_everything_of_reused_tasks_is_copied_and_nothing_else() -> None:
    """S-DUR-54, S-BUD-9: effects, outputs, decisions, and that they completed; under the new run's id, without epochs.

    Answers are marked as what the other run paid for.
    """
    decided = fact("decision", "read#0/0/call-0", 103, answer="done")
    of_read = [model("read#0", 0, 102, calls=["search"]), intent("read#0", 0, 0, 102.5), decided]
    of_read += [result("read#0", 0, 0, 103), *completed("read", output("Read Ray", "x"), 105)]
    others = [model("edit#0", 0, 106), *failed("edit", 107), ended(108, "failed", "error"), fact("resume", "run", 110)]
    copies = copied_facts([*begun(READ, EDIT), *of_read, *others], "run-2", _using("read"))
    marked = [{**f.data.to_data(), "is_copied": True} if f.kind == "model" else f.data.to_data() for f in of_read]
    assert [(each.kind, each.name) for each in copies] == [(f.kind, f.name) for f in of_read]
    assert [each.data.to_data() for each in copies] == marked
    assert {(each.run, each.epoch, each.seq) for each in copies} == {("run-2", 0, 0)}


def test_groups_are_parted_when_stimuli_are_copied() -> None:
    """S-DUR-54: the other half of the group may be missing."""
    told = fact("stimulus", "read#0", 105, type="TaskCompleted", key="read", at=105.0, more=1)
    assert [each.data.to_data() for each in copied_facts([told], "run-2", _using("read"))] == [
        {"type": "TaskCompleted", "key": "read", "at": 105.0}
    ]


def test_cancellation_of_a_reused_task_is_not_copied() -> None:
    """S-DUR-54: it belongs to the other run."""
    told = fact("stimulus", "read#0", 105, type="TaskCancelled", key="read", at=105.0)
    assert copied_facts([told], "run-2", _using("read")) == []


def test_calls_that_made_agents_are_copied_when_their_tasks_did_not_change() -> None:
    """S-DUR-54, S-DUR-37: a recorded answer is not asked for again."""
    made = fact("model", "edit#0/0/synthesis", 90, text="{}")
    facts = [made, model("edit#0", 0, 106)]
    assert copied_facts(facts, "run-2", _using()) == []
    assert [each.name for each in copied_facts(facts, "run-2", _using(), redone=["edit"])] == ["edit#0/0/synthesis"]


DECIDED = fact("delegation", "read#0/0/call-0", 101, request={}, worker="helper", charged="Helper")
HELPER = "read#0/0/call-0/delegate#0"
DEEPER = f"{HELPER}/0/call-1/delegate#0"


def test_work_that_a_reused_task_handed_on_is_copied() -> None:
    """S-DUR-76: however deep; that of a task which is done again is not."""
    kept = [DECIDED, model(HELPER, 0, 102), fact("output", DEEPER, 103), fact("output", HELPER, 104)]
    other = [fact("delegation", "edit#0/0/call-0", 105), fact("output", "edit#0/0/call-0/delegate#0", 106)]
    facts = [*begun(READ, EDIT), *kept, *completed("read", output("Read Ray", "x"), 107), *other, ended(108)]
    names = [each.name for each in copied_facts(facts, "run-2", _using("read"))]
    assert names == [*(each.name for each in kept), "read#0", "read#0"]


def test_agents_that_reused_tasks_asked_must_be_as_they_were() -> None:
    """S-DUR-76: also those that a worker asked; not those that only others asked."""
    deeper = fact("delegation", f"{HELPER}/0/call-1", 102, request={}, worker="checker")
    refused = fact("delegation", "read#0/0/call-2", 102, request={}, worker=None)
    other = fact("delegation", "edit#0/0/call-0", 103, request={}, worker="editor")
    asked = asked_agents([*begun(READ, EDIT), DECIDED, deeper, refused, other], ["read#0"])
    assert asked == {"helper", "checker"}
    old = _header(READ, EDIT, reader={}, helper={"max_iterations": 3}, editor={"max_iterations": 3})
    new = _header(READ, EDIT, reader={}, helper={"max_iterations": 9}, editor={"max_iterations": 9})
    assert reused_differences(old, new, ["read"], asked=asked) == ["agents.helper.max_iterations: 3 -> 9"]
    assert reused_differences(old, new, ["read"]) == []
