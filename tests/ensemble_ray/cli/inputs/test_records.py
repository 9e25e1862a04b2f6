"""The recorded runs that commands work on."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ensemble_ray.cli.inputs.records import age_of, say_where, where
from ensemble_ray.values.value import utc_now
from tests.command_line import Call


@pytest.mark.parametrize(
    "url", ["postgresql://me:secret@host:5432/runs?sslmode=require", "postgresql://host:5432/runs?password=secret"]
)
def test_place_tells_no_password(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """S-DUR-6, S-DUR-50: the store of `ENSEMBLE_RAY_STORE`, for people."""
    monkeypatch.setenv("ENSEMBLE_RAY_STORE", url)
    assert where() == "the database host:5432/runs"


def test_store_that_nobody_speaks_is_refused_by_every_command(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-DUR-5, S-DUR-50 to S-DUR-54: all of them look where `ENSEMBLE_RAY_STORE` says; the password is not shown."""
    monkeypatch.setenv("ENSEMBLE_RAY_STORE", "mysql://me:secret@host/runs")
    commands = [("runs",), ("trace",), ("resume", "a"), ("cancel", "a"), ("delete", "a"), ("fork", "a", "--from", "b")]
    for command in (*commands, ("prune", "--older-than", "1d")):
        called = call(*command)
        assert called.code == 2, command
        assert "Unknown store 'mysql://...'" in called.said
        assert "secret" not in called.said


@pytest.mark.parametrize(
    ("seconds", "told"), [(-5, "0 s"), (59, "59 s"), (61, "1 min"), (7200, "2 h"), (86400 * 40, "40 d")]
)
def test_age_is_told_in_its_largest_unit(seconds: int, told: str) -> None:
    """S-DUR-50."""
    now = utc_now()
    assert age_of(now - timedelta(seconds=seconds), now) == told


def test_that_nothing_was_kept_is_said(folder: object, capsys: pytest.CaptureFixture[str]) -> None:
    """S-DUR-2: a run with durability `off` has no record."""
    assert folder
    say_where("unheard-of")
    assert capsys.readouterr().err == "Record: none\n"
