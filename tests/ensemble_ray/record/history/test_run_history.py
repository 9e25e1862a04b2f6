"""The history of a run, where it decides what all readers show."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ensemble_ray.facts.fact import Fact
from ensemble_ray.record import history
from ensemble_ray.record.following import EventProjection
from ensemble_ray.record.trace import fold_trace, works_of
from ensemble_ray.studio.views.steps import StepsView
from tests.ensemble_ray.record.facts_of_runs import begun, completed, fact, failed, intent, model, node, output, result

_ASKED = {"review_id": "g", "timing": "after_execution", "task_description": "d"}


def _numbered(*facts: Fact) -> list[Fact]:
    return [replace(each, seq=position) for position, each in enumerate(facts, start=1)]


def _applied(facts: Sequence[Fact]) -> tuple[history.RunHistory, list[history.Change]]:
    found = history.RunHistory()
    return found, [change for each in facts for change in found.apply(each)]


def test_a_call_names_what_was_asked_and_is_open_until_it_returns() -> None:
    """S-STU-16: an intent is stored while its call is open, and only then."""
    facts = _numbered(
        *begun(node("facts", "Find facts")),
        model("facts#0", 0, 102.0, calls=["search"]),
        intent("facts#0", 0, 0, 102.0),
        result("facts#0", 0, 0, 103.0),
    )
    found, _ = _applied(facts[:-1])
    assert list(found.executions["facts#0"].open_calls or ()) == ["facts#0/0/call-0"]
    found, changes = _applied(facts)
    ended = changes[-1]
    assert isinstance(ended, history.CallEnded)
    assert ended.intent is not None
    assert (ended.intent.tool_name, found.executions["facts#0"].open_calls) == ("search", None)


def test_an_execution_starts_once_when_its_run_is_resumed() -> None:
    """S-SRV-31: the source wants it again, and no reader hears of a second start."""
    start = begun(node("facts", "Find facts"))
    resumed = fact("resume", "run", 120.0, is_restart=False)
    _, changes = _applied(_numbered(*start, model("facts#0", 0, 102.0), resumed, model("facts#0", 1, 130.0)))
    starts = [change.execution.id for change in changes if isinstance(change, history.ExecutionStarted)]
    assert starts == ["facts#0"]


def test_reflection_on_a_phase_is_no_task() -> None:
    """S-EVT-45: it has no message, and no step."""
    reflected = fact("reflection_recalled", "reflect:facts#0/0/reflection", 106.0)
    facts = _numbered(*begun(node("facts", "Find facts")), model("facts#0", 0, 102.0), reflected)
    found, _ = _applied(facts)
    assert list(found.executions) == ["facts#0"]
    projection = EventProjection("run")
    assert [each.type for one in facts for each in projection.apply(one)] == [
        "ensemble_started", "task_started", "llm_iteration_completed",
    ]  # fmt: skip


def test_a_gate_stays_open_when_its_run_is_cancelled() -> None:
    """S-STU-188: after the resumption its task waits again, and the time until the decision is a person's."""
    facts = _numbered(
        *begun(node("facts", "Find facts")),
        model("facts#0", 0, 102.0),
        fact("review", "facts#0/0/after-review", 103.0, **_ASKED),
        fact("end", "run", 104.0, state="cancelled", exit_reason="cancelled"),
        fact("resume", "run", 120.0, is_restart=False),
        fact("memory_recalled", "facts#0/0/memory", 121.0),
        fact("review_decision", "facts#0/0/after-review", 125.0, verdict="approve", by="ann"),
    )
    view, shown = StepsView(), list[tuple[str, bool]]()
    for each in facts:
        view.apply(each)
        (row,) = view.rows()
        shown.append((row.status, row.segments[-1:] == [("person", 103_000, 103_000)]))
    assert shown[3:7] == [("waiting", True), ("cancelled", False), ("running", True), ("waiting", True)]
    assert view.rows()[0].segments[-1] == ("person", 103_000, 125_000)


def test_a_task_that_a_spent_budget_stopped_goes_on_when_its_run_is_resumed() -> None:
    """S-MET-39: in steps and in the trace; a task that ended the run itself does not."""
    for reason, expected in (("budget_exhausted", ("running", "interrupted")), ("user_exit_early", ("exited", None))):
        facts = _numbered(
            *begun(node("facts", "Find facts")),
            model("facts#0", 0, 102.0),
            fact("task_exited", "facts#0", 103.0, reason=reason),
            fact("end", "run", 104.0, state="cancelled", exit_reason=reason),
            fact("resume", "run", 120.0, is_restart=False),
        )
        found, _ = _applied(facts)
        (task,) = fold_trace(facts).task_traces
        assert (found.executions["facts#0"].status, task.metadata.get("state")) == expected


def test_a_task_with_an_output_is_completed_when_a_failure_is_recorded_too() -> None:
    """S-MET-39: in steps and in the trace, whichever came first."""
    start, ends = (
        begun(node("facts", "Find facts")),
        (completed("facts", output("Find facts", "x"), 105)[0], *failed("facts", 106)),
    )
    for first, second in (ends[:2], ends[1::-1]):
        found = history.RunHistory(_numbered(*start, first, second), has_details=True)
        (work,) = works_of(found)
        assert (found.executions["facts#0"].status, work.has_failed) == ("completed", False)
