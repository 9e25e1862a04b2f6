"""Kills: scenarios, victims, a harness that kills and judges; `python -m tests.chaos` runs it for long."""
