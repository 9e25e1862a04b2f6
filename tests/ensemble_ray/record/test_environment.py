"""Which capture mode a run has."""

import logging

import pytest

from ensemble_ray import CaptureMode, ValidationError
from ensemble_ray.record.opening import CAPTURE_MODE_VARIABLE, effective_capture_mode

NAME = "ENSEMBLE_RAY_CAPTURE_MODE"


def _mode(explicit: CaptureMode | str | None, value: str | None) -> CaptureMode:
    return effective_capture_mode(explicit, {} if value is None else {NAME: value})


@pytest.mark.parametrize("explicit", ["off", "standard", CaptureMode.FULL])
@pytest.mark.parametrize("value", [None, "full", "loud"])
def test_explicit_mode_wins(explicit: CaptureMode | str, value: str | None) -> None:
    """S-CAP-2, S-CAP-3: off too, and the environment is not even looked at."""
    assert _mode(explicit, value) is CaptureMode(explicit)


@pytest.mark.parametrize(("value", "expected"), [("full", "full"), (" Standard\n", "standard"), ("OFF", "off")])
def test_environment_decides_when_nothing_is_chosen(value: str, expected: str) -> None:
    """S-CAP-2, S-CAP-4: trimmed, in any case."""
    assert CAPTURE_MODE_VARIABLE == NAME
    assert _mode(None, value) is CaptureMode(expected)


@pytest.mark.parametrize("value", [None, "", "   "])
def test_mode_is_off_when_nothing_is_said(value: str | None) -> None:
    """S-CAP-2, S-CAP-4: blank is ignored without a word."""
    assert _mode(None, value) is CaptureMode.OFF


@pytest.mark.parametrize(("value", "hint"), [("loud", ""), ("Ful", " Did you mean 'full'?")])
def test_unknown_mode_of_the_environment_is_an_error(value: str, hint: str) -> None:
    """S-CAP-4, S-ERR-63: it names the variable, the nearest word and the known ones."""
    with pytest.raises(ValidationError) as caught:
        _mode(None, value)
    assert str(caught.value) == f"Unknown {NAME} '{value.lower()}'.{hint} Known: [off, standard, full]"


def test_process_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-CAP-2, S-CAP-5: the calling process's own, resolved at each run."""
    monkeypatch.setenv(NAME, "full")
    assert effective_capture_mode(None) is CaptureMode.FULL
    monkeypatch.setenv(NAME, "standard")
    assert effective_capture_mode(None) is CaptureMode.STANDARD
    assert effective_capture_mode(None, {}) is CaptureMode.OFF


@pytest.mark.parametrize(("mode", "lines"), [("off", []), ("standard", ["Capture mode: standard"]), ("full", ["Capture mode: full"])])  # fmt: skip
def test_active_mode_is_logged(mode: str, lines: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """S-CAP-18: at INFO, when it is not off."""
    with caplog.at_level(logging.INFO, logger="ensemble_ray"):
        effective_capture_mode(mode)
    assert [record.getMessage() for record in caplog.records] == lines
    assert {record.levelname for record in caplog.records} <= {"INFO"}


def test_explicit_mode_is_refused_when_it_is_unknown() -> None:
    """S-CONV-6: an unknown value string."""
    with pytest.raises(ValidationError, match=r"Unknown capture_mode 'loud'\. Known: \[off, standard, full\]"):
        effective_capture_mode("loud", {})
