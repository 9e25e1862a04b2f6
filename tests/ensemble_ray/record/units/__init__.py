"""Tests of what units of a run gave."""
