"""Log fields: what a record is given where, in whatever process, and that nothing is left behind."""

from __future__ import annotations

import logging
import threading

import pytest

from ensemble_ray import Ensemble, LogContextFilter, Runtime, TaskExecutionError, tool
from ensemble_ray.process.context import current_log_context, log_context
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.teams import PATIENCE_S, by_task, told_by_us


@tool
def record_fields() -> str:
    """Log a line and give what the filter put on its record."""
    kept: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record)

    handler = Keep()
    handler.addFilter(LogContextFilter())
    log = logging.getLogger(f"user.tool.{id(kept)}")  # its own: two tasks may call it at the same time
    log.addHandler(handler)
    log.warning("a line of the user's")
    log.removeHandler(handler)
    (record,) = kept
    fields: dict[str, str] = record.ensemble_context  # type: ignore[attr-defined]
    assert all(getattr(record, name.replace(".", "_")) == value for name, value in fields.items())
    return "; ".join(f"{name}={value}" for name, value in sorted(fields.items()))


def seen_by(model: ScriptedModel) -> str:
    """What the tool saw, as it was sent to the model."""
    return model.calls[-1].messages[-1].content or ""


def test_records_of_a_sequential_task_carry_its_fields(runtime: Runtime) -> None:
    """S-ENG-21, S-ENG-23, S-ENG-24, S-ENG-25, S-ENG-26, S-CONV-35: in the process of the agent as well."""
    model = ScriptedModel("first", call("record_fields"), "done")
    writer = agent(model, tools=[record_fields])
    long = "d" * 100
    output = Ensemble(tasks=[task("short", writer), task(long, writer)]).run(runtime=runtime)
    assert seen_by(model) == (
        f"agent.role=Writer; ensemble.id={output.run_id}; task.description={'d' * 80}...; task.index=2/2"
    )


def test_callers_own_fields_are_carried_along(runtime: Runtime) -> None:
    """S-CONV-35, S-PAR-16, S-ENG-20: and are as before afterwards."""
    model = ScriptedModel(call("record_fields"), "done")
    with log_context({"request.id": "r-1"}):
        Ensemble(tasks=[task("go", agent(model, tools=[record_fields]))]).run(runtime=runtime)
        assert dict(current_log_context()) == {"request.id": "r-1"}
    assert "request.id=r-1" in seen_by(model)
    assert dict(current_log_context()) == {}


def test_parallel_tasks_do_not_see_each_others_fields(runtime: Runtime) -> None:
    """S-PAR-16, S-ENG-26: same run id, each its own role."""
    meeting = threading.Barrier(2)

    def first(_asked: ScriptedCall) -> object:
        meeting.wait(PATIENCE_S)
        return call("record_fields")

    def script() -> ScriptedModel:
        return ScriptedModel(first, lambda asked: asked.messages[-1].content)

    tasks = [task(role, agent(script(), role, tools=[record_fields])) for role in ("Ann", "Bob")]
    output = Ensemble(tasks=tasks, workflow="parallel").run(runtime=runtime)
    assert sorted(each.raw for each in output.task_outputs) == [
        f"agent.role={role}; ensemble.id={output.run_id}" for role in ("Ann", "Bob")
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_run_is_left_with_the_caller(inline_runtime: Runtime, *, fails: bool) -> None:
    """S-ENG-2, S-ENG-20: also on failure."""
    ensemble = Ensemble(tasks=[task("go", agent(ScriptedModel(ValueError("no") if fails else "x")))])
    if fails:
        with pytest.raises(TaskExecutionError):
            ensemble.run(runtime=inline_runtime)
    else:
        ensemble.run(runtime=inline_runtime)
    assert dict(current_log_context()) == {}


def test_fields_of_a_task_do_not_leak_into_the_next(runtime: Runtime) -> None:
    """S-ENG-20: each task has its own index and role only."""

    def tell(_context: object) -> str:
        return "; ".join(f"{name}={value}" for name, value in sorted(current_log_context().items()))

    model = ScriptedModel(otherwise=by_task(one="1"))
    output = Ensemble(tasks=[task("one", agent(model)), task("two", handler=tell)]).run(runtime=runtime)
    assert output.raw == (
        f"agent.role=(deterministic); ensemble.id={output.run_id}; task.description=two; task.index=2/2"
    )


def test_lines_of_the_library_carry_the_run(inline_runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """S-ENG-2, S-ENG-21: from the first line to the last."""
    caplog.handler.addFilter(LogContextFilter())
    with caplog.at_level(logging.INFO, logger="ensemble_ray"):
        output = Ensemble(tasks=[task("go", agent(ScriptedModel("x")))]).run(runtime=inline_runtime)
    told = told_by_us(caplog.records)
    assert told
    assert {record.ensemble_id for record in told} == {output.run_id}  # type: ignore[attr-defined]
    inside = [record for record in told if record.name.startswith("ensemble_ray.execute")]
    assert inside
    assert {record.agent_role for record in inside} == {"Writer"}  # type: ignore[attr-defined]
