"""Evaluations of teams with deps, a user, a redactor, and options of their runs."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from ensemble_ray import (
    Agent,
    Case,
    Ensemble,
    EnsembleOutput,
    Evaluation,
    Judge,
    Redactor,
    RunOptions,
    Task,
    TaskHandlerContext,
    ToolContext,
    ValidationError,
    provide,
    tool,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import call

from .teams import capital_of, make_cases, make_runtime, make_team


@dataclass
class Shop:
    prices: dict[str, int]


CASES = [Case("tea", {"item": "tea"}, expected=3), Case("rice", {"item": "rice"}, expected=2)]


def price_of(context: TaskHandlerContext[Shop]) -> str:
    return f"{context.deps.prices[context.inputs['item']]} for {context.user}"


def make_shop() -> Shop:
    return Shop({"tea": 3, "rice": 2})


SELLING = Ensemble(tasks=[Task("Sell {item}", handler=price_of)], deps_type=Shop)


@pytest.mark.parametrize("deps", [make_shop(), provide(make_shop)], ids=["value", "provided"])
def test_every_run_has_the_deps_when_they_are_an_option(home: str, deps: object) -> None:
    """S-EVL-28, S-CTX-20: and an evaluation without them ends before its first run."""
    evaluation = Evaluation(SELLING, CASES, "numeric", id="shop", options=RunOptions(deps=deps, user="ada"))
    with pytest.raises(ValidationError, match="the run has no deps"):
        evaluation.replace(options=None).run(runtime=make_runtime(home))
    result = evaluation.run(runtime=make_runtime(home))
    assert [case.runs[0].output for case in result.cases] == ["3 for ada", "2 for ada"]
    assert evaluation.run(runtime=make_runtime(home)) == result
    assert result.summary("numeric").mean == 1.0


async def test_a_resumed_run_has_the_deps_when_its_evaluation_starts_again(home: str) -> None:
    """S-EVL-28, S-CTX-50."""
    reached, is_open = threading.Event(), threading.Event()

    async def wait(context: TaskHandlerContext[Shop]) -> str:
        if not is_open.is_set():
            reached.set()
            await asyncio.Event().wait()
        return price_of(context)

    team = Ensemble(tasks=[Task("Sell {item}", handler=wait, effect="none")], deps_type=Shop)
    evaluation = Evaluation(team, CASES, "numeric", id="shop", concurrency=1)
    running = asyncio.create_task(evaluation.arun(runtime=make_runtime(home), deps=make_shop(), user="ada"))
    await asyncio.to_thread(reached.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    is_open.set()
    result = await evaluation.arun(runtime=make_runtime(home), deps=make_shop())
    assert [case.runs[0].output for case in result.cases] == ["3 for ada", "2 for "]


def test_the_answer_of_a_tool_is_scored_when_it_reads_the_deps(home: str) -> None:
    """S-EVL-28, S-CTX-1: a judge's run has no deps."""

    @tool(effect="none")
    def look_up(context: ToolContext[Shop]) -> str:
        """Look up the price."""
        return str(context.deps.prices[context.inputs["item"]])

    def answer(asked: ScriptedCall) -> object:
        if "Judge an output" in asked.text:
            return '{"reason": "right", "score": 1}'
        last = asked.messages[-1]
        return last.content if last.role == "tool" else call("look_up", "{}")

    model = ScriptedModel(otherwise=answer)
    team = Ensemble(tasks=[Task("Sell {item}", agent=Agent("Seller", "Sell", tools=[look_up], llm=model))], llm=model)
    evaluation = Evaluation(team, CASES, ["numeric", Judge("Right?")], id="tools")
    result = evaluation.run(runtime=make_runtime(home), deps=make_shop())
    assert [result.mean(name) for name in result.scorers] == [1.0, 1.0]
    asked = len(model.calls)
    assert evaluation.run(runtime=make_runtime(home), deps=make_shop()) == result
    assert len(model.calls) == asked


def test_scorers_compare_placeholders_when_the_team_has_a_redactor(home: str) -> None:
    """S-EVL-27: no record has the value, also not those of judges and of the result."""

    def answer(asked: ScriptedCall) -> str:
        if "Judge an output" in asked.text:
            return '{"reason": "right", "score": 1}'
        return asked.text.partition("Repeat ")[2].split("\n")[0]

    model = ScriptedModel(otherwise=answer)
    writer = Agent("Writer", "Repeat", llm=model)
    team = Ensemble(tasks=[Task("Repeat {letter}", agent=writer)], redactor=Redactor(patterns="email"), llm=model)

    def is_private(output: EnsembleOutput, case: Case) -> bool:
        return "@" not in f"{output.text} {case.expected} {case.inputs}"

    cases = [Case("ann", {"letter": "ann@corp.example"}, expected="ann@corp.example")]
    evaluation = Evaluation(team, cases, ["exact", is_private, Judge("Right?")], id="letters", repeats=2)
    result = evaluation.run(runtime=make_runtime(home))
    assert [result.mean(name) for name in result.scorers] == [1.0, 1.0, 1.0]
    assert (
        evaluation.run(runtime=make_runtime(home)) == result == Evaluation.load("letters", runtime=make_runtime(home))
    )
    assert all("@corp" not in each.text for each in model.calls)
    files = [each for each in Path(home).rglob("*") if each.is_file()]
    assert files
    assert [each for each in files if b"ann@corp" in each.read_bytes()] == []
    again = Evaluation.of_runs("evaluation=letters", ["exact"], cases=cases).run(runtime=make_runtime(home))
    assert again.mean("exact") == 1.0
    for each in (result, again):
        assert each.cases[0].expected == each.cases[0].runs[0].output
    with pytest.raises(ValidationError, match="'expected' contains a value that the redactor of the team replaces"):
        evaluation.replace(scorers="regex", id="other").run(runtime=make_runtime(home))


def test_prompts_have_the_text_when_additional_context_is_an_option(home: str) -> None:
    """S-EVL-22, S-EVL-28: another text is another evaluation."""
    model = ScriptedModel(otherwise=capital_of)
    options = RunOptions(additional_context="Write in capitals", max_iterations=3)
    evaluation = Evaluation(make_team(model), make_cases(), "exact", id="options", options=options)
    result = evaluation.run(runtime=make_runtime(home))
    assert all("Write in capitals" in each.text for each in model.calls)
    asked = len(model.calls)
    assert evaluation.run(runtime=make_runtime(home)) == result
    assert len(model.calls) == asked
    with pytest.raises(ValidationError, match="additional_context"):
        evaluation.run(runtime=make_runtime(home), additional_context="Write in small letters")
