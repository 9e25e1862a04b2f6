"""Runs that wait for decisions in their records, on both runtimes: what goes on first, what is done again, what ends them."""

from __future__ import annotations

import itertools
from datetime import timedelta
from pathlib import Path

import pytest

from ensemble_ray import (
    AbstractAgentTool,
    Ensemble,
    ExitReason,
    Graph,
    GraphEdge,
    GraphFork,
    GraphJoin,
    HumanInputTool,
    InlineRuntime,
    Loop,
    Phase,
    Review,
    ReviewDecision,
    ReviewRequest,
    RunState,
    Runtime,
    TaskHandlerContext,
    ToolResult,
    ValidationError,
    decide,
    pending_reviews,
    resume,
)
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.following import EventProjection
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.resume.fork import plan_unit_fork
from ensemble_ray.record.source import recorded_plan
from ensemble_ray.record.trace import fold_trace
from ensemble_ray.testing import ScriptedModel, replay
from tests.builders import agent, call, task
from tests.scenarios.detached import Given, gates_of, raws, team
from tests.scenarios.teams import PATIENCE_S, Marks, Watcher, until

APPROVE = ReviewDecision.continue_execution()


def never(request: ReviewRequest) -> ReviewDecision:
    """A handler that must not be asked."""
    raise AssertionError(request)


@pytest.fixture
def given(tmp_path: Path) -> Given:
    """The handler of every task of a test."""
    return Given(tmp_path / "done")


def test_an_edit_that_does_not_fit_opens_the_next_gate(runtime: Runtime) -> None:
    """S-REV-136, S-REV-139: as often as people edit; whoever lists gates reads why."""
    count = task("a", agent(ScriptedModel("7")), output_type=int, review=Review(prompt="Right?", timeout=0))
    ensemble = team(count)
    output = ensemble.run(runtime=runtime)
    run_id, seen = str(output.run_id), {""}
    for _ in range(2):
        (gate,) = output.open_reviews
        assert (gate.task_output, gate.gate_id in seen) == ("7", False)
        seen.add(gate.gate_id)
        decide(run_id, gate.gate_id, ReviewDecision.edit("eight"), runtime=runtime)
        output = resume(run_id, ensemble, runtime=runtime)
        (shown,) = pending_reviews(runtime=runtime)
        assert str(shown.prompt).startswith("The edit was refused, since it must fit int: The response is no int: ")
        assert str(shown.prompt).endswith(" Edit again, or decide otherwise. Right?")
    decide(run_id, output.open_reviews[0].gate_id, ReviewDecision.edit("8"), runtime=runtime)
    assert resume(run_id, ensemble, runtime=runtime).task_outputs[0].parsed_output == 8


def test_a_run_waits_in_its_record_and_goes_on_when_decided(runtime: Runtime, given: Given) -> None:
    """S-REV-113 to S-REV-117: both gates of a task; no handler is asked, nothing recorded is done again."""
    model, watcher = ScriptedModel("written", "sent"), Watcher()
    worker = agent(model)
    first = task("a", worker, review=Review(prompt="Polite?", timeout=3600, required_role="editor"))
    second = task("b", handler=given, context=[first], before_review=Review.required("Send it?"))
    ensemble = team(first, second, review_handler=never, listeners=[watcher])
    output = ensemble.run(runtime=runtime)
    assert (output.state, output.exit_reason, output.is_complete) == (RunState.WAITING, ExitReason.WAITING, False)
    assert (output.task_outputs, output.raw, watcher.lines) == ((), "", ["start a"])
    (gate,) = output.open_reviews
    assert (gate.run_id, gate.task_description, gate.task_output) == (output.run_id, "a", "written")
    assert (gate.timing, gate.prompt, gate.required_role) == ("after_execution", "Polite?", "editor")
    assert gate.expires_at == gate.created_at + timedelta(hours=1)
    assert output.trace.task_traces[0].metadata["reviews"][0]["verdict"] == "waiting"  # type: ignore[index]
    run_id = str(output.run_id)
    assert run_blocking(store_at(runtime.store_address).find(run_id)).state is RunState.WAITING

    again = resume(run_id, ensemble, runtime=runtime)
    assert ([each.gate_id for each in again.open_reviews], again.state) == ([gate.gate_id], RunState.WAITING)
    assert again.open_reviews == output.open_reviews

    decide(run_id, gate.gate_id, ReviewDecision.edit("edited"), runtime=runtime)
    third = resume(run_id, ensemble, runtime=runtime)
    assert (raws(third), third.raw, third.state) == (["edited"], "edited", RunState.WAITING)
    (before,) = third.open_reviews
    assert (before.task_description, before.timing, before.prompt) == ("b", "before_execution", "Send it?")
    decide(run_id, before.gate_id, APPROVE, runtime=runtime)
    last = resume(run_id, ensemble, runtime=runtime)
    assert (raws(last), last.state, last.open_reviews) == (["edited", "b+edited"], RunState.COMPLETED, ())
    assert (len(model.calls), given.done) == (1, ["b"])


