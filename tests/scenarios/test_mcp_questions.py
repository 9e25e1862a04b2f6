"""What MCP servers ask back in the middle of a call: real servers of the official SDK, of the newer protocol and the older one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from ensemble_ray import (
    MCP,
    Ensemble,
    EnsembleOutput,
    ReviewDecision,
    ReviewRequest,
    Runtime,
    ToolContext,
    decide,
    resume,
)
from ensemble_ray.facts.effects import SamplingAnswered
from ensemble_ray.record.runs import read_facts
from ensemble_ray.record.trace import fold_trace
from ensemble_ray.testing import ScriptedModel, assert_attached
from ensemble_ray.tools.tool import use_tool_context
from tests.builders import agent, answer, call, task
from tests.ensemble_ray.record.facts_of_runs import spent_of
from tests.scenarios.teams import PATIENCE_S
from tests.scenarios.test_mcp import calls_of, command, offered, use

pytest.importorskip("mcp")
pytestmark = [pytest.mark.program, pytest.mark.usefixtures("forked_servers")]

TEA = '{"what": "tea"}'
OLDER = pytest.mark.parametrize("older", [False, True], ids=["newer", "older"])


def reviewer(*decisions: ReviewDecision, asked: list[ReviewRequest] | None = None) -> Callable[..., ReviewDecision]:
    """A handler that decides in that order."""
    left = list(decisions)

    def handle(request: ReviewRequest) -> ReviewDecision:
        if asked is not None:
            asked.append(request)
        return left.pop(0)

    return handle


def buy(place: Path, *turns: Any, older: bool = False, **fields: Any) -> tuple[Ensemble, ScriptedModel]:
    """A team of one that calls the shop's tools, turn by turn, and its model."""
    model = ScriptedModel(*turns, "done")
    server = MCP(f"{command(place / 'journal')}{' older' if older else ''}")
    return Ensemble(tasks=[task("buy tea", agent(model, "Buyer", tools=[server]))], **fields), model


def told(model: ScriptedModel) -> list[str]:
    """What the tools gave, as the model read it."""
    return [message.content or "" for message in model.calls[-1].messages if message.role == "tool"]


def test_a_servers_question_goes_to_the_reviewer(runtime: Runtime, tmp_path: Path) -> None:
    """S-INT-12: on both runtimes; what does not fit is asked for again, and the trace has the gates."""
    asked: list[ReviewRequest] = []
    edits = [ReviewDecision.edit("many"), ReviewDecision.edit('{"count": 3, "gift": true}')]
    team, model = buy(tmp_path, [call("order", TEA)], review_handler=reviewer(*edits, asked=asked))
    output = team.run(runtime=runtime)
    assert told(model) == ["accept {'count': 3, 'gift': True}"]
    assert [each.task_description for each in asked] == ["order: How many of tea?"] * 2
    assert "count (integer, required): Pieces" in (asked[0].prompt or "")
    assert "'count' must be of the type integer" in (asked[1].prompt or "")
    assert output.trace is not None
    gates: Any = output.trace.task_traces[0].metadata["reviews"]
    assert [each["verdict"] for each in gates] == ["edit", "edit"]


@OLDER
def test_every_decision_is_an_answer_of_the_protocol(tmp_path: Path, older: bool) -> None:  # noqa: FBT001
    """S-INT-12, S-INT-13: values accept, an exit declines and the agent goes on; a page to open is declined unasked."""
    decisions = [
        ReviewDecision.edit("3"),
        ReviewDecision.exit_early(),
        ReviewDecision.exit_early_timeout(),
        ReviewDecision.continue_execution(),
    ]
    turns = [[call("order", TEA)]] * 4
    team, model = buy(tmp_path, *turns, [call("login")], older=older, review_handler=reviewer(*decisions))
    assert team.run(runtime="inline").raw == "done"
    assert told(model) == ["accept {'count': 3}", "decline None", "cancel None", "cancel None", "decline"]
    assert calls_of(tmp_path / "journal").count("ordered") == 1


@OLDER
def test_nobody_is_offered_where_nobody_can_be_asked(tmp_path: Path, older: bool) -> None:  # noqa: FBT001
    """S-INT-11, S-INT-12: the server knows before it asks; roots are refused always."""
    team, model = buy(tmp_path, [call("order", TEA)], [call("roots")], older=older)
    assert team.run(runtime="inline").raw == "done"
    refused, roots = told(model)
    assert refused.startswith("Error")
    assert roots.startswith("Error")
    assert "roots" in roots.lower()
    assert calls_of(tmp_path / "journal").count("ordered") == 0


