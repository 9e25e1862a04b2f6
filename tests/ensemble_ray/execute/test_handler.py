"""Handlers as effects: what is recorded of them, and what becomes of one that was begun before a crash."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import date
from typing import Literal

import pytest
from msgspec.structs import replace
from pydantic import BaseModel

from ensemble_ray import (
    AgentExecutionError,
    Effect,
    Task,
    TaskHandlerContext,
    ToolResult,
    UnknownEffect,
    UnknownOutcomeError,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import FailureRecorded
from ensemble_ray.ports import Persistence
from ensemble_ray.values.ids import uuid_of
from ensemble_ray.values.task_output import type_name
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench, Search, WatchedJournal

NAME = "count#0/0/handler"


class Count(BaseModel):
    """A structured output."""

    number: int
    day: date


class Counting:
    """A handler that keeps the keys it was called under."""

    def __init__(self, returned: object = "42") -> None:
        self.returned = returned
        self.keys: list[str] = []

    def __call__(self, context: TaskHandlerContext) -> object:
        self.keys.append(context.idempotency_key)
        if isinstance(self.returned, Exception):
            raise self.returned
        return self.returned


def bench_of(handler: object, *, known: list[Fact] | None = None, **fields: object) -> tuple[Bench, WatchedJournal]:
    """A task with that handler; `fields` of the task, and `on_unknown` and `ask` of the run."""
    journal = WatchedJournal(known or [])
    context = replace(RUN_CONTEXT, on_unknown=str(fields.pop("on_unknown", "tell_model")))
    ask = fields.pop("ask", None)
    bench = Bench(journal=journal, context=context, ask_unknown=ask)  # type: ignore[arg-type]  a callable
    task = Task(description="Count", expected_output="A number", handler=handler, **fields)  # type: ignore[arg-type]
    bench.tasks["count"] = task  # its callables look into the same mapping
    return bench, journal


async def begun(effect: Effect = "once") -> list[Fact]:
    """What a process recorded that died in the handler."""
    bench, journal = bench_of(Counting(), effect=effect)
    await bench.run("count")
    return journal.facts()[:1]


@pytest.mark.parametrize(
    ("effect", "degree"),
    [("none", Persistence.QUEUED), ("idempotent", Persistence.SYNCED), ("once", Persistence.SYNCED)],
)
async def test_intent_is_on_the_disk_when_a_handler_has_an_effect(effect: Effect, degree: Persistence) -> None:
    """S-DUR-3, S-DUR-25: and its result is in the record before the output that follows is."""
    bench, journal = bench_of(Counting(), effect=effect)
    await bench.run("count")
    assert journal.degrees_of("tool_intent") == [("tool_intent", degree)]
    intent, result, output = journal.facts()
    assert (intent.name, intent.data.to_data()) == (NAME, {"tool_name": "handler", "arguments": "", "effect": effect})
    assert (result.name, result.data.to_data()["outcome"], result.data.to_data()["text"]) == (NAME, "success", "42")
    assert output.kind == "output"


@pytest.mark.parametrize(("end", "outcome"), [("42", "success"), (ValueError("no"), "error")])
async def test_lines_of_a_handler_are_recorded_with_its_result(end: object, outcome: str) -> None:
    """S-TOOL-35: of one that fails, too; a handler that prints nothing has none in its fact."""

    def counting(context: TaskHandlerContext) -> object:
        print("counted", context.description)  # noqa: T201  the subject of this test
        logging.getLogger("counter").error("seven missing")
        if isinstance(end, Exception):
            raise end
        return end

    bench, journal = bench_of(counting)
    await bench.run("count")
    result = journal.facts()[1].data.to_data()
    assert (result["outcome"], result["log"]) == (outcome, ["counted Count", "ERROR counter: seven missing"])
    bench, journal = bench_of(Counting())
    await bench.run("count")
    assert "log" not in journal.facts()[1].data.to_data()


async def test_handler_is_not_called_when_its_result_is_recorded() -> None:
    """S-DUR-25: its structured output is of the task's type again."""
    returned = Count(number=3, day=date(2026, 1, 2))
    bench, journal = bench_of(Counting(ToolResult.success("three", returned)), output_type=Count)
    first = await bench.run("count")
    again = Counting("never")
    other, _ = bench_of(again, known=journal.facts()[:2], output_type=Count)
    second = await other.run("count", epoch=1)
    assert again.keys == []
    assert first.output is not None
    assert second.output is not None
    assert (second.output.raw, second.output.parsed_output) == ("three", returned)
    assert (first.output.raw, first.output.parsed_output) == ("three", returned)


async def test_recorded_structured_output_stays_data_when_the_type_changed(caplog: pytest.LogCaptureFixture) -> None:
    """S-DUR-25: with a warning; the work is not done again for that."""
    bench, journal = bench_of(Counting(ToolResult.success("x", {"other": 1})), output_type=dict)
    await bench.run("count")
    other, _ = bench_of(Counting("never"), known=journal.facts()[:2], output_type=Count)
    result = await other.run("count", epoch=1)
    assert result.output is not None
    assert result.output.parsed_output == {"other": 1}
    assert "stays JSON data" in caplog.text