def test_what_depends_on_no_gate_goes_on_first(inline_runtime: Runtime, given: Given) -> None:
    """S-REV-116: with one place for all tasks, those that wait do not hold it."""
    first = task("a", handler=given, review=Review.required())
    second = task("b", handler=given, before_review=Review.required())
    third = task("c", handler=given)
    last = task("d", handler=given, context=[first, third])
    ensemble = team(first, second, third, last, workflow="parallel", max_parallel_tasks=1)
    output = ensemble.run(runtime=inline_runtime)
    assert (raws(output), sorted(gates_of(output)), given.done) == (["c"], ["a", "b"], ["a", "c"])
    for name in "ba":
        decide(str(output.run_id), gates_of(output)[name], APPROVE, runtime=inline_runtime)
    done = resume(str(output.run_id), ensemble, runtime=inline_runtime)
    assert (sorted(raws(done)), done.state) == (["a", "b", "c", "d+a+c"], RunState.COMPLETED)
    assert sorted(given.done) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("order", "is_resumed_between"),
    [*((order, True) for order in itertools.permutations("abc")), (tuple("cab"), False)],
)
def test_gates_are_decided_in_any_order(
    inline_runtime: InlineRuntime, given: Given, order: tuple[str, ...], *, is_resumed_between: bool
) -> None:
    """S-REV-116, S-REV-117: the outputs are the same, whatever the order, and however often the run went on between."""
    tasks = [task(name, handler=given, review=Review.required()) for name in "abc"]
    ensemble = team(*tasks, task("d", handler=given, context=tasks), workflow="parallel")
    output = ensemble.run(runtime=inline_runtime)
    run_id, gates = str(output.run_id), gates_of(output)
    for count, name in enumerate(order, start=1):
        decide(run_id, gates[name], ReviewDecision.edit(name.upper()), runtime=inline_runtime)
        if is_resumed_between and count < len(order):
            output = resume(run_id, ensemble, runtime=inline_runtime)
            assert gates_of(output) == {other: gates[other] for other in order[count:]}
    done = resume(run_id, ensemble, runtime=inline_runtime)
    assert {each.task_description: each.raw for each in done.task_outputs} == {
        "a": "A",
        "b": "B",
        "c": "C",
        "d": "d+A+B+C",
    }
    assert sorted(given.done) == ["a", "b", "c", "d"]


class Payment(AbstractAgentTool):
    """Asks, and pays once."""

    name = "pay"
    description = "Pays."
    effect = "once"

    def __init__(self, path: Path) -> None:
        self._marks = Marks(path)

    def do_execute(self, text: str, /) -> ToolResult:
        """Ask twice, and pay."""
        try:
            for question in (f"Pay {text}?", f"Really pay {text}?"):
                if isinstance(self.request_approval(question), ReviewDecision.ExitEarly):
                    return ToolResult.failure(f"Rejected: {text}")
        except Exception as error:  # noqa: BLE001  as tools do that let nothing out
            return ToolResult.failure(str(error))
        self._marks.add(text)
        return ToolResult.success(f"paid {text}")


class Note(AbstractAgentTool):
    """Asks nobody."""

    name = "note"
    description = "Notes."
    effect = "once"

    def __init__(self, path: Path) -> None:
        self._marks = Marks(path)

    def do_execute(self, text: str, /) -> ToolResult:
        """Note."""
        self._marks.add(text)
        return ToolResult.success(f"noted {text}")


