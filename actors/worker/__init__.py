"""Processes that run user code: agents, managers and the callables of a run."""
