"""Several tools as one."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable

import pytest

from ensemble_ray import (
    AgentTool,
    CalculatorTool,
    Effect,
    ExitEarlyError,
    IllegalStateError,
    PipelineErrorStrategy,
    ToolContext,
    ToolPipeline,
    ToolResult,
    ValidationError,
    current_tool_context,
)
from ensemble_ray.tools.call import call_tool
from ensemble_ray.tools.cpu import ToolOutcome
from ensemble_ray.tools.registry import resolve_tools
from ensemble_ray.tools.tool import use_tool_context
from tests.ensemble_ray.tools.doubles import CountingMetrics, Plain, Safe, SafeAsync
from tests.ensemble_ray.virtual_time import run_in_virtual_time


def adding(letter: str, seen: list[str] | None = None) -> Plain:
    """A tool that adds a letter to its input."""

    def work(text: str) -> ToolResult:
        if seen is not None:
            seen.append(text)
        return ToolResult.success(text + letter)

    return Plain(work, name=letter)


def failing(message: str | None = "no", name: str = "bad") -> Plain:
    """A tool that fails."""
    return Plain(lambda _text: ToolResult.failure(message), name=name)


def raising(error: Exception, name: str = "bad") -> Plain:
    """A tool that raises."""

    def work(_text: str) -> ToolResult:
        raise error

    return Plain(work, name=name)


def test_output_is_the_next_input_when_steps_succeed() -> None:
    """S-TOOL-70: in order, inside one execute; the last step's result is returned, payload included."""
    last = Plain(lambda text: ToolResult.success(text + "c", {"n": 1}), name="c")
    assert ToolPipeline.of(adding("a"), adding("b"), last).execute("-") == ToolResult.success("-abc", {"n": 1})


def test_input_is_returned_when_there_are_no_steps() -> None:
    """S-TOOL-71: None is an empty text, for the first step too."""
    empty = ToolPipeline("empty", "does nothing")
    assert empty.execute("x") == ToolResult.success("x")
    assert empty.execute(None) == ToolResult.success("")  # type: ignore[arg-type]
    assert ToolPipeline.of(adding("a")).execute(None) == ToolResult.success("a")  # type: ignore[arg-type]


def test_pipeline_stops_when_a_step_fails_fast() -> None:
    """S-TOOL-72: the default; the failed result as it is."""
    seen: list[str] = []
    pipeline = ToolPipeline.of(adding("a"), failing("no rows"), adding("c", seen))
    assert pipeline.error_strategy is PipelineErrorStrategy.FAIL_FAST
    assert pipeline.execute("-") == ToolResult.failure("no rows")
    assert seen == []


@pytest.mark.parametrize(("message", "passed"), [("no rows", "no rows"), ("", "")])
def test_message_is_the_next_input_when_the_pipeline_goes_on(message: str, passed: str) -> None:
    """S-TOOL-72: continue_on_failure; what the last step gives counts, even after a failure."""
    seen: list[str] = []
    steps = [failing(message), adding("c", seen)]
    pipeline = ToolPipeline("p", "d", steps, error_strategy="continue_on_failure")
    assert pipeline.execute("-") == ToolResult.success(passed + "c")
    assert seen == [passed]
    last_fails = ToolPipeline("p", "d", [adding("a"), failing("no")], PipelineErrorStrategy.CONTINUE_ON_FAILURE)
    assert last_fails.execute("-") == ToolResult.failure("no")


def test_adapter_makes_the_next_input_when_its_step_succeeded() -> None:
    """S-TOOL-73, S-LLM-45: it sees the payload; None is an empty text; it may be async, or a generator; steps too."""
    seen: list[str] = []
    source = Plain(lambda _text: ToolResult.success("rows", {"first": "Oslo"}), name="source")

    async def later(result: ToolResult) -> str:
        return result.output.upper()

    for adapter, expected in (
        (lambda result: result.structured_output["first"], "Oslo"),
        (lambda _result: None, ""),
        (later, "ROWS"),
        (lambda result: iter(result.output), '["r","o","w","s"]'),
    ):
        ToolPipeline("p", "d", [(source, adapter), adding("c", seen)]).execute("-")
        assert seen.pop() == expected
    ToolPipeline("p", "d", [Plain(iter, name="letters"), adding("c", seen)]).execute("-+")
    assert seen == ['["-","+"]']


