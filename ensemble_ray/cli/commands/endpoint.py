"""Clients of an endpoint that runs."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Annotated, Any, cast
from urllib.parse import urlsplit

from typer import Option

from ensemble_ray.errors import EnsembleError, ValidationError, message_of
from ensemble_ray.errors.bodies import tls_flaw
from ensemble_ray.text.foreign_text import header_flaw

KEY_VARIABLE = "ENSEMBLE_RAY_KEY"
_URL = "http://127.0.0.1:8000"
_ANSWER_S = 120.0
_MOST_BYTES = 4_000_000
_SERVER_ERROR = 500

EndpointUrl = Annotated[str, Option("--url", metavar="URL", help="Address of the endpoint.")]
EndpointKey = Annotated[
    str | None,
    Option("--key", metavar="KEY", help=f"Key with the right admin. Default: {KEY_VARIABLE}.", show_default=False),
]
Data = Mapping[str, Any]


class EndpointError(EnsembleError):
    """The endpoint cannot be reached, or it failed."""


class _WithoutRedirects(urllib.request.HTTPRedirectHandler):
    """A key is only for its own endpoint."""

    def redirect_request(self, *_: object, **__: object) -> None: ...


class EndpointClient:
    """Sends requests to an endpoint.

    Raises:
        ValidationError: the address or the key is wrong, or the endpoint refused the request.
    """

    def __init__(self, url: str, key: str | None) -> None:
        found = urlsplit(url if "://" in url else f"http://{url}")
        if found.scheme not in {"http", "https"} or not found.hostname or found.username is not None:
            raise ValidationError(f"--url: '{url}' is not the address of an endpoint, such as {_URL}")
        self.url = found.geturl().rstrip("/")
        self._key = (key or os.environ.get(KEY_VARIABLE, "")).strip()
        if flaw := header_flaw(self._key):
            raise ValidationError(f"The key {flaw}. Copy it again, as one line")

    def ask(self, method: str, path: str, body: Data | None = None) -> Data:
        """Return the JSON of an answer."""
        headers = {"content-type": "application/json", "accept": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)  # noqa: S310  http or https
        try:
            with urllib.request.build_opener(_WithoutRedirects).open(request, timeout=_ANSWER_S) as answer:
                return _object_in(answer.read(_MOST_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                failure = _object_in(error.read(_MOST_BYTES))
            text = failure.get("message") or f"{method} {path} is answered with HTTP {error.code}"
            kind = EndpointError if error.code >= _SERVER_ERROR else ValidationError
            raise kind(f"{self.url}: {text}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or message_of(error) or type(error).__name__
            raise EndpointError(f"The endpoint at {self.url} cannot be reached: {tls_flaw(error) or reason}") from None


def _object_in(data: bytes) -> Data:
    try:
        found: object = json.loads(data)
    except ValueError:
        return {}
    return cast("Data", found) if isinstance(found, dict) else {}
