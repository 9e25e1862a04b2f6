"""Sandbox: what is inside, as written and as the file system resolves it; nothing is ever created."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ensemble_ray.tools.builtin.files import AccessDeniedError, Sandbox
from tests.ensemble_ray.tools.builtin.travel import travelled

_OUTSIDE = "Access denied: path is outside the sandbox directory"
_RESOLVES_OUTSIDE = "Access denied: path resolves outside the sandbox directory"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A sandbox directory with neighbours: a secret beside it, and a sibling that begins with its name."""
    inside = tmp_path / "box"
    inside.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "boxing").mkdir()
    return inside


def test_directory_is_refused_when_it_is_none_missing_or_a_file(tmp_path: Path) -> None:
    """S-BIT-20."""
    file = tmp_path / "file"
    file.touch()
    for wrong in (tmp_path / "missing", file):
        with pytest.raises(ValueError, match=f"^base_dir must be an existing directory: {wrong}$"):
            Sandbox(wrong)
    with pytest.raises(ValueError, match="base_dir"):
        Sandbox(None)


@pytest.mark.parametrize("path", ["a.txt", "new/deep/a.txt", "a/../b.txt", "./b.txt", "."])
def test_path_is_given_when_inside(base: Path, path: str) -> None:
    """S-BIT-21."""
    resolved = Sandbox(base).resolve(path)
    assert resolved == Path(os.path.realpath(base / path))
    assert not (base / "new").exists()


def test_absolute_path_is_given_when_it_lies_inside(base: Path) -> None:
    """S-BIT-21: only an absolute path elsewhere is outside."""
    assert Sandbox(base).resolve(str(base / "a.txt")).name == "a.txt"


@pytest.mark.parametrize("path", ["../secret.txt", "a/../../secret.txt", "..", "/etc/passwd", "../boxing/a.txt"])
def test_path_is_refused_when_outside_as_written(base: Path, path: str) -> None:
    """S-BIT-21: a sibling whose name merely begins with the base's name is outside, too."""
    with pytest.raises(AccessDeniedError) as caught:
        Sandbox(base).resolve(path)
    assert str(caught.value) == _OUTSIDE


def test_path_is_refused_when_a_link_leads_outside(base: Path) -> None:
    """S-BIT-22, S-BIT-25: a linked file, a linked parent of something new, a dangling link, a chain of links."""
    (base / "file").symlink_to(base.parent / "secret.txt")
    (base / "parent").symlink_to(base.parent)
    (base / "dangling").symlink_to(base.parent / "not-yet")
    (base / "chain").symlink_to(base / "parent")
    for path in ("file", "parent/new/a.txt", "dangling", "chain/secret.txt"):
        with pytest.raises(AccessDeniedError) as caught:
            Sandbox(base).resolve(path)
        assert str(caught.value) == _RESOLVES_OUTSIDE


def test_path_is_given_when_a_link_stays_inside(base: Path) -> None:
    """S-BIT-22."""
    (base / "real").mkdir()
    (base / "link").symlink_to(base / "real")
    assert Sandbox(base).resolve("link/a.txt") == Path(os.path.realpath(base / "real" / "a.txt"))


def test_path_is_given_when_the_base_itself_is_a_link(base: Path) -> None:
    """S-BIT-21: both spellings of an absolute path are inside."""
    alias = base.parent / "alias"
    alias.symlink_to(base)
    sandbox = Sandbox(alias)
    for path in ("a.txt", str(alias / "a.txt"), os.path.realpath(base / "a.txt")):
        assert sandbox.resolve(path) == Path(os.path.realpath(base / "a.txt"))


def test_sandbox_stays_where_it_was_when_the_directory_changes(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-BIT-20: a relative base is fixed at construction, and the sandbox travels."""
    monkeypatch.chdir(base.parent)
    sandbox = travelled(Sandbox("box"))
    monkeypatch.chdir("/")
    assert sandbox.base_dir == base
