"""What a team needs on each node, and what a node finds out about itself."""

from __future__ import annotations

import json
import pickle

import pytest

from ensemble_ray import Agent, Ensemble, OpenAIChatModel, RateLimit, RateLimitedChatModel, Task, tool
from ensemble_ray.actors.driver.node_check import question_about
from ensemble_ray.actors.worker.node_report import describe_node
from ensemble_ray.testing import ModelServer
from ensemble_ray.values.metrics import EndpointQuestion


@tool
def shout(text: str) -> str:
    """Shout it."""
    return text.upper()


@pytest.mark.heavy
def test_modules_and_endpoints_of_a_team_are_found_wherever_they_are() -> None:
    """S-CLU-4, S-CLU-5: behind a rate limit too; each endpoint once, without a user."""
    near = OpenAIChatModel("m", base_url="http://user:word@near:1/v1")
    far = RateLimitedChatModel.of(OpenAIChatModel("m", api_key="k"), RateLimit.per_minute(1))
    agents = [Agent(role="A", goal="g", llm=near, tools=[shout]), Agent(role="B", goal="g", llm=far)]
    tasks = [Task(description="d", expected_output="e", agent=agent) for agent in (*agents, agents[0])]
    asked = question_about(Ensemble(tasks=tasks, llm=near))
    assert set(asked.payloads) == {"Agent 'A'"}
    assert set(asked.endpoints) == {
        EndpointQuestion(url="http://near:1/v1", has_key=False),
        EndpointQuestion(url="", has_key=True),
    }
    assert {"ray", "ensemble-ray", "pydantic"} <= set(asked.packages)


@pytest.mark.heavy
def test_what_any_team_needs_is_asked_without_one() -> None:
    """S-CLU-1."""
    asked = question_about(None)
    assert (asked.payloads, asked.endpoints) == ({}, ())


def test_a_node_tells_versions_and_what_it_cannot_load_or_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-CLU-3 to S-CLU-5: an endpoint that refuses a call without a key is there; no model is asked."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with ModelServer("answer", api_key="k") as models:
        found = describe_node(
            ("ray", "no-such-package"),
            {"fine": pickle.dumps(json.dumps), "lacking": b"cno_such_module\nname\n."},
            ((models.base_url, True), ("http://127.0.0.1:9/v1", True), ("", False)),
            5.0,
        )
        assert models.requests == []
    assert found["packages"] == {"ray": __import__("ray").__version__, "no-such-package": ""}
    assert found["unloadable"] == {"lacking": "ModuleNotFoundError: No module named 'no_such_module'"}
    assert found["endpoints"] == {
        models.base_url: "",
        "http://127.0.0.1:9/v1": "cannot be reached: [Errno 111] Connection refused",
        "https://api.openai.com/v1": "OPENAI_API_KEY is not set on the node",
    }
