"""Who asks an endpoint, and what of. It knows no web framework: the process that drives runs loads none."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from ensemble_ray.access.keys import Right
from ensemble_ray.serve.schemas import Refusal

if TYPE_CHECKING:
    from ensemble_ray.access.admission import Knock


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


class Callers(Protocol):
    """Knows who may ask; `RunDriver` does on a cluster, for all replicas."""

    async def admit(self, knock: Knock) -> Caller:
        """Return who sends a request.

        Raises:
            Refusal: it is not let in.
        """
        ...
