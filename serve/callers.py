"""Callers of an endpoint and their rights. It imports no web framework, because the driver's process loads none."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from ensemble_ray.access.keys import Right
from ensemble_ray.serve.schemas import Refusal

if TYPE_CHECKING:
    from ensemble_ray.access.admission import Credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request."""

    #: for logs; empty if the endpoint does not identify callers
    name: str = ""
    rights: frozenset[Right] = frozenset(Right)
    #: names of the teams it may use; None: all
    ensembles: frozenset[str] | None = None

    def check(self, right: Right) -> None:
        """Raise a `Refusal` with status 403 if the caller lacks a right."""
        if right not in self.rights:
            raise Refusal(HTTPStatus.FORBIDDEN, "FORBIDDEN", f"This key lacks the right '{right}'")

    def sees(self, ensemble: str) -> bool:
        """Return whether the caller may use a team."""
        return self.ensembles is None or ensemble in self.ensembles


#: The caller of an endpoint that does not identify callers.
ANYBODY = Caller()


class Callers(Protocol):
    """Identifies callers. `RunDriver` implements it on a cluster, for all replicas."""

    async def admit(self, credentials: Credentials) -> Caller:
        """Return the sender of a request.

        Raises:
            Refusal: the credentials are invalid or missing.
        """
        ...
