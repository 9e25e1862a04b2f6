"""What `doctor` finds, and what it says to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ensemble_ray.cli.commands.doctor import (
    check_embedded,
    check_endpoint,
    check_model,
    check_models,
    check_packages,
    check_python,
    check_ray_token,
    check_records,
    finding_lines,
)
from tests.command_line import Call


def test_this_python_and_its_packages_are_fine() -> None:
    """They run these tests."""
    (python,) = check_python()
    assert python.state == "ok"
    assert sys.executable in python.detail
    *wrong, packages = check_packages()
    assert wrong == []
    assert "pydantic " in packages.detail


def test_the_directory_is_named_when_records_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in its place."""
    (tmp_path / "home").write_text("", encoding="utf-8")
    monkeypatch.setenv("ENSEMBLE_RAY_HOME", str(tmp_path / "home"))
    (finding,) = check_records()
    assert finding.state == "failed"
    assert "ENSEMBLE_RAY_HOME" in finding.advice
    assert finding_lines(finding)[1].strip().startswith("-> ")


def test_token_that_others_can_read_or_choose_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-40: its file is looked at and not changed; the advice can be followed."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".ray" / "auth_token"
    (none,) = check_ray_token()
    assert (none.state, str(path) in none.detail) == ("ok", True)
    path.parent.mkdir()
    path.write_text("token", encoding="utf-8")
    for mode, state in ((0o600, "ok"), (0o640, "failed")):
        path.chmod(mode)
        (found,) = check_ray_token()
        assert (found.state, path.stat().st_mode & 0o777) == (state, mode)
    assert "mode 640" in found.detail
    assert found.advice == f"Have a new one made: rm {path}"
    path.rename(tmp_path / "known")
    path.symlink_to(tmp_path / "known")
    (link,) = check_ray_token()
    assert (link.state, "is a symbolic link" in link.detail) == ("failed", True)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "token")
    assert [each.detail for each in check_ray_token()] == ["RAY_AUTH_TOKEN"]


def test_the_command_is_named_when_the_embedded_model_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No failure: it is an extra."""
    monkeypatch.setattr("ensemble_ray.llm.local.find_weights", lambda: None)
    finding = list(check_embedded())[-1]
    assert finding.state == "note"
    assert "ensemble-ray models install" in finding.advice


def test_the_variables_are_named_when_no_endpoint_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No failure either: there is the embedded model."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    (finding,) = check_endpoint()
    assert finding.state == "note"
    assert "OPENAI_API_KEY" in finding.advice
    monkeypatch.setenv("OPENAI_BASE_URL", "ftp://x")
    (finding,) = check_endpoint()
    assert finding.state == "failed"
    assert "OPENAI_BASE_URL" in finding.detail


def test_the_reason_is_told_when_a_model_is_none() -> None:
    """A mistyped model."""
    (finding,) = check_model("opnai:x")
    assert finding.state == "failed"
    assert "Unknown llm 'opnai:x'" in finding.detail


def test_each_model_of_a_chain_is_checked() -> None:
    """S-FBK-50: by its own; a comma in the path of a file separates no models."""
    first, second, third = check_models("opnai:x, openai:y z,local:/no,such.gguf")
    assert "Unknown llm 'opnai:x'" in first.detail
    assert second.detail.startswith("openai:y z: ")
    assert third.detail.startswith("local:/no,such.gguf: ")


def test_findings_are_data_when_json_is_asked_for(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the exit code says whether one failed."""
    monkeypatch.setenv("OPENAI_BASE_URL", "ftp://x")
    called = call("doctor", "--no-ray", "--json")
    assert called.code == 1
    states = {finding["name"]: finding["state"] for finding in json.loads(called.printed)}
    assert states["Python"] == "ok"
    assert states["Endpoint"] == "failed"
    monkeypatch.delenv("OPENAI_BASE_URL")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert call("doctor", "--no-ray").code == 0
