"""Ensemble: what a user runs. Definition in, `EnsembleOutput` out; no rule stands here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar, Unpack, cast

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.run_options import RunFields, RunOptions, merge_options
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import IllegalStateError
from ensemble_ray.events import Event
from ensemble_ray.plan.plan import Plan
from ensemble_ray.plan.planner import plan_run
from ensemble_ray.ports import ChatModel
from ensemble_ray.runs.handle import Run
from ensemble_ray.runs.launching import Resumption
from ensemble_ray.runs.planned import PlannedLauncher, check
from ensemble_ray.runs.ports import Runtime
from ensemble_ray.runtime import connect
from ensemble_ray.values.messages import ChatMessage
from ensemble_ray.values.outputs import EnsembleOutput
from ensemble_ray.values.task_output import OutputType

R = TypeVar("R", bound=Run)
Update = TypeVar("Update")

#: How long Ctrl-C waits for a run to let go of what it holds, s.
RELEASE_S = 10.0


class Startable(Generic[R]):
    """What can be run: the four ways to begin a run, each with the same arguments."""

    def run(
        self,
        inputs: Mapping[str, object] | None = None,
        *,
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        **fields: Unpack[RunFields],
    ) -> EnsembleOutput:
        """Run and wait. Works in scripts and inside a running event loop. Ctrl-C ends the run.

        Args:
            inputs: Values of template variables, merged over `Ensemble.inputs`.
            runtime: `"ray"`, `"inline"` or a runtime object; default `ENSEMBLE_RAY_RUNTIME`, else `"ray"`.
            run_id: Id of the run and name of its record; default a fresh UUID.
            options: Overrides for this run only.
            fields: The same one by one, such as `tags={"for": "docs"}` or `max_tokens=100_000`; they win over `options`.

        Raises:
            ValidationError: the definition cannot run; nothing was asked of any model.
            PromptTemplateError: inputs are missing; all of them are named.
            EnsembleError: the run failed; the error carries what was completed and the trace.
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
        """`run` for async code, with the same contract; cancelling it ends the run first."""
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
        """Begin a run and give its handle at once."""
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
        resumption: Resumption | None = None,
    ) -> R:
        """Begin a run, or go on with one; what all other ways to run come to.

        Args:
            inputs: As in `run`.
            runtime: As in `run`.
            run_id: As in `run`.
            options: As in `run`.
            is_watched: Whether the handle's `events()` will be asked.
            resumption: That the run is in the record already.
        """
        raise NotImplementedError


class Ensemble(EnsembleDefinition, Startable[Run]):
    """A team of agents and its tasks. May be run many times, also at the same time."""

    async def stream(
        self,
        inputs: Mapping[str, object] | None = None,
        *,
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        **fields: Unpack[RunFields],
    ) -> AsyncIterator[Event | EnsembleOutput]:
        """Events as they happen, then the output as the last item. Leaving the loop early cancels the run."""
        begun = self.begin(
            inputs, runtime=runtime, run_id=run_id, options=merge_options(options, fields), is_watched=True
        )
        async with aclosing(stream_run(begun, begun.events())) as stream:
            async for each in stream:
                yield each

    def plan(self, inputs: Mapping[str, object] | None = None) -> Plan:
        """Return what would run, in which order; no task runs.

        Raises:
            ValidationError, PromptTemplateError: as `run`.
        """
        return plan_run(self, check(self, inputs)).plan

    def begin(
        self,
        inputs: Mapping[str, object] | None = None,
        *,
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        is_watched: bool = True,
        resumption: Resumption | None = None,
    ) -> Run:
        """Begin a run, or go on with one; see `Startable.begin`."""
        return Run(
            PlannedLauncher(self.with_options(options).with_dashboard_parts(), inputs),
            runtime=connect(runtime),
            run_id=run_id,
            options=options,
            is_watched=is_watched,
            origin=self.source,
            resumption=resumption,
        )


async def stream_run(begun: Run, updates: AsyncIterable[Update]) -> AsyncGenerator[Update | EnsembleOutput, None]:
    """Yield what comes of a run, then its output; left early, it ends the run."""
    try:
        async for each in updates:
            yield each
        yield await begun.aresult()
    finally:
        if begun.state.is_going_on:
            await begun.acancel()


def join(begun: Run) -> EnsembleOutput:
    """Wait in this thread; on Ctrl-C end the run before the interrupt goes on (S-SET-27)."""
    try:
        return begun.result()
    except IllegalStateError:
        begun.cancel()  # it may be the refusal to wait here; a run that has ended is not concerned
        raise
    except KeyboardInterrupt:
        begun.cancel()
        begun.join(RELEASE_S)
        raise


async def join_run(begun: Run) -> EnsembleOutput:
    """Wait on this loop; when cancelled, end the run before the cancellation goes on."""
    try:
        return await begun.aresult()
    except asyncio.CancelledError:
        await asyncio.shield(begun.acancel())
        await asyncio.shield(begun.ajoin())
        raise


def build_question(
    agent: Agent, description: str, *, output_type: OutputType | None, history: Sequence[ChatMessage]
) -> Ensemble:
    """Return the ensemble of one task that asks an agent; for `Agent.run`."""
    task = Task.of(description).replace(agent=agent, output_type=output_type, history=history)
    return Ensemble(tasks=[task])


def run(
    *args: ChatModel | str | Task | None,
    inputs: Mapping[str, object] | None = None,
    runtime: Runtime | str | None = None,
    **fields: Unpack[RunFields],
) -> EnsembleOutput:
    """Run in the short form: `run(model, *tasks)`, or `run(*tasks)` if every task has a handler.

    The workflow is inferred: parallel if a task has another one as context, else sequential.

    Raises:
        ValueError: the model, tasks or handlers are missing; which one is named.
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
    return Ensemble(tasks=chosen, llm=cast("ChatModel | str | None", model), workflow=None).run(
        inputs, runtime=runtime, **fields
    )
