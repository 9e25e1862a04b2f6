"""Tasks without a model: what a handler is given and may give back, and where it lives."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    AgentExecutionError,
    AgentTool,
    Ensemble,
    ExitEarlyError,
    ExitReason,
    GuardrailInput,
    GuardrailOutput,
    GuardrailResult,
    Runtime,
    Task,
    TaskExecutionError,
    TaskHandlerContext,
    ToolPipeline,
    ToolResult,
    run,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, task
from tests.scenarios.teams import Marks, Watcher, prompt_of

Handler = Callable[[TaskHandlerContext], object]


def handled(handler: object, description: str = "do it", **fields: object) -> Task:
    """A task that a handler does."""
    return task(description, handler=handler, **fields)


class Upper(AgentTool):
    name = "upper"
    description = "Makes text upper case."

    def execute(self, text: str, /) -> ToolResult:
        return ToolResult.success(text.upper())


class Exclaim(AgentTool):
    name = "exclaim"
    description = "Adds an exclamation mark."

    def execute(self, text: str, /) -> ToolResult:
        return ToolResult.success(f"{text}!")


class City(BaseModel):
    """A payload."""

    name: str


def test_handler_is_given_the_resolved_task_and_its_context(runtime: Runtime) -> None:
    """S-DET-1, S-DET-7, S-DET-9, S-DET-32, S-DET-33: outputs in context order, immutable."""

    def tell(context: TaskHandlerContext) -> str:
        outputs = context.context_outputs
        assert isinstance(outputs, tuple)
        return f"{context.description}|{context.expected_output}|{[each.raw for each in outputs]}"

    one, two = handled(lambda _: "1", "one"), handled(lambda _: "2", "two")
    last = handled(tell, "say {x}", context=[two, one], expected_output="an {x}")
    output = run(one, two, last, inputs={"x": "a"}, runtime=runtime)
    assert output.raw == "say a|an a|['2', '1']"


def test_output_of_a_handler_task_names_no_agent(inline_runtime: Runtime) -> None:
    """S-DET-4, S-ENG-18, S-MET-14, S-TRC-13, S-EVT-20: no model, no tool call, tokens are known to be 0."""
    watcher = Watcher()
    output = Ensemble(tasks=[handled(lambda _: "done")], listeners=[watcher]).run(runtime=inline_runtime)
    (done,) = output.task_outputs
    assert (done.agent_role, done.tool_call_count, done.raw) == ("(deterministic)", 0, "done")
    assert (done.metrics.input_tokens, done.metrics.output_tokens, done.metrics.total_tokens) == (0, 0, 0)
    assert done.metrics.llm_call_count == 0
    assert done.trace is not None
    assert (done.trace.prompts, done.trace.llm_interactions) == (None, ())
    assert watcher.methods == ["on_ensemble_started", "on_task_start", "on_task_complete", "on_ensemble_completed"]


@pytest.mark.parametrize("workflow", ["sequential", "parallel"])
def test_handlers_and_agents_mix_freely(runtime: Runtime, workflow: str) -> None:
    """S-DET-7: they supply and receive context, in both workflows."""
    model = ScriptedModel("written")
    facts = handled(lambda _: "facts", "find")
    text = task("write", agent(model), context=[facts])
    end = handled(lambda context: f"checked {context.context_outputs[0].raw}", "check", context=[text])
    output = Ensemble(tasks=[facts, text, end], workflow=workflow).run(runtime=runtime)
    assert output.raw == "checked written"
    assert "### (deterministic): find\nfacts" in prompt_of(model.calls[0])


def test_tool_as_handler_gets_the_last_context_or_the_description(inline_runtime: Runtime) -> None:
    """S-DET-2: also a pipeline."""
    first = handled(Upper(), "shout this")
    second = handled(
        ToolPipeline.of(Exclaim(), Exclaim()), "ignored", context=[handled(lambda _: "x", "not me"), first]
    )
    output = Ensemble(tasks=[second.context[0], first, second]).run(runtime=inline_runtime)
    assert [each.raw for each in output.task_outputs] == ["x", "SHOUT THIS", "SHOUT THIS!!"]


def test_no_handler_when_it_is_none(inline_runtime: Runtime) -> None:
    """S-DET-2: `handler=None` is no handler."""
    output = Ensemble(tasks=[task("go", agent(ScriptedModel("by a model")), handler=None)]).run(runtime=inline_runtime)
    assert output.raw == "by a model"


@pytest.mark.parametrize(
    ("handler", "text"),
    [
        pytest.param(
            lambda _: 1 / 0,
            "Deterministic task handler threw an exception: division by zero (ZeroDivisionError)",
            id="raises",
        ),
        pytest.param(lambda _: None, "Deterministic task handler returned null for task: do it", id="None"),
        pytest.param(lambda _: ToolResult.failure("not found"), "Deterministic task failed: not found", id="failure"),
    ],
)
def test_failing_handler_fails_its_task(runtime: Runtime, handler: Handler, text: str) -> None:
    """S-DET-5: role `(deterministic)`, wrapped as any failure, the cause kept."""
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[handled(handler)]).run(runtime=runtime)
    assert (str(caught.value), caught.value.agent_role) == (f"Task 'do it' failed: {text}", "(deterministic)")
    cause = caught.value.__cause__
    assert isinstance(cause, AgentExecutionError)
    assert (str(cause), cause.agent_role, cause.task_description) == (text, "(deterministic)", "do it")
    if "division" in text:
        assert isinstance(cause.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("output_type", [City, None])
def test_payload_is_the_parsed_output(inline_runtime: Runtime, output_type: type[City] | None) -> None:
    """S-DET-6, S-DOM-43: the text is not parsed."""
    handler = lambda _: ToolResult.success("no JSON at all", City(name="Bern"))  # noqa: E731
    output = Ensemble(tasks=[handled(handler, output_type=output_type)]).run(runtime=inline_runtime)
    (done,) = output.task_outputs
    assert (done.raw, done.parsed_output, done.output_type) == ("no JSON at all", City(name="Bern"), output_type)


def test_handlers_pass_objects_to_handlers(runtime: Runtime) -> None:
    """S-DET-6, S-LLM-49: objects of a script's own classes, too, which travel between processes by value."""

    class Index:
        def __init__(self, cities: list[City]) -> None:
            self.cities = cities

    async def cities(_: TaskHandlerContext) -> AsyncIterator[City]:
        yield City(name="Bern")

    def index(context: TaskHandlerContext) -> Index:
        return Index(context.context_outputs[0].parsed)

    first = handled(cities, "one")
    second = handled(index, "two", context=[first])
    last = handled(lambda context: context.context_outputs[0].parsed.cities, "three", context=[second])
    output = Ensemble(tasks=[first, second, last]).run(runtime=runtime)
    assert output.raw == '[{"name":"Bern"}]'
    assert output[last].parsed == [City(name="Bern")]
    assert output[second].raw.endswith("Index object>")
    assert output[second].parsed.cities == [City(name="Bern")]


