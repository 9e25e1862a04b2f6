"""`ensemble-ray eval`: run a team on cases and score its outputs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ensemble_ray.cli.inputs import options
from ensemble_ray.cli.view.terminal import (
    FINE,
    INTERRUPTED,
    PARTLY,
    count_noun,
    screen_line,
    show_result,
    write_note,
)
from ensemble_ray.errors import ValidationError

if TYPE_CHECKING:
    from ensemble_ray.ensemble import Ensemble
    from ensemble_ray.evaluation.evaluation import Evaluation
    from ensemble_ray.evaluation.report import EvaluationOutcome
    from ensemble_ray.evaluation.running import CaseProgress

_BELOW = 5  # a minimum is missed, or a scorer is significantly worse
_SHOWN_ERRORS = 20
_LINE = 160


def evaluate(
    target: Annotated[
        str | None, Argument(metavar="[TARGET]", help="A YAML file, or module:attribute. Not with --runs.")
    ] = None,
    cases: Annotated[
        Path | None,
        Argument(metavar="[CASES]", help="A .jsonl or .csv file; default: the cases of the section 'evaluation'."),
    ] = None,
    *,
    scorers: Annotated[
        list[str] | None,
        Option(
            "--scorer",
            "-s",
            metavar="SCORER",
            help="exact, contains, regex, json_fields, numeric, similarity, module:function, or as in a team file: "
            "'judge: {rubric: ...}'; repeatable. In place of those of the file.",
        ),
    ] = None,
    repeats: Annotated[int | None, Option("--repeats", min=1, metavar="N", help="Runs per case.")] = None,
    concurrency: Annotated[
        int | None, Option("--concurrency", "-c", min=1, metavar="N", help="Cases at the same time; default: 4.")
    ] = None,
    only: Annotated[
        list[str] | None,
        Option("--only", metavar="TAG", help="Only cases with this tag; repeatable: with any of them."),
    ] = None,
    evaluation_id: Annotated[
        str | None,
        Option("--id", metavar="ID", help="Names the evaluation; the same id continues it. Default: a new one."),
    ] = None,
    retry_failed: Annotated[
        bool, Option("--retry-failed", help="Run again what failed in an earlier start of this evaluation.")
    ] = False,
    runs: Annotated[
        list[str] | None,
        Option(
            "--runs",
            metavar="RUN",
            help="Score recorded runs instead: an id, or NAME=VALUE for runs with a tag; repeatable.",
        ),
    ] = None,
    minimum: Annotated[
        list[str] | None,
        Option("--min", metavar="SCORER=MEAN", help="Least mean of a scorer, for the exit code; repeatable."),
    ] = None,
    compare: Annotated[
        str | None, Option("--compare", metavar="ID", help="Compare with an earlier evaluation, by case.")
    ] = None,
    junit: Annotated[Path | None, Option("--junit", metavar="FILE", help="Write JUnit XML there.")] = None,
    llm: Annotated[
        str | None, Option("--llm", metavar="MODEL", help="A model in place of every other of the team, not of judges.")
    ] = None,
    max_tokens: options.MaxTokens = None,
    max_cost: options.MaxCost = None,
    max_iterations: options.MaxIterations = None,
    context: options.Context = None,
    tags: options.Tags = None,
    user: options.User = None,
    runtime: options.RuntimeChoice = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Run a team on cases, and score its outputs.

    The section 'evaluation' of a team file declares cases, scorers and minimums; options win over it. Each case is a recorded
    run: an interrupted evaluation continues with the same command and --id.

    Exit codes: 0 all cases were scored and no minimum was missed, 1 the evaluation failed, 2 the command, the team or the
    cases are wrong, 3 a run or a scorer failed, 5 a minimum was missed or a scorer is significantly worse than in --compare,
    130 interrupted.
    """
    from ensemble_ray.cli.commands.run import find_write_error
    from ensemble_ray.evaluation.declared import declared_evaluation, scorers_of, scorers_of_texts
    from ensemble_ray.evaluation.evaluation import Evaluation
    from ensemble_ray.teamfile.evaluation import EvaluationKeys
    from ensemble_ray.values.ids import new_run_id

    if runs:
        if target is not None and cases is None:
            cases, target = Path(target), None
        elif target is not None:
            raise ValidationError(
                "--runs scores recorded runs, so there is no TARGET: ensemble-ray eval --runs RUN [CASES]"
            )
        declared = EvaluationKeys.model_construct()
    elif target is None:
        raise ValidationError("Name the team, or recorded runs: ensemble-ray eval TARGET [CASES], or --runs RUN")
    else:
        declared = declared_evaluation(target)
    chosen = scorers_of_texts(scorers, Path.cwd(), "--scorer") if scorers else scorers_of(declared.scorers or ())
    if not chosen:
        raise ValidationError(
            "There is no scorer. What to do: --scorer exact, or the key 'scorers' of the section 'evaluation'"
        )
    least = _read_minimum(minimum) if minimum else dict(declared.minimum or {})
    _check_minimum(least, [each.label for each in chosen])
    given: dict[str, Any] = {
        "scorers": chosen,
        "id": evaluation_id or new_run_id(),
        "concurrency": concurrency or declared.concurrency or 4,
    }
    place = cases or declared.cases
    if runs:
        evaluation = Evaluation.of_runs(runs, cases=_only(place, only), **given)
    else:
        if place is None:
            raise ValidationError(
                "There are no cases. What to do: name a file, or write the key 'cases' of the section 'evaluation'"
            )
        evaluation = Evaluation(
            _load(str(target), llm, runtime),
            _only(place, only),
            repeats=repeats or declared.repeats or 1,
            options=options.run_options(
                max_tokens or declared.max_tokens,
                max_cost or declared.max_cost,
                tags,
                user,
                max_iterations=max_iterations,
                context=context,
            ),
            retry_failed=retry_failed,
            **given,
        )
    if junit is not None and (refused := find_write_error(junit)) is not None:
        raise ValidationError(f"--junit: '{junit}' cannot be written: {refused.strerror or refused}. No case ran")
    return _carry_out(evaluation, least, compare=compare, junit=junit, runtime=runtime, as_json=as_json, is_quiet=quiet)


