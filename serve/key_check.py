"""KeyCheck: what every request passes before anything of it is read or looked up.

In: a request with its key. Out: the same without it, and with its `Caller`; or a refusal. Everything needs to be let in that is not
named here, so that a route which is added cannot be forgotten. Never: a key behind this point, in a log or in an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from http import HTTPStatus

from anyio import CancelScope
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ensemble_ray.access.admission import Knock, headers_of, host_name, is_loopback, own_address
from ensemble_ray.access.keys import digest_of, is_key
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.serve.answers import refusal_answer
from ensemble_ray.serve.callers import Callers
from ensemble_ray.serve.refusals import Refusal

RefusalForm = Callable[[Refusal], JSONResponse]
#: What probes ask, which have no key; nothing of teams or runs is in the answers.
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
#: An answer that goes on is looked at again so often, s: its key may have been revoked meanwhile.
_LOOK_S = 10.0
#: What a proxy adds to a request of somebody else; this machine's own programs send none of them.
_FORWARDED = (b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip")
_POLICY_VIOLATION = 1008
#: Stands in the place of what has another form than a key, which therefore none has.
_NO_KEY = "-"
_PLAIN: Mapping[str, RefusalForm] = {}
_log = bounded_logger(__name__)


class KeyCheck:
    """Lets requests pass of callers that are known.

    Args:
        app: What comes behind it.
        callers: Who is known.
        forms: How refusals are answered, by how a path begins, for parts of the interface that have a form of their own; the
            longest beginning decides.
        is_open: Says which paths besides those of probes need no key: nothing of teams or runs is in the answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        callers: Callers,
        forms: Mapping[str, RefusalForm] = _PLAIN,
        is_open: Callable[[str], bool] = OPEN_PATHS.__contains__,
    ) -> None:
        self._app = app
        self._is_open = is_open
        self._callers = callers
        self._forms = forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "websocket":  # none are served
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path in OPEN_PATHS or self._is_open(path):
            await self._app(scope, receive, send)
            return
        knock = Knock(digest=bearer_of(scope), is_local=is_local(scope))
        try:
            caller = await self._callers.admit(knock)
        except Refusal as refusal:
            _log.warning("Refused %.10s %.200s: %s", scope["method"], scope["path"], refusal.code)
            begun = max((each for each in self._forms if path.startswith(each)), key=len, default="")
            answer = self._forms.get(begun, refusal_answer)(refusal)
            if refusal.status is not HTTPStatus.TOO_MANY_REQUESTS:
                answer.headers["connection"] = "close"  # its body is not read
            await answer(scope, receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"authorization"]
        passed = {**scope, "headers": headers, "state": {**scope.get("state", {}), "caller": caller}}
        with CancelScope() as answering:
            watched = _WatchedAnswer(self._callers, knock, send, answering)
            await self._app(passed, receive, watched)


class _WatchedAnswer:
    """Ends an answer that goes on for long when its caller is known no more."""

    def __init__(self, callers: Callers, knock: Knock, send: Send, answering: CancelScope) -> None:
        self._callers = callers
        self._knock = Knock(digest=knock.digest, is_local=knock.is_local, is_counted=False)
        self._send = send
        self._answering = answering
        self._looked_at = time.monotonic()

    async def __call__(self, message: Message) -> None:
        if message.get("more_body") and time.monotonic() - self._looked_at >= _LOOK_S:
            try:
                await self._callers.admit(self._knock)
            except Refusal as refusal:
                if refusal.status is HTTPStatus.UNAUTHORIZED:
                    _log.warning("Ended an answer: its key was revoked")
                    await self._send({"type": "http.response.body", "body": b"", "more_body": False})
                    self._answering.cancel()
                    return
            self._looked_at = time.monotonic()
        await self._send(message)


def bearer_of(scope: Scope) -> str | None:
    """Return the digest of the key that a request brings; None where it brings none.

    What has not the form of a key, or comes twice, is a key that nobody has.
    """
    sent = headers_of(scope, b"authorization")
    if not sent:
        return None
    scheme, _, text = sent[0].strip().partition(" ")
    if len(sent) > 1 or scheme.lower() != "bearer" or not is_key(text.strip()):
        return _NO_KEY
    return digest_of(text.strip())


def is_local(scope: Scope) -> bool:
    """Return whether a request came by loopback, from this machine itself, as far as can be seen.

    It arrived at an address of loopback, is for a name of loopback, and no proxy says that it passes it on.
    """
    hosts = headers_of(scope, b"host")
    names = [own_address(scope), (host_name(hosts[0]) or "") if len(hosts) == 1 else ""]
    is_forwarded = any(name.lower() in _FORWARDED for name, _ in scope["headers"])
    return not is_forwarded and all(map(is_loopback, names))
