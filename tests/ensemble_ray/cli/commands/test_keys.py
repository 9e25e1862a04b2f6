"""`ensemble-ray keys`."""

from __future__ import annotations

import json

import pytest

from ensemble_ray.access.admission import digest_of
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.process.config import home_directory
from tests.command_line import Call


@pytest.mark.usefixtures("folder")
def test_a_key_is_shown_once_and_listed_without_it(call: Call) -> None:
    """S-SRV-150: standard output is the key alone, for scripts."""
    made = call("keys", "add", "ann", "--teams", "letters,orders", "--rights", "read,review", "--rate", "60/min")
    assert made.code == 0
    key = made.printed.strip()
    (kept,) = KeyFile(home_directory()).read() or ()
    assert kept.digest == digest_of(key)
    listed = call("keys", "ls")
    assert listed.printed.split()[:5] == ["ann", f"...{key[-4:]}", "read,review", "letters,orders", "60/min"]
    (data,) = json.loads(call("keys", "ls", "--json").printed)
    del data["created_at"]
    assert data == {
        "name": "ann",
        "last_four": key[-4:],
        "rights": ["read", "review"],
        "teams": ["letters", "orders"],
        "rate": "60/min",
    }
    assert json.loads(call("keys", "add", "ben", "--teams", "*", "--json").printed)["teams"] is None


@pytest.mark.usefixtures("folder")
def test_a_key_is_revoked_by_its_name(call: Call) -> None:
    """S-SRV-150, S-SRV-154."""
    call("keys", "add", "ann", "--teams", "*")
    assert call("keys", "revoke", "ann").code == 0
    again = call("keys", "revoke", "ann")
    assert (again.code, "There is no key 'ann'" in again.said) == (2, True)
    assert "There is no key in" in call("keys", "ls").said


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rights", "fly", "--teams", "a"], "Unknown right 'fly'"),
        (["--rate", "often", "--teams", "a"], "A rate is"),
        (["--teams", ","], "has no teams"),
        ([], "--teams"),
    ],
)
def test_what_is_no_key_is_not_made(call: Call, options: list[str], said: str) -> None:
    """S-SRV-153: exit code 2, and nothing is kept, so that loopback stays as it is."""
    refused = call("keys", "add", "ann", *options)
    assert (refused.code, said in refused.said) == (2, True)
    assert KeyFile(home_directory()).read() is None


@pytest.mark.usefixtures("folder")
def test_an_unknown_policy_is_refused_before_anything_starts(call: Call) -> None:
    """S-SRV-152."""
    refused = call("serve", "team.yaml", "--keys", "open")
    assert (refused.code, "--keys: unknown 'open'" in refused.said) == (2, True)
