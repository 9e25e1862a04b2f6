"""Kinds of agents: what makes two agents one kind, what travels instead, and what is kept of it."""

from __future__ import annotations

from typing import Any

import pytest

from ensemble_ray import Agent, RateLimit, tool
from ensemble_ray.execute.local_executor import (
    OVERRIDE_FIELDS,
    AgentTemplates,
    RefCountedCache,
    apply_overrides,
    overrides_of,
)
from ensemble_ray.testing import ScriptedModel

MODEL = ScriptedModel()


def worker(**fields: Any) -> Agent:
    """An agent."""
    return Agent(**{"role": "Writer", "goal": "write", "llm": MODEL, **fields})


@tool
def look() -> str:
    """Look."""
    return ""


def test_agents_that_differ_by_data_are_one_kind() -> None:
    """S-MR-142: an agent is its kind's template and what differs; tools and model are the template's own objects."""
    kinds = AgentTemplates()
    template = worker(tools=[look])
    changes: dict[str, Any] = {
        "role": "Reader",
        "goal": "read",
        "background": "long",
        "stream": True,
        "verbose": True,
        "max_iterations": 3,
        "response_format": "short",
        "on_incomplete": "fail",
        "keep_reasoning": True,
        "allow_delegation": True,
    }
    other = worker(tools=[look], **changes)
    changes["is_streaming"] = changes.pop("stream")  # read under another name than written
    assert set(changes) == set(OVERRIDE_FIELDS)
    kind = kinds.name_of(template)
    assert kinds.name_of(other) == kind
    assert overrides_of(other, template) == changes
    assert overrides_of(template, template) == {}
    assert overrides_of(worker(tools=[look], role="Reader"), template) == {"role": "Reader"}
    rebuilt = apply_overrides(template, overrides_of(other, template))
    assert {name: getattr(rebuilt, name) for name in Agent.model_fields} == {
        name: getattr(other, name) for name in Agent.model_fields
    }
    assert rebuilt.llm is MODEL
    assert rebuilt.tools[0] is template.tools[0]


class Special(Agent):
    """An agent of the user's own class."""

    extra: Any = None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (worker(), worker(llm=ScriptedModel())),
        (worker(), worker(tools=[look])),
        (worker(), worker(isolation="process")),
        (worker(), worker(replicas=2)),
        (worker(), worker(replicas=1)),
        (worker(), worker(max_concurrency=2)),
        (worker(), worker(rate_limit=RateLimit.per_second(1))),
        (worker(), Special(role="Writer", goal="write", llm=MODEL)),
        (worker(), worker().rewritten(replicas=1)),
        (
            Special(role="Writer", goal="write", llm=MODEL, extra=[1]),
            Special(role="Writer", goal="write", llm=MODEL, extra=[1]),
        ),
    ],
)
def test_agents_that_differ_by_an_object_or_a_limit_are_two_kinds(one: Agent, other: Agent) -> None:
    """S-MR-142, S-MR-141: who says nothing of replicas is another than who asks for one."""
    kinds = AgentTemplates()
    assert kinds.name_of(one) != kinds.name_of(other)
    assert kinds.name_of(one) == kinds.name_of(one.rewritten(role="Other"))


@pytest.mark.parametrize("name", ["openai:small", "local"])
def test_agents_whose_models_have_one_name_are_one_kind(name: str) -> None:
    """S-MR-142, S-CONV-19: one model object for all of them."""
    kinds = AgentTemplates()
    one, other = worker(llm=name), worker(llm=name)
    assert one.llm is other.llm
    assert kinds.name_of(one) == kinds.name_of(other)
    assert kinds.name_of(one) != kinds.name_of(worker(llm="openai:large"))


def test_kinds_do_not_pile_up_when_each_agent_is_one() -> None:
    """S-MR-142: those used last are known; one that was forgotten has another name, also where its objects are the same."""
    kinds = AgentTemplates(most=2)
    agents = [worker(llm=ScriptedModel()) for _ in range(3)]
    first, second = kinds.name_of(agents[0]), kinds.name_of(agents[1])
    assert kinds.name_of(agents[0]) == first
    third = kinds.name_of(agents[2])
    assert (kinds.name_of(agents[0]), kinds.name_of(agents[2])) == (first, third)
    assert kinds.name_of(agents[1]) not in {first, second, third}


def test_agents_that_ask_for_other_nodes_are_of_other_kinds() -> None:
    """S-CLU-45, S-MR-142: each kind has one template, and its processes ask for what that says."""
    kinds, model = AgentTemplates(), ScriptedModel()
    agents = [worker(llm=model), worker(llm=model, num_gpus=1), worker(llm=model, labels={"zone": "a"})]
    assert len({kinds.name_of(each) for each in agents}) == 3
    assert kinds.name_of(worker(llm=model, resources={}, num_gpus=1.0)) == kinds.name_of(agents[1])


def test_shelf_keeps_what_is_in_use_and_what_was_used_last() -> None:
    """S-MR-142: what is put stays until it is trimmed; dropping is told, once."""
    dropped: list[tuple[str, int]] = []
    shelf: RefCountedCache[int] = RefCountedCache(most=1, on_drop=lambda name, thing: dropped.append((name, thing)))
    for number, name in enumerate("abc"):
        shelf.put(name, number)
    shelf.put("a", 7)
    assert (shelf.use("a"), shelf.use("a"), shelf.use("x"), shelf.get("a"), len(shelf)) == (0, 0, None, 0, 3)
    shelf.trim()
    assert dropped == [("b", 1)]
    shelf.release("a")
    assert dropped == [("b", 1)]
    shelf.release("a")
    assert dropped == [("b", 1), ("c", 2)]
    assert ("a" in shelf, "c" in shelf) == (True, False)
