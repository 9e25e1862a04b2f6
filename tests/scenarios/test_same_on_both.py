"""The same run, inline and on Ray: outputs, events, traces and errors are equal but for times, ids and processes."""

from __future__ import annotations

from decimal import Decimal

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    ChatResponse,
    CostConfiguration,
    Ensemble,
    EnsembleError,
    Event,
    ExitEarlyError,
    GuardrailOutput,
    GuardrailResult,
    Runtime,
    Task,
    TaskHandlerContext,
    ToolResult,
    tool,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, answer, call, task
from tests.scenarios.comparing import as_data, plain


class City(BaseModel):
    """A typed answer."""

    name: str


@tool
def look(what: str) -> ToolResult:
    """Look."""
    return ToolResult.success(f"saw {what}", {"what": what})


@tool
def crash() -> str:
    """Raise."""
    raise ValueError("broke")


@tool
def leave() -> str:
    """Leave the run."""
    raise ExitEarlyError


def check(asked: GuardrailOutput) -> GuardrailResult:
    """Accept what is not rude."""
    return GuardrailResult.failure("rude") if "rude" in asked.raw_response else GuardrailResult.success()


def join(context: TaskHandlerContext) -> str:
    """Put context together."""
    return " + ".join(each.raw for each in context.context_outputs)


def everything() -> list[Task]:
    """A team with everything in it: tools, retries, streams, handlers, guardrails, context, templates."""
    researcher = agent(
        ScriptedModel(
            answer("hm", 10, 2, calls=[call("look", '{"what": "bees"}', number=1), call("crash", number=2)]),
            call("no_such"),
            answer("facts on bees", 20, 4),
        ),
        "Researcher",
        tools=[look, crash],
        background="patient",
    )
    typist = agent(ScriptedModel("Bern?", answer('{"name": "Bern"}', 5, 5)), "Typist", response_format="short")
    poet = agent(ScriptedModel("one two three"), "Poet", stream=True)
    facts = task("research {topic}", researcher, name="facts")
    city = task("name a city", typist, output_type=City)
    poem = task("write on {topic}", poet, context=[facts, city], output_guardrails=[check])
    return [facts, city, poem, task("join", handler=join, context=[poem, facts], name="end")]


def failing() -> list[Task]:
    """A team whose last task is refused."""
    return [*everything()[:2], task("be rude", agent(ScriptedModel("rude words")), output_guardrails=[check])]


def looping() -> list[Task]:
    """A team whose agent goes on calling tools."""
    model = ScriptedModel(otherwise=call("look", '{"what": "x"}'))
    return [task("loop", agent(model, tools=[look], max_iterations=2))]


def leaving() -> list[Task]:
    """A team that is left early."""
    return [
        *everything()[:1],
        task("leave", agent(ScriptedModel(call("leave")), tools=[leave])),
        task("never", handler=join),
    ]


def broken() -> list[Task]:
    """A team whose model gives nonsense."""
    return [task("go", agent(Nonsense()))]


class Nonsense:
    """A model that gives no response."""

    def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        return 7  # type: ignore[return-value]  what a broken model does


def observed(runtime: Runtime, tasks: list[Task], workflow: str) -> dict[str, object]:
    """All that a run shows, as plain data."""
    run = Ensemble(
        tasks=tasks,
        workflow=workflow,
        max_parallel_tasks=1,  # one at a time, so that there is one order
        capture_mode="full",
        trace_exporter=lambda _: None,
        cost_configuration=CostConfiguration(input_token_rate=Decimal("0.001"), output_token_rate=Decimal("0.002")),
    ).start({"topic": "bees"}, runtime=runtime)
    events = list(run.events())
    shown: dict[str, object] = {"events": [plain(event.to_dict()) for event in events if isinstance(event, Event)]}
    try:
        output = run.result()
    except EnsembleError as error:
        shown["error"] = (type(error).__name__, str(error), plain({"text": repr(vars(error).keys())}))
        causes: list[tuple[str, str]] = []
        cause = error.__cause__
        while cause is not None:
            causes.append((type(cause).__name__, str(cause)))
            cause = cause.__cause__
        shown["causes"] = causes
        shown["trace"] = as_data(error.trace)
    else:
        shown["output"] = as_data(output)
        shown["found"] = [found is not None and found.raw for found in map(output.get_output, tasks)]
    shown["state"] = run.state
    return shown


@pytest.mark.parametrize("workflow", ["sequential", "parallel"])
@pytest.mark.parametrize("team", [everything, failing, looping, leaving, broken])
def test_run_is_the_same_on_both_runtimes(
    inline_runtime: Runtime, ray_runtime: Runtime, team: object, workflow: str
) -> None:
    """S-CONV-32, S-EVT-10, S-STR-3, S-TRC-2, S-ERR-31, S-DOM-54: whatever a run shows, it shows on both."""
    inline, on_ray = (observed(runtime, team(), workflow) for runtime in (inline_runtime, ray_runtime))  # type: ignore[operator]
    for name, value in inline.items():
        assert on_ray[name] == value, name
    assert on_ray.keys() == inline.keys()
