"""What the golden tests share: the commands that a terminal names are on the path, as where the records were made."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def installed_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the environment's programs on the path: hints then say `ensemble-ray`, however the tests were started."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
