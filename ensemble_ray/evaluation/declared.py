"""Evaluations that team files declare: scorers of their kinds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ensemble_ray.evaluation.judging import Judge
from ensemble_ray.evaluation.scorers import NAMED, FunctionScorer, Scorer
from ensemble_ray.teamfile.evaluation import DeclaredScorer, EvaluationKeys, read_scorers
from ensemble_ray.teamfile.team import load_evaluation_keys

_CLASSES: Mapping[str, type[Scorer]] = {**NAMED, Judge.kind: Judge, FunctionScorer.kind: FunctionScorer}


def scorers_of(declared: Iterable[object]) -> list[Scorer]:
    """Return the scorers that a team file declares.

    Raises:
        ValidationError: a value is out of range.
    """
    return [_CLASSES[each.kind](**each.values) for each in declared if isinstance(each, DeclaredScorer)]


def scorers_of_texts(texts: Iterable[str], directory: Path, option: str) -> list[Scorer]:
    """Return scorers of texts such as `exact` or `numeric: {tolerance: 0.1}`. `option` begins messages."""
    return scorers_of(read_scorers(list(texts), directory, option))


def declared_evaluation(target: str) -> EvaluationKeys:
    """Return the section `evaluation` of a target; an empty one if it has none, or is no team file."""
    is_file = Path(target).suffix.lower() in {".yaml", ".yml"}
    return (load_evaluation_keys(target) if is_file else None) or EvaluationKeys.model_construct()