def test_gates_inside_calls_wait_beside_the_other_calls_of_the_turn(runtime: Runtime, tmp_path: Path) -> None:
    """S-REV-115, S-REV-117: what ended is not done again; a call that asked is made again, and pays once."""
    model = ScriptedModel(
        [
            call("pay", '{"input": "5"}', number=1),
            call("note", '{"input": "x"}', number=2),
            call("human_input", '{"input": "Which colour?"}', number=3),
        ],
        "done",
    )
    tools = [Payment(tmp_path / "paid"), Note(tmp_path / "noted"), HumanInputTool(timeout=0)]
    ensemble = team(task("a", agent(model, tools=tools)))
    output = ensemble.run(runtime=runtime)
    run_id = str(output.run_id)
    assert sorted(gates_of(output)) == ["Pay 5?", "Which colour?"]
    assert Marks(tmp_path / "noted").lines == ["x"]
    decide(run_id, gates_of(output)["Which colour?"], ReviewDecision.edit("blue"), runtime=runtime)
    output = resume(run_id, ensemble, runtime=runtime)
    assert list(gates_of(output)) == ["Pay 5?"]
    decide(run_id, gates_of(output)["Pay 5?"], APPROVE, runtime=runtime)
    output = resume(run_id, ensemble, runtime=runtime)
    assert list(gates_of(output)) == ["Really pay 5?"]
    assert Marks(tmp_path / "paid").lines == []
    decide(run_id, gates_of(output)["Really pay 5?"], APPROVE, runtime=runtime)
    output = resume(run_id, ensemble, runtime=runtime)
    trace = output.task_outputs[0].trace
    assert trace is not None
    results = [made.result for turn in trace.llm_interactions for made in turn.tool_calls]
    assert results == ["paid 5", "noted x", "blue"]
    assert (Marks(tmp_path / "paid").lines, Marks(tmp_path / "noted").lines, len(model.calls)) == (["5"], ["x"], 2)


def test_a_worker_that_asks_puts_its_manager_down(runtime: Runtime) -> None:
    """S-REV-115, S-REV-18: the workers of the turn that do not ask are done, and not asked again."""
    manager = ScriptedModel(
        [
            call("delegate_task", '{"agent_role": "Asker", "task_description": "ask"}', number=1),
            call("delegate_task", '{"agent_role": "Writer", "task_description": "write"}', number=2),
        ],
        "all done",
    )
    asking = ScriptedModel(call("human_input", '{"input": "Which colour?"}'), "it is blue")
    writing = ScriptedModel("written")
    workers = [agent(asking, "Asker", tools=[HumanInputTool(timeout=0)]), agent(writing, "Writer")]
    ensemble = team(task("a"), agents=workers, llm=manager, manager_llm=manager, workflow="hierarchical")
    output = ensemble.run(runtime=runtime)
    assert (output.state, list(gates_of(output)), len(writing.calls)) == (RunState.WAITING, ["Which colour?"], 1)
    decide(str(output.run_id), gates_of(output)["Which colour?"], ReviewDecision.edit("blue"), runtime=runtime)
    output = resume(str(output.run_id), ensemble, runtime=runtime)
    assert (output.raw, output.state) == ("all done", RunState.COMPLETED)
    assert (len(manager.calls), len(asking.calls), len(writing.calls)) == (2, 2, 1)
    assert "blue" in str(asking.calls[1].messages[-1].content)


