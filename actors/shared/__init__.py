"""Processes that the whole cluster shares: event hub, rate limiter, journals of a node."""