@pytest.mark.parametrize(("timed_out", "reason"), [(False, ExitReason.USER_EXIT_EARLY), (True, ExitReason.TIMEOUT)])
def test_exit_early_of_a_handler_ends_the_run(inline_runtime: Runtime, *, timed_out: bool, reason: ExitReason) -> None:
    """S-DET-10, S-ENG-17, S-ERR-22: what was done before is kept, no error."""

    def leave(_: TaskHandlerContext) -> str:
        raise ExitEarlyError("enough", timed_out)

    tasks = [handled(lambda _: "first", "one"), handled(leave, "two"), handled(lambda _: "never", "three")]
    output = Ensemble(tasks=tasks).run(runtime=inline_runtime)
    assert ([each.raw for each in output.task_outputs], output.exit_reason) == (["first"], reason)
    assert not output.is_complete


def test_guardrails_stand_around_a_handler(inline_runtime: Runtime, tmp_path: Path) -> None:
    """S-DET-4, S-GRD-10: input, handler, output, in this order; their role is `(deterministic)`."""
    marks = Marks(tmp_path / "marks")

    def before(asked: GuardrailInput) -> GuardrailResult:
        marks.add(f"before {asked.agent_role} {asked.task_description}")
        return GuardrailResult.success()

    def after(asked: GuardrailOutput) -> GuardrailResult:
        marks.add(f"after {asked.agent_role} {asked.raw_response}")
        return GuardrailResult.success()

    def work(_: TaskHandlerContext) -> str:
        marks.add("work")
        return "done"

    Ensemble(tasks=[handled(work, "go {x}", input_guardrails=[before], output_guardrails=[after])]).run(
        {"x": "on"}, runtime=inline_runtime
    )
    assert marks.lines == ["before (deterministic) go on", "work", "after (deterministic) done"]


