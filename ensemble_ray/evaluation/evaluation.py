"""`Evaluation`: the cases, the scorers, and how the team runs on them."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from pydantic import BeforeValidator, Field, SkipValidation

from ensemble_ray.definition import fields
from ensemble_ray.definition.run_options import RunFields, RunOptions, merge_options
from ensemble_ray.ensemble import RELEASE_S, Ensemble
from ensemble_ray.errors import IllegalStateError, ValidationError
from ensemble_ray.evaluation.cases import Case, place_cases
from ensemble_ray.evaluation.results import EvaluationResult, read_result
from ensemble_ray.evaluation.scorers import Scorer, check_labels, scorer_of
from ensemble_ray.items.text_files import CsvFile
from ensemble_ray.process.concurrency import bridge, library_loop, on_library_loop, run_blocking, submit
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.runs import check_run_id
from ensemble_ray.runtime import connect
from ensemble_ray.values.ids import new_run_id
from ensemble_ray.values.value import Accepts, FrozenSequence, Value, to_tuple

if TYPE_CHECKING:
    from ensemble_ray.evaluation.running import CaseProgress
    from ensemble_ray.runs.ports import Runtime

_LONGEST_ID = 100  # characters: it is the value of a tag


def _read_scorers(value: object) -> tuple[Scorer, ...]:
    scorers = tuple(scorer_of(each) for each in to_tuple(value))
    check_labels(scorers)
    return scorers


if TYPE_CHECKING:
    _Cases = Accepts[object, "str | Path | CsvFile | Sequence[Case] | None"]
    _Scorers = Accepts[Sequence[Scorer], object]  # a list of scorers, names and functions has no better type
else:
    _Cases = Annotated[Any, SkipValidation]
    _Scorers = Annotated[Sequence[Scorer], BeforeValidator(_read_scorers)]


class Evaluation(Value):
    """Runs a team on cases and scores the outputs.

    Each case runs `repeats` times. A run is recorded under an id that is derived from the id of the evaluation. If an evaluation is
    interrupted, the same evaluation with the same id continues it: no ended run and no recorded model call is repeated.

    Attributes:
        team: The evaluated team; None: recorded runs are evaluated.
        cases: The path of a `.jsonl` or `.csv` file, or a list of `Case`.
        scorers: Scorers, names such as `"exact"`, or functions of an `EnsembleOutput` and a `Case`.
        id: Names the evaluation: up to 100 letters, digits, `.`, `_` and `-`. Default: a new one.
        repeats: Runs of each case; > 0.
        concurrency: Cases that run at the same time; > 0.
        options: Options of each run of the team, such as `RunOptions(max_cost=0.05, deps=shop)`; judges have none of them.
        retry_failed: Whether runs that failed or spent their budget in an earlier start are run again.
        runs: Ids of recorded runs to evaluate, or `NAME=VALUE` for runs with a tag; see `of_runs`.
    """

    team: Annotated[Ensemble | None, SkipValidation] = Field(default=None, kw_only=False)
    cases: _Cases = Field(default=fields.initially(None), kw_only=False)
    scorers: _Scorers = Field(default=fields.initially(()), kw_only=False)
    id: fields.StrictText = Field(default_factory=new_run_id)
    repeats: fields.StrictInt = 1
    concurrency: fields.StrictInt = 4
    options: RunOptions | None = None
    retry_failed: bool = False
    runs: FrozenSequence[str] = ()

    @fields.checks_arguments
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> None:
        team, name = arguments.get("team"), arguments.get("id")
        if team is not None and not isinstance(team, Ensemble):
            raise ValidationError(f"Evaluation team must be an Ensemble, got: {type(team).__name__}")
        if (team is None) is not bool(arguments.get("runs")):
            raise ValidationError(
                "Evaluation needs a team, or recorded runs: Evaluation(team, cases, scorers), Evaluation.of_runs(...)"
            )
        if team is not None and arguments.get("cases") is None:
            raise ValidationError("Evaluation cases must not be None")
        if not to_tuple(arguments.get("scorers")):
            raise ValidationError("Evaluation needs at least one scorer, such as 'exact'")
        fields.check_positive(arguments.get("repeats"), "Evaluation repeats must be > 0")
        fields.check_positive(arguments.get("concurrency"), "Evaluation concurrency must be > 0")
        if isinstance(name, str):
            _check_id(name)

    @classmethod
    def of_runs(
        cls,
        runs: str | Sequence[str],
        scorers: object,
        *,
        cases: str | Path | CsvFile | Sequence[Case] | None = None,
        id: str | None = None,  # noqa: A002  the name of the field
        concurrency: int = 4,
    ) -> Evaluation:
        """Return an evaluation of recorded runs, which runs no team.

        Args:
            runs: Ids of runs, or `"NAME=VALUE"`: all ended runs with this tag. Several tags: runs with all of them.
            scorers: As in `Evaluation`.
            cases: Their expected outputs. The tag `case` of a run, or else equal inputs, assign the run to its case. None: the
                runs have no expected outputs.
            id: As in `Evaluation`.
            concurrency: Runs that are scored at the same time.
        """
        many = (runs,) if isinstance(runs, str) else tuple(runs)
        return cls(None, cases, scorers, runs=many, concurrency=concurrency, id=id or new_run_id())

    def run(
        self,
        *,
        runtime: Runtime | str | None = None,
        on_progress: Callable[[CaseProgress], object] | None = None,
        **options: Unpack[RunFields],
    ) -> EvaluationResult:
        """Run all cases, and wait for the result. Ctrl-C ends the runs; the same evaluation continues them.

        Args:
            runtime: As in `Ensemble.run`. Judges run in this process.
            on_progress: Called after each scored run, in another thread.
            options: Options of each run, such as `max_tokens=10_000`; they win over the field `options`.

        Raises:
            ValidationError: cases, scorers or the team are wrong; no model was called.
            RecordError: records cannot be read or written.
        """
        if on_library_loop():
            raise IllegalStateError(
                "a blocking call was made on ensemble_ray's own loop, from an async callable; await arun()"
            )
        started: list[asyncio.Task[Any]] = []
        future = submit(self._execute(runtime, on_progress, merge_options(self.options, options), started))
        try:
            return future.result()
        except KeyboardInterrupt:
            # The runs end and release their records, so that they can be resumed.
            for task in started:
                library_loop().call_soon_threadsafe(task.cancel)
            concurrent.futures.wait([future], timeout=RELEASE_S)
            raise

    async def arun(
        self,
        *,
        runtime: Runtime | str | None = None,
        on_progress: Callable[[CaseProgress], object] | None = None,
        **options: Unpack[RunFields],
    ) -> EvaluationResult:
        """`run` for async code, with the same contract. Cancelling it ends the runs."""
        return await bridge(self._execute(runtime, on_progress, merge_options(self.options, options), []))

    async def _execute(
        self,
        runtime: Runtime | str | None,
        on_progress: Callable[[CaseProgress], object] | None,
        options: RunOptions | None,
        started: list[asyncio.Task[Any]],
    ) -> EvaluationResult:
        from ensemble_ray.evaluation.running import EvaluationWork, RunningEvaluation

        if (task := asyncio.current_task()) is not None:
            started.append(task)
        work = EvaluationWork(
            id=self.id,
            team=self.team,
            cases=() if self.cases is None else place_cases(self.cases),
            scorers=self.scorers,
            repeats=self.repeats,
            concurrency=self.concurrency,
            options=options,
            retries_failed=self.retry_failed,
            runs=self.runs,
        )
        return await RunningEvaluation(work, connect(runtime), on_progress or _ignore).execute()

    @staticmethod
    def load(id: str, *, runtime: Runtime | str | None = None) -> EvaluationResult:  # noqa: A002  the name of the field
        """Return the stored result of an evaluation.

        Raises:
            ValidationError: there is none of that id.
            RecordError: its record is damaged.
        """
        return run_blocking(_load_result(id, runtime))


def _check_id(name: str) -> None:
    if len(name) > _LONGEST_ID:
        raise ValidationError(f"Evaluation id must have at most {_LONGEST_ID} characters, got: {len(name)}")
    check_run_id(name)


async def _load_result(evaluation: str, runtime: Runtime | str | None = None) -> EvaluationResult:
    store = store_at(connect(runtime or "inline").store_address)
    found = await read_result(store, evaluation)
    if found is None:
        raise ValidationError(
            f"There is no result of an evaluation '{evaluation}'. It was not run to its end here, or its records were deleted"
        )
    return found


def _ignore(_: CaseProgress) -> None:
    """No progress is reported."""
