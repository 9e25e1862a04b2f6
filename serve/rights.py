"""Who asks, and what of: the dependency of every route that concerns runs. Package: serve.

A middleware that knows its callers puts a `Caller` into the request's state; where there is none, everybody may do everything, as an
endpoint on loopback does. A run of a team that is not the caller's is not there for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Request

from ensemble_ray.serve.refusals import Refusal

__all__ = ["ANYBODY", "Caller", "CallerDependency", "Right", "caller_of"]


class Right(StrEnum):
    """What a caller may do."""

    #: begin runs and cancel them
    RUN = "run"
    #: see teams and runs
    READ = "read"
    #: decide at gates
    REVIEW = "review"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request."""

    #: for logs; empty: nobody asked who it is
    name: str = ""
    rights: frozenset[Right] = frozenset(Right)
    #: names of the teams that it may use; None: all
    ensembles: frozenset[str] | None = None

    def check(self, right: Right) -> None:
        """Refuse what the caller has no right to.

        Raises:
            Refusal: 403; it names the right.
        """
        if right not in self.rights:
            raise Refusal(HTTPStatus.FORBIDDEN, "FORBIDDEN", f"This key lacks the right '{right}'")

    def sees(self, ensemble: str) -> bool:
        """Return whether a team is there for this caller."""
        return self.ensembles is None or ensemble in self.ensembles


#: An endpoint that asks nobody who they are.
ANYBODY = Caller()


def caller_of(request: Request) -> Caller:
    """Return who sent a request."""
    found: object = getattr(request.state, "caller", ANYBODY)
    return found if isinstance(found, Caller) else ANYBODY


CallerDependency = Annotated[Caller, Depends(caller_of)]
