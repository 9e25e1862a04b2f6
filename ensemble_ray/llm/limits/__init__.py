"""Limits on model calls: rate limits, budgets of runs, and circuit breakers."""
