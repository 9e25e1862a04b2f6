"""Shared permits: how many model calls may begin in a span of time."""

from ensemble_ray.values.value import RateLimit

__all__ = ["RateLimit"]