def test_gates_inside_units_wait(inline_runtime: Runtime, given: Given) -> None:
    """S-REV-80, S-REV-116: a loop, while another task of the phase goes on; its second iteration has a gate of its own.

    S-LOOP-190, S-PHASE-124: meanwhile the output has the iterations and the phases so far.
    """
    body = task("refine", handler=given, review=Review.required())
    loop = Loop(name="polish", body=[body], max_iterations=2, until=lambda _context: False)
    beside = task("beside", handler=given)
    first = Phase(name="draft", tasks=[beside], loops=[loop], workflow="parallel")
    second = Phase(name="end", tasks=[task("end", handler=given)], after=[first])
    ensemble = Ensemble(phases=[first, second], review_wait="detach")
    output = ensemble.run(runtime=inline_runtime)
    assert (output.state, list(gates_of(output)), sorted(given.done)) == (
        RunState.WAITING,
        ["refine"],
        ["beside", "refine"],
    )
    decide(str(output.run_id), gates_of(output)["refine"], ReviewDecision.edit("one"), runtime=inline_runtime)
    output = resume(str(output.run_id), ensemble, runtime=inline_runtime)
    assert (output.state, len(output.open_reviews)) == (RunState.WAITING, 1)
    assert ([each["refine"].raw for each in output.get_loop_history("polish")], raws(output)) == (
        ["one"],
        ["beside", "one"],
    )
    assert [(each.name, each.status) for each in output.trace.phases] == [("draft", "running")]
    assert (output.phase_outputs, output.get_loop_termination_reason("polish")) == ({}, None)
    decide(str(output.run_id), gates_of(output)["refine"], ReviewDecision.edit("two"), runtime=inline_runtime)
    output = resume(str(output.run_id), ensemble, runtime=inline_runtime)
    assert output.state is RunState.COMPLETED
    assert [each["refine"].raw for each in output.get_loop_history("polish")] == ["one", "two"]
    assert given.done.count("refine") == 2
    assert output.raw == "end"


def test_a_gate_in_a_graph_waits(runtime: Runtime, given: Given) -> None:
    """S-REV-116, S-GRAPH-123: what routes behind it hears the decision; meanwhile the output has the steps so far.

    S-DUR-144: trace, events and forks of the record know what followed.
    """
    graph = Graph(
        name="triage",
        start="a",
        states={name: task(name, handler=given, review=Review.required()) for name in ("a", "b")},
        edges=[GraphEdge(from_state="a", to_state="b"), GraphEdge(from_state="b", to_state=Graph.END)],
    )
    ensemble = Ensemble(graph=graph, review_wait="detach")
    output = ensemble.run(runtime=runtime)
    assert (list(gates_of(output)), output.graph_history) == (["a"], [])
    decide(str(output.run_id), gates_of(output)["a"], APPROVE, runtime=runtime)
    output = resume(str(output.run_id), ensemble, runtime=runtime)
    assert list(gates_of(output)) == ["b"]
    assert [(each.state_name, each.output.raw, each.next_state) for each in output.graph_history] == [("a", "a", "b")]
    assert (raws(output), output.raw, output.graph_termination_reason) == (["a"], "a", None)
    facts = run_blocking(store_at(runtime.store_address).facts(str(output.run_id)))
    assert fold_trace(facts).graph_trace == output.trace.graph_trace
    decide(str(output.run_id), gates_of(output)["b"], APPROVE, runtime=runtime)
    output = resume(str(output.run_id), ensemble, runtime=runtime)
    assert (output.state, given.done, len(output.graph_history)) == (RunState.COMPLETED, ["a", "b"], 2)
    facts = run_blocking(store_at(runtime.store_address).facts(str(output.run_id)))
    assert fold_trace(facts).graph_trace == output.trace.graph_trace
    followed = EventProjection(str(output.run_id))
    told = [each.type for fact in facts for each in followed.apply(fact)]
    assert (told.count("task_started"), told.count("graph_state_completed")) == (2, 2)
    plan = recorded_plan(facts[0].data.plan)  # type: ignore[attr-defined]  the first fact is the plan
    assert plan_unit_fork(plan, plan, facts, "r", "graph:triage#1").reused == ("graph:triage#0",)


def test_a_task_goes_on_while_others_are_at_work(runtime: Runtime, tmp_path: Path) -> None:
    """S-REV-124: the run's call does not end before it; what it had done is not done again."""
    marks, model = Marks(tmp_path / "marks"), ScriptedModel("written", "sent")
    worker = agent(model)

    def slow(_context: TaskHandlerContext) -> str:
        marks.wait("sent")
        return "slow"

    def sent(context: TaskHandlerContext) -> str:
        marks.add("sent")
        return context.context_outputs[0].raw

    first = task("a", worker, review=Review(timeout=0))
    ensemble = team(first, task("b", handler=slow), task("c", handler=sent, context=[first]), workflow="parallel")
    run = ensemble.start(runtime=runtime)
    until(lambda: pending_reviews(runtime=runtime) != (), "an open gate")
    (gate,) = pending_reviews(runtime=runtime)
    decide(run.id, gate.gate_id, ReviewDecision.edit("edited"), runtime=runtime)
    output = run.result(timeout_s=PATIENCE_S)
    assert (output.state, sorted(raws(output)), len(model.calls)) == (
        RunState.COMPLETED,
        ["edited", "edited", "slow"],
        1,
    )


