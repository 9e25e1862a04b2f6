"""What an agent accepts, refuses, and stays."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable

import pytest

from ensemble_ray import (
    Agent,
    AgentTool,
    OpenAIChatModel,
    RateLimit,
    RateLimitedChatModel,
    Task,
    ToolResult,
    ValidationError,
    tool,
)
from ensemble_ray.testing import ScriptedModel

MODEL = ScriptedModel()
GIVEN: dict[str, object] = {"role": "Writer", "goal": "Write plainly", "llm": MODEL}


@tool
def count(text: str) -> int:
    """Count words."""
    return len(text.split())


class Desk:
    """An object with a tool method."""

    @tool
    def look(self, what: str) -> str:
        """Look."""
        return what


class Named(AgentTool):
    description = "any"

    def __init__(self, name: str | None) -> None:
        self.name = name  # type: ignore[assignment]  wrong names are what is tested

    def execute(self, text: str, /) -> ToolResult:
        return ToolResult.success(text)


def test_defaults_hold_when_only_the_required_is_given() -> None:
    """The table of fields of file 01; S-DOM-10."""
    agent = Agent(**GIVEN)
    assert (agent.background, agent.tools, agent.is_streaming, agent.verbose) == (None, (), None, False)
    assert (agent.max_iterations, agent.response_format, agent.rate_limit) == (25, "", None)
    assert (agent.isolation, agent.replicas, agent.max_concurrency) == (None, 1, None)
    assert (agent.num_cpus, agent.num_gpus, agent.resources, agent.labels) == (0, 0, {}, {})
    assert agent.allow_delegation is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"role": None}, "Agent role must not be blank"),
        ({"role": ""}, "Agent role must not be blank"),
        ({"role": " \t\n"}, "Agent role must not be blank"),
        ({"goal": None}, "Agent goal must not be blank"),
        ({"goal": "  "}, "Agent goal must not be blank"),
        ({"llm": None}, "Agent llm must not be None"),
        ({"max_iterations": 0}, "Agent max_iterations must be > 0, got: 0"),
        ({"max_iterations": -3}, "Agent max_iterations must be > 0, got: -3"),
        ({"tools": [count, None]}, "Tool at index 1 must not be None"),
        ({"tools": [object()]}, "Tool at index 0 (object) is neither an AgentTool nor has @tool methods"),
        (
            {"tools": [len]},
            "Tool at index 0 (builtin_function_or_method) is neither an AgentTool nor has @tool methods",
        ),
        ({"tools": [Named(None)]}, "Tool name must not be blank"),
        ({"tools": [Named(" ")]}, "Tool name must not be blank"),
        (
            {"tools": [Named("web-search")]},
            "Tool name 'web-search' must contain only alphanumeric characters and underscores",
        ),
        (
            {"tools": [Named("search\n")]},
            "Tool name 'search\n' must contain only alphanumeric characters and underscores",
        ),
        ({"max_concurrency": 0}, "Agent max_concurrency must be > 0 when set, got: 0"),
        ({"replicas": 0}, "Agent replicas must be > 0, got: 0"),
        ({"num_cpus": -1}, "Agent num_cpus must be 0 or at least 0.0001, got: -1"),
        ({"num_gpus": float("inf")}, "Agent num_gpus must be 0 or at least 0.0001, got: inf"),
        ({"num_gpus": 1.5}, "Agent num_gpus must be whole where it is above 1, got: 1.5"),
        ({"resources": {"GPU": 1}}, "Agent resources must not name 'GPU': use num_gpus"),
        (
            {"resources": {"memory": 1}},
            "Agent resources must name resources that nodes were started with, got: 'memory'",
        ),
        ({"resources": {"desk": 0}}, "Agent resources['desk'] must be at least 0.0001, got: 0"),
        ({"labels": {"-zone": "a"}}, "Agent labels must name labels of nodes, got: '-zone'"),
        (
            {"labels": {"zone": "in()"}},
            "Agent labels['zone'] must be a value, '!value', 'in(a, b)' or '!in(a, b)', got: 'in()'",
        ),
    ],
)
def test_agent_is_refused_with_the_exact_text_when_a_check_fails(changes: dict[str, object], message: str) -> None:
    """S-DOM-1 to S-DOM-9, S-CONV-10, S-CONV-12, S-SET-41, S-CLU-41."""
    with pytest.raises(ValidationError) as caught:
        Agent(**{**GIVEN, **changes})
    assert str(caught.value) == message


def test_missing_arguments_count_as_none_when_they_are_required() -> None:
    """S-CONV-13: the specified text, no TypeError. A model may be missing, and may not be None (S-DOM-3, S-DOM-72)."""
    for given, message in (
        ({}, "Agent role must not be blank"),
        ({"role": "r"}, "Agent goal must not be blank"),
        ({"role": "r", "goal": "g", "llm": None}, "Agent llm must not be None"),
    ):
        with pytest.raises(ValidationError) as caught:
            Agent(**given)  # type: ignore[arg-type]  missing arguments are what is tested
        assert str(caught.value) == message


def test_only_the_first_failure_is_told_when_several_checks_fail() -> None:
    """S-CONV-14, and all of them come before pydantic's own: `verbose` of a wrong type is not mentioned."""
    wrong = {"role": "r", "goal": " ", "llm": None, "max_iterations": 0, "tools": [None], "verbose": object()}
    for fix, message in (
        ({}, "Agent goal must not be blank"),
        ({"goal": "g"}, "Agent llm must not be None"),
        ({"llm": MODEL}, "Agent max_iterations must be > 0, got: 0"),
        ({"max_iterations": 1}, "Tool at index 0 must not be None"),
    ):
        wrong |= fix
        with pytest.raises(ValidationError) as caught:
            Agent(**wrong)  # type: ignore[arg-type]  wrong types are what is tested
        assert str(caught.value) == message


