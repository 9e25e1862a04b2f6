"""Guardrails in runs: when they are asked, what a refusal leads to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    AgentExecutionError,
    Ensemble,
    GuardrailInput,
    GuardrailOutput,
    GuardrailResult,
    GuardrailViolationError,
    OutputParsingError,
    Runtime,
    TaskExecutionError,
    TaskFailedEvent,
    tool,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.teams import Marks, Watcher


class City(BaseModel):
    """A typed answer."""

    name: str


def accept(_: object) -> GuardrailResult:
    """Say yes."""
    return GuardrailResult.success()


def refuse(reason: str) -> Callable[[object], GuardrailResult]:
    """Say no."""
    return lambda _: GuardrailResult.failure(reason)


def test_input_violation_stops_the_task_before_any_work(runtime: Runtime) -> None:
    """S-GRD-4, S-GRD-7, S-GRD-8, S-ERR-17, S-EVT-13: failed event with that error, then the wrapper."""
    model, watcher = ScriptedModel("first"), Watcher()
    writer = agent(model)
    tasks = [task("one", writer), task("of {x}", writer, input_guardrails=[accept, refuse("too risky")])]
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=tasks, listeners=[watcher]).run({"x": "bees"}, runtime=runtime)
    cause = caught.value.__cause__
    assert isinstance(cause, GuardrailViolationError)
    assert str(cause) == "INPUT guardrail violation on agent 'Writer' task 'of bees': too risky"
    assert (cause.guardrail_type, cause.violation_message) == ("input", "too risky")
    assert (cause.task_description, cause.agent_role) == ("of bees", "Writer")
    assert [each.raw for each in caught.value.completed_task_outputs] == ["first"]
    assert len(model.calls) == 1
    (failed,) = watcher.of(TaskFailedEvent)
    assert isinstance(failed.cause, GuardrailViolationError)
    assert "on_task_input" not in watcher.methods[watcher.methods.index("on_task_complete") :]


def test_output_violation_discards_the_answer(inline_runtime: Runtime) -> None:
    """S-GRD-5, S-GRD-7, S-GRD-9: after the whole loop; the refused output is nowhere."""

    @tool
    def look() -> str:
        """Look."""
        return "seen"

    def inspect(asked: GuardrailOutput) -> GuardrailResult:
        assert (asked.raw_response, asked.parsed_output) == ("rude words", None)
        assert (asked.task_description, asked.agent_role) == ("write", "Writer")
        return GuardrailResult.failure("rude")

    model = ScriptedModel(call("look"), "rude words")
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("write", agent(model, tools=[look]), output_guardrails=[inspect])]).run(
            runtime=inline_runtime
        )
    assert str(caught.value.__cause__) == "OUTPUT guardrail violation on agent 'Writer' task 'write': rude"
    assert caught.value.completed_task_outputs == ()
    assert len(model.calls) == 2


def test_first_refusal_stops_the_asking(inline_runtime: Runtime, tmp_path: Path) -> None:
    """S-GRD-6: in list order."""
    marks = Marks(tmp_path / "marks")

    def noting(name: str, verdict: GuardrailResult) -> Callable[[object], GuardrailResult]:
        def note(_: object) -> GuardrailResult:
            marks.add(name)
            return verdict

        return note

    guards = [
        noting("a", GuardrailResult.success()),
        noting("b", GuardrailResult.failure("b says no")),
        noting("c", GuardrailResult.failure("c says no")),
    ]
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("go", agent(ScriptedModel("x")), output_guardrails=guards)]).run(runtime=inline_runtime)
    assert marks.lines == ["a", "b"]
    assert str(caught.value.__cause__).endswith(": b says no")


def test_input_guardrail_sees_context_in_its_order(inline_runtime: Runtime) -> None:
    """S-GRD-16, S-GRD-2, S-GRD-10: resolved texts."""

    def inspect(asked: GuardrailInput) -> GuardrailResult:
        found = [each.raw for each in asked.context_outputs]
        return GuardrailResult.failure(f"{asked.task_description} {asked.expected_output} {found} {asked.agent_role}")

    writer = agent(ScriptedModel("A", "B"))
    one, two = task("one", writer), task("two", writer)
    last = task("of {x}", writer, context=[two, one], expected_output="{x}s", input_guardrails=[inspect])
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[one, two, last]).run({"x": "bee"}, runtime=inline_runtime)
    cause = caught.value.__cause__
    assert isinstance(cause, GuardrailViolationError)
    assert cause.violation_message == "of bee bees ['B', 'A'] Writer"


def test_output_guardrail_sees_the_parsed_object(inline_runtime: Runtime) -> None:
    """S-GRD-5, S-OUT-37: it is asked after parsing, about the original answer."""

    def inspect(asked: GuardrailOutput) -> GuardrailResult:
        assert isinstance(asked.parsed_output, City)
        return GuardrailResult.failure(f"{asked.parsed_output.name} from {asked.raw_response}")

    model = ScriptedModel("Bern", '{"name": "Bern"}')
    typed = task("where", agent(model), output_type=City, output_guardrails=[inspect])
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[typed]).run(runtime=inline_runtime)
    assert str(caught.value.__cause__).endswith(": Bern from Bern")


def test_unparsable_answer_reaches_no_output_guardrail(inline_runtime: Runtime, tmp_path: Path) -> None:
    """S-GRD-13."""
    marks = Marks(tmp_path / "marks")

    def note(_: object) -> GuardrailResult:
        marks.add("asked")
        return GuardrailResult.success()

    typed = task("x", agent(ScriptedModel("no")), output_type=City, max_output_retries=0, output_guardrails=[note])
    with pytest.raises(OutputParsingError):
        Ensemble(tasks=[typed]).run(runtime=inline_runtime)
    assert marks.lines == []


@pytest.mark.parametrize("kind", ["input", "output"])
def test_broken_guardrail_fails_closed(inline_runtime: Runtime, kind: str) -> None:
    """S-GRD-11: raising is no permission."""

    def broken(_: object) -> GuardrailResult:
        raise LookupError("no list of words")

    fields = {f"{kind}_guardrails": [broken]}
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("go", agent(ScriptedModel("x")), **fields)]).run(runtime=inline_runtime)
    cause = caught.value.__cause__
    assert isinstance(cause, AgentExecutionError)
    assert str(cause) == "Agent 'Writer': guardrail 'broken' raised LookupError: no list of words"
    assert isinstance(cause.__cause__, LookupError)


def test_guardrail_that_gives_no_verdict_is_named(inline_runtime: Runtime) -> None:
    """S-GRD-11."""
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("go", agent(ScriptedModel("x")), output_guardrails=[lambda _: True])]).run(
            runtime=inline_runtime
        )
    text = str(caught.value.__cause__)
    assert text.startswith("Agent 'Writer': Guardrail '")
    assert "returned bool" in text


async def yes(_: object) -> GuardrailResult:
    """An async guardrail."""
    return GuardrailResult.success()


def test_async_guardrails_are_awaited(runtime: Runtime) -> None:
    """S-CONV-16."""
    guarded = task("go", agent(ScriptedModel("x")), input_guardrails=[yes], output_guardrails=[yes])
    assert Ensemble(tasks=[guarded]).run(runtime=runtime).raw == "x"


def test_no_guardrails_change_nothing(inline_runtime: Runtime) -> None:
    """S-GRD-12: empty lists have no effect."""
    plain = task("go", agent(ScriptedModel("x")), input_guardrails=[], output_guardrails=[])
    assert Ensemble(tasks=[plain]).run(runtime=inline_runtime).raw == "x"


def test_violation_is_a_line_in_the_log(inline_runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """S-GRD-12, S-ERR-46: INFO, the description cut to 80; the error is raised."""
    caplog.set_level(logging.INFO, logger="ensemble_ray")
    guarded = task("d" * 100, agent(ScriptedModel()), input_guardrails=[refuse("no")])
    with pytest.raises(TaskExecutionError):
        Ensemble(tasks=[guarded]).run(runtime=inline_runtime)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert any("Guardrail: no" in line and f"[task: {'d' * 80}]" in line for line in lines)


def test_guardrails_of_parallel_tasks_may_overlap(runtime: Runtime, tmp_path: Path) -> None:
    """S-GRD-14: two meet, which one after the other could never do."""
    marks = Marks(tmp_path / "marks")

    def meet(asked: GuardrailInput) -> GuardrailResult:
        marks.add(asked.task_description)
        marks.wait("a")
        marks.wait("b")
        return GuardrailResult.success()

    writer = agent(ScriptedModel(otherwise="x"))
    tasks = [task(name, writer, input_guardrails=[meet]) for name in ("a", "b")]
    assert len(Ensemble(tasks=tasks, workflow="parallel").run(runtime=runtime).task_outputs) == 2


def test_guardrails_of_concurrent_runs_meet_no_other_run(runtime: Runtime) -> None:
    """S-CONV-37, S-GRD-14: short runs at the same time; each hears its own verdicts."""
    from concurrent.futures import ThreadPoolExecutor

    def only_even(asked: GuardrailInput) -> GuardrailResult:
        number = int(asked.task_description.split()[-1])
        return GuardrailResult.success() if number % 2 == 0 else GuardrailResult.failure(f"{number} is odd")

    ensemble = Ensemble(tasks=[task("number {n}", agent(ScriptedModel(otherwise="x")), input_guardrails=[only_even])])
    told: dict[int, str] = {}
    lock = threading.Lock()

    def one(number: int) -> None:
        try:
            text = ensemble.run({"n": number}, runtime=runtime).raw
        except TaskExecutionError as error:
            text = str(error.__cause__).rpartition(": ")[2]
        with lock:
            told[number] = text

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(6)))
    assert told == {n: "x" if n % 2 == 0 else f"{n} is odd" for n in range(6)}
