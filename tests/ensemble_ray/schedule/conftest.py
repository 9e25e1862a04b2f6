"""The machine under test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ensemble_ray.plan.plan import Plan
from tests.ensemble_ray.schedule.plans import STARTED, Told


@pytest.fixture
def told() -> Callable[[Plan], Told]:
    """Makes a machine of a plan and begins its run; it is validated after every step."""

    def begin(plan: Plan) -> Told:
        machine = Told(plan)
        machine(STARTED)
        return machine

    return begin
