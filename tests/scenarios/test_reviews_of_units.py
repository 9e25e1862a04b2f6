"""Review gates in loops, phases and graphs, run in the caller's process: who exits, and what is left."""

from __future__ import annotations

import pytest

from ensemble_ray import (
    Ensemble,
    EnsembleOutput,
    ExitReason,
    Graph,
    GraphEdge,
    HumanInputTool,
    Loop,
    Phase,
    PhaseReview,
    Review,
    ReviewDecision,
    ReviewRequest,
    Task,
    TaskHandlerContext,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call, task

#: Where somebody exits, and whether the task that is asked about gives its output.
WHERE = [("before", False), ("after", True), ("inside", False)]


def _named(context: TaskHandlerContext) -> str:
    return context.description


def _exit(request: ReviewRequest) -> ReviewDecision:
    del request
    return ReviewDecision.exit_early()


def _asked(where: str) -> Task:
    """A task at which somebody is asked."""
    if where == "inside":
        model = ScriptedModel(call("human_input", '{"input": "Go on?"}'), "never")
        return task("second", agent(model, tools=[HumanInputTool()]), name="second")
    gate = {"before_review" if where == "before" else "review": Review.required()}
    return task("second", None, name="second", handler=_named, **gate)


def _first() -> Task:
    return task("first", name="first", handler=_named)


def _run(**units: object) -> EnsembleOutput:
    return Ensemble(review_handler=_exit, **units).run(runtime="inline")  # type: ignore[arg-type]  # units


@pytest.mark.parametrize(("where", "has_output"), WHERE)
def test_exit_in_a_loop(where: str, has_output: bool) -> None:  # noqa: FBT001  a parameter
    """S-REV-110, S-REV-32, S-REV-33, S-LOOP-112: the unfinished iteration has what gave its output."""
    output = _run(loops=[Loop(name="refine", body=[_first(), _asked(where)], max_iterations=3)])
    names = ["first", "second"] if has_output else ["first"]
    assert [list(each) for each in output.get_loop_history("refine")] == [names]
    assert [each.raw for each in output.task_outputs] == names
    assert output.get_loop_termination_reason("refine") == "exit_early"
    assert (output.exit_reason, output.is_complete) == (ExitReason.USER_EXIT_EARLY, False)


@pytest.mark.parametrize("workflow", ["sequential", "parallel"])
@pytest.mark.parametrize(("where", "has_output"), WHERE)
def test_exit_in_a_phase(where: str, has_output: bool, workflow: str) -> None:  # noqa: FBT001  a parameter
    """S-REV-110, S-REV-32, S-REV-33, S-PHASE-56: no later task or phase runs."""
    first, asked = _first(), _asked(where)
    asked = asked.replace(context=[first])
    last = task("last", name="last", handler=_named, context=[asked])
    begin = Phase(name="begin", tasks=[first, asked, last], workflow=workflow)
    output = _run(phases=[begin, Phase(name="end", tasks=[task("later", handler=_named)], after=[begin])])
    names = ["first", "second"] if has_output else ["first"]
    assert {name: [each.raw for each in found] for name, found in output.phase_outputs.items()} == {"begin": names}
    assert [each.raw for each in output.task_outputs] == names
    assert (output.exit_reason, output.raw) == (ExitReason.USER_EXIT_EARLY, names[-1])


@pytest.mark.parametrize(("where", "has_output"), WHERE)
def test_exit_in_a_graph(where: str, has_output: bool) -> None:  # noqa: FBT001  a parameter
    """S-REV-110, S-REV-32, S-REV-33, S-GRAPH-53: its step is not routed."""
    graph = Graph(
        name="triage",
        states={"first": _first(), "second": _asked(where), "later": task("later", handler=_named)},
        edges=[
            GraphEdge(from_state="first", to_state="second"),
            GraphEdge(from_state="second", to_state="later"),
            GraphEdge(from_state="later", to_state=Graph.END),
        ],
        start="first",
    )
    output = _run(graph=graph)
    steps = [("first", "second"), ("second", None)] if has_output else [("first", "second")]
    assert [(step.state_name, step.next_state) for step in output.graph_history] == steps
    assert [each.raw for each in output.task_outputs] == [name for name, _ in steps]
    assert (output.exit_reason, output.graph_termination_reason) == (ExitReason.USER_EXIT_EARLY, None)


def test_person_behind_the_handler_of_a_phase_review_decides() -> None:
    """S-PHASE-62, S-REV-31: what the gate leaves is what is read, in every attempt."""
    asked: list[str] = []

    def decide(request: ReviewRequest) -> ReviewDecision:
        asked.append(request.task_output)
        return ReviewDecision.edit("RETRY: shorter") if len(asked) == 1 else ReviewDecision.continue_execution()

    attempts: list[str] = []

    def write(context: TaskHandlerContext) -> str:
        attempts.append(context.description)
        return f"draft {len(attempts)}"

    draft = task("write", name="write", handler=write)
    check = task("check", name="check", handler=lambda _: "APPROVE", review=Review.required(), context=[draft])
    phase = Phase(name="draft", tasks=[draft], review=PhaseReview.of(check))
    output = Ensemble(phases=[phase], review_handler=decide).run(runtime="inline")
    assert (output.raw, asked, len(attempts)) == ("draft 2", ["APPROVE", "APPROVE"], 2)
    assert (output.exit_reason, output.trace.phases[0].attempts) == (ExitReason.COMPLETED, 2)


def test_person_who_exits_at_a_phase_review_keeps_the_attempt() -> None:
    """S-REV-110, S-PHASE-56: what the review said is not followed."""
    draft = _first()
    check = task("check", name="check", handler=lambda _: "REJECT: no", review=Review.required(), context=[draft])
    output = _run(phases=[Phase(name="draft", tasks=[draft], review=PhaseReview.of(check))])
    assert ([each.raw for each in output.task_outputs], output.exit_reason) == (["first"], ExitReason.USER_EXIT_EARLY)
