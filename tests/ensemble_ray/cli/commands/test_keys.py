"""`ensemble-ray keys`."""

from __future__ import annotations

import json

import pytest

from ensemble_ray.access.admission import digest_of
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.access.quotas import Quotas
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
        "quotas": [],
        "roles": [],
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
def test_quotas_and_roles_are_set_and_shown(call: Call) -> None:
    """S-QUO-1, S-QUO-2, S-QUO-4, S-QUO-5: what no option names stays, the key itself too."""
    made = call(
        "keys",
        "add",
        "ann",
        "--teams",
        "a",
        "--quota",
        "runs=100/day",
        "--quota",
        "cost=5/day",
        "--roles",
        "lead, legal",
    )
    assert made.code == 0
    store = KeyFile(home_directory())
    (before,) = store.read() or ()
    assert (before.quotas, before.roles) == (Quotas(runs=100, cost=500_000_000), {"lead", "legal"})
    changed = call(
        "keys", "set", "ann", "--quota", "runs=none", "--quota", "tokens=1.5M/day", "--rights", "review", "--teams", "*"
    )
    assert (changed.code, changed.printed) == (0, f"Changed the key of 'ann' (...{before.last_four})\n")
    (data,) = json.loads(call("keys", "ls", "--json").printed)
    assert (data["quotas"], data["roles"]) == (["tokens=1500000/day", "cost=5/day"], ["lead", "legal"])
    assert (data["rights"], data["teams"]) == (["review"], None)
    listed = call("keys", "ls").printed
    assert ("tokens=1500000/day,cost=5/day" in listed, "lead,legal" in listed) == (True, True)
    assert call("keys", "set", "ann", "--roles", "", "--rate", "5/s").code == 0
    cleared = call("keys", "set", "ann", "--rate", "none", "--quota", "tokens=none", "--quota", "cost=none")
    assert cleared.code == 0
    (after,) = store.read() or ()
    assert (after.digest, after.roles, after.rate, after.is_limited) == (before.digest, frozenset(), None, False)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ann"], "No change. Name one"),
        (["ben", "--roles", "x"], "There is no key 'ben'"),
        (["ann", "--quota", "runs=many"], "A quota is runs=100/day"),
        (["ann", "--roles", "x" * 200], "printable characters"),
        (["ann", "--rights", ""], "Unknown right"),
        (["ann", "--teams", ","], "has no teams"),
    ],
)
def test_a_key_stays_when_a_change_is_wrong(call: Call, arguments: list[str], said: str) -> None:
    """S-QUO-2."""
    call("keys", "add", "ann", "--teams", "a", "--quota", "runs=1/day")
    store = KeyFile(home_directory())
    before = store.read()
    refused = call("keys", "set", *arguments)
    assert (refused.code, said in refused.said) == (2, True), refused.said
    assert store.read() == before


@pytest.mark.usefixtures("folder")
def test_an_unknown_policy_is_refused_before_anything_starts(call: Call) -> None:
    """S-SRV-152."""
    refused = call("serve", "team.yaml", "--keys", "open")
    assert (refused.code, "--keys: unknown 'open'" in refused.said) == (2, True)