def test_async_and_sync_handlers_run_at_the_same_time(runtime: Runtime, tmp_path: Path) -> None:
    """S-CONV-16, S-PAR-10: two sync ones and an async one meet; none holds the loop."""
    marks = Marks(tmp_path / "marks")

    def meet(name: str) -> str:
        marks.add(name)
        for other in ("a", "b", "c"):
            marks.wait(other)
        return name

    async def meet_async(context: TaskHandlerContext) -> str:
        return await asyncio.to_thread(meet, context.description)

    tasks = [
        handled(lambda context: meet(context.description), "a"),
        handled(lambda context: meet(context.description), "b"),
        handled(meet_async, "c"),
    ]
    output = Ensemble(tasks=tasks, workflow="parallel").run(runtime=runtime)
    assert sorted(each.raw for each in output.task_outputs) == ["a", "b", "c"]


class Counting:
    """A handler with state; it works on the loop, since two threads could both count before either tells."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self, _: TaskHandlerContext) -> str:
        self.count += 1
        return f"{self.count} in {os.getpid()}"


def test_one_copy_of_a_handler_serves_a_run(runtime: Runtime) -> None:
    """S-SET-31, S-SET-29: its state is shared by all tasks of the run; on Ray the caller's own object is untouched."""
    handler = Counting()
    output = Ensemble(tasks=[handled(handler, f"t{n}") for n in range(3)], workflow="parallel").run(runtime=runtime)
    counts, processes = zip(*(each.raw.split(" in ") for each in output.task_outputs), strict=True)
    assert sorted(counts) == ["1", "2", "3"]
    assert len(set(processes)) == 1
    is_here = processes[0] == str(os.getpid())
    assert handler.count == (3 if is_here else 0)


def test_handlers_and_guardrails_of_a_run_share_one_process(runtime: Runtime) -> None:
    """S-SET-31: what both close over is one object."""
    seen: list[str] = []

    def work(_: TaskHandlerContext) -> str:
        seen.append("work")
        return "done"

    def look(_: GuardrailOutput) -> GuardrailResult:
        seen.append("look")
        return GuardrailResult.success()

    def tell(_: TaskHandlerContext) -> str:
        return ",".join(seen)

    model_task = task("ask", agent(ScriptedModel("answer")), output_guardrails=[look])
    output = Ensemble(tasks=[handled(work, "one"), model_task, handled(tell, "three")]).run(runtime=runtime)
    assert output.raw == "work,look"


class Locked:
    """A handler that could never be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, _: Any) -> str:
        with self.lock:
            return "locked"


def test_anything_works_as_handler_inline(inline_runtime: Runtime) -> None:
    """S-CONV-34: inline nothing is pickled."""
    assert Ensemble(tasks=[handled(Locked())]).run(runtime=inline_runtime).raw == "locked"


def test_handler_that_exits_fails_its_task(runtime: Runtime) -> None:
    """S-DET-5: `sys.exit` is a failure like any other."""

    def leave(_: TaskHandlerContext) -> str:
        raise SystemExit(2)

    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[handled(leave)]).run(runtime=runtime)
    assert str(caught.value.__cause__) == "Deterministic task handler threw an exception: 2 (SystemExit)"
