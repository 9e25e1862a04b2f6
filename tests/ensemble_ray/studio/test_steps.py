"""Steps folded from facts: who they are, how they stand, and that piece by piece is the same as at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import InlineRuntime
from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.studio.schemas import ModelAttempts, ModelWaitSchema, StepDetail, StepSchema
from ensemble_ray.studio.views.steps import StepsView, detail_of
from tests.ensemble_ray.record.delegating_team import Counted
from tests.ensemble_ray.record.facts_of_runs import altered, begun, fact, header, intent, model, node, result
from tests.ensemble_ray.record.unit_teams import TEAMS

from .stored_runs import numbered, recorded_team


def folded(*facts: Fact) -> StepsView:
    """The steps of a run of these facts."""
    view = StepsView()
    for each in numbered(facts):
        view.apply(each)
    return view


def row_of(view: StepsView, step: str) -> StepSchema:
    """The row of one step."""
    return next(row for row in view.rows() if row.id == step)


@pytest.mark.parametrize("team", TEAMS)
async def test_steps_are_the_same_whenever_somebody_looks(team: str, tmp_path: Path) -> None:
    """S-STU-10: deltas behind each position, laid over each other, are the rows of the whole; no step stands still."""
    _, facts = await recorded_team(tmp_path, team)
    whole, view = StepsView(), StepsView()
    seen: dict[str, StepSchema] = {}
    last = 0
    for each in facts:
        whole.apply(each)
    for each in facts:
        view.apply(each)
        seen |= {row.id: row for row in view.rows(after=last)}
        last = each.seq
    assert seen == {row.id: row for row in whole.rows()}
    assert all(row.status in {"completed", "cancelled", "skipped"} for row in seen.values())
    assert view.rows(after=last) == []


@pytest.mark.parametrize("team", TEAMS)
async def test_every_step_of_a_unit_has_its_parents(team: str, tmp_path: Path) -> None:
    """S-STU-13: parents are there, begin with their first part and end with their last one."""
    _, facts = await recorded_team(tmp_path, team)
    view = StepsView()
    for each in facts:
        view.apply(each)
    rows = {row.id: row for row in view.rows()}
    inside = [row for row in rows.values() if row.parent is not None]
    assert inside or team == "flat"
    for row in inside:
        parent = rows[str(row.parent)]
        assert parent.started_at is not None
        assert row.started_at is None or parent.started_at <= row.started_at
        assert parent.status in {"completed", "cancelled"}
        if row.ended_at is not None and row.status == "completed":
            assert parent.ended_at is None or parent.ended_at >= row.started_at


@pytest.mark.parametrize("team", ["flat", "phases", "graph"])
async def test_units_run_while_something_in_them_does(team: str, tmp_path: Path) -> None:
    """S-STU-13: cut anywhere, a unit runs if and only if it has begun and has not come to its end."""
    _, facts = await recorded_team(tmp_path, team)
    view = StepsView()
    for each in facts[:-1]:
        view.apply(each)
        rows = {row.id: row for row in view.rows()}
        for row in rows.values():
            if row.status == "running" and row.parent is not None:
                assert rows[row.parent].status == "running", f"after {each.seq}: {row.id}"
            if row.kind in {"loop", "phase", "graph"} and row.status == "pending":
                assert row.started_at is None


def test_tasks_of_a_plan_are_there_from_the_beginning() -> None:
    """S-STU-11: pending, then running from when the run wants them; the time until they do something is their queue."""
    start = begun(node("facts", "Find facts"), node("draft", "Draft", context=["facts"]))
    view = folded(*start)
    assert [(row.id, row.status) for row in view.rows()] == [("facts#0", "running"), ("draft#0", "pending")]
    view = folded(*start, model("facts#0", 0, 103.0))
    assert row_of(view, "facts#0").segments == [("queue", 100_000, 102_000), ("model", 102_000, 103_000)]
    assert view.counts() == {"running": 1, "pending": 1}


def test_the_wait_for_a_permit_is_told_apart() -> None:
    """S-STU-15: it comes before the time of the model, and both are the time of the call."""
    waited = fact(
        "model", "facts#0/0/model", 106.0, request_digest="d", started_at=102.0, latency_s=4.0, waited_s=1.5,
        text="ok", tool_calls=[], input_tokens=1, output_tokens=1,
    )  # fmt: skip
    found = row_of(folded(*begun(node("facts", "Find facts")), waited), "facts#0")
    assert found.segments == [
        ("queue", 100_000, 102_000), ("rate_limit", 102_000, 103_500), ("model", 103_500, 106_000),
    ]  # fmt: skip


def test_a_call_without_a_known_outcome_is_told() -> None:
    """S-STU-16: open while it runs, unknown when nothing comes of it, repeated when it was begun twice."""
    start = [
        *begun(node("facts", "Find facts")),
        model("facts#0", 0, 102.0, calls=["search"]),
        intent("facts#0", 0, 0, 102.0),
    ]
    view = folded(*start)
    assert row_of(view, "facts#0").effect == "recorded"
    view.history.interrupt(110.0)
    assert (row_of(view, "facts#0").status, row_of(view, "facts#0").effect) == ("interrupted", "unknown")
    again = folded(*start, intent("facts#0", 0, 0, 104.0), result("facts#0", 0, 0, 105.0))
    assert row_of(again, "facts#0").effect == "repeated"
    assert row_of(again, "facts#0").tools == [("search", "success", 105_000)]


def test_a_run_that_goes_on_takes_its_steps_up_again() -> None:
    """S-STU-12: what was interrupted runs again; what is completed stays."""
    start = [*begun(node("facts", "Find facts")), model("facts#0", 0, 102.0, calls=["search"])]
    view = folded(*start)
    view.history.interrupt(110.0)
    assert row_of(view, "facts#0").status == "interrupted"
    resumed = numbered([*start, fact("resume", "run", 120.0, is_restart=False)])[-1]
    view.apply(resumed)
    assert row_of(view, "facts#0").status == "running"
    assert [row.id for row in view.rows(after=resumed.seq - 1)] == ["facts#0"]


def test_a_failure_is_told_in_one_line() -> None:
    """S-STU-11: class and message; a gap of lines is none."""
    failed = fact(
        "task_failed", "facts#0", 105.0, error_type="BoomError", message="one\ntwo", stack_trace=None, trace=None
    )
    view = folded(*begun(node("facts", "Find facts")), failed)
    found = row_of(view, "facts#0")
    assert (found.status, found.error) == ("failed", "BoomError: one\\ntwo")
    first = view.first_failed()
    assert first is not None
    assert first.id == "facts#0"


def test_attempts_count_epochs() -> None:
    """S-STU-17: a step that another process took up was begun twice."""
    from msgspec.structs import replace

    later = replace(model("facts#0", 0, 104.0), epoch=2)
    view = folded(*begun(node("facts", "Find facts")), model("facts#0", 0, 102.0), later)
    assert row_of(view, "facts#0").attempts == 2


def detail(*facts: Fact) -> StepDetail:
    """The only step of a run of these facts, in full."""
    view = folded(*begun(node("facts", "Find facts")), *facts)
    return detail_of(row_of(view, "facts#0"), numbered(facts), header(node("facts", "Find facts")), reviews=())


def test_an_answer_has_its_attempts_and_waits() -> None:
    """S-STU-220: in order, with the wait for a permit as the last one; null if there was one attempt without a wait."""
    retried = altered(
        model("facts#0", 1, 109.0), retries=1, attempts_failed=["HTTP 429: slow down"], max_attempts=5, waited_s=0.25,
        waits=[["retry", "HTTP 429: slow down", 102.5, 0.5], ["breaker", "circuit breaker open: HTTP 503", 103.0, 5.0]],
    )  # fmt: skip
    first, second = detail(model("facts#0", 0, 102.0, calls=["search"]), retried).answers
    assert first.attempts is None
    assert second.attempts == ModelAttempts(
        waits=[
            ModelWaitSchema(cause="retry", reason="HTTP 429: slow down", at=102_500, wait_ms=500),
            ModelWaitSchema(cause="breaker", reason="circuit breaker open: HTTP 503", at=103_000, wait_ms=5000),
            ModelWaitSchema(cause="permit", at=108_000, wait_ms=250),
        ],
        number=2,
        most=5,
    )


def test_attempts_of_earlier_versions_and_of_incomplete_answers_are_not_counted_against_the_policy() -> None:
    """S-STU-220: the former have reasons alone; a repeated answer has attempts of its own."""
    old = altered(model("facts#0", 0, 102.0), retries=1, attempts_failed=["HTTP 503: down"])
    cut = altered(
        model("facts#0", 1, 109.0), retries=1, attempts_failed=["cut off"], max_attempts=5,
        waits=[["repeat", "cut off", 105.0, 0.0]],
    )  # fmt: skip
    first, second = [each.attempts for each in detail(old, cut).answers]
    assert first == ModelAttempts(waits=[ModelWaitSchema(cause="retry", reason="HTTP 503: down")], number=2)
    assert second is not None
    assert (second.number, second.most) == (2, None)


def test_an_answer_names_its_model_of_a_chain() -> None:
    """S-FBK-30, S-FBK-31: with the failures of the others, which are not counted against the policy of one."""
    answered = altered(
        model("facts#0", 0, 109.0), retries=1, attempts_failed=["big: HTTP 401"], max_attempts=5, model="small",
        waits=[["skipped", "long: open", 105.0, 0.0], ["fallback", "big: HTTP 401", 105.0, 0.0]],
    )  # fmt: skip
    (found,) = detail(answered).answers
    assert found.model == "small"
    assert found.attempts is not None
    assert ([each.cause for each in found.attempts.waits], found.attempts.number, found.attempts.most) == (
        ["skipped", "fallback"], 2, None
    )  # fmt: skip


def test_a_failed_step_has_the_attempts_of_the_model_call_that_failed() -> None:
    """S-STU-220."""
    failed = fact(
        "task_failed", "facts#0", 105.0, error_type="AgentExecutionError", message="down", attempts=3, max_attempts=3,
        waits=[["retry", "HTTP 503: down", 101.0, 0.5], ["retry", "HTTP 429: slow down", 102.0, 1.0]],
    )  # fmt: skip
    found = detail(failed).failed_attempts
    assert found is not None
    assert ([each.reason for each in found.waits], found.number, found.most) == (
        ["HTTP 503: down", "HTTP 429: slow down"], 3, 3
    )  # fmt: skip
    assert detail(altered(failed, waits=[])).failed_attempts is None


def test_a_call_has_its_lines_and_the_repairs_of_its_arguments() -> None:
    """S-STU-221, S-STU-222: of a tool and of a handler; without any, the lists are empty."""
    asked = [model("facts#0", 0, 102.0, calls=["search"]), intent("facts#0", 0, 0, 102.0)]
    told = altered(
        result("facts#0", 0, 0, 103.0), log=["1 page", "WARNING s: slow"], repairs=["q: a number in a string"]
    )
    (call,) = detail(*asked, told).tool_calls
    assert (call.log, call.repairs) == (["1 page", "WARNING s: slow"], ["q: a number in a string"])
    (call,) = detail(*asked, result("facts#0", 0, 0, 103.0)).tool_calls
    assert (call.log, call.repairs) == ([], [])
    handled = fact("tool_intent", "facts#0/0/handler", 102.0, tool_name="handler", arguments="")
    ended = fact(
        "tool_result", "facts#0/0/handler", 103.0, outcome="error", text="no", started_at=102.0, duration_s=1.0,
        log=["row 7"],
    )  # fmt: skip
    (call,) = detail(handled, ended).tool_calls
    assert (call.name, call.log) == ("handler", ["row 7"])


def test_a_review_makes_its_step_wait_for_a_person() -> None:
    """S-STU-15: it waits until somebody decides, and that time is a person's."""
    asked = fact(
        "review", "facts#0/0/after-review", 103.0, review_id="g", timing="after_execution", task_description="d"
    )
    start = [*begun(node("facts", "Find facts")), model("facts#0", 0, 102.0), asked]
    waiting = row_of(folded(*start), "facts#0")
    assert (waiting.status, waiting.segments[-1]) == ("waiting", ("person", 103_000, 103_000))
    decided = fact("review_decision", "facts#0/0/after-review", 109.0, verdict="approve", by="ann")
    found = row_of(folded(*start, decided), "facts#0")
    assert (found.status, found.segments[-1], found.reviewed) == ("running", ("person", 103_000, 109_000), True)


