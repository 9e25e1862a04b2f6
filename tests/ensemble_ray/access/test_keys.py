"""Keys are made, written down and read again."""

from __future__ import annotations

import hashlib
import json
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec import structs

from ensemble_ray import EnsembleError, RateLimit, ValidationError
from ensemble_ray.access.admission import (
    ApiKey,
    Right,
    is_key,
    new_key,
    parse_rate,
    parse_rights,
    parse_roles,
    render_rate,
)
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.access.quotas import parse_quotas
from ensemble_ray.record.stores import Ownership

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def made(name: str = "ann", *teams: str, rate: RateLimit | None = None) -> tuple[str, ApiKey]:
    """A key that may read."""
    return new_key(name, rights=frozenset({Right.READ}), teams=teams or ("letters",), rate=rate, created_at=NOW)


def test_a_key_has_256_random_bits_and_only_its_digest_is_kept() -> None:
    """S-SRV-150."""
    text, key = made()
    assert is_key(text)
    assert len(text) == 4 + 43
    assert key.digest == hashlib.sha256(text.encode()).hexdigest()
    assert key.last_four == text[-4:]
    assert text not in repr(key)
    assert made()[0] != text


@pytest.mark.parametrize(
    "text", ["", "erk_", "erk_" + "a" * 42, "erk_" + "a" * 44, "sk-" + "a" * 43, "erk_" + "é" * 43]
)
def test_other_texts_have_not_the_form_of_a_key(text: str) -> None:
    """S-SRV-150."""
    assert not is_key(text)


def test_a_key_of_all_teams_is_made_when_a_star_is_among_them() -> None:
    """S-SRV-153."""
    assert made("ann", "letters", "*")[1].teams is None
    assert made("ann", " letters ", "orders")[1].teams == {"letters", "orders"}


@pytest.mark.parametrize("name", ["", "a:b", "-ann", "a b", "a\n", "x" * 65])
def test_names_are_refused_when_they_could_be_mistaken(name: str) -> None:
    """S-SRV-153: with a colon in it, idempotency keys of two callers could meet."""
    with pytest.raises(ValidationError, match="A key's name"):
        made(name)


def test_keys_without_rights_or_teams_are_refused() -> None:
    """S-SRV-153."""
    with pytest.raises(ValidationError, match="no rights"):
        new_key("ann", rights=frozenset(), teams=["a"], rate=None, created_at=NOW)
    with pytest.raises(ValidationError, match="no teams"):
        new_key("ann", rights=frozenset(Right), teams=[" "], rate=None, created_at=NOW)
    with pytest.raises(ValidationError, match="Unknown right 'fly'"):
        parse_rights(["read", "fly"])
    assert parse_rights(["read", " run "]) == {Right.READ, Right.RUN}


def test_rates_are_read_and_shown() -> None:
    """S-SRV-158."""
    for text in ("10/s", "60/min", "1000/h"):
        assert render_rate(parse_rate(text)) == text
    for wrong in ("", "60", "0/min", "60/day", "-1/s", "1.5/s", "1/s/s"):
        with pytest.raises(ValidationError, match="A rate is"):
            parse_rate(wrong)


def test_keys_are_read_as_they_were_written(tmp_path: Path) -> None:
    """S-SRV-150: in a file of mode 0600, without the key itself."""
    file = KeyFile(tmp_path / "home")
    assert file.read() is None
    assert file.stamp() is None
    text, ann = made("ann", rate=RateLimit.per_minute(60))
    ben = made("ben", "*")[1]
    file.add(ann)
    before = file.stamp()
    file.add(ben)
    assert file.read() == [ann, ben]
    assert file.stamp() != before
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    assert text not in file.path.read_text(encoding="utf-8")


def test_a_name_is_had_once_until_it_is_revoked(tmp_path: Path) -> None:
    """S-SRV-150: the file stays when the last key is gone."""
    file = KeyFile(tmp_path)
    key = made()[1]
    file.add(key)
    with pytest.raises(ValidationError, match="There is a key 'ann' already"):
        file.add(made()[1])
    assert file.revoke("ann") == key
    assert file.read() == []
    with pytest.raises(ValidationError, match=r"no key 'ann'.*Known: \[\]"):
        file.revoke("ann")
    file.add(made()[1])


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 2},
        {"keys": None},
        {"keys": [{}]},
        {"rights": ["fly"]},
        {"rights": "read"},
        {"teams": "letters"},
        {"teams": ...},
        {"sha256": ""},
        {"rate": {"requests": 0, "period_s": 60.0}},
        {"rate": {"requests": 1}},
        {"rate": 60},
        {"created_at": "yesterday"},
    ],
    ids=str,
)
def test_a_damaged_file_is_an_error_and_never_a_wider_right(tmp_path: Path, damage: dict[str, object]) -> None:
    """S-SRV-155: `...` stands for a field that is gone; no team is not all teams."""
    file = KeyFile(tmp_path)
    file.add(made()[1])
    data = json.loads(file.path.read_text(encoding="utf-8"))
    for name, value in damage.items():
        where = data if name in data else data["keys"][0]
        where[name] = value
        if value is ...:
            del where[name]
    file.path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(EnsembleError, match="is damaged"):
        file.read()
    with pytest.raises(EnsembleError, match="is damaged"):
        file.add(made("ben")[1])


