"""Where a request may be sent when an endpoint says that it is elsewhere. Package: llm; pure.

A request holds the prompt and the key, and an endpoint is not trusted to choose who else gets them: it may move a
request to another path of its own origin (scheme, host and port), and nowhere else (S-SEC-54).
"""

from __future__ import annotations

from urllib.parse import SplitResult, urljoin, urlsplit

from ensemble_ray.text.foreign_text import one_line

__all__ = ["MOST_REDIRECTS", "RedirectRefusedError", "follow_redirect", "is_redirect"]

#: Redirects in a row that are followed.
MOST_REDIRECTS = 3
#: These keep method and body; after the others a client would ask with GET, which no endpoint of the protocol answers.
_KEEPING = frozenset({307, 308})
_DEFAULT_PORTS = {"http": 80, "https": 443}
#: Characters of a place in a text.
_SHOWN = 200


class RedirectRefusedError(ValueError):
    """An answer sends the request where it must not go; the text says where."""


def is_redirect(status: int) -> bool:
    """Return whether that HTTP status is no answer but a word about where there is one."""
    return 300 <= status <= 399  # noqa: PLR2004  HTTP's own classes


def follow_redirect(url: str, status: int, location: str | None, *, followed: int) -> str:
    """Return where a request goes next.

    Args:
        url: Where it was sent.
        status: The status of the answer; one of a redirect.
        location: The answer's `Location`.
        followed: Redirects of this request that were followed before.

    Raises:
        RedirectRefusedError: it names another origin or none, the method would not be kept, or it is one too many.
    """
    if followed >= MOST_REDIRECTS:
        raise RedirectRefusedError(f"it redirects more than {MOST_REDIRECTS} times. Check `base_url`")
    if status not in _KEEPING or not location:
        raise RedirectRefusedError(
            f"it is a redirect (HTTP {status}) that a request with a body cannot follow. Check `base_url`"
        )
    try:
        target = urljoin(url, location)
        origin, here = _origin(urlsplit(target)), _origin(urlsplit(url))
    except ValueError:
        raise RedirectRefusedError(
            f"it redirects (HTTP {status}) to what is no URL: {one_line(location, _SHOWN)}. Check `base_url`"
        ) from None
    if origin != here:
        raise RedirectRefusedError(
            f"it redirects (HTTP {status}) to another origin, {one_line(_format_origin(origin), _SHOWN)}, where neither prompt "
            "nor key was sent. Set `base_url` to it if it is meant"
        )
    return target


def _origin(parts: SplitResult) -> tuple[str, str, int | None]:
    return parts.scheme, parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme)


def _format_origin(origin: tuple[str, str, int | None]) -> str:
    scheme, host, port = origin
    place = f"[{host}]" if ":" in host else host
    return f"{scheme}://{place}" + ("" if port == _DEFAULT_PORTS.get(scheme) else f":{port}")
