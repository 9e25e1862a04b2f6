"""Who asks, and what of: the dependency of every route that concerns runs. Package: serve.

`KeyCheck` puts a `Caller` into the request's state; where there is none, everybody may do everything, as an endpoint on loopback that
never had a key does. A run of a team that is not the caller's is not there for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Protocol

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from ensemble_ray.access.admission import Knock
from ensemble_ray.access.rights import Right
from ensemble_ray.serve.refusals import Refusal

__all__ = ["ANYBODY", "Caller", "CallerDependency", "Callers", "Right", "caller_of"]

#: Says in the OpenAPI document that a key is sent; `KeyCheck` has looked at it, and taken it out, long before.
_BEARER = HTTPBearer(auto_error=False, scheme_name="key", description="A key of `ensemble-ray keys add`")


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


def caller_of(
    request: Request, _sent: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)] = None
) -> Caller:
    """Return who sent a request."""
    found: object = getattr(request.state, "caller", ANYBODY)
    return found if isinstance(found, Caller) else ANYBODY


CallerDependency = Annotated[Caller, Depends(caller_of)]