def _load(target: str, llm: str | None, runtime: options.RuntimeName | None) -> Ensemble:
    from ensemble_ray.cli.inputs.arguments import check_keys_here
    from ensemble_ray.teamfile import load_ensemble

    team = load_ensemble(target, llm=llm)
    check_keys_here(team, None if runtime is None else runtime.value)
    return team


def _only(place: Path | None, tags: Sequence[str] | None) -> Any:
    """Return the file of cases, or its cases with one of the tags."""
    if not tags:
        return place
    if place is None:
        raise ValidationError("--only chooses among cases, and there are none")
    from ensemble_ray.evaluation.cases import place_cases

    placed = place_cases(place)
    found = [each.case for each in placed if not {*each.case.tags}.isdisjoint(tags)]
    if not found:
        known = sorted({tag for each in placed for tag in each.case.tags})
        raise ValidationError(f"--only: no case has the tag {' or '.join(tags)}. Known: [{', '.join(known)}]")
    return found


def _read_minimum(words: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for word in words:
        name, _, value = word.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise ValidationError(f"--min: '{word}' is not of the form SCORER=MEAN, such as exact=0.9")
    return found


def _check_minimum(minimum: dict[str, float], labels: Sequence[str]) -> None:
    for name in minimum:
        if name not in labels:
            raise ValidationError(f"--min: there is no scorer '{name}'. Known: [{', '.join(labels)}]")


def _carry_out(
    evaluation: Evaluation,
    minimum: dict[str, float],
    *,
    compare: str | None,
    junit: Path | None,
    runtime: options.RuntimeName | None,
    as_json: bool,
    is_quiet: bool,
) -> int:
    from ensemble_ray.cli.commands.run import terminable
    from ensemble_ray.evaluation.evaluation import Evaluation
    from ensemble_ray.evaluation.report import EvaluationOutcome

    earlier = None if compare is None else Evaluation.load(compare)
    labels = [each.label for each in evaluation.scorers]
    if earlier is not None and {*labels}.isdisjoint(earlier.scorers):
        known = f"Scorers: [{', '.join(earlier.scorers)}] and [{', '.join(labels)}]"
        raise ValidationError(f"--compare: evaluation '{compare}' has no scorer in common with this one. {known}")
    view = _ProgressLines(evaluation.id, is_quiet=is_quiet)
    try:
        with terminable():
            result = evaluation.run(runtime=None if runtime is None else runtime.value, on_progress=view.show)
    except KeyboardInterrupt:
        write_note(f"{view.summary()} Continue: the same command with --id {evaluation.id}")
        return INTERRUPTED
    outcome = EvaluationOutcome(
        result=result, comparison=None if earlier is None else result.compare(earlier), minimum=minimum
    )
    if junit is not None:
        junit.write_text(outcome.junit(), encoding="utf-8")
    tables = [result.table(), *([] if outcome.comparison is None else [outcome.comparison.table()])]
    show_result(outcome.to_data() if as_json else None, tables, as_json=as_json)
    _show_problems(outcome, is_quiet=is_quiet)
    if outcome.has_errors:
        return PARTLY
    return _BELOW if outcome.failures else FINE


def _show_problems(outcome: EvaluationOutcome, *, is_quiet: bool) -> None:
    errors = list(outcome.result.errors())
    for case, run, text in errors[:_SHOWN_ERRORS]:
        write_note(screen_line(f"Error: case '{case}', run {run.run_id}: {text}", 2 * _LINE))
    if len(errors) > _SHOWN_ERRORS:
        write_note(f"and {count_noun(len(errors) - _SHOWN_ERRORS, 'more error')}")
    for line in outcome.failures:
        write_note(f"Missed: {line}")
    if not is_quiet:
        write_note(f"Compare a later evaluation with this one: --compare {outcome.result.id}")


class _ProgressLines:
    def __init__(self, evaluation_id: str, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._last: CaseProgress | None = None
        self._lock = threading.Lock()
        if not is_quiet:
            write_note(f"Evaluation {evaluation_id}")

    def show(self, progress: CaseProgress) -> None:
        with self._lock:
            self._last = progress
            if self._is_quiet:
                return
            run = progress.run
            scores = ", ".join(
                f"{name} {'error' if score.value is None else f'{score.value:.2f}'}"
                for name, score in run.scores.items()
            )
            width = len(str(progress.total))
            took = "" if run.duration_s is None else f", {run.duration_s:.1f} s"
            recorded = ", from the record" if progress.is_recorded else ""
            what = scores or run.error or run.state
            line = f"[{progress.done:>{width}}/{progress.total}] {progress.case} #{run.repeat}: {what}{took}{recorded}"
            write_note(screen_line(line, _LINE))

    def summary(self) -> str:
        last = self._last
        return (
            "Interrupted." if last is None else f"Interrupted: {last.done} of {count_noun(last.total, 'run')} scored."
        )
