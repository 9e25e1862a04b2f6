"""Whether two definitions are the same."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ensemble_ray
from ensemble_ray import Node, Plan
from ensemble_ray.record.identity.definition import differences, digest_of, without_object_ids


def _plan(object_id: str, description: str = "Write") -> Plan:
    node = Node(
        key="a",
        index=1,
        object_id=object_id,
        description=description,
        expected_output="Text",
        agent_role="Writer",
        agent_key="Writer",
    )
    return Plan(workflow="sequential", nodes=(node,))


def test_digest_is_the_same_when_only_hidden_ids_differ() -> None:
    """S-SET-39: the same team declared again is the same team."""
    assert digest_of(_plan("id-1").to_dict()) == digest_of(_plan("id-2").to_dict())
    assert digest_of(_plan("id-1").to_dict()) != digest_of(_plan("id-1", "Read").to_dict())


def test_digest_does_not_depend_on_the_order_of_keys() -> None:
    """S-SET-39: mappings have none."""
    assert digest_of({"a": 1, "b": [1, 2]}) == digest_of({"b": (1, 2), "a": 1})
    assert digest_of({"a": [1, 2]}) != digest_of({"a": [2, 1]})


@pytest.mark.program
def test_digest_is_the_same_in_every_process() -> None:
    """S-SET-39: a run is asked for again in another one."""
    code = "from ensemble_ray.record.identity.definition import digest_of; print(digest_of({'ä': {1, }, 'b': None}))"
    home = Path(ensemble_ray.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=home)  # noqa: S603  our own code
    assert done.stdout.strip() == digest_of({"ä": {1}, "b": None})


def test_hidden_ids_are_left_out_at_any_depth() -> None:
    """They are for look-up inside one process."""
    assert without_object_ids({"object_id": 1, "nodes": ({"object_id": 2, "key": "a"},)}) == {"nodes": [{"key": "a"}]}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": {"b": "x"}}, {"a": {"b": "y"}}, ["a.b: 'x' -> 'y'"]),
        ({"nodes": [{"k": 1}]}, {"nodes": [{"k": 2}, {"k": 3}]}, ["nodes.0.k: 1 -> 2", "nodes.1: absent -> {'k': 3}"]),
        ({"a": 1, "object_id": 1}, {"b": 1, "object_id": 2}, ["a: 1 -> absent", "b: absent -> 1"]),
        (1, "1", ["value: 1 -> '1'"]),
        ({"a": "x" * 100}, {"a": ""}, [f"a: '{'x' * 59}... -> ''"]),
    ],
)
def test_differences_are_named_by_their_path(old: object, new: object, expected: list[str]) -> None:
    """S-SET-39: what an error can show."""
    assert differences(old, new) == expected


@pytest.mark.heavy
@given(st.dictionaries(st.text(), st.integers() | st.text()), st.dictionaries(st.text(), st.integers() | st.text()))
def test_digests_are_equal_exactly_when_nothing_differs(old: dict[str, object], new: dict[str, object]) -> None:
    """S-SET-39: the two ways of comparing agree."""
    assert (digest_of(old) == digest_of(new)) == (not differences(old, new))


def test_code_of_the_library_may_move_to_another_module() -> None:
    """S-DUR-36: the library's own code is known by its name."""
    recorded = {"tools": [{"callable": "ensemble_ray.tools.builtin.plain.CalculatorTool"}]}
    assert differences(recorded, {"tools": [{"callable": "ensemble_ray.CalculatorTool"}]}) == []
    assert differences(recorded, {"tools": [{"callable": "ensemble_ray.DateTimeTool"}]}) != []
    assert differences({"callable": "my.old.Tool"}, {"callable": "my.new.Tool"}) != []
