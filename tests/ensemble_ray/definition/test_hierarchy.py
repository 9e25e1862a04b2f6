"""What a hierarchical team declares beside its tasks."""

from __future__ import annotations

import pickle

import pytest

from ensemble_ray import (
    Agent,
    DefaultManagerPromptStrategy,
    HierarchicalConstraints,
    ManagerPromptContext,
    ManagerPromptStrategy,
    Task,
    ValidationError,
)
from ensemble_ray.definition.ensemble import check_constraints, check_roles
from ensemble_ray.testing import ScriptedModel

ROLES = ["Researcher", "Analyst", "Writer"]


def refusal(roles: list[str] | None = ROLES, **fields: object) -> str:
    """The text that the constraints are refused with at a run."""
    with pytest.raises(ValidationError) as caught:
        check_constraints(HierarchicalConstraints(**fields), roles)
    return str(caught.value)


def test_order_is_kept_when_roles_are_a_sequence_and_sorted_when_a_set() -> None:
    """S-SET-24: a role named again in one group counts once (S-HIER-38)."""
    constraints = HierarchicalConstraints(
        required_workers=["Writer", "Analyst", "Writer"],
        allowed_workers={"Writer", "Analyst", "Researcher"},
        required_stages=[{"b", "a"}, ("d", "c", "d"), []],
    )
    assert constraints.required_workers == ("Writer", "Analyst")
    assert constraints.allowed_workers == ("Analyst", "Researcher", "Writer")
    assert constraints.required_stages == (("a", "b"), ("d", "c"), ())
    assert HierarchicalConstraints(required_workers=frozenset({"b", "a"})).required_workers == ("a", "b")


def test_constraints_are_empty_when_nothing_or_none_is_given() -> None:
    """06, HierarchicalConstraints: nothing is held to."""
    empty = HierarchicalConstraints()
    assert empty == HierarchicalConstraints(
        required_workers=None, allowed_workers=None, max_calls_per_worker=None, required_stages=None
    )
    assert (empty.required_workers, empty.allowed_workers, empty.required_stages) == ((), (), ())
    assert (empty.max_calls_per_worker, empty.global_max_delegations) == ({}, 0)
    check_constraints(empty, [])
    check_constraints(None, [])


def test_callers_collections_stay_theirs_when_they_change_later() -> None:
    """S-CONV-5: and the value is frozen, compares by content and travels."""
    caps, required, stages = {"Writer": 1}, ["Writer"], [["Writer"]]
    constraints = HierarchicalConstraints(max_calls_per_worker=caps, required_workers=required, required_stages=stages)
    caps["Analyst"] = 2
    required.append("Analyst")
    stages[0].append("Analyst")
    assert constraints.max_calls_per_worker == {"Writer": 1}
    assert constraints.required_workers == ("Writer",)
    assert constraints.required_stages == (("Writer",),)
    assert pickle.loads(pickle.dumps(constraints)) == constraints  # noqa: S301  our own bytes
    with pytest.raises(ValueError, match="frozen"):
        constraints.global_max_delegations = 3  # type: ignore[misc]  # it must be refused


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"required_workers": 3}, "required_workers"),
        ({"allowed_workers": [3]}, "allowed_workers"),
        ({"max_calls_per_worker": {"Writer": True}}, "max_calls_per_worker"),
        ({"max_calls_per_worker": [("Writer", 1)]}, "max_calls_per_worker"),
        ({"global_max_delegations": "3"}, "global_max_delegations"),
        ({"required_stages": [3]}, "required_stages.0"),
        ({"required_stages": 3}, "required_stages"),
        ({"required": ["Writer"]}, "unknown field 'required'"),
    ],
)
def test_type_is_refused_at_construction_when_it_is_wrong(fields: dict[str, object], named: str) -> None:
    """S-DOM-60."""
    with pytest.raises(ValidationError) as caught:
        HierarchicalConstraints(**fields)
    assert str(caught.value).startswith("HierarchicalConstraints: ")
    assert named in str(caught.value)


def test_values_are_taken_at_construction_when_they_could_not_work() -> None:
    """S-DOM-60: no other workflow is disturbed by them."""
    HierarchicalConstraints(
        required_workers=["Nobody"],
        allowed_workers=["Somebody"],
        max_calls_per_worker={"Nobody": -1},
        global_max_delegations=-1,
        required_stages=[["Nobody"], ["Nobody"]],
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"allowed_workers": ["Writer", "Nobody"]}, "allowed_workers references unknown agent: 'Nobody'"),
        ({"required_workers": ["Nobody"]}, "required_workers references unknown agent: 'Nobody'"),
        (
            {"required_workers": ["Writer", "Analyst"], "allowed_workers": {"Writer"}},
            "required_workers contains 'Analyst' which is not in allowed_workers",
        ),
        ({"max_calls_per_worker": {"Nobody": 1}}, "max_calls_per_worker references unknown agent: 'Nobody'"),
        ({"max_calls_per_worker": {"Writer": 0}}, "max_calls_per_worker value for 'Writer' must be > 0, got: 0"),
        ({"max_calls_per_worker": {"Writer": -2}}, "max_calls_per_worker value for 'Writer' must be > 0, got: -2"),
        ({"global_max_delegations": -1}, "global_max_delegations must be >= 0, got: -1"),
        ({"required_stages": [["Writer"], ["Nobody"]]}, "required_stages references unknown agent: 'Nobody'"),
        (
            {"required_stages": [["Writer"], ["Analyst", "Writer"]]},
            "required_stages contains duplicate agent role 'Writer' in multiple stages",
        ),
    ],
)
def test_constraints_are_refused_with_the_exact_text_when_a_rule_is_broken(
    fields: dict[str, object], text: str
) -> None:
    """S-HIER-30, S-HIER-31, S-HIER-32, S-HIER-33, S-HIER-34, S-HIER-35, S-HIER-36, S-HIER-37."""
    assert refusal(**fields) == f"HierarchicalConstraints.{text}"


