"""Following runs: projection, golden records, live events."""
