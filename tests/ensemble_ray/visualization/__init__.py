"""Tests of graphs of teams and runs."""
