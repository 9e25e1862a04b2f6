"""Argument texts of the two delegation tools, whatever a model writes; what it is told of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray import DelegationContext
from ensemble_ray.execute.delegation.decisions import DelegationCall, manager_tool, peer_tool, read_call
from ensemble_ray.plan.plan import HierarchyRules
from ensemble_ray.values.delegation import Peer

ROLES = ("Writer", "Digger")
CONTEXT = DelegationContext(peers=[Peer(key=role.lower(), role=role) for role in ROLES])


@pytest.mark.parametrize("field", ["task", "task_description"])
def test_texts_are_taken_as_they_are(field: str) -> None:
    """S-HIER-20, S-DEL-3: also spaces around them, and other fields beside them."""
    text = json.dumps({"agent_role": " writer", field: "\nWrite ", "why": 5})
    assert read_call(text, field, ROLES) == DelegationCall(" writer", "\nWrite ")


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        ("{}", "Error: agent_role must not be None or blank."),
        ("", "Error: agent_role must not be None or blank."),
        ('{"agent_role": null, "task": "x", "task_description": "x"}', "Error: agent_role must not be None or blank."),
        ('{"agent_role": "A"}', "Error: task_description must not be None or blank."),
        (
            '{"agent_role": "A", "task": "", "task_description": " "}',
            "Error: task_description must not be None or blank.",
        ),
        ('{"agent_role": "", "task": "", "task_description": ""}', "Error: agent_role must not be None or blank."),
        ('{"agent_role": true}', "Error: agent_role must be a string."),
        ('{"agent_role": "A", "task": {}, "task_description": {}}', "Error: task"),
        ("[1]", "Error: the arguments are no JSON object."),
        ("nonsense", "Error: the arguments are no valid JSON ("),
        pytest.param("[" * 100_000, "Error: the arguments are no valid JSON (", id="deep"),
    ],
)
@pytest.mark.parametrize("field", ["task", "task_description"])
def test_error_says_what_is_wrong(field: str, arguments: str, start: str) -> None:
    """S-HIER-21, S-HIER-80, S-DEL-71, S-DEL-72: the role first; it says how to call it right."""
    answer = read_call(arguments, field, ROLES)
    assert isinstance(answer, str)
    assert answer.startswith(start)
    if "blank" in start and field == "task_description":
        assert answer == start
    elif "blank" in start:
        assert "[Writer, Digger]" in answer
    else:
        assert f'"{field}"' in answer


@pytest.mark.heavy
@given(
    st.text()
    | st.recursive(
        st.none() | st.integers() | st.text(),
        lambda each: st.lists(each) | st.dictionaries(st.sampled_from(["agent_role", "task"]), each),
    ).map(json.dumps)
)
def test_whatever_is_written_is_answered(arguments: str) -> None:
    """S-HIER-80: never an exception; what is taken is never blank."""
    answer = read_call(arguments, "task", ROLES)
    if isinstance(answer, DelegationCall):
        assert answer.agent_role.strip()
        assert answer.task_description.strip()
    else:
        assert answer.startswith("Error: ")


def test_roles_are_an_enum_in_the_schema() -> None:
    """S-HIER-20, S-HIER-80, S-DEL-1: a manager's allowed workers, a peer's colleagues but itself; required both."""
    rules = HierarchyRules(allowed_workers=("Digger",))
    manager, peer = manager_tool(CONTEXT, rules, "Only 'Digger'."), peer_tool(CONTEXT, " WRITER")
    assert (manager.name, peer.name) == ("delegate_task", "delegate")
    for spec, second in ((manager, "task_description"), (peer, "task")):
        properties = spec.parameters["properties"]
        assert isinstance(properties, dict)
        assert list(properties) == spec.parameters["required"] == ["agent_role", second]
        assert {each["type"] for each in properties.values()} == {"string"}
        assert properties["agent_role"]["enum"] == ["Digger"]
    assert manager.description.endswith("Only 'Digger'.")


def test_schema_has_no_enum_when_there_is_nobody() -> None:
    """S-DEL-1: an empty enum is no schema."""
    lonely = DelegationContext(peers=[Peer(key="writer", role="Writer")])
    assert "enum" not in peer_tool(lonely, "Writer").parameters["properties"]["agent_role"]  # type: ignore[index]
