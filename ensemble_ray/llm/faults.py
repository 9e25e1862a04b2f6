"""Whose fault a failed model call was. Package: llm; pure. In: an error of any model. Out: the provider's fault, or nothing.

Errors are recognised by their shape, for whichever package raised them: a status, or a class known for broken
connections by its name. None of those packages is imported. Must never happen: a fault found in an error that another
attempt cannot mend, such as a refusal, an answer nobody can read, or a mistake in the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from ensemble_ray.errors import EnsembleError, message_of
from ensemble_ray.errors.provider import status_of, told_by
from ensemble_ray.errors.tls import tls_flaw
from ensemble_ray.llm.protocol.arrival import seconds_since_arrival
from ensemble_ray.llm.retry import is_worth_repeating, retry_after_in

__all__ = ["ProviderFault", "fault_of"]

_TOO_MANY_REQUESTS = 429
_WISHES = ("retry-after", "retry-after-ms")
#: Classes of errors that mean no connection, a broken one, or no answer in time; by package, since names are shared.
_CONNECTION_ERRORS = {
    "builtins": frozenset({"ConnectionError", "TimeoutError"}),
    "socket": frozenset({"gaierror"}),
    "openai": frozenset({"APIConnectionError"}),
    "anthropic": frozenset({"APIConnectionError"}),
    "httpx": frozenset({"TimeoutException", "NetworkError", "RemoteProtocolError"}),
    "httpx2": frozenset({"TimeoutException", "NetworkError", "RemoteProtocolError"}),
    "httpcore": frozenset({"TimeoutException", "NetworkError", "RemoteProtocolError"}),
    "aiohttp": frozenset({"ClientConnectionError", "ClientPayloadError"}),
    "requests": frozenset({"ConnectionError", "Timeout", "ChunkedEncodingError"}),
    "urllib": frozenset({"URLError"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderFault:
    """A failure of the provider that another attempt may not meet again (S-DUR-61)."""

    #: in a few words: `HTTP 503`, `no connection`, `no answer in time`
    what: str
    #: the error's own text
    text: str
    #: None when there was no answer at all
    status: int | None = None
    #: the answer's wish for patience
    retry_after: str | None = None
    #: how long ago it arrived, s: naming it may have waited for a package to be imported
    ago_s: float = 0.0
    #: the endpoint is well, and refused what its model wrote (S-LLM-22)
    is_bad_generation: bool = False

    @property
    def is_refusal_for_now(self) -> bool:
        """Whether the endpoint is well and only asks for fewer calls (S-DUR-64, S-DUR-65)."""
        return self.status == _TOO_MANY_REQUESTS


def fault_of(error: BaseException) -> ProviderFault | None:
    """Return the provider's fault in a failed model call; None when another attempt would be of no use.

    Args:
        error: What the model raised, whichever model it is.
    """
    # Ours say what is wrong, and none of them is of a provider; `sys.exit` in a model has no status either.
    if isinstance(error, EnsembleError) or not isinstance(error, Exception):
        return None
    status, told = status_of(error), told_by(error)
    if told.is_out_of_credit:
        return None
    if status is None or status < 400:  # noqa: PLR2004  HTTP's own classes
        status = told.status or status
    if status is not None:
        if not is_worth_repeating(status) and not told.is_bad_generation:
            return None
        return ProviderFault(
            what=f"HTTP {status}",
            text=message_of(error),
            status=status,
            retry_after=retry_after_in(_headers(error), told),
            ago_s=seconds_since_arrival(error),
            is_bad_generation=told.is_bad_generation,
        )
    names = _names(error)
    if tls_flaw(error):
        return None
    if not any(name in _CONNECTION_ERRORS.get(package, ()) for package, name in names):
        return None
    is_late = any("Timeout" in name for _, name in names)
    what = "no answer in time" if is_late else "no connection"
    return ProviderFault(what=what, text=message_of(error), ago_s=seconds_since_arrival(error))


def _headers(error: BaseException) -> Mapping[str, str]:
    """Return the headers that say how long to wait, names in lower case."""
    found: dict[str, str] = {}
    for holder in (error, getattr(error, "response", None)):
        get: object = getattr(getattr(holder, "headers", None), "get", None)
        for name in _WISHES if callable(get) else ():
            # Plain dicts know a header under one spelling only.
            value: object = cast("Callable[[str], object]", get)(name) or cast("Callable[[str], object]", get)(
                name.title()
            )
            if value is not None:
                found[name] = str(value)
    return found


def _names(error: BaseException) -> list[tuple[str, str]]:
    """(package, name) of the error's class and of all its bases."""
    return [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__]
