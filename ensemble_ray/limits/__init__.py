"""Shared permits: how many model calls may begin in a span of time. Room: limits."""

from ensemble_ray.values.rate_limit import RateLimit

__all__ = ["RateLimit"]
