"""What every run has, seen from its caller: a state, events, a result, an end. Floor: above runtime.

In: a definition and what is chosen for one run. Out: a handle whose work has begun on the library's loop. What the work
is, is the business of the kinds of runs above. Rules: `result` gives nothing before every listener has heard everything;
an interrupt of a listener is raised in the caller's thread, never on the loop (S-SET-27).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from dataclasses import replace
from typing import TYPE_CHECKING

from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.context import current_log_context, log_context
from ensemble_ray.definition.durability import Durability
from ensemble_ray.delivery import Delivery, listeners_of
from ensemble_ray.errors import IllegalStateError, ValidationError
from ensemble_ray.event_log import EventLog, EventStream
from ensemble_ray.events import EnsembleCompletedEvent, Event
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.limits.budget import RunBudget
from ensemble_ray.loop import bridge, on_library_loop, submit
from ensemble_ray.outputs import EnsembleOutput, RunState
from ensemble_ray.record.resume.run_budget import budget_of
from ensemble_ray.record.retention import apply_retention
from ensemble_ray.record.stores import store_at
from ensemble_ray.record.view.exporters import effective_exporter, export_safely
from ensemble_ray.runtime import Runtime, connect

if TYPE_CHECKING:
    from ensemble_ray.definition.origin import Origin
    from ensemble_ray.definition.run_rules import RunOptions, Watched
    from ensemble_ray.facts.runs import PlanRecorded
    from ensemble_ray.trace import CaptureMode

__all__ = ["Interrupted", "RunLife"]

_log = bounded_logger(__name__)


class Interrupted:
    """Stands for a KeyboardInterrupt of a listener; raised in the caller's thread, never on the loop (S-SET-27)."""

    def __init__(self, stop: BaseException) -> None:
        self.stop = stop


