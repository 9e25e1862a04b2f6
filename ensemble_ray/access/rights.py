"""What a caller of an endpoint may do. Package: access. Pure."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Right"]


class Right(StrEnum):
    """One thing that a caller may do; none of them includes another."""

    #: begin runs and cancel them
    RUN = "run"
    #: see teams and runs
    READ = "read"
    #: decide at gates
    REVIEW = "review"
    ADMIN = "admin"
