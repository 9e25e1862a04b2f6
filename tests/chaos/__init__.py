"""Kills, freezes, damaged and removed records: scenarios, faults, a harness that judges; `python -m tests.chaos` runs it for long."""
