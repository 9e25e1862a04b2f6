"""The decision about a request, told the keys and the time."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime

import pytest

from ensemble_ray import RateLimit
from ensemble_ray.access.admission import (
    Admission,
    Admitted,
    ApiKey,
    Credentials,
    Denied,
    KeyPolicy,
    Right,
    digest_of,
    new_key,
)


def made(rate: RateLimit | None = None) -> tuple[str, ApiKey]:
    """A key and its digest."""
    text, key = new_key(
        "ann", rights=frozenset(Right), teams="*", rate=rate, created_at=datetime(2026, 1, 1, tzinfo=UTC)
    )
    return digest_of(text), key


@pytest.mark.parametrize(
    ("policy", "is_made", "is_local"), list(itertools.product(KeyPolicy, [None, False, True], [False, True]))
)
def test_a_key_is_needed_unless_the_operator_or_loopback_say_otherwise(
    *, policy: KeyPolicy, is_made: bool | None, is_local: bool
) -> None:
    """S-SRV-152: None: no key was ever made; False: all were revoked."""
    admission = Admission(policy)
    digest, key = made()
    admission.use(None if is_made is None else [key] if is_made else [])
    is_open = policy is KeyPolicy.NONE or (policy is KeyPolicy.AUTO and is_made is None and is_local)
    without = admission.decide(Credentials(digest=None, is_local=is_local), at=0)
    assert without == (Admitted(key=None) if is_open else Denied(is_openable=bool(is_made)))
    wrong = admission.decide(Credentials(digest="0" * 64, is_local=is_local), at=0)
    assert wrong == (Admitted(key=None) if is_open else Denied(has_key=True, is_openable=bool(is_made)))
    right = admission.decide(Credentials(digest=digest, is_local=is_local), at=0)
    assert right == (
        Admitted(key=None) if is_open else Admitted(key=key) if is_made else Denied(has_key=True, is_openable=False)
    )


def test_a_rate_is_had_at_once_and_comes_again() -> None:
    """S-SRV-158."""
    admission = Admission()
    digest, key = made(RateLimit.per_minute(3))
    admission.use([key])
    credentials = Credentials(digest=digest, is_local=True)
    assert [admission.decide(credentials, at=1000) for _ in range(3)] == [Admitted(key=key)] * 3
    assert admission.decide(credentials, at=1000) == Denied(name="ann", has_key=True, retry_after_s=20)
    assert admission.decide(Credentials(digest=digest, is_local=True, is_counted=False), at=1000) == Admitted(key=key)
    assert admission.decide(credentials, at=1020) == Admitted(key=key)
    assert isinstance(admission.decide(credentials, at=1021), Denied)
    admission.use([key])
    assert isinstance(admission.decide(credentials, at=1021), Denied), "reading the keys again gives no new requests"


def test_a_key_of_the_same_name_has_a_rate_of_its_own() -> None:
    """S-SRV-158."""
    admission = Admission()
    (first, old), (second, new) = made(RateLimit.per_minute(1)), made(RateLimit.per_minute(1))
    admission.use([old])
    admission.decide(Credentials(digest=first, is_local=False), at=0)
    admission.use([new])
    assert admission.decide(Credentials(digest=second, is_local=False), at=0) == Admitted(key=new)
    assert admission.decide(Credentials(digest=first, is_local=False), at=0) == Denied(has_key=True)
