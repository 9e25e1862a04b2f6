"""The scheduler: runs, their processes, and the dispatch of tasks."""
