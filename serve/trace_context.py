"""The span of a client that asks for a run, as its request names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.values.trace import parse_traceparent

if TYPE_CHECKING:
    from starlette.requests import Request


def traceparent_of(request: Request, said: object = None) -> str | None:
    """Return the span that asks for a run; None where there is none.

    Args:
        request: Its header `traceparent` names the span.
        said: What the request's body names; counts before the header, unless it is wrong: that is no reason to refuse a run.
    """
    texts = (said if isinstance(said, str) else "", request.headers.get("traceparent", ""))
    found = next((span for span in map(parse_traceparent, texts) if span is not None), None)
    return None if found is None else str(found)
