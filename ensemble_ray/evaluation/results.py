"""The result of an evaluation: scores by case, their summaries and comparisons, and their place in the store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec

from ensemble_ray.definition.fields import Origin
from ensemble_ray.definition.run_options import RunOptions
from ensemble_ray.definition.task import Task
from ensemble_ray.ensemble import Ensemble, join_run
from ensemble_ray.errors import RecordError, ValidationError
from ensemble_ray.evaluation.statistics import SIGNIFICANT, Interval, interval_of, paired_p_value, percentile
from ensemble_ray.record.history.run_history import RunHistory
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import RunReader, StoreAddress
from ensemble_ray.record.trace import output_of
from ensemble_ray.runs.inline import InlineRuntime
from ensemble_ray.values.ids import uuid_of
from ensemble_ray.values.outputs import RunState

# Tags of the runs of an evaluation.
EVALUATION, CASE, REPEAT, PART = "evaluation", "case", "repeat", "evaluation-part"
RESULTS, JUDGE = "results", "judge"  # values of `PART`; runs of the team have none
LONGEST_OUTPUT = 10_000  # characters of an output in a result; its run has all of it
COMPLETED = RunState.COMPLETED.value


@dataclass(frozen=True, slots=True, kw_only=True)
class RunScore:
    """The score of one run by one scorer.

    Attributes:
        value: None: the scorer raised the `error`.
        reason: Why, for people.
        error: Class and text of the error of the scorer.
        run_id: The recorded run of the judge; empty for other scorers.
        cost: Cost of the judge, as decimal text in the currency of the result; empty: none or unknown.
    """

    value: float | None
    reason: str = ""
    error: str = ""
    run_id: str = ""
    cost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRun:
    """One run of a case.

    Attributes:
        run_id: The recorded run.
        repeat: 1-based.
        state: State of the run, such as `completed` or `failed`.
        output: Its output, at most 10,000 characters.
        error: Why it has no complete output; empty for a completed run.
        duration_s: Wall time of the run, seconds; None: unknown.
        tokens: Input and output tokens; None: unknown.
        cost: As decimal text; empty: none or unknown.
        scores: By the names of the scorers; empty without an output.
    """

    run_id: str
    repeat: int
    state: str
    output: str = ""
    error: str = ""
    duration_s: float | None = None
    tokens: int | None = None
    cost: str = ""
    scores: dict[str, RunScore]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """All runs of one case.

    Attributes:
        id: Id of the case.
        inputs: As texts.
        expected: As JSON data; None: the case has none.
        tags: Tags of the case.
        runs: By repeat.
    """

    id: str
    inputs: dict[str, str]
    expected: Any = None
    tags: tuple[str, ...] = ()
    runs: tuple[CaseRun, ...] = ()

    def score(self, scorer: str) -> float | None:
        """Return the mean of this scorer's scores over the repeats; None without a score."""
        values = [each.scores[scorer].value for each in self.runs if scorer in each.scores]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSummary:
    """The scores of one scorer.

    Attributes:
        cases: Cases with a score.
        interval: Mean and 95% interval over the cases; None without a score. The score of a case is the mean of its repeats.
        errors: Runs that the scorer could not score.
    """

    scorer: str
    cases: int
    interval: Interval | None
    errors: int

    @property
    def mean(self) -> float | None:
        """The mean over the cases; None without a score."""
        return None if self.interval is None else self.interval.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSummary:
    """Runs, times and costs. Costs are decimal texts; empty: none is known.

    Attributes:
        errors: Runs without a complete output.
        p50_s: Median of the wall times of completed runs, seconds.
        p95_s: Their 95th percentile, seconds.
        judge_cost: Costs of judges, which `cost` lacks.
    """

    runs: int
    errors: int
    p50_s: float | None
    p95_s: float | None
    tokens: int
    cost: str
    judge_cost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedCase:
    """A case with different scores in two evaluations."""

    case: str
    earlier: float
    later: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreComparison:
    """The scores of one scorer in two evaluations, paired by case.

    Attributes:
        cases: Cases with a score in both.
        earlier: Mean of these cases in the earlier evaluation.
        later: Mean of these cases in the later evaluation.
        p_value: Of a two-sided paired permutation test.
        regressions: Cases with a lower score, the largest loss first.
        improvements: Cases with a higher score, the largest gain first.
    """

    scorer: str
    cases: int
    earlier: float
    later: float
    p_value: float
    regressions: tuple[ChangedCase, ...] = ()
    improvements: tuple[ChangedCase, ...] = ()

    @property
    def is_worse(self) -> bool:
        """Whether the mean is significantly lower: p < 0.05."""
        return self.later < self.earlier and self.p_value < SIGNIFICANT

    @property
    def is_better(self) -> bool:
        """Whether the mean is significantly higher: p < 0.05."""
        return self.later > self.earlier and self.p_value < SIGNIFICANT


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationComparison:
    """Two evaluations by scorer; see `EvaluationResult.compare`.

    Attributes:
        earlier: Id of the earlier evaluation.
        later: Id of the later evaluation.
        scores: For each scorer of both evaluations: `scorer`, means, `p_value`, `is_worse`, `regressions` and `improvements`.
    """

    earlier: str
    later: str
    scores: tuple[ScoreComparison, ...]

    def table(self) -> str:
        """Return the comparison as text, with all regressions."""
        rows: list[tuple[str, ...]] = [("scorer", "cases", "earlier", "later", "difference", "p", "")]
        for each in self.scores:
            verdict = "worse" if each.is_worse else "better" if each.is_better else "no significant difference"
            means = (
                f"{each.earlier:.3f}",
                f"{each.later:.3f}",
                f"{each.later - each.earlier:+.3f}",
                f"{each.p_value:.3f}",
            )
            rows.append((each.scorer, str(each.cases), *means, verdict))
        lines = [f"{self.later} compared with {self.earlier}, by a paired permutation test", *_align(rows)]
        for score in self.scores:
            changes = (f"  {each.case}: {each.earlier:.3f} -> {each.later:.3f}" for each in score.regressions)
            lines += [f"Regressions of {score.scorer}:", *changes] if score.regressions else []
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The scores of an evaluation, by case.

    Attributes:
        id: Id of the evaluation.
        team: Name of the team.
        scorers: Names of the scorers, in order.
        repeats: Runs of each case.
        currency: Of all costs.
        cases: In the order of the cases.
    """

    id: str
    team: str
    scorers: tuple[str, ...]
    repeats: int
    currency: str = "USD"
    cases: tuple[CaseResult, ...]

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags of all cases, sorted."""
        return tuple(sorted({tag for case in self.cases for tag in case.tags}))

    def _cases(self, tag: str | None) -> Sequence[CaseResult]:
        return self.cases if tag is None else [case for case in self.cases if tag in case.tags]

    def summary(self, scorer: str, tag: str | None = None) -> ScoreSummary:
        """Return the scores of a scorer, of all cases or of those with a tag.

        Raises:
            ValidationError: there is no such scorer.
        """
        if scorer not in self.scorers:
            raise ValidationError(
                f"Evaluation '{self.id}' has no scorer '{scorer}'. Known: [{', '.join(self.scorers)}]"
            )
        cases = self._cases(tag)
        values = [value for case in cases if (value := case.score(scorer)) is not None]
        errors = sum(run.scores[scorer].value is None for case in cases for run in case.runs if scorer in run.scores)
        return ScoreSummary(scorer=scorer, cases=len(values), interval=interval_of(values), errors=errors)

    def mean(self, scorer: str) -> float | None:
        """Return the mean of a scorer over the cases; None without a score."""
        values = [value for case in self.cases if (value := case.score(scorer)) is not None]
        return sum(values) / len(values) if values else None

    def usage(self, tag: str | None = None) -> UsageSummary:
        """Return counts, times and costs of the runs, of all cases or of those with a tag."""
        runs = [run for case in self._cases(tag) for run in case.runs]
        times = [run.duration_s for run in runs if run.state == COMPLETED and run.duration_s is not None]
        return UsageSummary(
            runs=len(runs),
            errors=sum(run.state != COMPLETED for run in runs),
            p50_s=percentile(times, 0.5),
            p95_s=percentile(times, 0.95),
            tokens=sum(run.tokens or 0 for run in runs),
            cost=_sum(run.cost for run in runs),
            judge_cost=_sum(score.cost for run in runs for score in run.scores.values()),
        )

    def errors(self) -> Iterator[tuple[str, CaseRun, str]]:
        """Yield the errors of runs and scorers: case, run and text."""
        for case in self.cases:
            for run in case.runs:
                if run.state != COMPLETED:
                    yield case.id, run, run.error or run.state
                for name, score in run.scores.items():
                    if score.value is None:
                        yield case.id, run, f"scorer '{name}': {score.error}"

    def missed(self, minimum: Mapping[str, float]) -> list[str]:
        """Return one line per scorer with a mean below its minimum, or without a score.

        Raises:
            ValidationError: there is no such scorer.
        """
        lines: list[str] = []
        for scorer, least in minimum.items():
            mean = self.summary(scorer).mean  # refuses an unknown scorer
            if mean is None or mean < least:
                shown = "none" if mean is None else f"{mean:.3f}"
                lines.append(f"{scorer}: the mean is {shown}, and must be at least {least:g}")
        return lines

    def compare(self, earlier: EvaluationResult) -> EvaluationComparison:
        """Compare with an earlier evaluation: cases with the same id, scorers with the same name.

        Raises:
            ValidationError: they have no scorer or no scored case in common.
        """
        known = {case.id: case for case in earlier.cases}
        found: list[ScoreComparison] = []
        for scorer in self.scorers:
            pairs = [
                ChangedCase(case=case.id, earlier=was, later=now)
                for case in self.cases
                if case.id in known
                and (was := known[case.id].score(scorer)) is not None
                and (now := case.score(scorer)) is not None
            ]
            if pairs:
                found.append(_compare(scorer, pairs))
        if not found:
            raise ValidationError(
                f"Evaluations '{earlier.id}' and '{self.id}' cannot be compared: no case has a score of the same scorer in both. "
                f"Scorers: [{', '.join(earlier.scorers)}] and [{', '.join(self.scorers)}]"
            )
        return EvaluationComparison(earlier=earlier.id, later=self.id, scores=tuple(found))

    def table(self) -> str:
        """Return the summary as text: scores by scorer and tag, errors, times and costs."""
        usage = self.usage()
        counts = f"{len(self.cases)} cases, {usage.runs} runs" + (
            f", {usage.errors} without an output" if usage.errors else ""
        )
        rows: list[tuple[str, ...]] = [("scorer", "tag", "cases", "mean", "95% interval", "", "")]
        for scorer in self.scorers:
            rows += [_row(self.summary(scorer, tag), tag or "") for tag in (None, *self.tags)]
        for tag in self.tags:
            part = self.usage(tag)
            rows.append(("time", tag, str(len(self._cases(tag))), *_times(part), _costs(part, self.currency), ""))
        total = (
            f"Time: {' '.join(filter(None, _times(usage)))}   Tokens: {usage.tokens:,}   {_costs(usage, self.currency)}"
        )
        return "\n".join([f"Evaluation {self.id}: {counts}", *_align(rows), total.rstrip()])

    def to_json(self) -> str:
        """Return the result as JSON text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> EvaluationResult:
        """Return the result of a JSON text.

        Raises:
            ValidationError: it is no such text.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ValidationError(f"Not the result of an evaluation: {error}") from None