class RunLife:
    """A run that was started. Results come with `result()` or `await aresult()`.

    Attributes:
        id: The run's id; also the name of its record.
    """

    def __init__(self, definition: Watched, *, run_id: str, runtime: Runtime | str | None, is_watched: bool) -> None:
        """Make one, ready to `_begin`; `is_watched` says whether `events()` will be asked."""
        self.id = run_id
        self._declared = definition
        self._listeners = listeners_of(definition)
        self._state = RunState.PENDING
        self._runtime = connect(runtime)
        self._is_cancelling = False
        self._is_replayed = False
        #: what a runtime that is being started looks at
        self._called_off = asyncio.Event()
        self._interrupt: Interrupted | None = None
        self._events = EventLog(is_open=is_watched)
        self._fields = {**current_log_context(), "ensemble.id": self.id}
        self._delivery = Delivery(self._listeners, fields=self._fields, on_interrupt=self._interrupted)
        self._future: concurrent.futures.Future[EnsembleOutput | Interrupted]

    def _begin(self) -> None:
        """Start the work; the last thing that a constructor does."""
        self._future = submit(self._execute())

    @property
    def _trace_id(self) -> str | None:
        """The id that a listener gave to what it traces."""
        trace_ids = (getattr(listener, "trace_id", None) for listener in self._listeners)
        return next((str(found) for found in trace_ids if found is not None), None)

    def _first_data(
        self, told: PlanRecorded, options: RunOptions | None, origin: Origin, mode: CaptureMode
    ) -> PlanRecorded:
        """Return the record's first fact: what is `told` of what will run, and with what else the run can go on."""
        declared = self._declared
        return replace(
            told,
            ensemble_id=self.id,
            options={} if options is None else options.model_dump(mode="json", exclude_none=True),
            budget=budget_of(RunBudget.of(declared.max_tokens, declared.max_cost)),
            origin=origin.place,
            overrides=dict(origin.overrides),
            runtime=self._runtime.name,
            capture_mode=mode.value,
        )

    async def _run(self) -> EnsembleOutput:
        """The work itself, on the library's loop."""
        raise NotImplementedError

    async def _stop(self) -> None:
        """Ask what is going on to end; `_is_cancelling` says so already."""
        raise NotImplementedError

    @property
    def is_recorded(self) -> bool:
        """Whether there is a record of it by now, with which it can go on."""
        return self._has_begun and self._declared.durability is not Durability.OFF

    @property
    def _has_begun(self) -> bool:
        """Whether the work was handed to the runtime."""
        raise NotImplementedError

    @property
    def state(self) -> RunState:
        """Where the run stands."""
        return self._state

    @property
    def is_replayed(self) -> bool:
        """Whether the output is the recorded one of a run that had completed before, so that no task ran now."""
        return self._is_replayed

    def events(self) -> EventStream:
        """All events of the run, the past ones first; iterate with `for` or `async for`. Ends with the run."""
        return self._events.stream()

    def result(self, timeout_s: float | None = None) -> EnsembleOutput:
        """Wait for the end and give the output; after `cancel()` one whose `exit_reason` is cancelled (S-SET-27).

        Raises:
            EnsembleError: the run failed.
            TimeoutError: it did not end in that time; it goes on.
            IllegalStateError: called on the library's own loop, where waiting would never end.
        """
        if on_library_loop():
            raise IllegalStateError(
                "a blocking call was made on ensemble_ray's own loop, from an async callable; await arun() or aresult()"
            )
        return self._given(self._future.result(timeout_s))

    async def aresult(self) -> EnsembleOutput:
        """`result` for async code, on any loop."""
        future = asyncio.wrap_future(self._future)
        # A caller that was cancelled hears no failure, and asyncio is not to complain of that.
        future.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        return self._given(await asyncio.shield(future))

    def join(self, timeout_s: float) -> bool:
        """Wait until the run has let go of everything; whether it did so in time. Raises nothing of the run's."""
        done, _ = concurrent.futures.wait([self._future], timeout=timeout_s)
        return bool(done)

    async def ajoin(self) -> None:
        """`join` for async code, however long it takes."""
        await asyncio.gather(asyncio.wrap_future(self._future), return_exceptions=True)

    def cancel(self) -> None:
        """Ask the run to end: nothing starts any more, running tasks are stopped, completed outputs are kept."""
        submit(self.acancel())

    async def acancel(self) -> None:
        """`cancel`, and return when it was asked."""
        await bridge(self._cancel())

    async def _cancel(self) -> None:
        self._is_cancelling = True
        self._called_off.set()
        await self._stop()

    def _given(self, outcome: EnsembleOutput | Interrupted) -> EnsembleOutput:
        if isinstance(outcome, Interrupted):
            raise outcome.stop
        return outcome

    def _interrupted(self, stop: BaseException) -> None:
        """A listener was interrupted; called on its thread."""
        self._interrupt = self._interrupt or Interrupted(stop)
        self.cancel()

    # On the library's loop.

    async def _execute(self) -> EnsembleOutput | Interrupted:
        try:
            output = await self._concluded()
        except Exception:
            if self._interrupt is None:
                raise
            return self._interrupt  # it may have come while the failure was told to listeners
        return self._interrupt or output

    async def _concluded(self) -> EnsembleOutput:
        """Run, and return or raise when every listener has heard everything."""
        with log_context(self._fields):
            try:
                return await self._run()
            except ValidationError as error:
                self._state = RunState.FAILED
                _log.info("Run refused (%s)", type(error).__name__)  # the caller is told why
                raise
            except Exception as error:
                self._state = RunState.FAILED
                _log.info("Run failed (%s)", type(error).__name__)
                raise
            finally:
                await self._delivery.close()
                self._events.close()
                if self._declared.durability is not Durability.OFF:
                    await apply_retention(store_at(self._runtime.store_address), spared=self.id)

    async def _finish(self, output: EnsembleOutput, mode: CaptureMode) -> None:
        self.emit(
            EnsembleCompletedEvent(
                run_id=self.id,
                ensemble_id=self.id,
                total_duration=output.total_duration,
                exit_reason=output.exit_reason,
            )
        )
        _log.info(
            "Run %s in %.3f s: %d tasks, %d tool calls",
            output.exit_reason.value, output.total_duration.total_seconds(),
            len(output.task_outputs), output.total_tool_calls,
        )  # fmt: skip
        exporter = effective_exporter(mode, self._declared.trace_exporter)
        if exporter is not None and self._state is RunState.COMPLETED:
            await export_safely(exporter, output.trace)

    # The sink of the run's events in this process.

    def wants(self, kind: type[Event]) -> bool:
        """Whether a listener or a reader of `events()` wants that type."""
        return self._delivery.wants(kind) or self._events.wants(kind)

    def emit(self, event: Event) -> None:
        """Hand the event to listeners and readers."""
        self._delivery.emit(event)
        self._events.emit(event)
