"""The pytest plugin, in a run of pytest of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

_TESTS = """
from ensemble_ray import Agent, Case, Ensemble, Task
from ensemble_ray.testing import ScriptedModel

CASES = [Case("fr", {"country": "France"}, expected="Paris"), Case("it", {"country": "Italy"}, expected="Rome")]


def team(answer):
    agent = Agent("Geographer", "Answer", llm=ScriptedModel(otherwise=answer))
    return Ensemble(tasks=[Task("Name the capital of {country}", agent=agent)])


def test_fine(evaluate):
    result = evaluate(team("Paris"), CASES, ["exact"], minimum={"exact": 0.5}, repeats=2)
    assert result.summary("exact").mean == 0.5


def test_missed(evaluate):
    evaluate(team("Paris"), CASES, "exact", minimum={"exact": 0.9})


def test_failed(evaluate):
    evaluate(team(RuntimeError("no model")), CASES, "exact")
"""


@pytest.mark.program
@pytest.mark.heavy
def test_a_test_fails_when_a_minimum_is_missed_or_a_run_failed(pytester: pytest.Pytester) -> None:
    """S-EVL-60: the failure shows the table."""
    pytester.makepyfile(_TESTS)
    result = pytester.runpytest_subprocess("-p", "ensemble_ray.testing.pytest_plugin", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines([
        "exact: the mean is 0.500, and must be at least 0.9",
        "*Evaluation*2 cases, 2 runs*",
        "*no model*",
    ])  # fmt: skip


@pytest.mark.program
def test_the_plugin_is_cheap_when_it_is_imported() -> None:
    """S-EVL-61."""
    code = (
        "import sys, ensemble_ray.testing.pytest_plugin; "
        "print([name for name in ('pydantic', 'ray', 'msgspec', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.strip() == "[]"
