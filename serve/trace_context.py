"""The span of a client that asks for a run, as its request names it. Package: serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.values.tracing import parse_traceparent

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["traceparent_of"]


def traceparent_of(request: Request) -> str | None:
    """Return the `traceparent` of a request; None where it has none, or one that is none: it is no reason to refuse a run."""
    found = parse_traceparent(request.headers.get("traceparent", ""))
    return None if found is None else str(found)
