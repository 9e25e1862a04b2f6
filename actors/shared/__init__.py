"""Actors that runs share: the journal of a node, and the rate limiter of a cluster."""
