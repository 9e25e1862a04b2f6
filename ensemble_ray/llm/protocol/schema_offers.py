"""Asking an endpoint for an answer in the form of a schema, and taking its no for an answer. Package: llm.

In: a request's body, a schema, what is known of the endpoint. Out: the answer, asked for with the schema or without.
Callers do not learn of a refusal: it is no failure of the call, and the endpoint is well (S-OUT-48). What was refused is
remembered for as long as the process lives, so that nothing is sent twice in vain (S-OUT-49).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from ensemble_ray.llm.protocol.errors import CallFailure, CallOrigin
from ensemble_ray.llm.protocol.transport import CallFailedError
from ensemble_ray.llm.protocol.wire import json_bytes
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.values.messages import ChatResponse, JsonSchema

__all__ = ["SchemaOffer", "is_refused_schema"]

_log = bounded_logger(__name__)

#: What an endpoint that does not take schemas answers with; 404 is a router's that knows no model that takes them.
_REFUSALS = frozenset({400, 404, 422, 501})
_SERVER_ERROR = 500
_CLIENT_ERROR = 400
#: How endpoints name the mode in the text of a refusal, in lower case.
_NAMES = (b"response_format", b"json_schema", b"structured output")
#: The mode is there, this schema is not taken.
_INVALID_SCHEMA = b"invalid schema"

#: Where no schema is sent any more: places, and places with a schema's digest.
_refused: set[str] = set()
#: Places that took a schema.
_accepting: set[str] = set()


class Send(Protocol):
    """Sends a request."""

    async def __call__(self, body: bytes, *, has_schema: bool = False) -> ChatResponse:
        """Return the answer; a request with a schema that is refused is not to be repeated."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaOffer:
    """A schema to hold an answer to, if the endpoint can."""

    schema: JsonSchema
    #: whether the user says that the endpoint takes schemas; otherwise the first call finds out
    is_declared: bool = False

    async def answer(self, send: Send, body: bytes, origin: CallOrigin) -> ChatResponse:
        """Return the answer to a request with the schema; to the same without it where the endpoint does not take it.

        Args:
            send: Sends a body.
            body: The request without the schema.
            origin: Which endpoint and model.

        Raises:
            CallFailedError: the call failed, and not for the schema's sake.
        """
        endpoint = f"{origin.endpoint} {origin.model}"
        member = _member(self.schema)
        this_schema = f"{endpoint} {sha256(member).hexdigest()}"
        if endpoint in _refused or this_schema in _refused:
            return await send(body)
        try:
            response = await send(b"".join((body[:-1], b",", member, b"}")), has_schema=True)
        except CallFailedError as failed:
            refusal = failed.failure
            if not is_refused_schema(refusal):
                raise
        else:
            _accepting.add(endpoint)
            return response
        is_particular = self.is_declared or endpoint in _accepting or _INVALID_SCHEMA in refusal.body.lower()
        refused = this_schema if is_particular else endpoint
        if _names_the_mode(refusal):
            self._remember(refused, endpoint, refusal)
            return await send(body)
        response = await send(body)
        self._remember(refused, endpoint, refusal)
        return response

    def _remember(self, refused: str, endpoint: str, refusal: CallFailure) -> None:
        if refused not in _refused:
            _refused.add(refused)
            what = "JSON schemas" if refused == endpoint else f"the JSON schema of '{self.schema.name}'"
            _log.info(
                "%s does not take %s (HTTP %s); the prompt alone asks for the form", endpoint, what, refusal.status
            )


def is_refused_schema(failure: CallFailure) -> bool:
    """Whether a request with a schema may have failed for the schema's sake: then it is worth a try without."""
    if failure.told.is_bad_generation or failure.told.is_out_of_credit:
        return False
    if failure.status in _REFUSALS:
        return True
    is_explained = failure.status == _SERVER_ERROR or (failure.status or _SERVER_ERROR) < _CLIENT_ERROR
    return is_explained and _names_the_mode(failure)


def _names_the_mode(failure: CallFailure) -> bool:
    said = failure.body.lower() + failure.reason.lower().encode()
    return any(name in said for name in _NAMES)


def _member(schema: JsonSchema) -> bytes:
    """`response_format` as a member of the request's body."""
    member = {"name": schema.name, "schema": schema.schema, "strict": schema.strict}
    return b'"response_format":' + json_bytes({"type": "json_schema", "json_schema": member})