@dataclass
class Leg:
    """A value without pydantic."""

    start: str


class Index:
    """An object without a text."""

    def __init__(self, *words: str) -> None:
        self.words = words


INDEX = Index("tide")


@pytest.mark.parametrize(
    ("returned", "raw", "parsed"),
    [
        ("yes", "yes", None),
        ({"b": [1, None]}, '{"b":[1,null]}', {"b": [1, None]}),
        ([Leg("Bern")], '[{"start":"Bern"}]', [Leg("Bern")]),
        (Count(number=3, day=date(2026, 1, 2)), '{"number":3,"day":"2026-01-02"}', Count(number=3, day=date(2026, 1, 2))),
        (42, "42", 42),
        (0.5, "0.5", 0.5),
        (INDEX, f"<{__name__}.Index object>", INDEX),
        (b"\xff", r"b'\xff'", b"\xff"),
        (ToolResult.success("found", INDEX), "found", INDEX),
        (ToolResult.success("found"), "found", None),
        (ToolResult.success({"a": 1}), '{"a":1}', {"a": 1}),
    ],
)  # fmt: skip
async def test_result_of_a_handler_is_text_and_object(returned: object, raw: str, parsed: object) -> None:
    """S-DET-6, S-DET-9, S-LLM-49: without an output type, too; an object without a text is named by its class."""
    bench, _ = bench_of(Counting(returned))
    output = (await bench.run("count")).output
    assert output is not None
    assert (output.raw, output.parsed_output) == (raw, parsed)


async def later(_: object) -> list[int]:
    return [1, 2]


async def one_by_one(_: object) -> AsyncIterator[int]:
    yield 1
    yield 2


@pytest.mark.parametrize("handler", [later, one_by_one, lambda _: iter([1, 2]), lambda _: later(None)])
async def test_items_of_a_handler_are_collected(handler: object) -> None:
    """S-LLM-45."""
    bench, _ = bench_of(handler)
    output = (await bench.run("count")).output
    assert output is not None
    assert (output.raw, output.parsed_output) == ("[1,2]", [1, 2])


@pytest.mark.parametrize(
    ("output_type", "returned", "parsed"),
    [
        (Count, {"number": 3, "day": "2026-01-02"}, Count(number=3, day=date(2026, 1, 2))),
        (list[Leg], [{"start": "Bern"}], [Leg("Bern")]),
        (Index, INDEX, INDEX),
        (str, "yes", "yes"),
        (Literal["yes", "no"], "yes", "yes"),
        (int | None, 42, 42),
        (Count, "no value", None),
        (dict[str, int], ToolResult.success("one", {"a": 1}), {"a": 1}),
        (Index | None, INDEX, INDEX),
        (Count, '{"number": 3, "day": "2026-01-02"}', Count(number=3, day=date(2026, 1, 2))),
        (Leg | None, '{"start": "Bern"}', Leg("Bern")),
        (list[int], "[1,2]", [1, 2]),
        (Index, "no value", None),
        (str, {"a": 1}, '{"a":1}'),
        (str, 5, "5"),
        (str, Leg("Bern"), '{"start":"Bern"}'),
        (dict, Count(number=3, day=date(2026, 1, 2)), {"number": 3, "day": "2026-01-02"}),
    ],
)
async def test_result_of_a_handler_is_of_the_output_type(output_type: object, returned: object, parsed: object) -> None:
    """S-DET-6: the value if it fits, else what its text is parsed into; None for a text that does not fit."""
    bench, _ = bench_of(Counting(returned), output_type=output_type)
    output = (await bench.run("count")).output
    assert output is not None
    assert output.parsed_output == parsed


@pytest.mark.parametrize(
    ("output_type", "returned"),
    [
        (Count, {"day": 1}),
        (list[int], ["a"]),
        (Index, 5),
        (list[Index], [INDEX]),
        (list["Citty"], ["x"]),  # type: ignore[name-defined]  # noqa: F821  a class that is not there
    ],
)
async def test_task_fails_when_the_handlers_result_is_of_another_type(output_type: object, returned: object) -> None:
    """S-DET-6."""
    bench, _ = bench_of(Counting(returned), output_type=output_type)
    failed = await bench.run("count")
    assert str(failed.error).startswith("Deterministic task handler returned a ")
    assert f", which is no {type_name(output_type)}: " in str(failed.error)
    assert "errors.pydantic.dev" not in str(failed.error)


