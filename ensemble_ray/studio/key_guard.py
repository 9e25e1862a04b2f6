"""KeyGuard: lets those in who bring a key of this home (S-STU-72).

Where studio listens beyond loopback, whoever reaches the port could read every prompt. So every request brings a key; what it may do
are the key's rights, and which runs it sees are its teams'.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import PurePath
from typing import TYPE_CHECKING

from fastapi import Request

from ensemble_ray.access.admission import Admission, Admitted, KeyPolicy, Knock, headers_of
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.access.keys import Right, digest_of, is_key
from ensemble_ray.definition.fields import Origin
from ensemble_ray.errors import ValidationError
from ensemble_ray.studio.refusals import StudioRefusal

if TYPE_CHECKING:
    from pathlib import Path

    from ensemble_ray.access.keys import ApiKey
    from ensemble_ray.record.stores import RecordedRun


@dataclass(frozen=True, slots=True)
class _KeyHolder:
    """Who brings a key."""

    key: ApiKey

    @property
    def name(self) -> str:
        """Under which name decisions are recorded."""
        return self.key.name

    @property
    def sees_cluster(self) -> bool:
        """Whether the key has the right `admin`."""
        return Right.ADMIN in self.key.rights

    @property
    def sees_all(self) -> bool:
        """Whether the key is for all teams."""
        return self.key.teams is None

    def may_see(self, run: RecordedRun) -> bool:
        """Whether a run is of one of the key's teams."""
        teams = self.key.teams
        names = {Origin(place=run.origin).name, PurePath(run.origin).name, run.origin}
        return teams is None or not names.isdisjoint(teams)


class KeyGuard:
    """Asks every request for a key."""

    def __init__(self, home: Path) -> None:
        """Use the keys of a home.

        Raises:
            ValidationError: there is none, so that nobody could ask; or they cannot be read.
        """
        self._file = KeyFile(home)
        self._admission = Admission(KeyPolicy.REQUIRED)
        self._stamp: tuple[int, int, int] | None = None
        if not self._file.read():
            raise ValidationError(
                "Beyond loopback studio asks for a key, and there is none: ensemble-ray keys add NAME --rights read"
            )

    async def admit(self, request: Request, right: Right, *, is_counted: bool = True) -> _KeyHolder:
        """Return who asks.

        Raises:
            StudioRefusal: no key, one that is not known, too many requests, or a right that the key has not.
        """
        await asyncio.to_thread(self._look)
        knock = Knock(digest=_digest_of(request), is_local=False, is_counted=is_counted)
        decided = self._admission.decide(knock, at=time.monotonic())
        if not isinstance(decided, Admitted) or decided.key is None:
            wait_s = getattr(decided, "retry_after_s", None)
            if wait_s is not None:
                raise StudioRefusal(
                    HTTPStatus.TOO_MANY_REQUESTS, "RATE_LIMITED", f"The key has no more requests for {wait_s} s"
                )
            raise StudioRefusal(
                HTTPStatus.UNAUTHORIZED, "KEY_NEEDED", "Send a key that is known: Authorization: Bearer erk_..."
            )
        if right not in decided.key.rights:
            raise StudioRefusal(
                HTTPStatus.FORBIDDEN, "RIGHT_MISSING", f"The key '{decided.key.name}' lacks the right '{right.value}'"
            )
        return _KeyHolder(decided.key)

    def _look(self) -> None:
        """Take the keys as they are now."""
        stamp = self._file.stamp()
        if stamp != self._stamp or stamp is None:
            self._admission.use(self._file.read() or ())
            self._stamp = stamp


def _digest_of(request: Request) -> str | None:
    sent = headers_of(request.scope, b"authorization")
    if len(sent) != 1:
        return None
    scheme, _, text = sent[0].strip().partition(" ")
    return digest_of(text.strip()) if scheme.lower() == "bearer" and is_key(text.strip()) else None
