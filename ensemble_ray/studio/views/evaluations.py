"""Evaluations: a list from the tags of runs, and one evaluation from its stored result. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ensemble_ray.evaluation.results import (
    EVALUATION,
    PART,
    RESULTS,
    CaseResult,
    CaseRun,
    EvaluationResult,
    ScoreComparison,
    ScoreSummary,
)
from ensemble_ray.studio import schemas
from ensemble_ray.studio.schemas import RunRow

MOST_EVALUATIONS = 100
_MOST_CASES = 1_000  # of one evaluation
_LONGEST_OUTPUT = 2_000  # characters; the page of the run has all of it


class EvaluationRuns(Struct, kw_only=True):
    """The runs with the tag of one evaluation."""

    id: str
    created_at: int
    team: str = ""
    statuses: Counter[str]
    results_run: str | None = None  # the completed run that has its result


def group_runs(rows: Iterable[RunRow]) -> list[EvaluationRuns]:
    """Return the evaluations of these runs, newest first. `rows`: newest first."""
    found: dict[str, EvaluationRuns] = {}
    for row in rows:
        name = row.tags.get(EVALUATION)
        if not name:
            continue
        one = found.setdefault(name, EvaluationRuns(id=name, created_at=row.created_at, statuses=Counter()))
        part = row.tags.get(PART)
        if part is None:
            one.team = one.team or row.ensemble
            one.statuses[row.status] += 1
        elif part == RESULTS and row.status == "completed":
            one.results_run = row.run_id
    return list(found.values())


def evaluation_row(found: EvaluationRuns, result: EvaluationResult | None) -> schemas.EvaluationRow:
    return schemas.EvaluationRow(
        id=found.id,
        team=found.team if result is None else result.team,
        created_at=found.created_at,
        runs=dict(found.statuses),
        has_result=result is not None,
        cases=0 if result is None else len(result.cases),
        means={} if result is None else {scorer: result.mean(scorer) for scorer in result.scorers},
    )


def evaluation_detail(result: EvaluationResult, earlier: EvaluationResult | None) -> schemas.EvaluationDetail:
    usage = result.usage()
    before: Mapping[str, CaseResult] = {} if earlier is None else {case.id: case for case in earlier.cases}
    cases = [_case(case, before.get(case.id), result.scorers) for case in result.cases]
    cases.sort(key=lambda case: case.change)  # stable: without a comparison in their order
    return schemas.EvaluationDetail(
        id=result.id,
        team=result.team,
        repeats=result.repeats,
        currency=result.currency,
        scores=[
            _score_row(result.summary(scorer, tag), tag) for scorer in result.scorers for tag in (None, *result.tags)
        ],
        runs=usage.runs,
        errors=usage.errors,
        p50_ms=_millis(usage.p50_s),
        p95_ms=_millis(usage.p95_s),
        tokens=usage.tokens,
        cost=usage.cost,
        judge_cost=usage.judge_cost,
        cases=cases[:_MOST_CASES],
        more_cases=max(0, len(cases) - _MOST_CASES),
        compared=None if earlier is None else earlier.id,
        comparison=[] if earlier is None else [_comparison_row(each) for each in result.compare(earlier).scores],
    )


def _score_row(found: ScoreSummary, tag: str | None) -> schemas.ScoreRow:
    interval = found.interval
    return schemas.ScoreRow(
        scorer=found.scorer,
        tag=tag,
        cases=found.cases,
        mean=found.mean,
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
        method="" if interval is None else interval.method,
        errors=found.errors,
    )


def _comparison_row(found: ScoreComparison) -> schemas.ComparisonRow:
    return schemas.ComparisonRow(
        scorer=found.scorer,
        cases=found.cases,
        earlier=found.earlier,
        later=found.later,
        p_value=found.p_value,
        verdict="worse" if found.is_worse else "better" if found.is_better else "same",
    )


def _case(case: CaseResult, earlier: CaseResult | None, scorers: Sequence[str]) -> schemas.EvaluationCase:
    changes = [
        now - was
        for scorer in scorers
        if earlier is not None
        and (now := case.score(scorer)) is not None
        and (was := earlier.score(scorer)) is not None
    ]
    return schemas.EvaluationCase(
        id=case.id,
        inputs=case.inputs,
        expected=case.expected,
        tags=list(case.tags),
        runs=[_run(each) for each in case.runs],
        earlier=[] if earlier is None else [_run(each) for each in earlier.runs],
        change=round(sum(changes), 9),
    )


def _run(run: CaseRun) -> schemas.EvaluationRun:
    return schemas.EvaluationRun(
        run_id=run.run_id,
        repeat=run.repeat,
        state=run.state,
        output=run.output[:_LONGEST_OUTPUT],
        error=run.error,
        duration_ms=_millis(run.duration_s),
        cost=run.cost,
        scores={
            name: schemas.EvaluationScore(
                value=score.value, reason=score.reason, error=score.error, run_id=score.run_id
            )
            for name, score in run.scores.items()
        },
    )


def _millis(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)
