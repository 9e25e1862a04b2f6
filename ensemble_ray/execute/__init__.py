"""Run one task: pure machines decide, and the runner carries out their decisions through ports."""
