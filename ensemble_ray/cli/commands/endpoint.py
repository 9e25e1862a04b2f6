"""`ensemble-ray drain`, `reload`, `versions` and `deliveries`: clients of an endpoint that runs."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, cast
from urllib.parse import quote, urlsplit

from typer import Argument, Option

from ensemble_ray.cli.inputs import options
from ensemble_ray.cli.inputs.records import age_of
from ensemble_ray.cli.view.terminal import (
    FAILED,
    FINE,
    align,
    count_noun,
    own_command,
    screen_line,
    show,
    show_json,
    write_note,
)
from ensemble_ray.errors import EnsembleError, ValidationError, message_of
from ensemble_ray.errors.bodies import tls_flaw
from ensemble_ray.text.foreign_text import header_flaw

_ANSWER_S = 120.0
_MOST_BYTES = 4_000_000
#: Interval of questions during a drain, and how long an endpoint that does not answer is asked again, s.
_POLL_S, _PATIENCE_S = 1.0, 30.0
_SERVER_ERROR = 500
_SHOWN = 100

TeamArgument = Annotated[str, Argument(metavar="NAME", help="Name of the team.", show_default=False)]
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

    def __init__(self, url: str | None, key: str | None) -> None:
        url = url or os.environ.get(options.URL_VARIABLE, "").strip() or options.DEFAULT_URL
        found = urlsplit(url if "://" in url else f"http://{url}")
        if found.scheme not in {"http", "https"} or not found.hostname or found.username is not None:
            raise ValidationError(f"--url: '{url}' is not the address of an endpoint, such as {options.DEFAULT_URL}")
        self.url = found.geturl().rstrip("/")
        self._key = (key or os.environ.get(options.KEY_VARIABLE, "")).strip()
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


def drain(
    *,
    url: options.EndpointUrl = None,
    key: options.AdminKey = None,
    timeout: Annotated[
        float | None,
        Option(
            "--timeout", metavar="S", help="The endpoint accepts runs again if some are still open after S seconds."
        ),
    ] = None,
    waiting: Annotated[
        bool, Option("--waiting/--no-waiting", help="Whether to wait for runs that wait for people, too.")
    ] = True,
    end: Annotated[bool, Option("--end", help="End the drain: accept new runs again.")] = False,
    as_json: options.ItAsJson = False,
) -> int:
    """Let an endpoint refuse new runs, and wait until no run is open.

    Accepted runs continue. Ctrl-C ends the wait and not the drain: --end does.

    Exit codes: 1 the time was over and the endpoint accepts runs again, or it cannot be reached; 2 it refused the request.
    """
    client = EndpointClient(url, key)
    if end:
        found = client.ask("POST", "/drain/end", {})
    else:
        if timeout is not None and not timeout > 0:
            raise ValidationError(f"--timeout must be > 0, got: {timeout:g}")
        found = client.ask("POST", "/drain", {"timeout_s": timeout})
        try:
            found = wait_until_drained(lambda: client.ask("GET", "/drain"), found, needs_waiting=waiting)
        except KeyboardInterrupt:
            write_note(
                f"The endpoint keeps draining. To let it accept runs again: {own_command()} drain --end --url {client.url}"
            )
            raise
    if as_json:
        show_json(dict(found))
    else:
        show(f"{client.url}: {_describe_drain(found)}")
    if end or found["state"] != "serving":
        return FINE
    write_note("The time is over, so the endpoint accepts new runs again.")
    return FAILED


def wait_until_drained(look: Callable[[], Data], found: Data, *, needs_waiting: bool) -> Data:
    """Write the progress of a drain until no run is open, or the drain has ended; return the last answer."""
    shown, silent_since = "", None
    while True:
        if (text := _describe_drain(found)) != shown:
            write_note(text)
            shown = text
        counts = found["open"]
        left = counts["accepted"] + counts["running"] + (counts["waiting"] if needs_waiting else 0)
        if found["state"] == "serving" or not left:
            return found
        time.sleep(_POLL_S)
        try:
            found, silent_since = look(), None
        except EndpointError:  # its process restarts
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > _PATIENCE_S:
                raise


def _describe_drain(found: Data) -> str:
    counts = found["open"]
    words = {"running": "running", "accepted": "queued", "waiting": "waiting for people"}
    parts = [f"{counts[name]} {word}" for name, word in words.items() if counts[name]]
    total = count_noun(sum(counts.values()), "open run")
    return f"{found['state']}, {total}{': ' + ', '.join(parts) if parts else ''}"


def reload(
    name: TeamArgument,
    *,
    share: Annotated[
        float, Option("--share", metavar="S", help="Part of new runs that the version gets, 0 to 1.")
    ] = 1.0,
    url: options.EndpointUrl = None,
    key: options.AdminKey = None,
    as_json: options.ThemAsJson = False,
) -> int:
    """Load the file of a served team again, as a new version, and list its versions.

    Runs that were accepted before keep their version.

    Exit codes: 1 the endpoint cannot be reached; 2 the file cannot be served, and the version before stays.
    """
    client = EndpointClient(url, key)
    return _show_versions(client.ask("POST", _path_of(name), {"share": _checked(share)}), as_json=as_json)


def versions(
    name: TeamArgument,
    version: Annotated[
        str | None, Argument(metavar="[VERSION]", help="The version whose share to change.", show_default=False)
    ] = None,
    *,
    share: Annotated[
        float | None, Option("--share", metavar="S", help="Its new share: 1 promotes it, 0 rolls it back.")
    ] = None,
    url: options.EndpointUrl = None,
    key: options.AdminKey = None,
    as_json: options.ThemAsJson = False,
) -> int:
    """List the loaded versions of a served team, newest first, or change the share of one.

    Exit codes: 1 the endpoint cannot be reached; 2 it refused the request.
    """
    if (version is None) is not (share is None):
        raise ValidationError("A version and --share belong together: ensemble-ray versions NAME VERSION --share 1")
    client = EndpointClient(url, key)
    if version is None or share is None:
        found = client.ask("GET", _path_of(name))
    else:
        found = client.ask("POST", f"{_path_of(name)}/{quote(version, safe='')}", {"share": _checked(share)})
    return _show_versions(found, as_json=as_json)


def _path_of(name: str) -> str:
    return f"/ensembles/{quote(name, safe='')}/versions"


def _checked(share: float) -> float:
    if not 0 <= share <= 1:
        raise ValidationError(f"--share must be in the range 0 to 1, got: {share:g}")
    return share


def _show_versions(found: Data, *, as_json: bool) -> int:
    if as_json:
        show_json(dict(found))
        return FINE
    now = datetime.now(UTC)
    rows = [("version", "share", "open runs", "loaded")]
    for each in found["versions"]:
        age = age_of(datetime.fromisoformat(each["loaded_at"]), now)
        rows.append((each["version"], f"{each['share']:.3g}", str(each["open_runs"]), f"{age} ago"))
    show("\n".join(align(rows)))
    return FINE


def deliveries(
    run: Annotated[str, Argument(metavar="RUN", help="A run's id.", show_default=False)],
    *,
    redeliver: Annotated[
        str | None, Option("--redeliver", metavar="ID", help="Send this delivery again, and list it.")
    ] = None,
    url: options.EndpointUrl = None,
    key: options.EndpointKey = None,
    as_json: options.ThemAsJson = False,
) -> int:
    """List the webhooks of a run of an endpoint, with their last attempts, or send one again.

    Exit codes: 1 the endpoint cannot be reached; 2 it refused the request.
    """
    client, path = EndpointClient(url, key), f"/runs/{quote(run, safe='')}/deliveries"
    if redeliver is None:
        found = client.ask("GET", path)["deliveries"]
    else:
        found = [client.ask("POST", f"{path}/{quote(redeliver, safe='')}/redeliver", {})]
    if as_json:
        show_json(found)
    elif found:
        rows = [("delivery", "event", "receiver", "state", "attempts", "last attempt"), *map(_delivery_row, found)]
        show("\n".join(align(rows)))
    else:
        write_note(f"Run '{run}' has no webhooks. A request names one with 'webhook'")
    return FINE


def _delivery_row(found: Data) -> tuple[str, ...]:
    last = "-"
    if attempts := found["attempts"]:
        attempt = attempts[-1]
        last = screen_line(attempt["error"] or f"HTTP {attempt['status']}", _SHOWN)
    receiver = screen_line(found["receiver"], _SHOWN)
    return found["delivery_id"], found["event"], receiver, found["state"], str(found["attempt_count"]), last
