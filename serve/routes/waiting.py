"""How long a client wants to wait for a run: `?wait=S`, or `Prefer: wait=S` (RFC 7240). Pure."""

from __future__ import annotations

import re

#: Longer waits end after this; proxies seldom allow more.
LONGEST_WAIT_S = 3600.0
_WAIT = re.compile(r"\s*wait\s*=\s*\"?(\d{1,9})\"?\s*(?:;.*)?", re.IGNORECASE | re.DOTALL)


def preferred_wait(prefer: str | None) -> float | None:
    """Return the seconds of a `Prefer` header; None where it does not ask to wait.

    Preferences that are not understood are passed over, as the RFC has it.

    Examples:
        >>> preferred_wait("respond-async, wait=10")
        10.0
    """
    for part in (prefer or "").split(","):
        if found := _WAIT.fullmatch(part):
            return min(float(found[1]), LONGEST_WAIT_S)
    return None
