"""Runs: handles and launchers for callers, the coordinator, ownership of records, and outcomes."""
