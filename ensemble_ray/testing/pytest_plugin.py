"""The fixture `evaluate` of pytest. Importing this module imports no pydantic and no Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ensemble_ray.evaluation.results import EvaluationResult

_SHOWN_ERRORS = 20


@pytest.fixture
def evaluate(tmp_path: Path) -> Callable[..., EvaluationResult]:
    """Evaluate a team in a test: `evaluate(team, cases, scorers, minimum={"exact": 0.9})`.

    It takes the fields of `Evaluation`, `minimum`, the least mean by scorer, and `runtime`; default: inline, with records in
    `tmp_path`. It returns the result. A missed minimum, and a run or scorer that failed, fail the test.
    """

    def run(
        team: object,
        cases: object,
        scorers: object,
        *,
        minimum: Mapping[str, float] | None = None,
        runtime: Any = None,
        **options: Any,
    ) -> EvaluationResult:
        from ensemble_ray.evaluation.evaluation import Evaluation
        from ensemble_ray.evaluation.report import EvaluationOutcome
        from ensemble_ray.runs.inline import InlineRuntime

        given: Any = {"team": team, "cases": cases, "scorers": scorers, **options}
        result = Evaluation(**given).run(runtime=runtime or InlineRuntime(home=tmp_path / "ensemble-ray"))
        failures = EvaluationOutcome(result=result, minimum=minimum or {}).failures
        errors = [f"case '{case}', run {run.run_id}: {text}" for case, run, text in result.errors()]
        if failures or errors:
            pytest.fail("\n".join([*failures, *errors[:_SHOWN_ERRORS], result.table()]), pytrace=False)
        return result

    return run
