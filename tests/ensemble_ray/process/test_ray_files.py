"""The files of a local Ray instance, before Ray looks for them."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

import pytest

from ensemble_ray import EnsembleError
from ensemble_ray.process import private_files as ray_files
from ensemble_ray.process.private_files import private_ray_directory, secure_token_file, token_file


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has never run anything."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def mode_of(path: Path) -> int:
    """Who may do what with it."""
    return stat.S_IMODE(path.stat().st_mode)


def test_token_is_made_once_and_only_for_its_owner(user: Path) -> None:
    """S-SEC-31: of 256 bits, where Ray looks for it."""
    secure_token_file()
    path = user / ".ray" / "auth_token"
    token = path.read_text(encoding="utf-8")
    assert path == token_file()
    assert (mode_of(path), mode_of(path.parent), len(bytes.fromhex(token))) == (0o600, 0o700, 32)
    secure_token_file()
    assert path.read_text(encoding="utf-8") == token


def test_token_that_the_environment_gives_is_used_as_it_is(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-31: no file is made beside it; one that it names and that is missing is Ray's to complain about."""
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(user / "missing"))
    secure_token_file()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a token")
    secure_token_file()
    assert token_file() is None
    assert list(user.iterdir()) == []


def test_named_token_file_is_checked_like_our_own(
    user: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S-SEC-32, S-SEC-33: narrowed where it is too wide, refused where it is a link."""
    path = user / "token"
    path.write_text("a token", encoding="utf-8")
    path.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    with caplog.at_level(logging.WARNING):
        secure_token_file()
    assert (mode_of(path), len(caplog.messages)) == (0o600, 1)
    link = user / "link"
    link.symlink_to(path)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(link))
    with pytest.raises(EnsembleError, match="is a symbolic link"):
        secure_token_file()


def test_rays_directory_is_below_one_that_only_its_owner_enters(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-35: Ray opens its own to everybody."""
    user.chmod(0o755)
    with tempfile.TemporaryDirectory(prefix="er-", dir="/tmp") as name:
        base = Path(name)
        base.chmod(0o1777)
        monkeypatch.setenv("RAY_TMPDIR", name)
        path = private_ray_directory()
        assert (path.parent.parent, path.name, mode_of(path.parent)) == (base, "ray", 0o700)
        base.chmod(0o700)
        assert private_ray_directory() == base / "ray"


def test_rays_directory_leaves_room_for_the_names_of_sockets(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-35: a path may have 107 characters, and Ray puts some 70 behind its directory."""
    base = user / ("long" * 10)
    base.mkdir()
    base.chmod(0o755)
    monkeypatch.setenv("RAY_TMPDIR", str(base))
    monkeypatch.setattr(ray_files, "private_directory", lambda where, name: where / name)
    assert private_ray_directory() == Path("/tmp") / f"ensemble-ray-{os.geteuid()}" / "ray"  # noqa: S108  Ray's own default