async def test_recorded_object_stays_data_when_pydantic_does_not_know_its_class(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """S-DET-6, S-DUR-36: the run can be read and resumed; with a warning."""
    bench, journal = bench_of(Counting(INDEX), output_type=Index)
    await bench.run("count")
    for known in (journal.facts()[:2], journal.facts()):
        caplog.clear()
        other, _ = bench_of(Counting("never"), known=known, output_type=Index)
        output = (await other.run("count", epoch=1)).output
        assert output is not None
        assert str(output.parsed_output).startswith(f"<{__name__}.Index object")
        assert "no longer fits Index" in caplog.text


async def test_recorded_result_without_a_type_is_data() -> None:
    """S-DET-6, S-DUR-25: the record has JSON; with an output type it is an object again."""
    bench, journal = bench_of(Counting([Leg("Bern")]))
    await bench.run("count")
    again, _ = bench_of(Counting("never"), known=journal.facts()[:2])
    output = (await again.run("count", epoch=1)).output
    assert output is not None
    assert output.parsed_output == [{"start": "Bern"}]
    typed, _ = bench_of(Counting("never"), known=journal.facts()[:2], output_type=list[Leg])
    output = (await typed.run("count", epoch=1)).output
    assert output is not None
    assert output.parsed_output == [Leg("Bern")]


@pytest.mark.parametrize(
    ("returned", "outcome", "text"),
    [
        (ValueError("no"), "error", "Deterministic task handler threw an exception: no (ValueError)"),
        (None, "failure", "Deterministic task handler returned null for task: Count"),
        (ToolResult.failure("empty"), "failure", "Deterministic task failed: empty"),
    ],
)
async def test_failure_of_a_handler_is_recorded_and_told_again(returned: object, outcome: str, text: str) -> None:
    """S-DUR-25, S-DET-5: it is not called again either."""
    bench, journal = bench_of(Counting(returned))
    assert str((await bench.run("count")).error) == text
    result = journal.facts()[1]
    assert (result.kind, result.data.to_data()["outcome"], result.data.to_data()["text"]) == (
        "tool_result",
        outcome,
        text,
    )
    again = Counting("never")
    other, _ = bench_of(again, known=journal.facts()[:2])
    failed = await other.run("count", epoch=1)
    assert isinstance(failed.error, AgentExecutionError)
    assert (str(failed.error), again.keys) == (text, [])


@pytest.mark.parametrize("effect", ["none", "idempotent"])
async def test_handler_is_called_again_under_the_same_key_when_its_effect_allows_it(effect: Effect) -> None:
    """S-DUR-23, S-DUR-25."""
    again = Counting()
    bench, _ = bench_of(again, known=await begun(effect), effect=effect)
    assert (await bench.run("count", epoch=1)).status == "completed"
    assert again.keys == [uuid_of(f"run/{NAME}")]


async def test_tool_as_handler_finds_the_key_in_its_context() -> None:
    """S-DUR-23: as it does when a model calls it."""
    search = Search("idempotent")
    bench, _ = bench_of(search)
    await bench.run("count")
    assert search.keys == [uuid_of(f"run/{NAME}")]


@pytest.mark.parametrize("how", ["tell_model", "fail"])
async def test_unknown_outcome_of_a_handler_fails_the_task(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """S-DUR-25, S-DUR-26: there is no model to tell; one WARN line."""
    again = Counting()
    bench, _ = bench_of(again, known=await begun(), on_unknown=how)
    result = await bench.run("count", epoch=1)
    assert isinstance(result.error, UnknownOutcomeError)
    assert (result.error.effect, result.error.tool_name, again.keys) == (NAME, "handler", [])
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line == (
        "Task 'count': its handler was called at 1970-01-01T00:16:40+00:00 and did not return: its outcome is unknown"
    )


async def test_handler_is_called_again_when_somebody_says_so() -> None:
    """S-DUR-24, S-DUR-25: asked with the key under which it was begun."""
    asked: list[UnknownEffect] = []

    def ask(effect: UnknownEffect) -> str:
        asked.append(effect)
        return "repeat"

    again = Counting()
    bench, _ = bench_of(again, known=await begun(), on_unknown="ask", ask=ask)
    assert (await bench.run("count", epoch=1)).status == "completed"
    assert [effect.idempotency_key for effect in asked] == again.keys == [uuid_of(f"run/{NAME}")]


async def test_output_says_so_when_a_handler_is_confirmed_to_be_done() -> None:
    """S-DUR-25, S-DUR-26: the trace has the outcome, the output what is known."""
    again = Counting()
    bench, journal = bench_of(again, known=await begun(), on_unknown="ask", ask=lambda _: "done")
    result = await bench.run("count", epoch=1)
    assert again.keys == []
    assert result.output is not None
    assert "What it returned is lost" in result.output.raw
    assert result.output.trace is not None
    assert result.output.trace.metadata == {"outcome": "unknown"}
    assert (await journal.lookup_recorded("count#0"))[NAME, "tool_result"].data.to_data()["outcome"] == "unknown"


async def test_failure_of_a_handler_is_recorded_as_its_own() -> None:
    """S-MR-155: a provider that a handler asked refused no model call of the run."""
    bench, journal = bench_of(Counting(LookupError("no list")))
    await bench.run("count")
    failures = [fact.data for fact in journal.facts() if isinstance(fact.data, FailureRecorded)]
    assert [failure.is_of_callable for failure in failures] == [True]
