"""Roles of messages for models whose templates have no system role, or want roles that alternate. Package: llm.

In: a conversation, and the endpoint's refusal of it. Out: the same texts under roles that the endpoint accepts. The first
refusal shows what a model needs; it is remembered for the endpoint and the model as long as the process lives (S-LLM-28).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from ensemble_ray.llm.protocol.errors import CallFailure, CallOrigin
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.values.messages import ChatMessage, Role

__all__ = ["MessageRoles", "RoleSearch", "SystemRole", "is_refused_role"]

_log = bounded_logger(__name__)

#: The role that a system message is sent under; `user`: its text goes in front of the next user message.
SystemRole = Literal["system", "developer", "user"]

#: Statuses of a refused request; some servers report an error of the template as their own.
_REFUSALS = frozenset({400, 422, 500, 501})
_CLIENT_ERROR = 400
_ALTERNATING = re.compile(rb"\broles?\b.{0,40}alternat|alternat.{0,60}\broles?\b|should alternate with", re.DOTALL)
_SYSTEM = re.compile(
    rb"\b(system|developer)\W{0,4}(roles?|messages?|prompts?|instructions?)\b|\broles?\b.{0,60}\b(system|developer)\b"
    rb"|user\W{1,4}(and|or)\W{1,4}assistant|(start|begin) with a user",
    re.DOTALL,
)
_NEGATIVE = re.compile(rb"\bnot\b|n't|cannot|unsupported|invalid|unexpected|unknown|\bonly\b|\bmust\b|\bshould\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRoles:
    """The roles that a model accepts."""

    system: SystemRole = "system"
    #: whether neighbours of the same role become one message
    are_merged: bool = False

    def arrange(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Return the conversation under these roles; the same messages where nothing changes."""
        if self == MessageRoles():
            return messages
        arranged: list[ChatMessage] = []
        follows_system = False
        for message in messages:
            is_system = message.role == "system"
            # The protocol has `developer`, too; no message of ours is made with it.
            sent = replace(message, role=cast("Role", self.system)) if is_system else message
            joins = self.are_merged or (self.system == "user" and (is_system or follows_system))
            if joins and arranged and _fit_together(arranged[-1], sent):
                texts = (arranged[-1].content, sent.content)
                arranged[-1] = replace(arranged[-1], content="\n\n".join(text for text in texts if text))
            else:
                arranged.append(sent)
            follows_system = is_system
        return arranged


class RoleSearch:
    """One request, sent under other roles where the endpoint refuses them.

    Args:
        encode: Returns the request's body under roles.
        origin: The endpoint and the model.
        declared: The user's choice for system messages; None: the first refusal decides.
    """

    def __init__(
        self, encode: Callable[[MessageRoles], bytes], origin: CallOrigin, declared: SystemRole | None
    ) -> None:
        self._encode = encode
        self._place = f"{origin.endpoint} {origin.model}"
        self._declared = declared
        known = _accepted.get(self._place, MessageRoles())
        self._roles = known if declared is None else replace(known, system=declared)
        self._refusal: CallFailure | None = None

    @property
    def body(self) -> bytes:
        """The request's body under the roles that are tried now."""
        return self._encode(self._roles)

    def adapt(self, failure: CallFailure) -> bool:
        """Choose other roles after a failure; return False when none would help."""
        if not is_refused_role(failure):
            return False
        alternates = self._roles.are_merged or _ALTERNATING.search(_text_of(failure)) is not None
        others = [replace(self._roles, are_merged=alternates)]
        if self._declared is None:
            others.append(replace(others[0], system="user"))
        refused = self.body
        for roles in others:
            if self._encode(roles) != refused:
                self._roles, self._refusal = roles, failure
                return True
        return False

    def succeed(self) -> None:
        """Remember the roles that the endpoint accepted after a refusal."""
        if self._refusal is None:
            return
        if _accepted.get(self._place) != self._roles:
            _accepted[self._place] = self._roles
            _log.info(
                "%s refused the roles of the messages (HTTP %s); from now on %s",
                self._place,
                self._refusal.status,
                " and ".join(_describe(self._roles)),
            )
        self._refusal = None


#: place -> the roles that it accepted after it had refused others
_accepted: dict[str, MessageRoles] = {}


def is_refused_role(failure: CallFailure) -> bool:
    """Whether a request may have failed because of the roles of its messages."""
    status = failure.status
    if status is None or (status >= _CLIENT_ERROR and status not in _REFUSALS):
        return False
    text = _text_of(failure)
    return bool(_ALTERNATING.search(text) or (_SYSTEM.search(text) and _NEGATIVE.search(text)))


def _text_of(failure: CallFailure) -> bytes:
    return failure.body.lower() + failure.reason.lower().encode()


def _fit_together(first: ChatMessage, second: ChatMessage) -> bool:
    return (
        first.role == second.role != "tool"
        and first.name == second.name
        and not first.tool_calls
        and not second.tool_calls
    )


def _describe(roles: MessageRoles) -> list[str]:
    said = ["system messages go into the next user message"] if roles.system == "user" else []
    return [*said, "neighbours of the same role are merged"] if roles.are_merged else said
