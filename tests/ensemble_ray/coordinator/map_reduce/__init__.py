"""Tests of the tasks of a map-reduce."""
