"""The section `evaluation` of a team file, and scorers as texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import ExactMatch, FunctionScorer, Judge, NumericMatch, Similarity, ValidationError
from ensemble_ray.evaluation.declared import declared_evaluation, scorers_of, scorers_of_texts
from tests.ensemble_ray.teamfile.conftest import Load, Refused
from tests.ensemble_ray.teamfile.test_json_schema import schema_errors

TEAM = """
llm: local
tasks:
  a: {description: "do {what}"}
"""
EVALUATION = """
evaluation:
  cases: cases.jsonl
  repeats: 3
  concurrency: 2
  max_cost: 0.5
  scorers:
    - exact
    - numeric: {tolerance: 0.5, name: near}
    - similarity:
    - scoring:short
    - function: {function: scoring:short, name: brief}
    - judge: {rubric: "Is it right?", llm: {model: openai:gpt-4o, api_key_env: JUDGES_KEY}}
  minimum: {exact: 0.9, judge: 1}
"""


@pytest.fixture
def scoring(folder: Path) -> None:
    """A module of the user beside the team file."""
    (folder / "scoring.py").write_text("def short(output, case): return True\n", encoding="utf-8")


@pytest.mark.usefixtures("scoring")
def test_a_team_loads_without_the_keys_of_judges_when_it_has_an_evaluation(
    load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-EVL-40: only an evaluation needs them."""
    monkeypatch.delenv("JUDGES_KEY", raising=False)
    assert load(TEAM + EVALUATION).tasks[0].name == "a"
    with pytest.raises(ValidationError, match=r"team.yaml:17:.*the environment variable 'JUDGES_KEY' is not set"):
        declared_evaluation("team.yaml")
    monkeypatch.setenv("JUDGES_KEY", "k")
    found = declared_evaluation("team.yaml")
    assert (found.cases, found.repeats, found.concurrency, found.max_cost) == (folder / "cases.jsonl", 3, 2, 0.5)
    assert found.minimum == {"exact": 0.9, "judge": 1}
    scorers = scorers_of(found.scorers)
    assert [type(each) for each in scorers] == [
        ExactMatch, NumericMatch, Similarity, FunctionScorer, FunctionScorer, Judge,
    ]  # fmt: skip
    assert [each.label for each in scorers] == ["exact", "near", "similarity", "short", "brief", "judge"]
    assert schema_errors(TEAM + EVALUATION) == []


def test_an_evaluation_is_empty_when_the_file_has_none(load: Load) -> None:
    """S-EVL-40."""
    load(TEAM)
    assert declared_evaluation("team.yaml").scorers is None
    assert declared_evaluation("module:team").cases is None


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("scorers: [exakt]", "evaluation.scorers[0]: unknown scorer 'exakt'. Did you mean 'exact'?"),
        ("scorers: [judge]", "evaluation.scorers[0]: the scorer 'judge' needs options. Keys: [name, rubric, llm]"),
        ("scorers: [{judge: {}}]", "evaluation.scorers[0].judge: the scorer 'judge' needs the key 'rubric'"),
        (
            "scorers: [{numeric: {tolerence: 1}}]",
            "numeric.tolerence: unknown key of the scorer 'numeric'. Did you mean",
        ),
        ("scorers: [{exact: {}, regex: {}}]", "a scorer is a name, module:function, or a mapping"),
        ("scorers: [nowhere:short]", "There is no module 'nowhere'"),
        ("repeats: many", "evaluation.repeats: must be a whole number"),
        ("repetitions: 3", "evaluation.repetitions: unknown key of the evaluation. Did you mean 'repeats'?"),
        ("minimum: 3", "evaluation.minimum: must be a mapping of scorers to numbers"),
    ],
)
def test_a_mistake_has_its_place_when_the_section_is_wrong(refused: Refused, section: str, line: str) -> None:
    """S-EVL-40: also for commands that run the team."""
    (found,) = refused(f"{TEAM}evaluation: {{{section}}}\n")
    assert found.startswith("team.yaml:5:")
    assert line in found


@pytest.mark.usefixtures("scoring")
def test_scorers_are_read_when_they_are_texts(folder: Path) -> None:
    """S-EVL-41: in the forms of a team file."""
    found = scorers_of_texts(["exact", "numeric: {tolerance: 1}", "scoring:short"], folder, "--scorer")
    assert [each.label for each in found] == ["exact", "numeric", "short"]
    with pytest.raises(ValidationError, match=r"--scorer:1:1: scorers\[1\]: unknown scorer 'exakt'"):
        scorers_of_texts(["exact", "exakt"], folder, "--scorer")
    with pytest.raises(ValidationError, match="--scorer:1:3: not valid YAML"):
        scorers_of_texts(["[a"], folder, "--scorer")
    with pytest.raises(ValidationError, match="Input should be greater than or equal to 0"):
        scorers_of_texts(["numeric: {tolerance: -1}"], folder, "--scorer")
