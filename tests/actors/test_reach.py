"""`reach`: which calls are tried again, how often, and what ends the tries."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError

from ensemble_ray.actors.link.reach import reach


class Calls:
    """A call that fails so often in that way; then it is answered."""

    def __init__(self, *errors: RayError) -> None:
        self._errors = list(errors)
        self.count = 0

    async def __call__(self) -> str:
        self.count += 1
        if self._errors:
            raise self._errors.pop(0)
        return "here"


def away() -> ActorUnavailableError:
    """An actor that is being started again."""
    return ActorUnavailableError("out of reach", None)


async def test_call_is_made_again_until_the_actor_is_back() -> None:
    """S-PAR-34."""
    call = Calls(away(), away())
    assert await reach(call, (0.0, 0.0)) == "here"
    assert call.count == 3


async def test_error_is_raised_when_the_last_pause_is_over() -> None:
    """S-DUR-34."""
    call = Calls(away(), away(), away())
    with pytest.raises(ActorUnavailableError):
        await reach(call, (0.0,))
    assert call.count == 2


async def test_dead_actor_is_not_asked_again_unless_its_caller_wants_that() -> None:
    """S-DUR-34: most actors do not come back."""
    with pytest.raises(ActorDiedError):
        await reach(Calls(ActorDiedError()), (0.0,))
    assert await reach(Calls(ActorDiedError(), away()), (0.0, 0.0), retry_on=RayActorError) == "here"


async def test_tries_end_when_the_caller_finds_no_reason_for_another() -> None:
    """S-DUR-34: such as that the cluster is gone."""
    call = Calls(away(), away())

    async def give_up() -> None:
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        await reach(call, (0.0, 0.0), before_retry=give_up)
    assert call.count == 1
