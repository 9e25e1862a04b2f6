"""Processes that run user code: agents, managers, the callables of a run."""
