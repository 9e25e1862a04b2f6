"""Items from standard input are copied beside the records."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from ensemble_ray.cli.map_team import copied_items, forget_items


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the records."""
    monkeypatch.setenv("ENSEMBLE_RAY_HOME", str(tmp_path))
    return tmp_path


def test_a_copy_is_nobody_elses_and_goes_with_its_run(home: Path) -> None:
    """S-MR-180: what cannot be read twice is kept for the resume."""
    path = copied_items("a", io.BytesIO(b'{"a": 1}\n'))
    assert path.read_bytes() == b'{"a": 1}\n'
    assert path.stat().st_mode & 0o077 == 0
    forget_items("a")
    forget_items("a")
    assert not path.exists()


def test_copies_without_a_run_are_removed_in_time(home: Path) -> None:
    """S-MR-180: nothing piles up; a young one may be of a run that is about to begin."""
    old, young = copied_items("old", io.BytesIO(b"1")), copied_items("young", io.BytesIO(b"2"))
    os.utime(old, (1, 1))
    copied_items("next", io.BytesIO(b"3"))
    assert not old.exists()
    assert young.exists()
