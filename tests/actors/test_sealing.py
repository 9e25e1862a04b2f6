"""Sealed packages: what opens them, and what is refused before it is loaded."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from ensemble_ray import EnsembleError
from ensemble_ray.actors.scheduler.submission_store import Seal

BODY = b"a package with sk-key-of-a-model in it" * 100


@pytest.fixture
def seal(tmp_path: Path) -> Seal:
    """One whose key does not exist yet."""
    return Seal(tmp_path / "home" / "package.key")


def test_sealed_package_says_nothing_and_opens_with_its_key(seal: Seal, tmp_path: Path) -> None:
    """S-SEC-36, S-SEC-38: the key is made with the first package, and another scheduler of the same user finds it."""
    sealed = seal.seal("run", BODY)
    key = tmp_path / "home" / "package.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert b"sk-key" not in sealed
    assert sealed != seal.seal("run", BODY)
    assert Seal(key).open("run", sealed) == BODY


def test_package_is_refused_under_another_runs_name(seal: Seal) -> None:
    """S-SEC-37: the run's id is authenticated with it."""
    sealed = seal.seal("run", BODY)
    for other in ("run2", "ru", "", "run\0"):
        with pytest.raises(EnsembleError, match="sealed for another run"):
            seal.open(other, sealed)


def test_package_is_refused_wherever_it_was_altered(seal: Seal) -> None:
    """S-SEC-37: each part of it is authenticated: version, time, start vector, text, signature; and its length."""
    sealed = seal.seal("run", b"short")
    for position in range(0, len(sealed), 3):
        other = b"A" if sealed[position : position + 1] != b"A" else b"B"
        with pytest.raises(EnsembleError, match="or was altered"):
            seal.open("run", sealed[:position] + other + sealed[position + 1 :])
    for wrong in (b"", sealed[:-4], BODY, b"\x80\x05N.", sealed[4:]):
        with pytest.raises(EnsembleError, match="or was altered"):
            seal.open("run", wrong)


def test_package_is_refused_when_another_user_sealed_it(seal: Seal, tmp_path: Path) -> None:
    """S-SEC-37: who has not the key can make none."""
    seal.seal("run", BODY)
    planted = Seal(tmp_path / "other.key").seal("run", BODY)
    with pytest.raises(EnsembleError, match="not sealed with the key of this cluster's owner"):
        seal.open("run", planted)


def test_what_is_wrong_with_the_key_is_told(seal: Seal, tmp_path: Path) -> None:
    """S-SEC-38: it is gone, it is another file, it holds something else."""
    key = tmp_path / "home" / "package.key"
    with pytest.raises(EnsembleError, match=r"is gone: .*package\.key"):
        seal.open("run", b"whatever")
    sealed = seal.seal("run", BODY)
    key.rename(tmp_path / "moved")
    key.symlink_to(tmp_path / "moved")
    for use in (seal.open, seal.seal):
        with pytest.raises(EnsembleError, match=r"package\.key is a symbolic link"):
            use("run", sealed)
    key.unlink()
    key.write_bytes(b"no key")
    key.chmod(0o600)
    for use in (seal.open, seal.seal):
        with pytest.raises(EnsembleError, match=r"package\.key holds no key\. Remove it"):
            use("run", sealed)
