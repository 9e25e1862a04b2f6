"""Runs of a map or map-reduce: launcher, tasks, outputs and recovery."""
