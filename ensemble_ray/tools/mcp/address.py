"""Where an MCP server is, and how it is reached. Package: tools. Pure.

In: `stdio:COMMAND ARGUMENTS` or a URL. Out: a value that says which session is meant: equal addresses share one.
Never: a secret in a text that is shown.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ensemble_ray.errors import ValidationError
from ensemble_ray.text.header_values import header_flaw, header_name_flaw

__all__ = ["ServerAddress"]

_STDIO = "stdio:"
_FORMS = "'stdio:COMMAND ARGUMENTS' or 'https://HOST/PATH'"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """One server: a program that this process starts, or a URL."""

    #: program and arguments; empty for a URL
    command: tuple[str, ...] = ()
    #: what the program gets beside the few variables that every program needs
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    #: where the program runs; None: where this process does
    cwd: str | None = None
    url: str = ""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    #: longest time until the session stands, s
    connect_timeout_s: float = 30.0
    #: whether the session offers to ask a person
    has_reviewer: bool = False
    #: how often a model may be asked in one call; 0: it is not offered
    max_samples: int = 0

    @classmethod
    def of(
        cls,
        server: str,
        *,
        env: Mapping[str, str],
        headers: Mapping[str, str],
        cwd: str | None,
        connect_timeout_s: float,
        max_samples: int,
    ) -> ServerAddress:
        """Read an address.

        Raises:
            ValidationError: it is neither a command nor a URL, or has what belongs to the other.
        """
        if server.startswith(_STDIO):
            if headers:
                raise ValidationError("MCP headers are for a URL: give a program its secrets by env")
            try:
                command = tuple(shlex.split(server.removeprefix(_STDIO)))
            except ValueError as error:
                raise ValidationError(f"MCP server has no readable command: {error}") from None
            if not command:
                raise ValidationError(f"MCP server must be {_FORMS}, got a command without a program")
            return cls(
                command=command,
                env=tuple(env.items()),
                cwd=cwd,
                connect_timeout_s=connect_timeout_s,
                max_samples=max_samples,
            )
        parts = urlsplit(server)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValidationError(f"MCP server must be {_FORMS}, got: {server.partition('@')[2] or server!r}")
        if parts.username is not None or parts.password is not None:
            raise ValidationError("MCP server must be a URL without a name or password: give them in headers")
        if env or cwd is not None:
            raise ValidationError("MCP env and cwd are for a program, and not for a URL")
        return cls(url=server, headers=_checked(headers), connect_timeout_s=connect_timeout_s, max_samples=max_samples)

    @property
    def shown(self) -> str:
        """The server for texts: its program, or its URL without a query."""
        if self.command:
            return f"{_STDIO}{self.command[0]}"
        return urlsplit(self.url)._replace(query="", fragment="").geturl()


def _checked(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return headers without blanks around their values.

    Raises:
        ValidationError: one cannot be sent; its value is not shown.
    """
    for name, value in headers.items():
        if flaw := header_name_flaw(name):
            raise ValidationError(f"MCP headers: {name!r} {flaw}")
        if flaw := header_flaw(value.strip()):
            raise ValidationError(f"MCP headers: '{name}' {flaw}")
    return tuple((name, value.strip()) for name, value in headers.items())
