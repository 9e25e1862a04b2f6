"""The caller's handle of a started run of any kind; a launcher does the work."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from datetime import timedelta

from msgspec.structs import replace

from ensemble_ray.definition.fields import Durability, Origin
from ensemble_ray.definition.run_options import RunOptions
from ensemble_ray.errors import IllegalStateError, RecordError, ValidationError
from ensemble_ray.errors.texts import shorten_tracebacks
from ensemble_ray.events import EnsembleCompletedEvent, EnsembleStartedEvent
from ensemble_ray.events.delivery import EventStream
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.process.concurrency import abandon, bridge, on_library_loop, run_blocking, submit, track
from ensemble_ray.process.context import (
    bounded_logger,
    collecting_less,
    current_log_context,
    log_context,
    use_traceparent,
)
from ensemble_ray.record.failure import read_failure
from ensemble_ray.record.head import name_in
from ensemble_ray.record.opening import effective_capture_mode, store_at
from ensemble_ray.record.result import RunResultHead, assemble, not_begun
from ensemble_ray.record.resume.reading import budget_of, check_same
from ensemble_ray.record.runs import Retention
from ensemble_ray.record.view.exporters import effective_exporter, export_safely
from ensemble_ray.runs.launching import (
    Launcher,
    ResumeState,
    RunEvents,
    RunScope,
    TracedRun,
    WorkSummary,
    decide_costs,
    exit_reason_of,
    name_of,
    recorded_prices,
    show_run,
)
from ensemble_ray.runs.ports import Runtime
from ensemble_ray.values.ids import new_run_id
from ensemble_ray.values.metrics import RunBudget
from ensemble_ray.values.outputs import EnsembleOutput, ExitReason, RunState
from ensemble_ray.values.reviews import ModelSwitch, RunDirective, check_directive
from ensemble_ray.values.trace import CaptureMode

_log = bounded_logger(__name__)
_retention = Retention()  # one per process


class _Interrupted:
    """A listener's KeyboardInterrupt, raised in the caller's thread, never on the loop (S-SET-27)."""

    def __init__(self, stop: BaseException) -> None:
        self.stop = stop


class Run:
    """A started run. `result()` or `await aresult()` returns its output.

    Attributes:
        id: The run's id; also the name of its record.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        runtime: Runtime,
        run_id: str | None = None,
        options: RunOptions | None = None,
        is_watched: bool = True,
        origin: Origin | None = None,
        resumption: ResumeState | None = None,
    ) -> None:
        """Begin or resume the run.

        Args:
            launcher: Prepares and launches the work.
            runtime: Executes the work.
            run_id: Id of the run; None: a fresh one.
            options: Options for this run alone; the launcher's definition includes them already.
            is_watched: Whether `events()` may be called.
            origin: Source of the definition.
            resumption: Record of the run to resume; None: a new run.
        """
        self.id = run_id or new_run_id()
        self._launcher = launcher
        self._definition = definition = launcher.definition
        self._options = options
        self._origin = origin or Origin()
        recorded = "" if resumption is None else name_in(resumption.header)
        self._name = recorded or name_of(definition, self._origin)
        self._state = RunState.PENDING
        self._is_replayed = False
        self._interrupt: _Interrupted | None = None
        is_recorded = definition.durability is not Durability.OFF
        fields = {**current_log_context(), "ensemble.id": self.id}

        def on_interrupt(stop: BaseException) -> None:
            self._interrupt = self._interrupt or _Interrupted(stop)
            self.cancel()

        events = RunEvents(definition, fields=fields, is_read=is_watched, on_interrupt=on_interrupt)
        self._traced = TracedRun(self.id, events, name=self._name, resumption=resumption)
        self._scope = RunScope(
            run_id=self.id,
            runtime=runtime,
            store_address=runtime.store_address if is_recorded else None,
            events=events,
            log_fields=fields,
            origin=self._origin.place,
            is_named=run_id is not None,
            resumption=resumption,
            cancelled=asyncio.Event(),
            begun=asyncio.Event(),
            tracing=self._traced.context,
            tags={**definition.tags, **((options and options.tags) or {})},
            user=(options and options.user) or "",
        )
        self._future: concurrent.futures.Future[EnsembleOutput | _Interrupted] = submit(self._execute())
        track(self)

    def after_fork(self) -> None:
        """Fail waiting calls in a forked child for a run of the parent: the child never learns the end."""
        if not self._future.done():
            abandon(self._future)
            self._future = concurrent.futures.Future()
            self._future.set_exception(
                IllegalStateError(
                    f"Run {self.id} continues in the process that started it, not in this forked child. Wait for it there, or start "
                    "another one here"
                )
            )

    @property
    def is_recorded(self) -> bool:
        """Whether the run has a record now, from which it can resume."""
        has_begun = self._launcher.has_begun or self._scope.resumption is not None
        return has_begun and self._scope.store_address is not None

    @property
    def recorded_tasks(self) -> int:
        """Number of tasks with recorded outputs when the run resumed; 0 for a new run."""
        return 0 if self._scope.resumption is None else self._scope.resumption.recorded_tasks

    @property
    def recorded_items(self) -> int:
        """How many of these tasks are items of a map-reduce."""
        return 0 if self._scope.resumption is None else self._scope.resumption.recorded_items

    @property
    def state(self) -> RunState:
        """The current state of the run."""
        return self._state

    @property
    def is_replayed(self) -> bool:
        """Whether the output is the recorded one of a completed run, so that no task ran now."""
        return self._is_replayed

    def events(self) -> EventStream:
        """Return all events of the run, past ones first; iterate with `for` or `async for`. Ends with the run."""
        return self._scope.events.stream()

    def result(self, timeout_s: float | None = None) -> EnsembleOutput:
        """Wait for the end and return the output; after `cancel()` its `exit_reason` is cancelled.

        Raises:
            EnsembleError: the run failed.
            TimeoutError: the run did not end in this time; it continues.
            IllegalStateError: called on the library's own loop, where waiting would never end.
        """
        if on_library_loop():
            raise IllegalStateError(
                "a blocking call was made on ensemble_ray's own loop, from an async callable; await arun() or aresult()"
            )
        try:
            return self._unwrap(self._future.result(timeout_s))
        except Exception as error:
            _shorten(error)
            raise

    async def aresult(self) -> EnsembleOutput:
        """Wait for the end as `result` does, in async code on any loop."""
        future = asyncio.wrap_future(self._future)
        # A cancelled caller does not retrieve the exception, and asyncio would log a warning.
        future.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        try:
            return self._unwrap(await asyncio.shield(future))
        except Exception as error:
            _shorten(error)
            raise

    def join(self, timeout_s: float) -> bool:
        """Wait until the run has released all resources; return whether it did so in time."""
        done, _ = concurrent.futures.wait([self._future], timeout=timeout_s)
        return bool(done)

    async def ajoin(self) -> None:
        """Wait as `join` does, in async code and without a timeout."""
        await asyncio.gather(asyncio.wrap_future(self._future), return_exceptions=True)

    def cancel(self) -> None:
        """Request the end of the run: no new tasks start, running tasks are stopped, completed outputs stay."""
        submit(self.acancel())

    async def acancel(self) -> None:
        """Request the end of the run, and return when the request is made."""

        async def cancel() -> None:
            self._scope.cancelled.set()
            await self._launcher.stop()

        if not self._future.done():
            await bridge(cancel())

    def inject(self, text: str, ttl: timedelta | float | None = None) -> None:
        """Send a directive to the tasks that start from now on: their prompts have it under `## Active Directives`.

        It is recorded when this returns, so a resumed run has it too. Before the run has begun, the call waits.
        Args:
            text: Text of the directive.
            ttl: How long it is active, a timedelta or seconds; None: until the run ends.

        Raises:
            ValidationError: the text is blank or too long, or the time is not positive.
            IllegalStateError: the run is over or waits for reviews, so no task would receive it.
            RecordError: it cannot be recorded.
            RuntimeError: called on the library's own loop; there, await `ainject`.
        """
        run_blocking(self.ainject(text, ttl))

    async def ainject(self, text: str, ttl: timedelta | float | None = None, *, given_by: str = "") -> None:
        """Send a directive as `inject` does, in async code; `given_by` is recorded."""
        await bridge(self._inject(check_directive(text, ttl, given_by)))

    def switch_model(self, model: str | None, *, agent: str | None = None) -> None:
        """Switch the tasks of the run that start from now on to another model.

        The switch is recorded when this returns, so a resumed run keeps it. Before the run has begun, the call waits.

        Args:
            model: A name of the ensemble's `models`; None: each agent's own again.
            agent: Role of an agent, to switch only its tasks; None: all tasks.

        Raises:
            ValidationError: there is no model, or no agent, of that name.
            IllegalStateError: the run is over or waits for reviews, so no task would call the model.
            RecordError: it cannot be recorded.
            RuntimeError: called on the library's own loop; there, await `aswitch_model`.
        """
        run_blocking(self.aswitch_model(model, agent=agent))

    async def aswitch_model(self, model: str | None, *, agent: str | None = None, given_by: str = "") -> None:
        """Switch the model as `switch_model` does, in async code; `given_by` is recorded."""
        known = self._launcher.definition.models
        if model is not None and model not in known:
            raise ValidationError(f"Unknown model '{model}'. Known: [{', '.join(sorted(known))}]")
        await bridge(self._inject(ModelSwitch(model=model, agent=agent, given_by=given_by)))

    async def _inject(self, directive: RunDirective) -> None:
        await self._scope.begun.wait()
        if self._future.done() or not await self._launcher.inject(directive):
            raise IllegalStateError(f"Run '{self.id}' does not go on: no task of it starts any more")

    def _unwrap(self, outcome: EnsembleOutput | _Interrupted) -> EnsembleOutput:
        if isinstance(outcome, _Interrupted):
            raise outcome.stop
        return outcome

    async def _execute(self) -> EnsembleOutput | _Interrupted:
        try:
            output = await self._conclude()
        except Exception:
            if self._interrupt is None:
                raise
            return self._interrupt  # an interrupt may arrive while listeners receive the failure
        finally:
            self._scope.begun.set()  # or it never begins
        return self._interrupt or output

    async def _conclude(self) -> EnsembleOutput:
        """Run, and return or raise after every listener has received every event."""
        async with contextlib.AsyncExitStack() as leaving:
            leaving.enter_context(log_context(self._scope.log_fields))
            leaving.enter_context(collecting_less())
            if self._traced.context is None:  # the caller may have a span: an untraced run sends none (S-INT-37)
                leaving.enter_context(use_traceparent(""))
            try:
                await show_run(self._definition.dashboard, self.id, self._scope.store_address, leaving)
                return await self._run()
            except ValidationError as error:
                self._state = RunState.FAILED
                self._name_run(error)
                await self._explain(error)
                _log.info("Run refused (%s)", type(error).__name__)
                raise
            except Exception as error:
                if self._state is not RunState.INTERRUPTED:
                    self._state = RunState.FAILED
                self._name_run(error)
                await self._explain(error)
                self._traced.fail(error)
                _log.info("Run %s (%s)", self._state.value, type(error).__name__)
                raise
            except BaseException as error:  # such as a `SystemExit` of user code
                self._name_run(error)
                raise
            finally:
                self._traced.end(self._state)
                await self._scope.events.close(self.id, exit_reason_of(self._state))
                if (address := self._scope.store_address) is not None:
                    now = asyncio.get_running_loop().time()
                    await _retention.run_ended(address, store_at(address), spared=self.id, at=now)

    def _name_run(self, error: BaseException) -> None:
        """Add the run's id to an error of any class (S-ERR-50)."""
        if self._launcher.has_begun and getattr(error, "run_id", None) is None:
            with contextlib.suppress(AttributeError):  # a class with slots
                error.run_id = self.id  # type: ignore[attr-defined]

    async def _explain(self, error: Exception) -> None:
        """Add a note with what failed and what to do next, as `ensemble-ray trace` shows it (S-ERR-68)."""
        address = self._scope.store_address
        if address is None or not self._launcher.has_begun:
            return
        store = store_at(address)
        with contextlib.suppress(RecordError):  # the error itself is raised
            run = await store.summary(self.id)
            failure = None if run is None else await read_failure(store, run)
            if failure is not None:
                error.add_note(failure.note())

    async def _run(self) -> EnsembleOutput:
        try:
            mode = effective_capture_mode(self._definition.capture_mode)
            prepared = await self._launcher.prepare(self._scope)
            if isinstance(prepared, ExitReason):
                return self._end_early(prepared)
            resumption = self._scope.resumption
            costs = await decide_costs(self._definition, None if resumption is None else resumption.header)
            self._scope = replace(self._scope, costs=costs)
            header = self._header(mode)
            self._announce(prepared, header)
            recorded = None
            if self._scope.is_named if resumption is None else resumption.is_completed:
                expected = header if resumption is None else None
                recorded = await self._launcher.replay(self._scope, expected, self._describe(prepared, mode))
            if recorded is not None:
                self._state, self._is_replayed = RunState.COMPLETED, True
                self._traced.answer()
                return recorded
            conclusion = await self._launcher.launch(self._scope, header, mode)
            if isinstance(conclusion, ExitReason):
                return self._end_early(conclusion)
            self._state = conclusion.end.state
            if conclusion.warning:
                _log.warning("%s", conclusion.warning)
            description = self._describe(prepared, mode)
            output = assemble(description, conclusion.results, conclusion.end, conclusion.failure)
            await self._finish(output, mode)
            return output
        finally:
            self._launcher.close()

    def _describe(self, prepared: WorkSummary, mode: CaptureMode) -> RunResultHead:
        """A listener may have set the trace id meanwhile."""
        return RunResultHead(
            run_id=self.id,
            name=self._name,
            workflow=prepared.workflow,
            inputs=prepared.inputs,
            capture_mode=mode,
            trace_id=self._scope.events.trace_id,
        )

    def _end_early(self, reason: ExitReason) -> EnsembleOutput:
        """Return the output of a run that ended before it began, without a record."""
        self._state = RunState(reason.value)
        return not_begun(self.id, reason)

    def _header(self, mode: CaptureMode) -> PlanRecorded:
        """Return the record's first fact, which must match that of an earlier run with this id."""
        if self._scope.store_address is None and not self._scope.is_named:
            return PlanRecorded()
        definition, options = self._definition, self._options
        return replace(
            self._launcher.describe(),
            ensemble_id=self.id,
            name=self._name or None,
            tags=dict(definition.tags) or None,
            options={} if options is None else options.model_dump(mode="json", exclude_none=True),
            budget=budget_of(RunBudget.of(definition.max_tokens, definition.max_cost)),
            origin=self._origin.place,
            overrides=dict(self._origin.overrides),
            runtime=self._scope.runtime.name,
            capture_mode=mode.value,
            prices=recorded_prices(self._scope.costs),
            traceparent=self._traced.traceparent,
        )

    def _announce(self, prepared: WorkSummary, header: PlanRecorded) -> None:
        """Log the start. A ValidationError: the definition is not the recorded one (S-DUR-36)."""
        resumption = self._scope.resumption
        if resumption is not None and not resumption.allows_changes:
            check_same(self.id, resumption.header, header, doing="resume")
        self._traced.begin(prepared.workflow)
        _log.info("Run started: workflow %s, %s", prepared.workflow, prepared.size)
        _log.debug("Inputs: %s", dict(prepared.inputs))
        self._scope.events.emit(
            EnsembleStartedEvent(
                run_id=self.id, ensemble_id=self.id, workflow=prepared.workflow, total_tasks=prepared.total_tasks
            )
        )
        self._state = RunState.RUNNING

    async def _finish(self, output: EnsembleOutput, mode: CaptureMode) -> None:
        self._scope.events.emit(
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
        exporter = effective_exporter(mode, self._definition.trace_exporter)
        if exporter is not None and self._state is RunState.COMPLETED:
            await export_safely(exporter, output.trace)


def _shorten(error: Exception) -> None:
    """Keep only lines of user code in tracebacks, except at DEBUG."""
    if not _log.isEnabledFor(logging.DEBUG):
        shorten_tracebacks(error)