def test_items_of_a_dynamic_run_are_steps_with_levels() -> None:
    """S-STU-18: maps when they were pulled, reduces when their group was made."""
    head = fact("plan", "run", 100.0, plan={}, items={"source": "list"}, workflow="map_reduce_adaptive", agents=[])
    view = folded(
        head,
        fact("items", "run", 101.0, first=0, digests=["a", "b"]),
        model("map-0#0", 0, 103.0),
        fact("group", "reduce-1-0#0", 104.0, level=1, number=0, inputs=["map-0", "map-1"], is_final=False),
        fact("group", "final-reduce#0", 105.0, level=2, number=0, inputs=["reduce-1-0"], is_final=True),
    )
    found = [(row.id, row.kind, row.level, row.status) for row in view.rows()]
    assert found == [
        ("map-0#0", "map", 0, "running"),
        ("map-1#0", "map", 0, "pending"),
        ("reduce-1-0#0", "reduce", 1, "pending"),
        ("final-reduce#0", "final-reduce", 2, "pending"),
    ]


def test_a_failed_item_has_the_title_and_the_start_of_its_trace() -> None:
    """S-STU-244: no model call of it is recorded, and no plan has its text."""
    head = fact("plan", "run", 100.0, plan={}, items={"kind": "list", "count": 2}, workflow="map", agents=[])
    trace = {"task_description": "Read item 1", "agent_role": "Reader", "started_at": "1970-01-01T00:01:42Z"}
    failed = fact("task_failed", "map-1#0", 105.0, error_type="BoomError", message="no", stack_trace=None, trace=trace)
    found = row_of(folded(head, fact("items", "run", 101.0, first=0, digests=["a", "b"]), failed), "map-1#0")
    assert (found.title, found.agent) == ("Read item 1", "Reader")
    assert (found.started_at, found.ended_at) == (102_000, 105_000)


