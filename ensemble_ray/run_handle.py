"""One run, seen from its caller: prepare, submit, wait, assemble; and the `Run` handle. Floor: above runtime.

The order is the specification's (S-ENG-1): validate, resolve templates, infer the workflow, synthesize agents, execute.
A failure in a step leaves later steps untouched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.definition.durability import Durability
from ensemble_ray.definition.ensemble import EnsembleDefinition, RunOptions
from ensemble_ray.definition.origin import Origin
from ensemble_ray.definition.validation import doubled_names, validate
from ensemble_ray.definition.workflow import Workflow
from ensemble_ray.errors import AgentExecutionError, BudgetExhaustedError, message_of
from ensemble_ray.events import EnsembleStartedEvent
from ensemble_ray.execute.recorded import answers_before
from ensemble_ray.execute.recorded_model import RecordedModel
from ensemble_ray.execute.spending import Spending, spending_here
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.ids import new_run_id
from ensemble_ray.limits.budget import NOTHING, Amount, RunBudget
from ensemble_ray.outputs import EnsembleOutput, ExitReason, RunState
from ensemble_ray.plan.manager import manager_context, workers_of
from ensemble_ray.plan.planner import Planned, ResolvedTasks, needs_synthesis, plan_run, resolve_tasks
from ensemble_ray.plan.synthesis import synthesize_agents
from ensemble_ray.prompts.manager import manager_prompts
from ensemble_ray.record.environment import effective_capture_mode
from ensemble_ray.record.identity.definition import run_data
from ensemble_ray.record.rerun import check_same, recorded_output
from ensemble_ray.record.result import assemble, manager_failure
from ensemble_ray.record.stores import store_at
from ensemble_ray.run_frame import failed_manager_events, frame_of
from ensemble_ray.run_life import RunLife
from ensemble_ray.runtime import RunHandle, RunRequest, Runtime
from ensemble_ray.threads import USER_ERRORS, threads
from ensemble_ray.tools.tool import NoOpToolMetrics

if TYPE_CHECKING:
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.facts.effects import ModelAnswered
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.ports import ChatModel
    from ensemble_ray.trace import CaptureMode

__all__ = ["Resumption", "Run", "check"]

_log = bounded_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """That a run is in the record already and goes on."""

    #: its first fact
    header: PlanRecorded
    #: recorded answers of before scheduling, by effect name, in the order of the calls
    answers: Mapping[str, Sequence[Fact[ModelAnswered]]]
    #: how many tasks have recorded outputs
    recorded_tasks: int = 0
    #: how many of them are of items of a map-reduce
    recorded_items: int = 0
    #: whether it is over, so that its recorded output is all there is to give
    is_completed: bool = False
    #: whether it is taken from an owner that still holds it (S-DUR-17)
    takes_over: bool = False
    #: whether another definition than the recorded one may go on with it (S-DUR-36)
    allows_changes: bool = False
    #: what its recorded answers cost, where it has a budget
    spent: Amount = NOTHING


def check(definition: EnsembleDefinition, inputs: Mapping[str, object] | None) -> ResolvedTasks:
    """Validate the definition and fill in its texts; calls no model.

    Raises:
        ValidationError: the definition cannot run.
        PromptTemplateError: inputs are missing.
    """
    for warning in (*validate(definition), *doubled_names(definition.tasks)):
        _log.warning("%s", warning)
    return resolve_tasks(definition, inputs)


class Run(RunLife):
    """A run that was started. Results come with `result()` or `await aresult()`.

    Attributes:
        id: The run's id; also the name of its record.
    """

    def __init__(
        self,
        definition: EnsembleDefinition,
        inputs: Mapping[str, object] | None = None,
        *,
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        is_watched: bool = True,
        origin: Origin | None = None,
        resumption: Resumption | None = None,
    ) -> None:
        """Begin, or go on; `is_watched` says whether `events()` will be asked."""
        super().__init__(
            definition.with_options(options), run_id=run_id or new_run_id(), runtime=runtime, is_watched=is_watched
        )
        self._definition = definition.with_options(options)
        self._inputs = inputs
        self._earlier: list[Fact] = []
        self._budget = RunBudget.of(self._definition.max_tokens, self._definition.max_cost)
        #: of the requests before scheduling; whoever owns the run then counts on from their facts
        self._spending = self._spending_before(resumption)
        self._is_named = run_id is not None
        self._origin = origin or Origin()
        self._options = options
        self._resumption = resumption
        #: recorded answers of before scheduling, by effect name
        self._answers: Mapping[str, Sequence[Fact[ModelAnswered]]] = {} if resumption is None else resumption.answers
        self._handle: RunHandle | None = None
        self._synthesizing: asyncio.Task[Mapping[str, Agent]] | None = None
        self._begin()

    @property
    def recorded_tasks(self) -> int:
        """How many tasks had recorded outputs when the run went on; none when it begins."""
        return 0 if self._resumption is None else self._resumption.recorded_tasks

    @property
    def recorded_items(self) -> int:
        """How many of them are of items of a map-reduce."""
        return 0 if self._resumption is None else self._resumption.recorded_items

    @property
    def _has_begun(self) -> bool:
        return self._handle is not None or self._resumption is not None

    async def _stop(self) -> None:
        if self._handle is not None:
            await self._handle.cancel()
        elif self._synthesizing is not None:
            self._synthesizing.cancel()  # a model is asked there, which may take as long as any

    # On the library's loop.

    async def _run(self) -> EnsembleOutput:
        resolved = check(self._definition, self._inputs)
        agents = await self._synthesized(resolved)
        if isinstance(agents, ExitReason):
            return self._not_begun(agents)
        planned = plan_run(self._definition, resolved, agents, await self._manager_prompts(resolved, agents))
        plan = planned.plan
        _log.info(
            "Run started: workflow %s, %d tasks, %d agents", plan.shown_workflow, len(plan.nodes), len(plan.agents)
        )
        _log.debug("Inputs: %s", dict(plan.inputs))
        mode = effective_capture_mode(self._definition.capture_mode)
        self.emit(
            EnsembleStartedEvent(
                run_id=self.id, ensemble_id=self.id, workflow=plan.shown_workflow, total_tasks=len(plan.nodes)
            )
        )
        self._state = RunState.RUNNING
        request = self._request(planned, mode)
        if self._resumption is not None and not self._resumption.allows_changes:
            check_same(self.id, self._resumption.header, request.header, doing="resume")
        if (known := await self._recorded_output(planned, request)) is not None:
            self._state, self._is_replayed = RunState.COMPLETED, True
            return known
        try:
            self._handle = await self._runtime.submit(request)
        except asyncio.CancelledError:
            if not self._is_cancelling:
                raise
            return self._not_begun(ExitReason.CANCELLED)
        if self._is_cancelling:
            await self._handle.cancel()
        outcome = await self._handle.wait()
        self._state = outcome.state
        if outcome.warning:
            _log.warning("%s", outcome.warning)
        output = assemble(plan, outcome, capture_mode=mode, trace_id=self._trace_id)
        await self._finish(output, mode)
        return output

    def _not_begun(self, why: ExitReason) -> EnsembleOutput:
        """The output of a run that ended before it began; it has no record of its own."""
        self._state = RunState(why.value)
        return EnsembleOutput(exit_reason=why, run_id=self.id)

    async def _synthesized(self, resolved: ResolvedTasks) -> Mapping[str, Agent] | ExitReason:
        """Agents for the tasks that name none; why the run ends where it was cancelled meanwhile, or has spent its budget.

        Then it never begins, and there is no record to go on with.
        """
        if not needs_synthesis(resolved.tasks):
            return {}
        if self._is_named and self._resumption is None:  # where that run is finished, nobody is asked again
            self._answers = answers_before(await store_at(self._runtime.store_address).facts(self.id))
        if self._is_cancelling:
            return ExitReason.CANCELLED
        if self._definition.durability is not Durability.OFF:
            # A store that cannot be had is told of before anybody is asked (S-DUR-5).
            await store_at(self._runtime.store_address).summary(self.id)
        asked = synthesize_agents(resolved, self._definition, recorded=self._recorded)
        self._synthesizing = asyncio.get_running_loop().create_task(asked)
        await asyncio.wait([self._synthesizing])
        if not self._synthesizing.cancelled():
            try:
                return self._synthesizing.result()
            except BudgetExhaustedError as spent:
                _log.warning("%s", message_of(spent))
                return ExitReason.BUDGET_EXHAUSTED
        if self._is_cancelling:
            return ExitReason.CANCELLED
        raise AgentExecutionError("The agent synthesizer cancelled its own call")

    async def _manager_prompts(self, resolved: ResolvedTasks, made: Mapping[str, Agent]) -> tuple[str, str] | None:
        """What the manager of a hierarchical run is told; None in other runs.

        Raises:
            TaskExecutionError: the user's strategy raised (S-HIER-13).
        """
        if resolved.workflow is not Workflow.HIERARCHICAL:
            return None
        workers = [agent for agent, _ in workers_of(self._definition, resolved.tasks, made, models=resolved.models)]
        strategy, context = self._definition.manager_prompt_strategy, manager_context(workers, resolved.tasks)
        try:
            return await threads.run(manager_prompts, strategy, context)
        except USER_ERRORS as error:
            failure = manager_failure(error)
            failure.run_id = self.id
            for event in failed_manager_events(self.id, error):
                self.emit(event)
            raise failure from error

    async def _recorded_output(self, planned: Planned, request: RunRequest) -> EnsembleOutput | None:
        """What a finished run of that id gave; it is not run again (S-SET-39). None for a run that begins or goes on."""
        resumption = self._resumption
        if not (self._is_named if resumption is None else resumption.is_completed):
            return None
        store = store_at(self._runtime.store_address)
        summary = await store.summary(self.id)
        if summary is None:
            return None
        return recorded_output(
            self.id,
            summary.state,
            await store.facts(self.id),
            None if resumption is not None else request.header,
            output_types={key: task.output_type for key, task in planned.tasks.items() if task.output_type is not None},
            object_ids={node.key: node.object_id for node in planned.plan.nodes},
        )

    def _spending_before(self, resumption: Resumption | None) -> Spending | None:
        """What requests before scheduling may spend; None without a budget."""
        if self._budget is None:
            return None
        known = self._budget if resumption is None else replace(self._budget, spent=resumption.spent)
        return spending_here(known, self._definition.cost_configuration)

    def _recorded(self, name: str, model: ChatModel) -> ChatModel:
        """The model for a synthesizer, its calls recorded as effects of the run (S-SET-46)."""
        known = self._answers.get(name, ())
        return RecordedModel(model, self.id, name, self._earlier.append, known=known, spending=self._spending)

    def _request(self, planned: Planned, mode: CaptureMode) -> RunRequest:
        definition = self._definition
        frame = frame_of(
            definition,
            planned,
            run_id=self.id,
            interest=self._delivery.interest | self._events.interest,
            capture_mode=mode,
            log_fields=self._fields,
        )
        # It is for the record, and to be compared with that of an earlier run of the same id.
        is_needed = definition.durability is not Durability.OFF or self._is_named
        header = self._header(planned, mode) if is_needed else PlanRecorded()
        return RunRequest(
            run_id=self.id,
            planned=planned,
            frame=frame,
            header=header,
            events=self,
            earlier=tuple(self._earlier),
            tool_metrics=definition.tool_metrics or NoOpToolMetrics(),
            delegation_policies=definition.delegation_policies,
            on_unknown=definition.on_unknown,
            is_resumed=self._resumption is not None,
            takes_over=self._resumption is not None and self._resumption.takes_over,
            called_off=self._called_off,
        )

    def _header(self, planned: Planned, mode: CaptureMode) -> PlanRecorded:
        """Return the record's first fact: everything that tells whether, and with what, the run can go on."""
        told = run_data(planned, self._definition)
        return self._first_data(told, self._options, self._origin, mode)
