"""A recorded run against today's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pydantic
import pytest

from ensemble_ray import (
    Agent,
    CaptureMode,
    ChatMessage,
    Ensemble,
    EnsembleError,
    EnsembleOutput,
    ExitEarlyError,
    GuardrailInput,
    GuardrailResult,
    InlineRuntime,
    RayRuntime,
    RecordError,
    RunState,
    Task,
    TaskOutput,
    ToolCall,
    ValidationError,
    build_system_prompt,
    build_user_prompt,
    tool,
)
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.prompts.output_format import correction_prompt
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.testing import Replay, ScriptedModel, replay
from ensemble_ray.testing.scripted import ScriptEntry

CALLED: list[str] = []
#: titles that are refused, and why
REFUSED: dict[str, str] = {}


class Facts(pydantic.BaseModel):
    """What a task gives."""

    title: str

    @pydantic.field_validator("title")
    @classmethod
    def _check(cls, title: str) -> str:
        if title in REFUSED:
            raise ValueError(REFUSED[title])
        return title


@tool
def look_up(word: str) -> str:
    """Look it up."""
    CALLED.append(word)
    return f"{word}: a thing"


def join_up(context: object) -> str:
    """A handler."""
    CALLED.append("handler")
    return f"joined {type(context).__name__}"


SCRIPT = (ToolCall("1", "look_up", '{"word": "ebb"}'), "{}", '{"title": "Tides"}', "An article")


def _team(
    *script: ScriptEntry,
    last: str = "Write on {topic}",
    max_iterations: int = 25,
    guardrails: Sequence[Callable[[GuardrailInput], GuardrailResult]] = (),
    handler: Callable[[object], str] = join_up,
    **more: object,
) -> Ensemble:
    model = ScriptedModel(*script)
    reader = Agent(role="Reader", goal="Read", tools=[look_up], llm=model, max_iterations=max_iterations)
    facts = Task(name="facts", description="Find facts", expected_output="x", agent=reader, output_type=Facts)
    notes = Task(name="notes", description="Join", expected_output="x", handler=handler, context=[facts])
    article = Task(
        name="article",
        description=last,
        expected_output="x",
        agent=reader,
        context=[facts, notes],
        output_guardrails=guardrails,
    )
    return Ensemble(tasks=[facts, notes, article], inputs={"topic": "tides"}).replace(**more)


@pytest.fixture
def recorded(tmp_path: Path) -> EnsembleOutput:
    """A run with tools, a correction, a handler and context."""
    output = _team(*SCRIPT).run(runtime=InlineRuntime(home=tmp_path), run_id="one")
    CALLED.clear()
    return output


def test_run_is_the_same_when_nothing_was_changed(recorded: EnsembleOutput, tmp_path: Path) -> None:
    """S-DUR-55: no model is asked (the script is empty), no tool and no handler is called, nothing is written."""
    before = run_blocking(SqliteStore(tmp_path).facts("one"))
    found = replay(recorded, _team(), home=tmp_path)
    assert found.is_same, str(found)
    assert (found.tasks, found.effects) == (3, 6)
    assert str(found) == "Run 'one' is what today's code does: 3 tasks, 6 recorded answers and results"
    assert CALLED == []
    assert run_blocking(SqliteStore(tmp_path).facts("one")) == before
    assert replay("latest", _team(), home=tmp_path).is_same


def _differs(found: Replay) -> tuple[str, str]:
    assert found.difference is not None
    assert not found.is_same
    return found.difference.where, found.difference.what


def test_changed_plan_is_told_with_its_path(recorded: EnsembleOutput, tmp_path: Path) -> None:
    """S-DUR-55: before any task is done."""
    found = replay(recorded, _team(last="Write a poem on {topic}"), home=tmp_path)
    assert _differs(found) == ("the plan", "nodes.2.description")
    assert found.difference is not None
    assert "Write on tides" in found.difference.recorded
    assert "Write a poem on tides" in str(found)


def test_message_that_differs_is_told_with_its_place(
    recorded: EnsembleOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-DUR-55: which message of which request, cut to where the texts part."""

    def brief(agent: Agent) -> str:
        return build_system_prompt(agent) + "\nBe brief."

    monkeypatch.setattr("ensemble_ray.execute.agent.loop.build_system_prompt", brief)
    found = replay(recorded, _team(), home=tmp_path)
    assert _differs(found) == ("task 'facts', turn 0, model call", "message 1 (system) of the request")
    assert found.difference is not None
    assert "Be brief." in found.difference.current
    assert "Be brief." not in found.difference.recorded


