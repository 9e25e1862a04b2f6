"""Scorers on outputs, without runs."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    Case,
    Contains,
    EnsembleOutput,
    ExactMatch,
    FunctionScorer,
    JsonFields,
    Judge,
    NumericMatch,
    RegexMatch,
    Score,
    Scorer,
    Similarity,
    TaskOutput,
    ValidationError,
)
from ensemble_ray.evaluation.scorers import check_labels, score_of, scorer_of
from ensemble_ray.values.value import utc_now


class Bill(BaseModel):
    total: float
    currency: str


def output_of(raw: str, parsed: object = None) -> EnsembleOutput:
    task = TaskOutput(
        raw=raw, task_description="t", agent_role="a", completed_at=utc_now(), duration=0, parsed_output=parsed
    )
    return EnsembleOutput.of(raw, [task], 0.0, 0)


class LettersModel:
    """An embedding model that counts letters."""

    def embed(self, text: str) -> Sequence[float]:
        return [text.count(each) for each in "abc"]


async def value_of(scorer: Scorer, raw: str, expected: object = None, parsed: object = None) -> float:
    case = Case("c", expected=expected)
    assert scorer.problem(case) == ""
    return (await scorer.score(output_of(raw, parsed), case)).value


@pytest.mark.parametrize(
    ("scorer", "raw", "expected", "value"),
    [
        (ExactMatch(), " Paris\n", "Paris", 1),
        (ExactMatch(), "paris", "Paris", 0),
        (ExactMatch(ignore_case=True), "paris", "Paris", 1),
        (ExactMatch(), 'The bill: {"total": 3}', {"total": 3}, 1),
        (ExactMatch(), "3", 3, 1),
        (ExactMatch(), "no data", 3, 0),
        (Contains(), "Paris and Rome", ["Paris", "Bern"], 0.5),
        (Contains(texts=["rome"], ignore_case=True), "Paris and Rome", None, 1),
        (RegexMatch(r"\d{4}"), "in 1999", None, 1),
        (RegexMatch(), "in 99", r"^\d", 0),
        (JsonFields(), '{"a": 1, "b": "x "}', {"a": 1, "b": "x"}, 1),
        (JsonFields(["a", "c.d"]), '{"a": 2, "c": {"d": true}}', {"a": 1, "c": {"d": True}, "e": 1}, 0.5),
        (JsonFields(tolerance=0.5), '{"a": 1.4}', {"a": 1}, 1),
        (JsonFields(), "none", {"a": 1}, 0),
        (NumericMatch(), "about 1,234.5 EUR", 1234.5, 1),
        (NumericMatch(tolerance=1), "from 3 to 41", 40, 1),
        (NumericMatch(relative=0.1), "89", "100", 0),
        (NumericMatch(), "none", 1, 0),
        (Similarity(model=LettersModel()), "aab", "aab", 1),
        (Similarity(model=LettersModel()), "aa", "bb", 0),
    ],
)  # fmt: skip
async def test_an_output_has_its_score_when_it_is_compared(
    scorer: Scorer, raw: str, expected: object, value: float
) -> None:
    """S-EVL-11 to S-EVL-16."""
    assert await value_of(scorer, raw, expected) == pytest.approx(value)


async def test_the_parsed_output_is_compared_when_there_is_one() -> None:
    """S-EVL-11, S-EVL-14, S-EVL-15."""
    bill = Bill(total=3.5, currency="EUR")
    assert await value_of(JsonFields(), "other text 9", {"total": 3.5, "currency": "EUR"}, bill) == 1
    assert await value_of(ExactMatch(), "other text 9", {"total": 3.5, "currency": "EUR"}, bill) == 1
    assert await value_of(NumericMatch(), "other text 9", 3, parsed=3) == 1


async def test_a_score_has_a_reason_when_it_is_not_full() -> None:
    """S-EVL-10."""
    found = await JsonFields().score(output_of('{"a": 1}'), Case("c", expected={"a": 2, "b": 3}))
    assert found == Score(0.0, "a: 1 instead of 2; b: missing")


@pytest.mark.parametrize(
    ("scorer", "expected", "problem"),
    [
        (ExactMatch(), None, "the scorer 'exact' needs 'expected', and the case has none"),
        (Contains(), 3, "needs 'expected', a text or a list of texts, got: 3"),
        (RegexMatch(), None, "needs 'expected', a regular expression"),
        (RegexMatch(), "(", "'(' is no regular expression"),
        (JsonFields(), "x", "needs 'expected', an object with fields"),
        (JsonFields(["c"]), {"a": 1}, "'expected' has no field 'c'. Known: [a]"),
        (NumericMatch(), "many", "needs 'expected', a number"),
    ],
)
def test_a_case_is_refused_when_a_scorer_cannot_use_what_it_expects(
    scorer: Scorer, expected: object, problem: str
) -> None:
    """S-EVL-3, S-EVL-11 to S-EVL-15."""
    assert problem in scorer.problem(Case("c", expected=expected))


async def test_a_function_scores_when_it_returns_a_number_a_flag_or_a_score() -> None:
    """S-EVL-17."""

    def short(output: EnsembleOutput, case: Case) -> bool:
        return len(output.raw) < int(case.expected)

    async def graded(output: EnsembleOutput, case: Case) -> Score:
        return Score(0.5, f"{output.raw} {case.id}")

    assert await value_of(scorer_of(short), "abc", 4) == 1
    assert await FunctionScorer(graded).score(output_of("abc"), Case("c")) == Score(0.5, "abc c")
    assert (FunctionScorer(short).label, FunctionScorer(short, name="brief").label) == ("short", "brief")


@pytest.mark.parametrize("returned", [None, "1", float("nan"), Score(float("inf"))])
def test_a_result_is_refused_when_it_is_no_finite_score(returned: object) -> None:
    """S-EVL-10, S-EVL-17."""
    with pytest.raises(ValidationError, match="must return a Score, a finite number, True or False"):
        score_of(returned, "mine")


def test_names_are_checked_when_scorers_are_declared() -> None:
    """S-EVL-10."""
    assert scorer_of("numeric") == NumericMatch()
    with pytest.raises(
        ValidationError, match=re.escape("Unknown scorer 'exakt'. Did you mean 'exact'? Known: [exact,")
    ):
        scorer_of("exakt")
    with pytest.raises(ValidationError, match="A scorer must be a Scorer, a name or a function"):
        scorer_of(3)
    with pytest.raises(ValidationError, match="Two scorers are named 'exact'"):
        check_labels([ExactMatch(), ExactMatch(ignore_case=True)])
    check_labels([ExactMatch(), ExactMatch(ignore_case=True, name="folded")])


def test_a_scorer_is_refused_when_its_options_are_wrong() -> None:
    """S-EVL-13, S-EVL-18."""
    with pytest.raises(ValidationError, match="is no regular expression"):
        RegexMatch("(")
    with pytest.raises(ValidationError, match="Judge rubric must not be blank"):
        Judge(" ")
    with pytest.raises(ValidationError, match="Unknown embedding_model 'nowhere'"):
        Similarity(model="nowhere")