def test_adapter_is_not_called_when_its_step_failed_or_is_last() -> None:
    """S-TOOL-73."""
    called: list[ToolResult] = []

    def adapter(result: ToolResult) -> str:
        called.append(result)
        return "adapted"

    steps = [(failing("no"), adapter), (adding("b"), adapter)]
    pipeline = ToolPipeline("p", "d", steps, "continue_on_failure")
    assert pipeline.execute("-") == ToolResult.success("nob")
    assert called == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad date"), "Step 'bad' threw: ValueError: bad date"),
        (ValueError(), "Step 'bad' threw: Tool execution failed with no message"),
    ],
)
def test_step_counts_as_failed_when_it_raises(error: Exception, message: str) -> None:
    """S-TOOL-74: then the strategy applies; an adapter that raises fails its step too."""
    assert ToolPipeline.of(raising(error), adding("b")).execute("-") == ToolResult.failure(message)
    going_on = ToolPipeline("p", "d", [raising(error), adding("b")], "continue_on_failure")
    assert going_on.execute("-") == ToolResult.success(message + "b")

    def adapter(_result: ToolResult) -> str:
        raise error

    adapted = ToolPipeline("p", "d", [(Plain(ToolResult.success, name="bad"), adapter), adding("b")])
    assert adapted.execute("-") == ToolResult.failure(message)


@pytest.mark.parametrize("error", [ExitEarlyError("enough"), IllegalStateError("bad")])
@pytest.mark.parametrize("place", ["step", "adapter"])
def test_error_passes_when_it_ends_the_run(error: Exception, place: str) -> None:
    """S-TOOL-74: also with continue_on_failure."""

    def adapter(_result: ToolResult) -> str:
        raise error

    first = raising(error) if place == "step" else (adding("a"), adapter)
    with pytest.raises(type(error)) as caught:
        ToolPipeline("p", "d", [first, adding("b")], "continue_on_failure").execute("-")
    assert caught.value is error


def test_result_is_an_empty_success_when_a_step_returns_nothing() -> None:
    """S-TOOL-74."""
    assert ToolPipeline.of(Plain(lambda _text: None), adding("b")).execute("-") == ToolResult.success("b")


def test_names_come_from_the_steps_when_none_are_given() -> None:
    """S-TOOL-75."""
    one, two = ToolPipeline.of(adding("a")), ToolPipeline.of(adding("a"), adding("b"))
    assert (one.name, one.description) == ("a", "Pipeline: a")
    assert (two.name, two.description) == ("a_then_b", "Pipeline: a -> b")
    named = ToolPipeline.of_named("ab", "Adds two letters", adding("a"), adding("b"))
    assert (named.name, named.description, len(named.steps)) == ("ab", "Adds two letters", 2)


#: Without types: what a user may do who has no type checker.
_pipeline: Callable[..., object] = ToolPipeline
_pipeline_of: Callable[..., object] = ToolPipeline.of


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _pipeline(" "), "ToolPipeline name must not be blank"),
        (lambda: _pipeline(None), "ToolPipeline name must not be blank"),
        (lambda: _pipeline("p"), "ToolPipeline description must not be blank"),
        (lambda: _pipeline("p", "d", [None]), "ToolPipeline step must not be None"),
        (lambda: _pipeline_of(None), "ToolPipeline step must not be None"),
        (lambda: _pipeline("p", "d", ["a"]), "ToolPipeline step must be an AgentTool, got: str"),
        (lambda: _pipeline("p", "d", [(adding("a"), None)]), "ToolPipeline adapter must be callable, got: None"),
        (
            lambda: _pipeline("p", "d", [], None),
            "ToolPipeline error_strategy must be one of [fail_fast, continue_on_failure], got: None",
        ),
    ],
)
def test_pipeline_is_refused_when_a_part_is_missing(make: Callable[[], object], message: str) -> None:
    """S-TOOL-76, S-CONV-13: a ValueError; a missing argument reads like None."""
    with pytest.raises(ValueError, match=r"ToolPipeline") as caught:
        make()
    assert str(caught.value) == message
    assert isinstance(caught.value, ValidationError)


