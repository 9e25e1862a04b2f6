"""The `Runtime` port, and `connect`: THE SEAM between the core and its actors. Floor: above inline.

The only import of `actors` in the core stands in `ray_runtime_class`, inside the function; a contract names it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ensemble_ray.config import Settings
from ensemble_ray.definition.durability import OnUnknown
from ensemble_ray.errors import ValidationError
from ensemble_ray.facts.runs import PlanRecorded

if TYPE_CHECKING:
    from actors.runtime import RayRuntime
    from ensemble_ray.execute.orders import RunFrame, RunOutcome, TaskOrder, TaskResult
    from ensemble_ray.execute.spending import Spending
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.facts.runs import PlanRecorded
    from ensemble_ray.plan.planner import Planned
    from ensemble_ray.ports import EventSink, Journal, ToolMetrics
    from ensemble_ray.record.stores import StoreAddress

__all__ = ["FedHouses", "FeedRequest", "RunHandle", "RunRequest", "Runtime", "connect", "ray_runtime_class"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Everything a runtime needs to run a plan."""

    run_id: str
    planned: Planned
    frame: RunFrame
    #: the record's first fact, but for its time; an empty one for a run that is recorded nowhere
    header: PlanRecorded
    #: takes the run's events in this process
    events: EventSink
    #: effects of before scheduling: calls of an LLM-based synthesizer (S-SET-46)
    earlier: Sequence[Fact] = ()
    tool_metrics: ToolMetrics
    #: asked in order about each delegation
    delegation_policies: Sequence[object] = ()
    #: how a person or a callable is asked what became of an effect (S-DUR-24)
    on_unknown: OnUnknown | Callable[..., object] = OnUnknown.TELL_MODEL
    #: whether the run is in the record already and goes on
    is_resumed: bool = False
    #: whether it is taken from an owner that still holds it (S-DUR-17)
    takes_over: bool = False
    #: set when the run is cancelled: a runtime that is only being started need not be waited for
    called_off: asyncio.Event = field(default_factory=asyncio.Event)


class RunHandle(Protocol):
    """A run that has begun."""

    async def wait(self) -> RunOutcome:
        """Return when the run ended and all its events were handed to the sink."""
        ...

    async def cancel(self) -> None:
        """Ask the run to end; `wait` returns within seconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedRequest:
    """Everything a runtime needs to do tasks that are made while their run goes on."""

    run_id: str
    frame: RunFrame
    #: takes the run's events in this process
    events: EventSink
    tool_metrics: ToolMetrics
    #: how a person or a callable is asked what became of an effect (S-DUR-24)
    on_unknown: OnUnknown | Callable[..., object] = OnUnknown.TELL_MODEL
    #: what this process writes the run's facts with
    journal: Journal
    #: where the run is recorded; None: nowhere
    store: StoreAddress | None = None
    #: told the result of each order, once, on the library's loop; several at a time
    deliver: Callable[[Sequence[TaskResult]], None]
    #: set when the run is cancelled: a runtime that is only being started need not be waited for
    called_off: asyncio.Event = field(default_factory=asyncio.Event)


class FedHouses(Protocol):
    """Where the tasks of a fed run are done."""

    @property
    def failed(self) -> asyncio.Future[None]:
        """Never done, unless nothing more can be done here: then it has the error, such as that the cluster is gone."""
        ...

    @property
    def most_processes(self) -> int | None:
        """How many processes a kind of agents may get; None: this one is all there is."""
        ...

    @property
    def spending(self) -> Spending | None:
        """What this process's own requests for the run may spend, such as those that make agents; None: no budget."""
        ...

    def start(self, orders: Sequence[TaskOrder]) -> None:
        """Do these tasks; never waits."""
        ...

    def stop(self, instances: Sequence[str]) -> None:
        """Stop these tasks; each is still delivered, within the houses' grace."""
        ...

    async def close(self) -> None:
        """Let everything go; all events of delivered tasks were handed to the sink. Nothing is delivered any more."""
        ...


@runtime_checkable
class Runtime(Protocol):
    """Where runs live: this process, or actors on a cluster."""

    @property
    def name(self) -> str:
        """What `connect` knows it by, for the record: a run is resumed where it ran."""
        ...

    @property
    def store_address(self) -> StoreAddress:
        """Where its runs are recorded."""
        ...

    async def submit(self, request: RunRequest) -> RunHandle:
        """Begin a run.

        Raises:
            ValidationError: something that must travel cannot (S-CONV-34).
            CancelledError: the run was called off before it began.
        """
        ...

    async def feed(self, request: FeedRequest) -> FedHouses:
        """Houses for tasks that are made while their run goes on.

        Raises:
            ValidationError: something that must travel cannot (S-CONV-34).
            CancelledError: the run was called off before there were any.
        """
        ...

    async def close(self) -> None:
        """Let go of everything the runtime keeps warm."""
        ...


_shared: dict[str, Runtime] = {}


def connect(choice: Runtime | str | None = None) -> Runtime:
    """The runtime for a choice: an object as it is, `"ray"`, `"inline"`, or the environment's default.

    A runtime chosen by name is made once per process, so that the next run finds its actors warm.

    Raises:
        ValidationError: the name is unknown.
    """
    if choice is not None and not isinstance(choice, str):
        return choice
    name = (choice or Settings.from_environment().runtime).strip().lower()
    if name not in _shared:
        if name == "inline":
            from ensemble_ray.inline import InlineRuntime

            _shared[name] = InlineRuntime()
        elif name == "ray":
            _shared[name] = ray_runtime_class()()
        else:
            where = "" if choice else " in ENSEMBLE_RAY_RUNTIME"
            raise ValidationError(f"Unknown runtime '{name}'{where}. Known: [inline, ray], or a Runtime object")
    return _shared[name]


def ray_runtime_class() -> type[RayRuntime]:
    """The runtime on Ray; Ray is imported here and not before."""
    from actors.runtime import RayRuntime

    return RayRuntime
