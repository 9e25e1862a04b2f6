"""The scheduler's process, one per cluster: the runs, their processes, which process has which task."""
