"""MapReduceRun: what the handle of a run over items has beside what every run has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.runs.handle import Run

if TYPE_CHECKING:
    from ensemble_ray.coordinator.map_reduce.item_log import ItemStream
    from ensemble_ray.definition.fields import Origin
    from ensemble_ray.definition.run_options import RunOptions
    from ensemble_ray.runs.launching import Resumption
    from ensemble_ray.runs.map_reduce.launcher import MapReduceLauncher
    from ensemble_ray.runs.ports import Runtime


class MapReduceRun(Run):
    """A run over items that was started. Results come with `result()`, or item by item with `items()`."""

    def __init__(
        self,
        launcher: MapReduceLauncher,
        *,
        runtime: Runtime,
        run_id: str | None = None,
        options: RunOptions | None = None,
        is_watched: bool = True,
        origin: Origin | None = None,
        resumption: Resumption | None = None,
    ) -> None:
        """Begin, or go on; see `Run`."""
        self._items = launcher.items
        super().__init__(
            launcher,
            runtime=runtime,
            run_id=run_id,
            options=options,
            is_watched=is_watched,
            origin=origin,
            resumption=resumption,
        )

    @property
    def failed_count(self) -> int:
        """How many items have failed until now, also where nobody collects them."""
        return self._items.failed_count

    @property
    def completed_count(self) -> int:
        """How many items have their output until now."""
        return self._items.completed_count

    def items(self) -> ItemStream:
        """Return what came of each item, in the order in which it came, the past ones first."""
        return self._items.stream()