def test_an_item_of_several_tasks_runs_when_the_first_of_them_does() -> None:
    """S-STU-244."""
    head = fact("plan", "run", 100.0, plan={}, items={"kind": "list", "count": 1}, workflow="map", agents=[])
    pulled = fact("items", "run", 101.0, first=0, digests=["a"])
    view = folded(head, pulled, model("map-0#0/loop:refine#0/draft#0", 0, 103.0))
    found = row_of(view, "map-0#0")
    assert (found.status, found.started_at) == ("running", row_of(view, "map-0#0/loop:refine#0/draft#0").started_at)


async def test_work_that_was_handed_on_belongs_to_who_asked(tmp_path: Path) -> None:
    """S-STU-14: with the worker's role and the question; what was refused is no step, what failed failed."""
    await Counted().peers().arun(runtime=InlineRuntime(home=tmp_path), run_id="asks")
    facts = await SqliteStore(tmp_path).facts("asks")
    view = StepsView()
    for each in facts:
        view.apply(each)
    found = [(row.id.count("delegate#"), row.kind, row.title, row.agent, row.status) for row in view.rows()]
    assert found == [
        (0, "task", "Ask around", "Asker", "completed"),
        (1, "delegation", "dig", "Researcher", "completed"),
        (1, "delegation", "break", "Breaker", "failed"),
        (2, "delegation", "check the site", "Checker", "completed"),
        (3, "delegation", "note it", "Writer", "completed"),
    ]
    parents = {row.parent for row in view.rows() if row.parent}
    assert parents < {row.id for row in view.rows()}
    assert [name for name, _, _ in row_of(view, "ask#0").tools] == ["delegate"] * 3


def test_very_many_steps_are_counted_and_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-STU-19: the first ones are told."""
    monkeypatch.setattr("ensemble_ray.studio.views.steps.MOST_STEPS", 3)
    view = folded(*begun(*(node(f"t{n}", "d") for n in range(5))))
    assert (len(view.rows()), view.history.left_out) == (3, 2)