@OLDER
def test_a_question_of_a_detached_run_waits_in_its_record(tmp_path: Path, older: bool) -> None:  # noqa: FBT001
    """S-INT-14: the call is cancelled at the server and made again when somebody has decided; nobody is asked twice."""
    turns = [call("order", TEA)]
    team, _ = buy(tmp_path, turns, older=older, review_wait="detach")
    waiting = team.run(runtime="inline")
    (gate,) = waiting.open_reviews
    assert "How many of tea?" in gate.task_description
    decide(gate.run_id, gate.gate_id, ReviewDecision.edit("3"), runtime="inline")
    again, model = buy(tmp_path, older=older, review_wait="detach")
    output = resume(gate.run_id, again, runtime="inline")
    assert isinstance(output, EnsembleOutput)
    assert output.raw == "done"
    assert told(model) == ["accept {'count': 3}"]
    assert [each for each in calls_of(tmp_path / "journal") if each == "ordered"] == ["ordered"]


@OLDER
def test_what_a_reviewer_raises_ends_the_call(tmp_path: Path, older: bool) -> None:  # noqa: FBT001
    """S-INT-14: the model reads it as an error of the tool, and the session serves the next call."""

    def leave(_request: ReviewRequest) -> ReviewDecision:
        raise RuntimeError("no line to the reviewer")

    team, model = buy(tmp_path, [call("order", TEA)], [call("buy", TEA)], older=older, review_handler=leave)
    assert team.run(runtime="inline").raw == "done"
    failed, bought = told(model)
    assert "no line to the reviewer" in failed
    assert bought == "bought tea"


@OLDER
def test_a_server_may_ask_the_agents_model(home: str, tmp_path: Path, older: bool) -> None:  # noqa: FBT001
    """S-INT-15, S-INT-16: recorded and counted as the task's; in trace, metrics and budget, also as they are read later."""
    model = ScriptedModel(
        answer("", 10, 1, calls=[call("advise", TEA)]),
        answer("Take the green one", 5, 4),
        answer("", 10, 1, calls=[call("advise", '{"what": "photo"}')]),
        answer("done", 20, 2),
    )
    server = MCP(f"{command(tmp_path / 'journal')}{' older' if older else ''}", sampling=True)
    team = Ensemble(tasks=[task("buy tea", agent(model, "Buyer", tools=[server]))], max_tokens=1000)
    output = team.run(runtime="inline")
    assert [(each.role, each.content) for each in model.calls[1].messages] == [("system", "Advise"), ("user", "tea")]
    advice, refused = told(model)
    assert advice == "Take the green one (endTurn)"
    assert "ScriptedModel does not read Image 'image.png'" in refused
    assert (output.metrics.total_tokens, output.metrics.total_llm_call_count) == (53, 4)
    assert output.run_id is not None
    facts = read_facts(output.run_id, Path(home))
    (sampled,) = [fact for fact in facts if isinstance(fact.data, SamplingAnswered)]
    assert sampled.name.endswith("/0/call-0-sampling-0")
    assert spent_of(facts, None).tokens == 53
    assert output.trace is not None
    assert fold_trace(facts).task_traces == output.trace.task_traces
    (shown,) = cast("list[dict[str, Any]]", output.trace.task_traces[0].metadata["sampling"])
    assert (shown["text"], shown["output_tokens"]) == ("Take the green one", 4)


@pytest.mark.parametrize(("fields", "limit"), [({}, 10), ({"max_samples": 2}, 2)])
def test_a_server_may_ask_a_model_only_so_often_in_a_call(tmp_path: Path, fields: dict[str, Any], limit: int) -> None:
    """S-INT-90: and people ten times; each call counts for itself."""
    model = ScriptedModel(
        [call("pester")], *(["more"] * limit), [call("pester")], *(["more"] * limit), "done", otherwise="too often"
    )
    server = MCP(f"{command(tmp_path / 'journal')} older", sampling=True, **fields)
    decisions = [ReviewDecision.edit("3")] * 20
    team = Ensemble(tasks=[task("buy tea", agent(model, "Buyer", tools=[server]))], review_handler=reviewer(*decisions))
    assert team.run(runtime="inline").raw == "done"
    refused = f"The model was asked {limit} times in this call, which is the limit"
    expected = ["said"] * limit + [refused] * (12 - limit) + ["accept"] * 10 + ["cancel"] * 2
    assert told(model) == [", ".join(expected)] * 2