def _sum(amounts: Iterable[str]) -> str:
    known = [Decimal(each) for each in amounts if each]
    return f"{sum(known):f}" if known else ""


def _compare(scorer: str, pairs: Sequence[ChangedCase]) -> ScoreComparison:
    earlier, later = [each.earlier for each in pairs], [each.later for each in pairs]
    changed = sorted((each for each in pairs if each.earlier != each.later), key=lambda it: it.later - it.earlier)
    return ScoreComparison(
        scorer=scorer,
        cases=len(pairs),
        earlier=sum(earlier) / len(pairs),
        later=sum(later) / len(pairs),
        p_value=paired_p_value(earlier, later),
        regressions=tuple(each for each in changed if each.later < each.earlier),
        improvements=tuple(each for each in reversed(changed) if each.later > each.earlier),
    )


def _row(found: ScoreSummary, tag: str) -> tuple[str, ...]:
    interval, errors = found.interval, f"{found.errors} errors" if found.errors else ""
    if interval is None:
        return (found.scorer, tag, "0", "-", "", "", errors)
    spread = "" if interval.low is None or interval.high is None else f"{interval.low:.3f} to {interval.high:.3f}"
    return (found.scorer, tag, str(found.cases), f"{interval.mean:.3f}", spread, interval.method, errors)