def test_question_of_a_conversation_is_told_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-DUR-55, S-DOM-77: behind what was said before, which is in the trace."""

    def asker(*script: ScriptEntry) -> Ensemble:
        said = [ChatMessage(role="user", content="Two?"), ChatMessage(role="assistant", content="2")]
        return Agent(role="Clerk", goal="Count", llm=ScriptedModel(*script)).to_ensemble("Three?", history=said)

    asker("3").run(runtime=InlineRuntime(home=tmp_path), run_id="one")
    assert replay("one", asker(), home=tmp_path).is_same

    def politely(task: Task, outputs: Sequence[TaskOutput], *others: Any, **more: Any) -> str:
        return build_user_prompt(task, outputs, *others, **more) + "\nPlease."

    monkeypatch.setattr("ensemble_ray.execute.agent.loop.build_user_prompt", politely)
    found = replay("one", asker(), home=tmp_path)
    assert _differs(found) == ("task 'task-1', turn 0, model call", "message 4 (user) of the request")


def test_message_of_a_later_turn_is_told(recorded: EnsembleOutput, tmp_path: Path) -> None:
    """S-DUR-55: what a model is told of a tool's result."""
    found = replay(recorded, _team(max_tool_output_length=3), home=tmp_path)
    assert _differs(found) == ("task 'facts', turn 1, model call", "message 4 (tool) of the request")
    assert found.difference is not None
    assert "ebb: a thing" in found.difference.recorded


def test_call_that_is_not_made_any_more_is_told(recorded: EnsembleOutput, tmp_path: Path) -> None:
    """S-DUR-55: a stop message stands where the recorded call stood."""
    script = (*SCRIPT[:1], ToolCall("2", "look_up", '{"word": "flow"}'), *SCRIPT[2:])
    _team(*script).run(runtime=InlineRuntime(home=tmp_path), run_id="two")
    found = replay("two", _team(max_iterations=1), home=tmp_path)
    assert _differs(found) == ("task 'facts', turn 2, model call", "message 6 (tool) of the request")
    assert found.difference is not None
    assert "STOP" in found.difference.current
    assert recorded.run_id == "one"


