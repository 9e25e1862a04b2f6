"""The tasks of a run that wait at open gates, as its coordinator's side knows them.

In: results of tasks that were put down. Out: what the source is told, and the gates that the run waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ensemble_ray.schedule.stimuli import Waiting
from ensemble_ray.values.outputs import RunState

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import FailureSummary, TaskResult
    from ensemble_ray.schedule.instructions import End
    from ensemble_ray.values.reviews import OpenReview


class PutDown:
    """Tasks that wait, with their open gates."""

    def __init__(self, is_waiting: Callable[[str], bool]) -> None:
        """Make one that has none.

        Args:
            is_waiting: Says whether a task is started again when the run goes on; one that was cancelled meanwhile, as by a
                join of a graph, is not.
        """
        self._is_waiting = is_waiting
        self._reviews: dict[str, tuple[OpenReview, ...]] = {}

    @property
    def reviews(self) -> Mapping[str, Sequence[OpenReview]]:
        """The open gates of the tasks that wait, by instance, in the order in which they came to them."""
        return {instance: reviews for instance, reviews in self._reviews.items() if self._is_waiting(instance)}

    def keep(self, result: TaskResult[object, FailureSummary]) -> Waiting:
        """Keep the gates that a task waits for; return what the source is told."""
        self._reviews[result.instance] = result.open_reviews
        return Waiting(at=result.at, instance=result.instance)

    def pick_up(self, instance: str) -> bool:
        """Forget the gates of a task that is handed out; return whether it had been put down."""
        return self._reviews.pop(instance, None) is not None

    def waited_for(self, ending: End) -> tuple[OpenReview, ...]:
        """Return the gates that a run waits for that ends so; none where it has ended for good."""
        if ending.state is not RunState.WAITING:
            return ()
        return tuple(each for reviews in self.reviews.values() for each in reviews)