def _times(usage: UsageSummary) -> tuple[str, str]:
    p50, p95 = (f"{each:.2f} s" if each is not None else "unknown" for each in (usage.p50_s, usage.p95_s))
    return f"p50 {p50}", f"p95 {p95}"


def _costs(usage: UsageSummary, currency: str) -> str:
    parts = [f"Cost: {_money(usage.cost)} {currency}"] if usage.cost else []
    parts += [f"judges: {_money(usage.judge_cost)} {currency}"] if usage.judge_cost else []
    return ", ".join(parts)


def _money(amount: str) -> str:
    return f"{Decimal(amount):.4f}"


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


# The place of a result: the output of a recorded run with one task. So it is stored, listed, served and deleted as every run.


def derived_run_id(evaluation: str, *parts: object) -> str:
    """Return the id of a run of an evaluation."""
    return uuid_of(json.dumps(["evaluation", evaluation, *parts]))


def results_run_id(evaluation: str) -> str:
    return derived_run_id(evaluation, RESULTS)


async def store_result(result: EvaluationResult, address: StoreAddress) -> None:
    """Store a result in place of an earlier one of the evaluation.

    A process that dies between both loses only the summary: the same evaluation makes it again from its recorded runs.
    """
    store, run_id, text = store_at(address), results_run_id(result.id), result.to_json()
    found = await store.summary(run_id)
    if found is not None:
        if found.state is RunState.COMPLETED and await read_output(store, run_id) == text:
            return
        await store.delete(run_id)
    task = Task(description=f"Results of evaluation {result.id}", name=RESULTS, handler=lambda _: text, effect="none")
    team = Ensemble(tasks=[task]).with_source(Origin(called=f"evaluation {result.id}"))
    options = RunOptions(tags={EVALUATION: result.id, PART: RESULTS})
    runtime = InlineRuntime(home=address.home, store=address.url)
    await join_run(team.begin(runtime=runtime, run_id=run_id, options=options, is_watched=False))


async def read_result(store: RunReader, evaluation: str) -> EvaluationResult | None:
    """Return the stored result of an evaluation; None: there is none.

    Raises:
        RecordError: its record is damaged.
    """
    run_id = results_run_id(evaluation)
    found = await store.summary(run_id)
    if found is None or found.state is not RunState.COMPLETED:
        return None
    return EvaluationResult.from_json(await read_output(store, run_id))


async def read_output(store: RunReader, run_id: str) -> str:
    """Return the text of a completed run's output."""
    facts = [fact async for page in store.read(run_id) for fact in page]
    if not facts:
        raise RecordError(f"Run '{run_id}' has no recorded facts")
    return output_of(RunHistory(facts, has_details=True)).raw