@pytest.mark.parametrize(
    "changes",
    [
        {"manager": 1},
        {"role": 5},
        {"max_iterations": "7"},
        {"max_iterations": True},
        {"llm": object()},
        {"llm": ScriptedModel},
        {"tools": 5},
        {"isolation": "cage"},
        {"rate_limit": 60},
    ],
)
def test_our_error_is_raised_when_a_field_is_unknown_or_of_a_wrong_type(changes: dict[str, object]) -> None:
    """S-CONV-4, S-CONV-12, S-SET-41."""
    with pytest.raises(ValidationError) as caught:
        Agent(**{**GIVEN, **changes})
    assert type(caught.value) is ValidationError


def test_unknown_field_is_named_when_it_is_refused() -> None:
    """S-CONV-4."""
    with pytest.raises(ValidationError, match="unknown field 'memory'"):
        Agent(**GIVEN, memory=None)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Agent(rol="Writer"), "Agent: unknown field 'rol'. Did you mean 'role'?"),  # type: ignore[call-arg]
        (lambda: Agent(**GIVEN, gaol="x"), "Agent: unknown field 'gaol'. Did you mean 'goal'?"),  # type: ignore[call-arg]
        (lambda: Agent(zzz=1), "Agent: unknown field 'zzz'"),  # type: ignore[call-arg]
    ],
)
def test_misspelt_field_is_told_first_with_the_nearest_name(make: Callable[[], object], told: str) -> None:
    """S-CONV-4: what else is wrong follows from it."""
    with pytest.raises(ValidationError) as caught:
        make()
    assert str(caught.value) == told


def test_positional_arguments_are_refused_with_the_fields_when_there_are_too_many() -> None:
    """S-CONV-4: by the name of the class that was called."""
    told = (
        r"^Agent takes only role, goal without a name, and got 'Expert' without a name\. Fields: role, goal, background"
    )
    with pytest.raises(TypeError, match=told):
        Agent("Writer", "Write", "Expert")  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"^RateLimit takes keyword arguments only, and got 5 without a name\. Fields:"):
        RateLimit(5)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"^Agent got role twice: by position and by name$"):
        Agent("Writer", role="Editor", goal="Write")  # type: ignore[misc]


def test_every_kind_of_tool_is_kept_in_order_when_given() -> None:
    """S-DOM-6: functions, bound methods, objects and AgentTools, mixed; S-DOM-14: equal names are no error here."""
    desk, named = Desk(), Named("look")
    agent = Agent(**GIVEN, tools=[count, desk, desk.look, named])
    assert agent.tools == (count, desk, desk.look, named)


def test_no_tools_are_kept_when_none_is_given() -> None:
    """S-DOM-10, S-CONV-7."""
    assert Agent(**GIVEN, tools=None).tools == ()


def test_agent_is_unchanged_when_the_caller_changes_the_list() -> None:
    """S-CONV-5: copied at construction, read as a tuple."""
    tools: list[object] = [count]
    agent = Agent(**GIVEN, tools=tools)
    tools.clear()
    assert agent.tools == (count,)


def test_a_bound_of_one_is_kept_when_given() -> None:
    """S-DOM-11."""
    assert Agent(**GIVEN, max_iterations=1).max_iterations == 1


