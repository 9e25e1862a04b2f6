"""What the tasks of a map-reduce need from others, and how it ended. Contracts and values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ensemble_ray.definition.task import Task
    from ensemble_ray.plan.map_reduce_factories import FactoryFailure, ItemLoop
    from ensemble_ray.schedule.instructions import End, ReduceGroup
    from ensemble_ray.schedule.stimuli import Evaluated
    from ensemble_ray.values.outputs import ExitReason
    from ensemble_ray.values.task_output import TaskOutput


class TaskFactories(Protocol):
    """The user's factories; each call is made in a thread, one at a time (S-MR-143)."""

    async def maps(self, items: Sequence[object]) -> Sequence[Task | ItemLoop | FactoryFailure]:
        """Make a task for each item, or tell why its factory could not."""
        ...

    async def reduce(self, outputs: Sequence[TaskOutput]) -> tuple[Task, Sequence[int]]:
        """Return a task that reduces these outputs, and the positions of those that it wants as context, in its order.

        Raises:
            ValidationError: its context lacks one (S-MR-24).
        """
        ...


class ItemResults(Protocol):
    """Hears what comes of items."""

    async def free_slots(self, in_flight: Callable[[], int]) -> int:
        """Return how many more items may be pulled, when some may: a reader or a file may be slow (S-MR-131).

        Args:
            in_flight: Tells how many items were pulled whose results have not come.
        """
        ...

    def write_output(self, number: int, index: int, item: object, output: TaskOutput) -> None:
        """Note that the item of that place, and of that index in its source, has its output."""
        ...

    def write_failure(self, index: int, item: object, error: BaseException, attempts: int) -> None:
        """Note that an item has none."""
        ...


class RecordedTasks(Protocol):
    """What the record knows of a run that goes on; what its tasks gave is in the store already.

    Tasks are named as the machine names them: a map by its place in the source.
    """

    @property
    def groups(self) -> Sequence[ReduceGroup]:
        """Recorded groups, in their order."""
        ...

    def failure(self, level: int, number: int) -> MapReduceFailure | None:
        """Return how a task failed that is not tried again; None for one that did not fail."""
        ...

    def exit_reason(self, level: int, number: int) -> ExitReason | None:
        """Return why a task ended the run early; None for one that did not."""
        ...

    def occurrence(self, level: int, number: int) -> int:
        """Return which attempt of the run at that task is the current one."""
        ...

    @property
    def verdicts(self) -> Mapping[str, Sequence[Evaluated]]:
        """Recorded answers of the predicates of items that have not ended, by the instance of the item."""
        ...

    @property
    def knows_all(self) -> bool:
        """Whether it says how many items there are."""
        ...

    def check_items(self, first: int, indices: Sequence[int], digests: Sequence[str]) -> int:
        """Compare items, the first of which has that place, with the recorded ones; how many of them are recorded.

        Raises:
            ValidationError: one differs, or there are more than there were (S-MR-162).
        """
        ...

    def check_end(self, count: int) -> None:
        """Compare how many items there are.

        Raises:
            ValidationError: the record has more (S-MR-162).
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MapReduceFailure:
    """A map or reduce that failed."""

    #: of its task; of an item whose map is more than one task, the item's; empty: the run itself failed
    key: str
    level: int
    at: float
    task_description: str
    agent_role: str
    error: BaseException
    #: requests to the provider for its last model call (S-MR-152)
    attempts: int = 0


@dataclass(slots=True, kw_only=True)
class MapReduceEnd:
    """How a map-reduce ended."""

    ending: End
    started_at: float
    completed_at: float
    #: the first of them, on all levels
    failures: Sequence[MapReduceFailure] = field(default_factory=list["MapReduceFailure"])
    #: how many maps failed
    failed_maps: int = 0
    #: what the source or a factory raised
    cause: BaseException | None = None
    #: the first call that a provider refused as it would refuse all others (S-MR-155)
    refusal: MapReduceFailure | None = None
    #: what to warn of, such as a budget that is spent; "": nothing
    warning: str = ""
