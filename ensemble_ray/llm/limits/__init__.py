"""Limits on model calls: rate limits, budgets of runs, and circuit breakers."""

from ensemble_ray.values.value import RateLimit

__all__ = ["RateLimit"]
