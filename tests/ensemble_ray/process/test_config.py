"""What the environment decides, and what of it is no setting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ensemble_ray import ValidationError
from ensemble_ray.process.config import INTERNAL_VARIABLES, VARIABLES, unknown_variables
from ensemble_ray.runtime import connect

ROOT = Path(__file__).resolve().parents[3]


def test_misspelt_variable_is_told_with_the_nearest_one() -> None:
    """S-SET-49: others' variables are not ours to judge."""
    told = unknown_variables(
        ["PATH", *INTERNAL_VARIABLES, "ENSEMBLE_RAY_RUNTIM", "ENSEMBLE_RAY_HOME", "ENSEMBLE_RAY_ZZZ"]
    )
    assert [line.partition(" Known:")[0] for line in told] == [
        "The environment variable ENSEMBLE_RAY_RUNTIM is unknown and is ignored. Did you mean ENSEMBLE_RAY_RUNTIME?",
        "The environment variable ENSEMBLE_RAY_ZZZ is unknown and is ignored.",
    ]


def test_every_variable_that_the_code_reads_is_known() -> None:
    """S-SET-49: and no other; what is read nowhere is not offered."""
    read = {
        name
        for folder in ("ensemble_ray", "actors", "serve")
        for file in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\"(ENSEMBLE_RAY_[A-Z_]*[A-Z])\"", file.read_text(encoding="utf-8"))
    }
    assert read == {*VARIABLES, *INTERNAL_VARIABLES}


def test_variable_is_named_when_its_runtime_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SET-49: where the wrong word stands."""
    monkeypatch.setenv("ENSEMBLE_RAY_RUNTIME", "rey")
    with pytest.raises(
        ValidationError,
        match=r"^Unknown runtime 'rey' in ENSEMBLE_RAY_RUNTIME\. Did you mean 'ray'\? Known: \[inline, ray\]",
    ):
        connect()