@OLDER
def test_a_call_made_again_after_its_server_died_asks_the_model_once(home: str, tmp_path: Path, older: bool) -> None:  # noqa: FBT001
    """S-INT-16: the repetition finds the answer, which is recorded and counted once."""
    model = ScriptedModel(
        answer("", 10, 1, calls=[call("consult", TEA)]), answer("Take the green one", 5, 4), answer("done", 20, 2)
    )
    server = MCP(f"{command(tmp_path / 'journal')}{' older' if older else ''}", sampling=True)
    output = Ensemble(tasks=[task("buy tea", agent(model, "Buyer", tools=[server]))]).run(runtime="inline")
    assert told(model) == ["Take the green one (endTurn)"]
    assert calls_of(tmp_path / "journal").count("consult") == 2
    assert (output.metrics.total_tokens, output.metrics.total_llm_call_count) == (42, 3)
    assert output.run_id is not None
    facts = read_facts(output.run_id, Path(home))
    assert len([fact for fact in facts if isinstance(fact.data, SamplingAnswered)]) == 1
    assert output.trace is not None
    assert fold_trace(facts).task_traces == output.trace.task_traces


@OLDER
def test_a_call_made_again_after_its_server_died_asks_the_reviewer_once(tmp_path: Path, older: bool) -> None:  # noqa: FBT001
    """S-INT-12, S-INT-16: the repetition finds all decisions, also of what was asked for again."""
    asked: list[ReviewRequest] = []
    edits = [ReviewDecision.edit("many"), ReviewDecision.edit("3")]
    team, model = buy(tmp_path, [call("reserve", TEA)], older=older, review_handler=reviewer(*edits, asked=asked))
    output = team.run(runtime="inline")
    assert told(model) == ["accept {'count': 3}"]
    assert calls_of(tmp_path / "journal").count("reserve") == 2
    assert len(asked) == 2
    assert output.trace is not None
    gates: Any = output.trace.task_traces[0].metadata["reviews"]
    assert [each["verdict"] for each in gates] == ["edit", "edit"]


@OLDER
def test_a_server_may_show_a_picture_to_the_agents_model(tmp_path: Path, older: bool) -> None:  # noqa: FBT001
    """S-ATT-68: a model that reads pictures sees that of the server's request."""
    photo = [call("advise", '{"what": "photo"}')]
    model = ScriptedModel(answer("", 10, 1, calls=photo), "A tea pot", "done", reads=["image"])
    server = MCP(f"{command(tmp_path / 'journal')}{' older' if older else ''}", sampling=True)
    Ensemble(tasks=[task("buy tea", agent(model, "Buyer", tools=[server]))]).run(runtime="inline")
    assert_attached(model.calls[1], b"a")
    assert told(model) == ["A tea pot (endTurn)"]


def test_a_model_is_offered_to_nobody_unasked(tmp_path: Path) -> None:
    """S-INT-11, S-INT-15: servers that spend tokens are chosen; a spent budget ends the run before the model is asked."""
    team, model = buy(tmp_path, [call("advise", TEA)])
    assert team.run(runtime="inline").raw == "done"
    assert told(model)[0].startswith("Error")
    asked = ScriptedModel(answer("", 2000, 1, calls=[call("advise", TEA)]), otherwise="never")
    server = MCP(command(tmp_path / "journal"), sampling=True)
    poor = Ensemble(tasks=[task("buy tea", agent(asked, "Buyer", tools=[server]))], max_tokens=2000)
    assert poor.run(runtime="inline").exit_reason == "budget_exhausted"
    assert len(asked.calls) == 1


async def test_calls_of_the_older_protocol_cannot_be_told_apart(tmp_path: Path) -> None:
    """S-INT-13: with two calls in one session a question is refused, and never shown for the wrong call."""
    asked: list[ReviewRequest] = []
    journal = tmp_path / "journal"
    context = ToolContext(review_handler=reviewer(ReviewDecision.edit("3"), asked=asked))
    with use_tool_context(context):
        tools = await offered(MCP(f"{command(journal)} older"))
        other = asyncio.ensure_future(use(tools["sleep"]))
        async with asyncio.timeout(PATIENCE_S):
            while calls_of(journal) != ["sleep"]:  # noqa: ASYNC110  another process writes it
                await asyncio.sleep(0.02)
        refused = await use(tools["order"], TEA)
        assert "one tool at a time" in (refused.error_message or "")
        other.cancel()
        async with asyncio.timeout(PATIENCE_S):
            while "woken" not in calls_of(journal):  # noqa: ASYNC110  as above
                await asyncio.sleep(0.02)
        assert not asked
        assert (await use(tools["order"], TEA)).output == "accept {'count': 3}"
