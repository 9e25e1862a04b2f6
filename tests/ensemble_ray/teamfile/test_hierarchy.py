"""A hierarchical team as a file."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ensemble_ray import HierarchicalConstraints, OpenAIChatModel, Workflow
from ensemble_ray.teamfile.team import team_schema
from tests.ensemble_ray.teamfile.conftest import Load, Refused
from tests.ensemble_ray.teamfile.test_json_schema import schema_errors

NEWSROOM = """
llm: local
workflow: hierarchical
manager_llm: openai:m
manager_max_iterations: 30
manager_prompt_strategy: newsroom:Words
manager_stall_turns: 0
enforce_required: fail
max_delegation_depth: 2
delegation_policies: [newsroom:allow, newsroom:Policy, newsroom:policy]
delegation_timeout: 90.5
delegation_retries: 0
on_delegation_started: newsroom:allow
on_delegation_failed: [newsroom:allow, newsroom:allow]
hierarchical_constraints:
  required_workers: [Writer, Analyst]
  allowed_workers: [Writer, Analyst, Researcher]
  max_calls_per_worker: {Writer: 2, Researcher: 3}
  global_max_delegations: 9
  required_stages: [[Researcher, Analyst], [Writer]]
agents:
  Researcher: {goal: Find, allow_delegation: true}
  Analyst: {goal: Weigh}
  Writer: {goal: Write}
tasks:
  article: {description: Write about tides}
"""

CODE = """
class Words:
    def build_system_prompt(self, context): return ""
    def build_user_prompt(self, context): return ""

class Policy:
    def evaluate(self, request, context): ...

policy = Policy()

def allow(*args): ...
"""
#: The part of a file that every team needs.
REST = "llm: local\ntasks: {t: {description: d}}\n"


@pytest.fixture(autouse=True)
def newsroom(folder: Path) -> None:
    """The user's module."""
    (folder / "newsroom.py").write_text(CODE, encoding="utf-8")


def test_every_rule_arrives_when_a_team_has_a_manager(load: Load) -> None:
    """S-CONV-19: by the names that they have in Python."""
    team = load(NEWSROOM)
    assert team.workflow is Workflow.HIERARCHICAL
    assert isinstance(team.manager_llm, OpenAIChatModel)
    assert team.hierarchical_constraints == HierarchicalConstraints(
        required_workers=["Writer", "Analyst"],
        allowed_workers=["Writer", "Analyst", "Researcher"],
        max_calls_per_worker={"Writer": 2, "Researcher": 3},
        global_max_delegations=9,
        required_stages=[["Researcher", "Analyst"], ["Writer"]],
    )
    assert (team.manager_max_iterations, team.manager_stall_turns, team.enforce_required) == (30, 0, "fail")
    assert (team.max_delegation_depth, team.delegation_retries) == (2, 0)
    assert team.delegation_timeout == timedelta(seconds=90.5)
    assert type(team.manager_prompt_strategy).__name__ == "Words"
    assert [type(policy).__name__ for policy in team.delegation_policies] == ["function", "Policy", "Policy"]
    assert (len(team.on_delegation_started), len(team.on_delegation_failed)) == (1, 2)
    assert [agent.allow_delegation for agent in team.agents or ()] == [True, False, False]


def test_defaults_are_pythons_when_a_file_says_nothing(load: Load) -> None:
    """The same team as in Python."""
    team = load(REST)
    assert (team.manager_llm, team.hierarchical_constraints, team.delegation_timeout) == (None, None, None)
    assert (team.manager_max_iterations, team.max_delegation_depth, team.delegation_retries) == (20, 3, 2)
    assert load(REST + "hierarchical_constraints: {}\n").hierarchical_constraints == HierarchicalConstraints()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hierarchical_constraints: [Writer]", "hierarchical_constraints: the constraints must be a mapping"),
        ("hierarchical_constraints: {required_worker: [A]}", "Did you mean 'required_workers'?"),
        (
            "hierarchical_constraints: {required_workers: 5}",
            'hierarchical_constraints.required_workers: must be text: put it in quotes, "5"',
        ),
        (
            "hierarchical_constraints: {required_stages: [5]}",
            'hierarchical_constraints.required_stages[0]: must be text: put it in quotes, "5"',
        ),
        ("hierarchical_constraints: {max_calls_per_worker: [A]}", "must be a mapping of roles to whole numbers"),
        (
            "hierarchical_constraints: {max_calls_per_worker: {A: many}}",
            "hierarchical_constraints.max_calls_per_worker.A: must be a whole number",
        ),
        ("manager_prompt_strategy: newsroom:Policy", "'newsroom:Policy' is a Policy, and not an object with 'build"),
        ("delegation_policies: [newsroom:CODE]", "newsroom"),
        ("enforce_required: warn", "unknown word 'warn'"),
        ("delegation_timeout: soon", "delegation_timeout: must be a number"),
        ("workflow: hierarchic", "Did you mean 'hierarchical'?"),
    ],
)
def test_mistake_is_told_with_its_place_when_a_rule_is_wrong(refused: Refused, text: str, told: str) -> None:
    """S-CONV-12: file, line and path."""
    lines = refused(REST + text + "\n")
    found = [line for line in lines if told in line]
    assert len(found) == 1, lines
    assert "team.yaml:3:" in found[0]


@pytest.mark.heavy
def test_editor_takes_what_the_loader_takes_when_a_team_has_a_manager() -> None:
    """The published schema knows the keys, with Python's defaults."""
    assert schema_errors(NEWSROOM) == []
    assert schema_errors(REST + "hierarchical_constraints: {required_stages: [A, [B, C]]}\n") == []
    assert schema_errors(REST + "hierarchical_constraints: {required_stages: [5]}\n")
    properties = team_schema()["properties"]
    assert isinstance(properties, dict)
    manager = properties["manager_max_iterations"]
    assert isinstance(manager, dict)
    assert manager["default"] == 20
