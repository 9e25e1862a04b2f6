"""Lines for people that are no warnings."""

from __future__ import annotations

import logging

import pytest

from ensemble_ray.process.context import NOTICES, notify


def test_notice_is_on_standard_error_when_no_logging_is_set_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-SET-55: one line, whatever stands in it; nothing where the logger's level says so."""
    monkeypatch.setattr(logging.getLogger(NOTICES), "propagate", False)  # pytest's own handlers stand above
    notify("Starting\nsomething")
    logging.getLogger(NOTICES).setLevel(logging.WARNING)
    notify("unheard")
    logging.getLogger(NOTICES).setLevel(logging.INFO)
    assert capsys.readouterr() == ("", "Starting\\nsomething\n")


def test_notice_goes_to_the_log_that_is_set_up(caplog: pytest.LogCaptureFixture) -> None:
    """S-SET-55: a level of INFO, shown by every handler, though the root's level is WARNING."""
    notify("Starting")
    (record,) = caplog.records
    assert (record.name, record.levelno, record.getMessage()) == (NOTICES, logging.INFO, "Starting")
