"""Means, intervals and tests of scores. Scipy is imported when it is used."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

from msgspec import Struct

from ensemble_ray.errors import ValidationError

CONFIDENCE = 0.95
SIGNIFICANT = 0.05  # a difference with a smaller p-value is significant
_RESAMPLES = 9_999
_SEED = 0  # of all resamples, so that the same scores have the same summary


class Interval(Struct, frozen=True, kw_only=True):
    """A mean and its 95% confidence interval. `low` and `high` are None for fewer than two values."""

    mean: float
    low: float | None = None
    high: float | None = None
    method: str = ""  # `Wilson`, `bootstrap` or `all equal`


def has_scipy() -> bool:
    return importlib.util.find_spec("scipy") is not None


def require_scipy() -> None:
    """Refuse evaluations without the extra.

    Raises:
        ValidationError: scipy is not installed.
    """
    if not has_scipy():
        raise ValidationError('Evaluations need an extra: pip install "ensemble-ray[eval]"')


def interval_of(values: Sequence[float]) -> Interval | None:
    """Return the mean of the values of cases, with its interval; None without values.

    Values that are all 0 or 1 have Wilson's interval. Other values have a BCa bootstrap with a fixed seed.
    """
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if len(values) < 2 or not has_scipy():  # noqa: PLR2004  one value has no spread; Studio may run without the extra
        return Interval(mean=mean)
    if {*values} <= {0.0, 1.0}:
        from scipy.stats import binomtest

        found = binomtest(sum(map(int, values)), len(values)).proportion_ci(CONFIDENCE, "wilson")
        return Interval(mean=mean, low=float(found.low), high=float(found.high), method="Wilson")
    if len({*values}) == 1:
        return Interval(mean=mean, low=mean, high=mean, method="all equal")
    import numpy as np
    from scipy.stats import bootstrap

    numbers = np.asarray(values, dtype=float)
    with np.errstate(all="ignore"):
        result = bootstrap((numbers,), np.mean, confidence_level=CONFIDENCE, n_resamples=_RESAMPLES, rng=_SEED)
    low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
    if not math.isfinite(low + high):  # BCa is undefined for some small samples
        result = bootstrap((numbers,), np.mean, n_resamples=_RESAMPLES, rng=_SEED, method="percentile")
        low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
    return Interval(mean=mean, low=low, high=high, method="bootstrap")


def paired_p_value(earlier: Sequence[float], later: Sequence[float]) -> float:
    """Return the p-value of a two-sided paired permutation test of the mean difference.

    The values of a case change places. All permutations are tried if there are fewer than 10,000, else as many by a fixed seed.
    """
    differences = [b - a for a, b in zip(earlier, later, strict=True)]
    if not any(differences):
        return 1.0
    require_scipy()
    import numpy as np
    from scipy.stats import permutation_test

    # Of one sample, the test changes the signs: that is the exchange of the values of a pair.
    result = permutation_test(
        (np.asarray(differences, dtype=float),), np.mean, permutation_type="samples", n_resamples=_RESAMPLES, rng=_SEED
    )
    return float(result.pvalue)


def percentile(values: Sequence[float], part: float) -> float | None:
    """Return the smallest value that is not below this part of the values; None without values."""
    ordered = sorted(values)
    return ordered[math.ceil(part * len(ordered)) - 1] if ordered else None