def test_a_cut_file_and_a_link_are_errors(tmp_path: Path) -> None:
    """S-SRV-155."""
    file = KeyFile(tmp_path)
    file.add(made()[1])
    content = file.path.read_bytes()
    file.path.write_bytes(content[:-9])
    with pytest.raises(EnsembleError, match="is damaged"):
        file.read()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(content)
    file.path.unlink()
    file.path.symlink_to(elsewhere)
    with pytest.raises(EnsembleError, match="symbolic link"):
        file.read()


def test_two_that_write_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SRV-150: the second one is told who has the file."""
    file = KeyFile(tmp_path)
    file.add(made()[1])
    other = Ownership(file.path.with_suffix(".lock"))
    assert other.acquire()
    monkeypatch.setattr("ensemble_ray.access.key_store._TRIES", 1)
    monkeypatch.setattr("ensemble_ray.access.key_store._PAUSE_S", 0)
    with pytest.raises(EnsembleError, match="is being written by process"):
        file.revoke("ann")
    other.release()
    file.revoke("ann")


def test_no_more_keys_are_kept_than_a_request_is_compared_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SRV-150."""
    monkeypatch.setattr("ensemble_ray.access.admission._MOST_KEYS", 1)
    file = KeyFile(tmp_path)
    file.add(made()[1])
    with pytest.raises(ValidationError, match="the limit is 1"):
        file.add(structs.replace(made()[1], name="ben"))


def test_quotas_and_roles_are_read_as_they_were_written(tmp_path: Path) -> None:
    """S-QUO-3, S-QUO-4: in a version that earlier releases refuse; without any, in theirs."""
    file = KeyFile(tmp_path)
    ann, ben = made("ann")[1], made("ben")[1]
    file.add(ann)
    file.add(ben)
    document = json.loads(file.path.read_text(encoding="utf-8"))
    assert document["version"] == 1
    assert not [each for each in document["keys"] if {"quotas", "roles"} & each.keys()]
    changes = {"quotas": parse_quotas(["runs=3/day", "cost=0.5/day"]), "roles": parse_roles(["lead", " legal team "])}
    changed = file.change("ann", lambda key: structs.replace(key, **changes))
    assert changed.roles == {"lead", "legal team"}
    assert file.read() == [changed, ben]
    assert json.loads(file.path.read_text(encoding="utf-8"))["version"] == 2
    file.change("ann", lambda _key: ann)
    assert json.loads(file.path.read_text(encoding="utf-8")) == document


@pytest.mark.parametrize(
    ("version", "damage"),
    [
        (1, {}),
        (1, {"roles": ...}),
        (1, {"quotas": ...}),
        (3, {}),
        (2, {"quotas": ...}),
        (2, {"roles": ...}),
        (2, {"quotas": None}),
        (2, {"quotas": {}}),
        (2, {"quotas": {"runs": 1, "tokens": None}}),
        (2, {"quotas": {"runs": "many", "tokens": None, "cost": None}}),
        (2, {"quotas": {"runs": None, "tokens": None, "cost": "-1"}}),
        (2, {"roles": "lead"}),
        (2, {"roles": ["x" * 1000]}),
    ],
    ids=str,
)
def test_damaged_quotas_are_an_error_and_never_wider_ones(
    tmp_path: Path, version: int, damage: dict[str, object]
) -> None:
    """S-QUO-3, S-SRV-155: a lost quota is no unlimited key."""
    file = KeyFile(tmp_path)
    file.add(structs.replace(made()[1], quotas=parse_quotas(["runs=3/day"])))
    document = json.loads(file.path.read_text(encoding="utf-8"))
    (key,) = document["keys"]
    for name, value in damage.items():
        if value is ...:
            del key[name]
        else:
            key[name] = value
    file.path.write_text(json.dumps({**document, "version": version}), encoding="utf-8")
    with pytest.raises(EnsembleError, match="damaged"):
        file.read()


def test_roles_are_refused_when_they_cannot_be_shown() -> None:
    """S-QUO-4."""
    assert parse_roles(["", " lead ", "lead"]) == {"lead"}
    for wrong in (["a\nb"], ["\x1b[31m"], ["x" * 101], [str(number) for number in range(101)]):
        with pytest.raises(ValidationError, match="printable characters"):
            parse_roles(wrong)
