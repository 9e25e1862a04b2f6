"""Files with secrets: how they are made, and which are refused."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from ensemble_ray import EnsembleError
from ensemble_ray.process import private_files
from ensemble_ray.process.private_files import create_private_file, exposed_bits, private_directory, read_private_file


def mode_of(path: Path) -> int:
    """Who may do what with it."""
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> object:
    """Whatever the user's umask is."""
    before = os.umask(int(request.param))
    yield
    os.umask(before)


def test_file_is_its_owners_before_it_has_content(
    tmp_path: Path, umask: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-SEC-31: it has its mode when it is empty, and its name when it has its content."""
    made: list[tuple[int, int, bool]] = []
    path, opened = tmp_path / "new" / "secret", os.open

    def watched(name: os.PathLike[str], flags: int, mode: int = 0o777) -> int:
        descriptor = opened(name, flags, mode)
        found = os.fstat(descriptor)
        made.append((stat.S_IMODE(found.st_mode), found.st_size, path.exists()))
        return descriptor

    monkeypatch.setattr(private_files.os, "open", watched)
    assert create_private_file(path, b"token")
    assert made == [(0o600, 0, False)]
    assert (mode_of(path), mode_of(path.parent), path.read_bytes()) == (0o600, 0o700, b"token")
    assert [each.name for each in path.parent.iterdir()] == ["secret"]


def test_first_one_stays_when_two_create_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-31: the other one finds it whole, also where it appears at the last moment."""
    path, link = tmp_path / "secret", os.link

    def late(half: Path, name: Path) -> None:
        path.write_bytes(b"of the first")
        link(half, name)

    monkeypatch.setattr(private_files.os, "link", late)
    assert not create_private_file(path, b"of the second")
    assert not create_private_file(path, b"of the third")
    assert path.read_bytes() == b"of the first"
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o604, 0o777])
def test_wider_file_is_narrowed_and_told(tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    """S-SEC-32: the warning names the file and its mode, and says that what it holds may be known."""
    path = tmp_path / "secret"
    path.write_bytes(b"token")
    path.chmod(mode)
    assert exposed_bits(path) == mode & 0o077
    with caplog.at_level(logging.WARNING):
        assert read_private_file(path) == b"token"
    (said,) = caplog.messages
    assert str(path) in said
    assert f"mode {0o600 | mode & 0o077:03o}" in said
    assert "delete it" in said
    assert (mode_of(path), exposed_bits(path)) == (0o600, 0)
    caplog.clear()
    assert read_private_file(path) == b"token"
    assert caplog.messages == []


def planted(path: Path, kind: str) -> None:
    """What another user may have put there."""
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_bytes(b"known")
    elsewhere.chmod(0o600)
    match kind:
        case "link":
            path.symlink_to(elsewhere)
        case "dangling link":
            path.symlink_to(path.with_name("nowhere"))
        case "directory":
            path.mkdir()
        case _:
            os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("link", "is a symbolic link"),
        ("dangling link", "is a symbolic link"),
        ("directory", "is not a regular file"),
        ("pipe", "is not a regular file"),
    ],
)
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str, reason: str) -> None:
    """S-SEC-33: and not waited for, and not replaced."""
    path = tmp_path / "secret"
    planted(path, kind)
    for look in (read_private_file, exposed_bits):
        with pytest.raises(EnsembleError, match=reason) as refused:
            look(path)
        assert str(path) in str(refused.value)
    assert not create_private_file(path, b"token")


def test_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-33: also when only its owner can read it, for its owner chose what is in it."""
    path, me = tmp_path / "secret", os.geteuid()
    create_private_file(path, b"token")
    monkeypatch.setattr(private_files.os, "geteuid", lambda: me + 1)
    for look in (read_private_file, exposed_bits):
        with pytest.raises(EnsembleError, match=f"belongs to user {me}, and this process is of user {me + 1}"):
            look(path)


def test_directory_that_others_write_to_is_narrowed_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """S-SEC-32: they could put a file of theirs in the place of ours; where the sticky bit keeps them from it, it stays."""
    place, common = tmp_path / "place", tmp_path / "common"
    for path, mode in ((place, 0o777), (common, 0o1777)):
        path.mkdir()
        path.chmod(mode)
        with caplog.at_level(logging.WARNING):
            assert create_private_file(path / "secret", b"token")
    (said,) = caplog.messages
    assert str(place) in said
    assert (mode_of(place), mode_of(common)) == (0o755, 0o1777)


def test_directory_of_another_user_that_others_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-SEC-33: it cannot be narrowed."""
    me = os.geteuid()
    tmp_path.chmod(0o777)
    monkeypatch.setattr(private_files.os, "geteuid", lambda: me + 1)
    with pytest.raises(EnsembleError, match="can be written to by others"):
        create_private_file(tmp_path / "secret", b"token")
    assert list(tmp_path.iterdir()) == []


def test_directory_is_private_whoever_was_there_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-35: a name in a directory that all write to can be taken by anybody."""
    path = private_directory(tmp_path, "mine")
    assert (path, mode_of(path)) == (tmp_path / "mine", 0o700)
    path.chmod(0o755)
    assert private_directory(tmp_path, "mine") == path
    assert mode_of(path) == 0o700
    (tmp_path / "linked").symlink_to(path)
    other = private_directory(tmp_path, "linked")
    assert (other.parent, mode_of(other)) == (tmp_path, 0o700)
    assert other not in (path, tmp_path / "linked")
    me = os.geteuid()
    monkeypatch.setattr(private_files.os, "geteuid", lambda: me + 1)
    assert private_directory(tmp_path, "mine") != path
