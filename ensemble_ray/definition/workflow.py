"""The words that choose how tasks follow each other. Package: definition."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["ParallelErrorStrategy", "Workflow"]


class Workflow(StrEnum):
    """How the tasks of an ensemble follow each other."""

    #: one at a time, in list order
    SEQUENTIAL = "sequential"
    #: a manager hands tasks to workers
    HIERARCHICAL = "hierarchical"
    #: each as soon as its context tasks are done
    PARALLEL = "parallel"


class ParallelErrorStrategy(StrEnum):
    """What a failed task does to the others of a parallel run."""

    #: nothing new starts
    FAIL_FAST = "fail_fast"
    #: only what depends on it is skipped
    CONTINUE_ON_ERROR = "continue_on_error"
