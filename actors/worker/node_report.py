"""Describes a node from a process on that node.

This module is sent by value and imports only the standard library, since a node may have another version of this package,
or none. It calls no model and sends no key.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import os
import pickle
import platform
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

_OPENAI = "https://api.openai.com/v1"


def describe_node(
    packages: Sequence[str], payloads: Mapping[str, bytes], endpoints: Sequence[tuple[str, bool]], timeout_s: float
) -> dict[str, object]:
    """Return versions of packages, and the payloads and endpoints that cannot be used here."""
    began = time.monotonic()
    versions = dict.fromkeys(packages, "")
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    unloadable: dict[str, str] = {}
    for name, body in payloads.items():
        try:
            pickle.loads(body)  # noqa: S301  bytes of our own driver
        except Exception as error:  # noqa: BLE001  the answer is whatever a user's module raises
            unloadable[name] = f"{type(error).__name__}: {error}"
    return {
        "python": platform.python_version(),
        "packages": versions,
        "unloadable": unloadable,
        "endpoints": dict(_reach(url, has_key=has_key, timeout_s=timeout_s) for url, has_key in endpoints),
        "duration_s": time.monotonic() - began,
    }


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A server that answers is reachable."""

    def redirect_request(self, *_: object, **__: object) -> None:
        pass


def _reach(url: str, *, has_key: bool, timeout_s: float) -> tuple[str, str]:
    """Return the URL without credentials, and why it cannot be used. No key is sent."""
    whole = (url or os.environ.get("OPENAI_BASE_URL", "").strip() or _OPENAI).rstrip("/")
    parts = urlsplit(whole)
    host = parts.netloc.rpartition("@")[2]
    shown = f"{parts.scheme}://{host}{parts.path}"
    if whole == _OPENAI and not has_key and not os.environ.get("OPENAI_API_KEY", "").strip():
        return shown, "OPENAI_API_KEY is not set on the node"
    handlers: dict[str, str] | None = {} if parts.hostname in {"localhost", "127.0.0.1", "::1"} else None
    opener = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler(handlers))  # as model calls do
    try:
        with opener.open(f"{shown}/models", timeout=timeout_s):
            return shown, ""
    except urllib.error.HTTPError as error:  # it answers; without a key it may refuse
        error.close()
        return shown, ""
    except (OSError, ValueError, http.client.HTTPException) as error:
        # The reason, since other texts contain parts of the URL.
        reason = (getattr(error, "reason", None) or error) if isinstance(error, OSError) else type(error).__name__
        return shown, f"cannot be reached: {reason}"
