"""The garbage collector's settings while runs are active."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

from ensemble_ray.process.context import collecting_less


@pytest.fixture(autouse=True)
def restored() -> Generator[None]:
    """Restore the settings of the test session."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_settings_are_restored_when_the_last_of_several_runs_ends() -> None:
    """Runs overlap: the first that ends does not restore the settings."""
    gc.set_threshold(700, 10, 10)
    first, second = collecting_less(), collecting_less()
    first.__enter__()
    second.__enter__()
    during = gc.get_threshold()
    first.__exit__(None, None, None)
    between = gc.get_threshold()
    second.__exit__(None, None, None)

    assert during == between
    assert during[0] > 700
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("threshold", [0, 100_000])
def test_settings_stay_when_the_program_collects_less_often_or_never(threshold: int) -> None:
    gc.set_threshold(threshold, 10, 10)
    with collecting_less():
        assert gc.get_threshold() == (threshold, 10, 10)
    assert gc.get_threshold() == (threshold, 10, 10)


def test_settings_of_the_program_stay_when_it_changes_them_during_a_run() -> None:
    gc.set_threshold(700, 10, 10)
    with collecting_less():
        gc.set_threshold(5, 5, 5)
    assert gc.get_threshold() == (5, 5, 5)
