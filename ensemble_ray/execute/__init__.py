"""Carry out one task. Package: execute. Pure machines decide, the runner carries out through ports."""
