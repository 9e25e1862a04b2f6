"""Actors that the whole cluster shares: event hub, rate limiter and the journals of nodes."""