def test_request_that_is_not_recorded_is_told(
    recorded: EnsembleOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-DUR-55: today's check refuses what was taken, and asks for a correction that nobody asked for then."""
    monkeypatch.setitem(REFUSED, "Tides", "too short")
    found = replay(recorded, _team(), home=tmp_path)
    assert _differs(found) == ("task 'facts', a model call", "a request whose answer is not recorded")
    assert found.difference is not None
    assert found.difference.recorded == "nothing"


def test_output_that_differs_is_told(recorded: EnsembleOutput, tmp_path: Path) -> None:
    """S-DUR-55: guardrails are today's code; this one refuses what was let through."""

    def refuse(given: object) -> GuardrailResult:
        del given
        return GuardrailResult.failure("too short")

    found = replay(recorded, _team(guardrails=[refuse]), home=tmp_path)
    assert _differs(found) == ("task 'article'", "the end")
    assert found.difference is not None
    assert found.difference.recorded == "completed"
    assert "GuardrailViolationError" in found.difference.current


def test_failed_run_is_the_same_when_it_fails_the_same(tmp_path: Path) -> None:
    """S-DUR-55: a model that was not reached is not asked; a handler's failure is recorded, and compared."""
    runtime = InlineRuntime(home=tmp_path)

    def fail(context: object) -> str:
        raise OSError(f"no disk for {type(context).__name__}")

    with pytest.raises(EnsembleError):
        _team(ConnectionError("gone"), retry=None).run(runtime=runtime, run_id="unreached")
    assert replay("unreached", _team(), home=tmp_path).is_same
    with pytest.raises(EnsembleError):
        _team(*SCRIPT, handler=fail).run(runtime=runtime, run_id="failed")
    found = replay("failed", _team(), home=tmp_path)
    assert found.is_same, str(found)


def test_early_exit_and_interruption_are_not_compared_beyond_their_record(tmp_path: Path) -> None:
    """S-DUR-55: what is not recorded cannot differ."""

    def leave(context: object) -> str:
        raise ExitEarlyError(f"enough of {type(context).__name__}")

    _team(*SCRIPT, handler=leave).run(runtime=InlineRuntime(home=tmp_path), run_id="left")
    assert replay("left", _team(), home=tmp_path).is_same
    _team(*SCRIPT).run(runtime=InlineRuntime(home=tmp_path), run_id="whole")
    store = SqliteStore(tmp_path)

    async def tear() -> None:
        facts = await store.facts("whole")
        owned = await store.begin("torn")
        cut = next(number for number, fact in enumerate(facts) if fact.kind == "tool_result")
        await owned.journal.append(
            [read_fact(run="torn", kind=f.kind, name=f.name, at=f.at, data=f.data.to_data()) for f in facts[:cut]]
        )
        await owned.close(RunState.INTERRUPTED)

    run_blocking(tear())
    CALLED.clear()
    assert replay("torn", _team(), home=tmp_path).is_same
    assert CALLED == []


def test_captured_messages_are_compared_when_the_run_kept_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-DUR-55: corrections too, whose texts are kept by the capture mode alone."""
    _team(*SCRIPT, capture_mode=CaptureMode.STANDARD).run(runtime=InlineRuntime(home=tmp_path), run_id="one")

    def politely(kind: type[object], *, problem: str, response: str) -> str:
        return correction_prompt(kind, problem=problem, response=response) + "\nPlease."

    monkeypatch.setattr("ensemble_ray.execute.agent.structured.correction_prompt", politely)
    found = replay("one", _team(), home=tmp_path)
    assert _differs(found) == ("task 'facts', turn 2, model call", "message 2 (user) of the request")


def test_origin_is_used_when_no_definition_is_given(recorded: EnsembleOutput, tmp_path: Path) -> None:
    """S-DUR-55: a run of a program needs the program's definition."""
    with pytest.raises(ValidationError, match=r"call replay\('one', ensemble\)"):
        replay(recorded, home=tmp_path)
    with pytest.raises(ValidationError, match="made by hand"):
        replay(EnsembleOutput.of("x", [], 1, 0), home=tmp_path)
    run_blocking(_empty(tmp_path))
    with pytest.raises(RecordError, match="recorded no plan"):
        replay("empty", _team(), home=tmp_path)


async def _empty(home: Path) -> None:
    await (await SqliteStore(home).begin("empty")).close(RunState.INTERRUPTED)


def test_a_home_may_be_a_text(tmp_path: Path) -> None:
    """S-DUR-5: of both runtimes, and of what reads its records."""
    home = str(tmp_path / "home")
    Ensemble(tasks=[Task.of("Write")], llm=ScriptedModel("done")).run(runtime=InlineRuntime(home=home), run_id="one")
    assert (tmp_path / "home" / "runs" / "one").is_dir()
    team = Ensemble(tasks=[Task.of("Write")], llm=ScriptedModel("done"))
    assert replay("one", team, home=home).is_same
    assert RayRuntime(home=home).store_address == InlineRuntime(home=Path(home)).store_address
