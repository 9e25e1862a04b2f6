"""Shared permits: how many model calls may begin in a span of time. Package: limits."""

from ensemble_ray.values.rate_limit import RateLimit

__all__ = ["RateLimit"]