def test_only_the_first_broken_rule_is_told_when_there_are_several() -> None:
    """S-HIER-30 to S-HIER-37 in order: each is told once those before it are mended."""
    fields: dict[str, object] = {
        "allowed_workers": ["Nobody"],
        "required_workers": ["No one"],
        "max_calls_per_worker": {"Writer": 0, "Nobody": 0},
        "global_max_delegations": -1,
        "required_stages": [["Writer"], ["Writer"], ["Nobody"]],
    }
    for mend, told in (
        ({}, "allowed_workers references"),
        ({"allowed_workers": ["Writer"]}, "required_workers references"),
        ({"required_workers": ["Analyst"]}, "required_workers contains 'Analyst'"),
        ({"required_workers": ["Writer"]}, "max_calls_per_worker references"),
        ({"max_calls_per_worker": {"Writer": 0}}, "max_calls_per_worker value"),
        ({"max_calls_per_worker": {"Writer": 1}}, "global_max_delegations must be"),
        ({"global_max_delegations": 0}, "required_stages references"),
        ({"required_stages": [["Writer"], ["Writer"]]}, "required_stages contains duplicate"),
    ):
        fields |= mend
        assert refusal(**fields).startswith(f"HierarchicalConstraints.{told}")
    check_constraints(HierarchicalConstraints(**{**fields, "required_stages": [["Writer", "Writer"]]}), ROLES)


def test_role_is_unknown_when_it_is_spelt_otherwise() -> None:
    """S-HIER-38: letter by letter, though delegations themselves are forgiving."""
    assert "unknown agent: 'writer'" in refusal(allowed_workers=["writer"])
    assert "unknown agent: 'Writer '" in refusal(required_workers=["Writer "])


def test_existence_is_left_open_when_not_all_roles_are_known() -> None:
    """S-DET-26: agents are yet to be made; what does not depend on them is still refused."""
    unknown = HierarchicalConstraints(
        required_workers=["X"], allowed_workers=["X"], max_calls_per_worker={"X": 1}, required_stages=[["X"]]
    )
    check_constraints(unknown, None)
    for fields, told in (
        ({"required_workers": ["X"], "allowed_workers": ["Y"]}, "which is not in allowed_workers"),
        ({"max_calls_per_worker": {"X": 0}}, "must be > 0"),
        ({"global_max_delegations": -1}, "must be >= 0"),
        ({"required_stages": [["X"], ["X"]]}, "multiple stages"),
    ):
        assert told in refusal(None, **fields)


@pytest.mark.parametrize("role", ["Manager", "manager", "MANAGER", " Manager "])
def test_role_is_refused_when_it_is_the_managers(role: str) -> None:
    """S-HIER-4: as a delegation would find it."""
    with pytest.raises(ValidationError) as caught:
        check_roles(["Writer", "writer", role])
    assert str(caught.value) == (
        "Agent role 'Manager' is reserved for the virtual manager in HIERARCHICAL workflow. "
        f"Choose a different role for agent '{role}'."
    )


@pytest.mark.parametrize("role", ["Writer", "writer", "Writer "])
def test_role_is_refused_when_another_worker_has_it(role: str) -> None:
    """S-HIER-4."""
    with pytest.raises(ValidationError) as caught:
        check_roles(["Writer", "Analyst", role])
    assert str(caught.value) == (
        f"Duplicate agent role '{role}' detected in HIERARCHICAL workflow. "
        "All agent roles must be unique (case-insensitive) to avoid ambiguous delegation."
    )
    check_roles(["Writer", "Analyst", "Project Manager"])


def test_any_object_is_a_strategy_when_it_has_both_methods() -> None:
    """S-HIER-10: by shape."""

    class Half:
        def build_system_prompt(self, context: ManagerPromptContext) -> str:
            return ""

    class Whole(Half):
        def build_user_prompt(self, context: ManagerPromptContext) -> str:
            return ""

    assert isinstance(Whole(), ManagerPromptStrategy)
    assert isinstance(DefaultManagerPromptStrategy(), ManagerPromptStrategy)
    assert not isinstance(Half(), ManagerPromptStrategy)


def test_context_is_frozen_when_it_is_made() -> None:
    """S-HIER-10: its four parts; lists are copied."""
    agents = [Agent(role="Writer", goal="g", llm=ScriptedModel())]
    context = ManagerPromptContext(agents=agents, tasks=[Task.of("d")])
    agents.clear()
    assert [agent.role for agent in context.agents] == ["Writer"]
    assert (context.previous_outputs, context.workflow_description) == ((), None)
    with pytest.raises(ValidationError):
        ManagerPromptContext(agents=["Writer"])
