"""The built-in tools' module: its names, each imported only when asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ensemble_ray.tools import builtin


def test_names_are_sorted_and_all_there_when_listed() -> None:
    """S-CONV-1."""
    assert builtin.__all__ == sorted(builtin.__all__)
    assert dir(builtin) == builtin.__all__
    for name in builtin.__all__:
        assert getattr(builtin, name).__name__ == name


def test_unknown_name_is_refused_when_asked_for() -> None:
    """S-CONV-4."""
    with pytest.raises(AttributeError, match="GitHubTool"):
        _ = builtin.GitHubTool


@pytest.mark.program
def test_no_web_library_is_loaded_when_the_tools_are_imported() -> None:
    """S-CONV-1: all tools can be named, and most be made, without the optional extra."""
    program = (
        "import sys; from ensemble_ray.tools.builtin import *; CalculatorTool(); WebSearchTool(str);"
        "print([m for m in ('selectolax', 'ray', 'openai') if m in sys.modules])"
    )
    done = subprocess.run(  # noqa: S603  our own program
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