def test_a_decision_that_comes_last_is_seen_before_the_run_waits(inline_runtime: InlineRuntime, given: Given) -> None:
    """S-REV-124: the call goes on with it, and nobody has to resume."""

    def deciding(_context: TaskHandlerContext) -> str:
        until(lambda: pending_reviews(runtime=inline_runtime) != (), "an open gate")
        (gate,) = pending_reviews(runtime=inline_runtime)
        decide(gate.run_id, gate.gate_id, ReviewDecision.edit("edited"), runtime=inline_runtime)
        return "decided"

    first = task("a", handler=given, review=Review(timeout=0))
    last = task("c", handler=given, context=[first], review=Review(timeout=0))
    output = team(first, task("b", handler=deciding), last, workflow="parallel").run(runtime=inline_runtime)
    assert (output.state, list(gates_of(output)), given.done) == (RunState.WAITING, ["c"], ["a", "c"])
    assert sorted(raws(output)) == ["decided", "edited"]


def test_a_branch_that_a_join_cancelled_has_no_open_gate(inline_runtime: InlineRuntime, given: Given) -> None:
    """S-REV-119, S-GRAPH-97: nobody is asked about it any more, while others are."""
    states = {
        "a": task("a", handler=given),
        "b": task("b", handler=given, review=Review(timeout=0)),
        "c": task("c", handler=given, before_review=Review(timeout=0)),
        "d": task("d", handler=given, review=Review(timeout=0)),
    }
    graph = Graph(
        name="race",
        start="a",
        states=states,
        edges=[
            GraphFork(from_state="a", to_states=["b", "c"]),
            GraphJoin(from_states=["b", "c"], to_state="d", count=1),
            GraphEdge(from_state="d", to_state=Graph.END),
        ],
    )
    ensemble = Ensemble(graph=graph, review_wait="detach")
    output = ensemble.run(runtime=inline_runtime)
    assert sorted(gates_of(output)) == ["b", "c"]
    run_id, gates = str(output.run_id), gates_of(output)
    decide(run_id, gates["c"], APPROVE, runtime=inline_runtime)
    output = resume(run_id, ensemble, runtime=inline_runtime)
    assert list(gates_of(output)) == ["d"]
    output = resume(run_id, ensemble, runtime=inline_runtime)
    assert list(gates_of(output)) == ["d"]
    decide(run_id, gates_of(output)["d"], APPROVE, runtime=inline_runtime)
    output = resume(run_id, ensemble, runtime=inline_runtime)
    assert (output.state, given.done) == (RunState.COMPLETED, ["a", "b", "c", "d"])


def test_a_detached_run_is_replayed_while_it_waits_and_when_it_completed(inline_runtime: InlineRuntime) -> None:
    """S-REV-117, S-DUR-55: the gates are where they were, and their decisions are taken from the record."""
    first = task("a", agent(ScriptedModel("written", "sent")), review=Review(timeout=0))
    ensemble = team(first, task("b", first.agent, context=[first], before_review=Review(timeout=0)))
    output = ensemble.run(runtime=inline_runtime)
    for _ in range(2):
        assert replay(output, ensemble).difference is None
        decide(str(output.run_id), output.open_reviews[0].gate_id, APPROVE, runtime=inline_runtime)
        output = resume(str(output.run_id), ensemble, runtime=inline_runtime)
    assert output.state is RunState.COMPLETED
    assert replay(output, ensemble).difference is None


def test_a_detached_run_needs_a_record(inline_runtime: InlineRuntime, given: Given) -> None:
    """S-REV-113: said before anything is done."""
    with pytest.raises(ValidationError, match="review_wait 'detach' needs a record"):
        team(task("a", handler=given), durability="off").run(runtime=inline_runtime)
    assert given.done == []
