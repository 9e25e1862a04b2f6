"""What the tasks of a map-reduce are made with. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble_ray.coordinator.map_reduce.item_buffer import ItemBuffer
    from ensemble_ray.coordinator.map_reduce.orders import OrderMaker
    from ensemble_ray.coordinator.map_reduce.outputs import MapReduceOutputs
    from ensemble_ray.coordinator.map_reduce.ports import ItemResults, RecordedTasks
    from ensemble_ray.definition.map_reduce import MapDefinition
    from ensemble_ray.ports import EventSink


@dataclass(frozen=True, slots=True, kw_only=True)
class MapReduceParts:
    """What the tasks of a map-reduce are made with."""

    items: ItemBuffer
    orders: OrderMaker
    store: MapReduceOutputs
    results: ItemResults
    definition: MapDefinition
    #: takes what is told of iterations; None: nobody listens
    events: EventSink | None = None
    #: what the record knows of a run that goes on; None: it begins
    record: RecordedTasks | None = None
