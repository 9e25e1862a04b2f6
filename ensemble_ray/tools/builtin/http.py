"""One fixed HTTP endpoint as a tool. Package: built-in tools. In: text; out: the body of the answer.

The address is the developer's own, not the model's: whatever host it names is thereby allowed, also a private one.
Redirects are not followed, so that nobody else can choose another host. Header values are secrets: they are kept out
of repr, logs and failure texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from urllib.parse import quote

from pydantic import SecretStr
from pydantic_core import from_json

from ensemble_ray.process.threads import threads
from ensemble_ray.text.header_values import header_flaw, header_name_flaw
from ensemble_ray.tools.approval import approve, preview
from ensemble_ray.tools.tool import AbstractAgentTool, ToolResult
from ensemble_ray.tools.web.net import RequestFailedError, WebAnswer, exchange

__all__ = ["HttpAgentTool"]

_DEFAULT_MAX_BYTES = 1_048_576
_ERROR_BODY_CHARACTERS = 200
#: the guard around every tool comes after the tool's own limit, whose text says more
_GRACE_S = 10.0
#: methods that change nothing at the server
_READING = frozenset({"GET", "HEAD"})


class HttpAgentTool(AbstractAgentTool):
    """Sends its input to one HTTP endpoint and returns the body of the answer.

    With GET the input is the query parameter `input`, with any other method it is the body.

    Args:
        name: What the model calls it.
        description: Tells the model when to use it and what to send.
        url: The endpoint.
        method: HTTP method.
        headers: Sent with every request; values do not show anywhere.
        timeout: For one exchange, in seconds or as a `timedelta`.
        max_response_bytes: A longer body is cut, and says so.
        require_approval: Whether the run's review handler is asked before anything is sent.

    Raises:
        ValueError: name or url is blank, there is no description, a header is malformed, or a limit is not positive.
    """

    def __init__(
        self,
        name: str | None = None,
        description: str | None = None,
        url: str | None = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str | SecretStr] | None = None,
        timeout: float | timedelta = 30.0,
        max_response_bytes: int = _DEFAULT_MAX_BYTES,
        require_approval: bool = False,
    ) -> None:
        self.name = _require("name", name)
        if description is None:
            raise ValueError("HttpAgentTool description must not be None")
        self.description = description
        self._url = _require("url", url)
        self._method = _require("method", method).upper()
        self._headers = {_header_name(key): _header_value(key, value) for key, value in (headers or {}).items()}
        self._limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        if not self._limit_s > 0:
            raise ValueError(f"HttpAgentTool timeout must be > 0, got: {timeout}")
        if max_response_bytes <= 0:
            raise ValueError(f"HttpAgentTool max_response_bytes must be > 0, got: {max_response_bytes}")
        self._max_bytes = max_response_bytes
        self.require_approval = require_approval
        self.timeout = self._limit_s + _GRACE_S
        self.effect = "none" if self._method in _READING else "once"

    @classmethod
    def get(cls, name: str | None = None, description: str | None = None, url: str | None = None) -> HttpAgentTool:
        """Build a tool that asks with GET."""
        return cls(name, description, url, method="GET")

    @classmethod
    def post(cls, name: str | None = None, description: str | None = None, url: str | None = None) -> HttpAgentTool:
        """Build a tool that sends with POST."""
        return cls(name, description, url, method="POST")

    async def do_execute(self, text: str, /) -> ToolResult:
        """Send the input and give the answer."""
        if self.require_approval:
            described = f"HTTP {self._method} {self._url}"
            shown = f"{described}\nBody: {preview(text or '')}"
            approved = await approve(self.context.review_handler, self.name, shown, text or "")
            if approved is None:
                return ToolResult.failure(f"HTTP request rejected by reviewer: {self._method} {self._url}")
            text = approved
        # both may be long, and neither is read on the event loop
        url, headers, body = await threads.run(self._request, text or "")
        try:
            answer = await exchange(
                self._method, url, headers=headers, body=body, max_bytes=self._max_bytes, timeout_s=self._limit_s
            )
        except RequestFailedError as error:
            return ToolResult.failure(f"HTTP request failed: {error}")
        return await threads.run(self._read, answer)

    def _request(self, text: str) -> tuple[str, dict[str, str], bytes]:
        headers = {name: value.get_secret_value() for name, value in self._headers.items()}
        if self._method == "GET":
            return _with_input(self._url, text), headers, b""
        headers.setdefault("content-type", "application/json" if _is_json(text) else "text/plain; charset=UTF-8")
        # half a surrogate pair, as a model may write it, has no UTF-8
        return self._url, headers, text.encode("utf-8", "replace")

    def _read(self, answer: WebAnswer) -> ToolResult:
        body = answer.text()
        if answer.status >= 400:  # noqa: PLR2004  where HTTP's errors begin
            reason = f": {body[:_ERROR_BODY_CHARACTERS]}" if body.strip() else ""
            return ToolResult.failure(f"HTTP {answer.status}{reason}")
        if answer.is_truncated:
            body += f"\n[response truncated at {self._max_bytes} bytes]"
        return ToolResult.success(body)


def _require(what: str, value: str | None) -> str:
    if value is None or not value.strip():
        raise ValueError(f"HttpAgentTool {what} must not be blank")
    return value


def _header_name(name: str) -> str:
    if header_name_flaw(name):
        raise ValueError(f"HttpAgentTool header name is not valid: {name!r}")
    return name.lower()


def _header_value(name: str, value: str | SecretStr) -> SecretStr:
    plain = (value.get_secret_value() if isinstance(value, SecretStr) else value).strip()
    if flaw := header_flaw(plain):
        raise ValueError(f"HttpAgentTool header '{name}' {flaw}")
    return SecretStr(plain)


def _with_input(url: str, text: str) -> str:
    """Return the URL with the query parameter `input`, before the fragment if it has one."""
    base, mark, fragment = url.partition("#")
    joiner = "" if base.endswith(("?", "&")) else "&" if "?" in base else "?"
    return f"{base}{joiner}input={quote(text, safe='', errors='replace')}{mark}{fragment}"


def _is_json(text: str) -> bool:
    try:
        from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError):  # the latter: half of a surrogate pair
        return False
    return True
