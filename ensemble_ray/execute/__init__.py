"""Room 4, execute one task: pure machines decide, the runner carries out through ports."""
