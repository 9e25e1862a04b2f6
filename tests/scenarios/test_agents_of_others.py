"""Agents of other frameworks in teams: the examples run as a user runs them, against a model server on loopback."""

from __future__ import annotations

from pathlib import Path

from ensemble_ray import ToolCall
from ensemble_ray.testing import ServedRequest
from ensemble_ray.testing.model_server import Answer
from tests.scenarios.running_examples import results_of, run_example


def _clerk(request: ServedRequest) -> Answer:
    """Answer as a model that looks up the stock first."""
    if request.tools and not results_of(request):
        return ToolCall("call_1", request.tools[0], '{"item": "tea"}')
    if request.tools:
        return f"There are {results_of(request)[0]}"
    return "A note: " + ("12 are told" if "There are 12" in request.text else "nothing is told")


def test_with_pydantic_ai_runs(tmp_path: Path) -> None:
    """S-INT-59: its tool is called, its streamed answer is the context of an agent with a model, its tokens count."""
    printed, server = run_example("with_pydantic_ai.py", _clerk, tmp_path, "some-model")
    assert printed.startswith("A note: 12 are told\n")
    assert {request.model for request in server.requests} == {"some-model"}
    assert "You are Clerk." in str(server.requests[0].messages[0])
    assert "2 tasks, 2 model calls" in printed


def test_with_langgraph_runs(tmp_path: Path) -> None:
    """S-INT-59: the graph goes round by its tool, and its tokens count."""
    printed, server = run_example("with_langgraph.py", _clerk, tmp_path, "some-model")
    assert printed.startswith("There are 12\n")
    assert len(server.requests) == 2
    assert "You are Clerk." in str(server.requests[0].messages[0])


def test_with_openai_agents_runs(tmp_path: Path) -> None:
    """S-INT-59: what its own output type gives is the task's parsed output; nothing is sent to anybody else."""

    def script(request: ServedRequest) -> Answer:
        return _clerk(request) if not results_of(request) else '{"item": "tea", "pieces": 12}'

    printed, server = run_example("with_openai_agents.py", script, tmp_path, "some-model")
    assert printed.strip() == "item='tea' pieces=12"
    assert len(server.requests) == 2
