"""The dependency of every route that concerns runs: who asks.

`KeyCheck` puts a `Caller` into the request's state; where there is none, everybody may do everything, as an endpoint on loopback that
never had a key does. A run of a team that is not the caller's is not there for it.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from ensemble_ray.serve.callers import ANYBODY, Caller

#: Says in the OpenAPI document that a key is sent; `KeyCheck` has looked at it, and taken it out, long before.
_BEARER = HTTPBearer(auto_error=False, scheme_name="key", description="A key of `ensemble-ray keys add`")


def caller_of(
    request: Request, _sent: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)] = None
) -> Caller:
    """Return who sent a request."""
    found: object = getattr(request.state, "caller", ANYBODY)
    return found if isinstance(found, Caller) else ANYBODY


CallerDependency = Annotated[Caller, Depends(caller_of)]
