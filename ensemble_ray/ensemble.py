"""`Ensemble`, and the ways to run an ensemble."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar, Unpack, cast

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.run_options import RunFields, RunOptions, merge_options
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import IllegalStateError

# Imported with the first plan or run.
if TYPE_CHECKING:
    from ensemble_ray.events import Event
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.ports import ChatModel
    from ensemble_ray.runs.handle import Run
    from ensemble_ray.runs.launching import ResumeState
    from ensemble_ray.runs.ports import Runtime
    from ensemble_ray.values.attachments import Attachment
    from ensemble_ray.values.messages import ChatMessage
    from ensemble_ray.values.outputs import EnsembleOutput
    from ensemble_ray.values.task_output import OutputType

R = TypeVar("R", bound="Run")
Update = TypeVar("Update")

RELEASE_S = 10.0  # Ctrl-C waits this long for a run to release its resources


class Startable(Generic[R]):
    """The ways to begin a run, all with the same arguments."""

    def run(
        self,
        inputs: Mapping[str, object] | None = None,
        *,
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        **fields: Unpack[RunFields],
    ) -> EnsembleOutput:
        """Run, and wait for the output. It works in scripts and inside a running event loop. Ctrl-C ends the run.

        Args:
            inputs: Values of template variables; they win over `Ensemble.inputs`.
            runtime: `"ray"`, `"inline"` or a runtime object; default `ENSEMBLE_RAY_RUNTIME`, else `"ray"`.
            run_id: Id of the run and name of its record; default a new UUID.
            options: Settings for this run only.
            fields: Single options, such as `tags={"for": "docs"}` or `max_tokens=100_000`; they win over `options`.

        Raises:
            ValidationError: the definition cannot run; no model was called.
            PromptTemplateError: inputs are missing; the message lists all of them.
            EnsembleError: the run failed; the error contains the completed outputs and the trace.
        """
        return join(
            self.begin(inputs, runtime=runtime, run_id=run_id, options=merge_options(options, fields), is_watched=False)
        )

    async def arun(
        self,
        inputs: Mapping[str, object] | None = None,
        *,
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        **fields: Unpack[RunFields],
    ) -> EnsembleOutput:
        """`run` for async code, with the same contract. Cancelling it ends the run first."""
        begun = self.begin(
            inputs, runtime=runtime, run_id=run_id, options=merge_options(options, fields), is_watched=False
        )
        return await join_run(begun)

    def start(
        self,
        inputs: Mapping[str, object] | None = None,
        *,
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        **fields: Unpack[RunFields],
    ) -> R:
        """Begin a run, and return its handle immediately."""
        return self.begin(
            inputs, runtime=runtime, run_id=run_id, options=merge_options(options, fields), is_watched=True
        )

    def begin(
        self,
        inputs: Mapping[str, object] | None = None,
        *,
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        is_watched: bool = True,
        has_event_readers: bool = True,
        resumption: ResumeState | None = None,
    ) -> R:
        """Begin or resume a run; all other ways to run call this method.

        Args:
            inputs: As in `run`.
            runtime: As in `run`.
            run_id: As in `run`.
            options: As in `run`.
            is_watched: Whether the caller reads events or results of the handle.
            has_event_readers: Whether the caller reads `events()`.
            resumption: State of a run that is already in the record; None: a new run.
        """
        from ensemble_ray.runtime import connect

        begin = self._prepare(inputs, options, keeps_items=is_watched)
        return begin(
            runtime=connect(runtime),
            run_id=run_id,
            options=options,
            is_watched=is_watched and has_event_readers,
            resumption=resumption,
        )

    def _prepare(
        self, inputs: Mapping[str, object] | None, options: RunOptions | None, *, keeps_items: bool
    ) -> Callable[..., R]:
        """Return a function that makes the handle from the other arguments of `begin`."""
        raise NotImplementedError


class Ensemble(EnsembleDefinition, Startable["Run"]):
    """A team of agents and its tasks. It may run many times, also at the same time."""

    async def stream(
        self,
        inputs: Mapping[str, object] | None = None,
        *,
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        **fields: Unpack[RunFields],
    ) -> AsyncIterator[Event | EnsembleOutput]:
        """Yield events as they happen, then the output as the last item. Leaving the loop early cancels the run."""
        begun = self.begin(
            inputs, runtime=runtime, run_id=run_id, options=merge_options(options, fields), is_watched=True
        )
        async with aclosing(stream_run(begun, begun.events())) as stream:
            async for each in stream:
                yield each

    def plan(self, inputs: Mapping[str, object] | None = None) -> Plan:
        """Return the tasks of a run and their order, without running a task.

        Raises:
            ValidationError, PromptTemplateError: as `run`.
        """
        from ensemble_ray.plan.planner import plan_run
        from ensemble_ray.runs.planned import check

        return plan_run(self, check(self, inputs)).plan

    def _prepare(
        self,
        inputs: Mapping[str, object] | None,
        options: RunOptions | None,
        *,
        keeps_items: bool,  # noqa: ARG002  a plan has no items
    ) -> Callable[..., Run]:
        from ensemble_ray.runs.handle import Run
        from ensemble_ray.runs.planned import PlannedLauncher

        definition = self.with_options(options).with_dashboard_parts()
        return partial(Run, PlannedLauncher(definition, inputs), origin=self.source)


def run(
    *args: ChatModel | str | Sequence[ChatModel | str] | Task | None,
    inputs: Mapping[str, object] | None = None,
    runtime: Runtime | str | None = None,
    **fields: Unpack[RunFields],
) -> EnsembleOutput:
    """Run tasks directly: `run(model, *tasks)`, or `run(*tasks)` if every task has a handler.

    The workflow is inferred: parallel if a task has another one as context, else sequential.

    Raises:
        ValueError: a model, task or handler is missing; the message says which.
        EnsembleError: as `Ensemble.run`.
    """
    if args and isinstance(args[0], Task):
        model, tasks = None, args
    else:
        model, tasks = (args[0] if args else None), args[1:]
        if model is None:
            raise ValueError("model must not be None")
    if not tasks:
        raise ValueError("tasks must not be None or empty")
    for index, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise ValueError(f"tasks[{index}] must not be None" if task is None else f"tasks[{index}] is not a Task")  # noqa: TRY004  S-DET-31 names the class
        if model is None and task.handler is None:
            raise ValueError(
                f"Task '{task.description}' has no handler configured. "
                "Give every task a handler, or pass a model as the first argument"
            )
    chosen = cast("tuple[Task, ...]", tasks)
    return Ensemble(
        tasks=chosen, llm=cast("ChatModel | str | Sequence[ChatModel | str] | None", model), workflow=None
    ).run(inputs, runtime=runtime, **fields)


def build_question(
    agent: Agent,
    description: str,
    *,
    output_type: OutputType | None,
    history: Sequence[ChatMessage],
    attachments: Attachment | Sequence[Attachment],
) -> Ensemble:
    """Return the ensemble of one task for a question to an agent."""
    asked = Task(description, agent=agent, output_type=output_type, history=history, attachments=attachments)
    return Ensemble(tasks=[asked])


def join(begun: Run) -> EnsembleOutput:
    """Wait in this thread. On Ctrl-C, end the run first (S-SET-27)."""
    try:
        return begun.result()
    except IllegalStateError:
        begun.cancel()  # this thread may not be allowed to wait; `cancel` does not affect a finished run
        raise
    except KeyboardInterrupt:
        begun.cancel()
        begun.join(RELEASE_S)
        raise


async def join_run(begun: Run) -> EnsembleOutput:
    """Wait on this event loop. On cancellation, end the run first."""
    try:
        return await begun.aresult()
    except asyncio.CancelledError:
        await asyncio.shield(begun.acancel())
        await asyncio.shield(begun.ajoin())
        raise


async def stream_run(begun: Run, updates: AsyncIterable[Update]) -> AsyncGenerator[Update | EnsembleOutput, None]:
    """Yield the updates of a run, then its output. Leaving the loop early ends the run."""
    try:
        async for each in updates:
            yield each
        yield await begun.aresult()
    finally:
        if begun.state.is_active:
            await begun.acancel()
