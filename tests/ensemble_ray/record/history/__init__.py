"""Tests of the history of a run."""
