"""Carry out one task. Pure machines decide, the runner carries out through ports."""
