"""Tests of the coordinator and of what stands behind it."""
