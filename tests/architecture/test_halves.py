"""`make test` runs everything that pytest runs by itself, in two halves."""

import re
import tomllib

from .project import ROOT


def test_no_test_is_in_neither_half() -> None:
    """What is not among `NEAR` must lie in `tests`, all of which the other half runs."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.search(r"^NEAR := (.+)$", makefile, re.MULTILINE)
    programs = re.search(r"^PROGRAMS := (.+)$", makefile, re.MULTILINE)
    assert named is not None
    assert programs is not None
    near = named[1].split() + [f"tests/scenarios/test_{name}.py" for name in programs[1].split()]
    assert all((ROOT / path).exists() for path in near)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert "tests" in settings["testpaths"]
    assert set(settings["testpaths"]) - {"tests"} <= set(near)
