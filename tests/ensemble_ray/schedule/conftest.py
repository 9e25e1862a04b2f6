"""The machine under test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ensemble_ray import Plan
from tests.ensemble_ray.schedule.plans import STARTED, CheckedMachine


@pytest.fixture
def begin_run() -> Callable[[Plan], CheckedMachine]:
    """Makes a machine of a plan and begins its run; it is validated after every step."""

    def begin(plan: Plan) -> CheckedMachine:
        machine = CheckedMachine(plan)
        machine(STARTED)
        return machine

    return begin
