"""Summaries, comparisons and reports of results, without runs."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

import pytest

from ensemble_ray import CaseResult, CaseRun, EvaluationResult, RunScore, ValidationError
from ensemble_ray.evaluation.report import EvaluationOutcome
from ensemble_ray.evaluation.statistics import interval_of, paired_p_value, percentile


def make_result(name: str, values: Sequence[Sequence[float | None]]) -> EvaluationResult:
    """Return a result with a case for each sequence of scores of its runs; None: its run failed."""

    def run(repeat: int, value: float | None) -> CaseRun:
        if value is None:
            return CaseRun(run_id=f"r{repeat}", repeat=repeat, state="failed", error="Boom: \x00 it", scores={})
        return CaseRun(
            run_id=f"r{repeat}", repeat=repeat, state="completed", output="out", duration_s=float(repeat), tokens=10,
            cost="0.5", scores={"exact": RunScore(value=value, cost="0.25", reason="so")},
        )  # fmt: skip

    cases = [
        CaseResult(
            id=f"case-{number}",
            inputs={"n": str(number)},
            expected=number,
            tags=("even",) if number % 2 == 0 else (),
            runs=tuple(run(repeat, value) for repeat, value in enumerate(scores, start=1)),
        )
        for number, scores in enumerate(values)
    ]
    return EvaluationResult(id=name, team="team", scorers=("exact",), repeats=max(map(len, values)), cases=tuple(cases))


def test_an_interval_is_wilsons_when_all_values_are_0_or_1() -> None:
    """S-EVL-31: 8 of 10, as in any table of Wilson's interval."""
    found = interval_of([1.0] * 8 + [0.0] * 2)
    assert found is not None
    assert (found.mean, found.method) == (0.8, "Wilson")
    assert (found.low, found.high) == (pytest.approx(0.490, abs=0.001), pytest.approx(0.943, abs=0.001))


def test_an_interval_is_a_bootstrap_when_values_are_graded() -> None:
    """S-EVL-31: the same values have the same interval, which contains the mean."""
    values = [0.1, 0.4, 0.5, 0.9, 0.7, 0.3]
    found = interval_of(values)
    assert found is not None
    assert found.method == "bootstrap"
    assert found.low is not None
    assert found.high is not None
    assert min(values) < found.low < found.mean < found.high < max(values)
    assert interval_of(values) == found


def test_an_interval_is_missing_when_there_is_one_value() -> None:
    """S-EVL-31."""
    one, equal = interval_of([0.5]), interval_of([0.5, 0.5])
    assert one is not None
    assert equal is not None
    assert (one.mean, one.low, one.high) == (0.5, None, None)
    assert (equal.low, equal.high, equal.method) == (0.5, 0.5, "all equal")
    assert interval_of([]) is None


def test_the_p_value_counts_all_permutations_when_there_are_few() -> None:
    """S-EVL-33: of 2 ** 8 changes of signs, 2 are as extreme."""
    assert paired_p_value([1.0] * 8, [0.0] * 8) == pytest.approx(2 / 2**8)
    assert paired_p_value([1.0] * 8, [1.0] * 8) == 1.0


def test_the_score_of_a_case_is_a_mean_when_it_has_repeats() -> None:
    """S-EVL-30, S-EVL-24: a failed run has no score, and its case the mean of the others."""
    result = make_result("a", [[1, 0, None], [1, 1, 1], [None, None, None]])
    summary = result.summary("exact")
    assert (summary.cases, summary.mean) == (2, 0.75)
    assert result.summary("exact", "even").mean == 0.5
    assert len(list(result.errors())) == 4
    with pytest.raises(ValidationError, match="has no scorer 'other'"):
        result.summary("other")


def test_usage_adds_runs_when_it_is_of_all_cases_or_a_tag() -> None:
    """S-EVL-32: judges are counted apart."""
    usage = make_result("a", [[1, 1, None], [1, 1, 1]]).usage()
    assert (usage.runs, usage.errors, usage.tokens, usage.cost, usage.judge_cost) == (6, 1, 50, "2.5", "1.25")
    assert (usage.p50_s, usage.p95_s) == (2.0, 3.0)
    assert make_result("a", [[1], [1]]).usage("even").runs == 1
    assert percentile([], 0.5) is None


def test_regressions_are_listed_when_two_results_are_compared() -> None:
    """S-EVL-33: cases are paired by id; the largest loss comes first."""
    earlier = make_result("a", [[1]] * 10)
    later = make_result("b", [[0.5], [0], [0], [0], [0], [0], [0], [1]])
    (found,) = later.compare(earlier).scores
    assert (found.cases, found.earlier, found.is_worse, found.is_better) == (8, 1.0, True, False)
    assert [each.case for each in found.regressions] == [*(f"case-{number}" for number in range(1, 7)), "case-0"]
    assert earlier.compare(later).scores[0].is_better
    assert "Regressions of exact:\n  case-1: 1.000 -> 0.000" in later.compare(earlier).table()
    other = EvaluationResult(id="c", team="t", scorers=("judge",), repeats=1, cases=earlier.cases)
    with pytest.raises(ValidationError, match="no case has a score of the same scorer in both"):
        other.compare(earlier)


def test_junit_fails_exactly_when_the_exit_code_does() -> None:
    """S-EVL-35: errors of cases, failures of checks; characters that XML lacks are replaced."""
    result = make_result("b", [[0, None], *([[0]] * 7)])
    outcome = EvaluationOutcome(
        result=result, comparison=result.compare(make_result("a", [[1]] * 8)), minimum={"exact": 0.5}
    )
    cases, checks = ET.fromstring(outcome.junit())  # noqa: S314  its own text
    assert (cases.get("tests"), cases.get("errors"), cases.get("failures")) == ("8", "1", "0")
    assert (checks.get("tests"), checks.get("errors"), checks.get("failures")) == ("2", "0", "2")
    assert "\ufffd" in str(cases.find("testcase/error[@message]").get("message"))  # type: ignore[union-attr]
    assert len(outcome.failures) == 2
    fine = EvaluationOutcome(result=make_result("c", [[1], [1]]), minimum={"exact": 0.5})
    assert (fine.failures, fine.has_errors) == ([], False)
    assert "<failure" not in fine.junit()
    assert "<error" not in fine.junit()


def test_a_result_is_equal_when_it_comes_from_its_json() -> None:
    """S-EVL-34."""
    result = make_result("a", [[1, None], [0.5, 0.25]])
    assert EvaluationResult.from_json(result.to_json()) == result
    with pytest.raises(ValidationError, match="Not the result of an evaluation"):
        EvaluationResult.from_json("{}")


def test_the_table_names_methods_and_costs_when_it_is_shown() -> None:
    """S-EVL-31, S-EVL-32."""
    text = make_result("a", [[1], [0], [None]]).table()
    assert text.splitlines()[0] == "Evaluation a: 3 cases, 3 runs, 1 without an output"
    assert "Wilson" in text
    assert "Cost: 1.0000 USD, judges: 0.5000 USD" in text