async def test_context_reaches_the_steps_when_the_pipeline_has_one() -> None:
    """S-TOOL-77, S-TOOL-42: role and metrics, in nested pipelines too, each step under its own name; plain steps get none."""
    seen: list[tuple[str, str, str]] = []

    def note(name: str) -> Callable[[str], ToolResult]:
        def work(text: str) -> ToolResult:
            context = current_tool_context()
            seen.append((name, context.agent_role, context.logger.name))
            return ToolResult.success(text)

        return work

    inner = ToolPipeline.of_named("inner", "d", Safe(note("deep"), name="deep"))
    pipeline = ToolPipeline.of_named("outer", "d", Safe(note("first"), name="first"), inner, Plain(note("plain")))
    metrics = CountingMetrics()
    (bound,) = resolve_tools([pipeline])
    await call_tool(bound, "x", context=ToolContext(tool_name="outer", agent_role="Writer", metrics=metrics))
    assert seen == [
        ("first", "Writer", "ensemble_ray.tool.first"),
        ("deep", "Writer", "ensemble_ray.tool.deep"),
        ("plain", "unknown", "ensemble_ray.tools.tool"),
    ]
    assert [entry[1] for entry in metrics.counts] == ["first", "deep", "inner", "outer"]
    assert {(entry[0], entry[2]) for entry in metrics.counts} == {("success", "Writer")}


async def test_pipeline_is_a_tool_like_any_other_when_registered() -> None:
    """S-TOOL-78, S-TOOL-20: one text input; steps cannot be changed."""
    steps = [adding("a"), adding("b")]
    pipeline = ToolPipeline("ab", "Adds two letters", steps)
    steps.append(adding("c"))
    (bound,) = resolve_tools([pipeline])
    assert list(bound.spec.parameters["properties"]) == ["input"]  # type: ignore[call-overload]
    assert await call_tool(bound, '{"input": "-"}', context=ToolContext()) == ToolOutcome("-ab")
    assert isinstance(pipeline.steps, tuple)
    assert [step.name for step in pipeline.steps] == ["a", "b"]
    with pytest.raises(AttributeError):
        pipeline.steps = ()  # type: ignore[misc]


def test_time_limits_hold_when_a_step_does_not_return() -> None:
    """S-SET-34, S-TOOL-72: a step's own limit makes it a failed step; the pipeline's limit ends the whole."""

    async def forever(_text: str) -> ToolResult:
        await asyncio.Event().wait()
        return ToolResult.success("never")

    slow = SafeAsync(forever, name="slow")
    slow.timeout = 5

    async def go(pipeline: ToolPipeline) -> ToolOutcome:
        (bound,) = resolve_tools([pipeline])
        return await call_tool(bound, "-", context=ToolContext())

    patient: AgentTool = SafeAsync(_echo, name="echo")
    going_on = ToolPipeline("p", "d", [slow, patient], "continue_on_failure")
    assert run_in_virtual_time(go(going_on)) == (ToolOutcome("timed out after 5 s"), 5)
    hasty = ToolPipeline("p", "d", [slow], timeout=2)
    assert run_in_virtual_time(go(hasty)) == (ToolOutcome("Error: timed out after 2 s", "error"), 2)


async def _echo(text: str) -> ToolResult:
    return ToolResult.success(text)


def test_pipeline_works_elsewhere_when_its_steps_travel() -> None:
    """S-TOOL-78: it is data and tools, nothing else."""
    copy = pickle.loads(pickle.dumps(ToolPipeline.of(CalculatorTool())))  # noqa: S301  made here
    assert copy.name == "calculator"
    assert copy.execute("2 + 3").output == "5"


@pytest.mark.parametrize(
    ("effects", "strongest"),
    [((), "none"), (("none", "none"), "none"), (("none", "idempotent"), "idempotent"), (("once", "none"), "once")],
)
def test_effect_is_the_strongest_of_the_steps(effects: tuple[Effect, ...], strongest: Effect) -> None:
    """S-DUR-21."""
    steps = [Plain(str, f"step_{index}") for index in range(len(effects))]
    for step, effect in zip(steps, effects, strict=True):
        step.effect = effect
    assert ToolPipeline("all", "does all", steps).effect == strongest


def test_pipeline_is_refused_when_the_effect_of_a_step_cannot_be() -> None:
    """S-DUR-20."""
    step = Plain(str, "post")
    step.effect = "twice"  # type: ignore[assignment]  on purpose
    with pytest.raises(ValidationError, match=r"^ToolPipeline step 'post' effect must be one of"):
        ToolPipeline.of(step)


async def test_steps_have_keys_of_their_own_when_one_tool_stands_there_twice() -> None:
    """S-DUR-23: the second is no repetition of the first, and both keep theirs when the call is repeated."""
    keys: list[str] = []
    step = Safe(lambda text: keys.append(current_tool_context().idempotency_key) or ToolResult.success(text))
    pipeline = ToolPipeline.of_named("twice", "does it twice", step, step)
    for _ in range(2):
        with use_tool_context(ToolContext(tool_name="twice", idempotency_key="k")):
            await pipeline.aexecute("x")
    assert keys == ["k/0/safe", "k/1/safe"] * 2