def test_response_format_is_empty_when_none_is_given() -> None:
    """The table of fields of file 01: None becomes ""."""
    assert Agent(**GIVEN, response_format=None).response_format == ""


def test_assigning_raises_when_the_agent_is_built() -> None:
    """S-CONV-3."""
    with pytest.raises(Exception, match="frozen"):
        Agent(**GIVEN).role = "Other"


def test_replace_checks_again_when_a_field_changes() -> None:
    """S-CONV-3."""
    agent = Agent(**GIVEN, tools=[count])
    changed = agent.replace(role="Editor")
    assert (changed.role, changed.tools, agent.role) == ("Editor", (count,), "Writer")
    with pytest.raises(ValidationError, match=r"^Agent role must not be blank$"):
        agent.replace(role=" ")
    with pytest.raises(ValidationError, match="unknown field 'rôle'"):
        agent.replace(rôle="x")


def test_agents_are_equal_only_to_themselves_when_built_alike() -> None:
    """S-CONV-30, S-CONV-31: by a hidden id that pickling and internal rewrites keep and `replace` does not."""
    agent = Agent(role="r", goal="g", llm="openai:m")
    copy = pickle.loads(pickle.dumps(agent))  # noqa: S301  our own bytes
    rewritten = agent.rewritten(goal="other")
    assert agent != Agent(role="r", goal="g", llm="openai:m")
    assert copy == agent
    assert hash(copy) == hash(agent)
    assert rewritten == agent
    assert rewritten.goal == "other"
    assert agent.goal == "g"
    assert agent.replace() != agent
    assert agent.replace().object_id != agent.object_id
    assert len({agent, copy, rewritten, agent.replace()}) == 2
    assert agent != "r"
    assert "object_id" not in Agent.model_fields


def test_model_is_made_when_llm_is_a_string() -> None:
    """S-CONV-19: resolved at construction, on agents and tasks."""
    agent = Agent(role="r", goal="g", llm="openai:gpt-4o-mini")
    task = Task(description="d", expected_output="e", llm="openai:gpt-4o-mini")
    assert isinstance(agent.llm, OpenAIChatModel)
    assert isinstance(task.llm, OpenAIChatModel)


def test_known_prefixes_are_listed_when_the_string_has_another() -> None:
    """S-CONV-19."""
    with pytest.raises(ValidationError, match=r"gpt:x.*openai:MODEL.*local"):
        Agent(role="r", goal="g", llm="gpt:x")


def test_model_is_limited_when_a_rate_limit_is_set() -> None:
    """S-DOM-13, S-RATE-30: wrapped at construction; the bucket stays with the agent through `replace` and pickling."""
    limit = RateLimit.per_minute(60)
    agent = Agent(**GIVEN, rate_limit=limit)
    assert isinstance(agent.llm, RateLimitedChatModel)
    assert (agent.llm.delegate, agent.llm.rate_limit) == (MODEL, limit)
    assert agent.replace(role="Other").llm == agent.llm
    assert Agent(**GIVEN, rate_limit=limit).llm != agent.llm


def test_new_limit_takes_the_old_ones_place_when_replaced() -> None:
    """S-RATE-30: a wider limit would be of no use above the old one."""
    agent = Agent(**GIVEN, rate_limit=RateLimit.per_minute(1))
    wider = agent.replace(rate_limit=RateLimit.per_minute(600))
    assert isinstance(wider.llm, RateLimitedChatModel)
    assert wider.llm.delegate is MODEL
    assert agent.replace(rate_limit=None).llm is MODEL


def test_shared_wrapper_stays_below_when_an_agent_limits_it_further() -> None:
    """S-RATE-34: one wrapper given to several agents is one bucket, also under a limit of one agent's own."""
    shared = RateLimitedChatModel.of(MODEL, RateLimit.per_minute(60))
    first, second = Agent(role="a", goal="g", llm=shared), Agent(role="b", goal="g", llm=shared)
    limited = Agent(role="c", goal="g", llm=shared, rate_limit=RateLimit.per_minute(6))
    assert first.llm is second.llm is shared
    assert isinstance(limited.llm, RateLimitedChatModel)
    assert limited.llm.delegate is shared


def test_nothing_is_logged_or_called_when_an_agent_is_built(caplog: pytest.LogCaptureFixture) -> None:
    """An agent holds a specification: building it asks no model."""
    model = ScriptedModel()
    with caplog.at_level(logging.DEBUG):
        Agent(role="r", goal="g", llm=model)
    assert not model.calls
    assert not caplog.records
