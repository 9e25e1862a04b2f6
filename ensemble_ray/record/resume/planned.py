"""The point where a planned run resumes: the stimuli of its source, and the results of its tasks (S-DUR-30).

The caller decides where recorded outputs are stored, since a scheduler runs no user code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

from msgspec.structs import replace

from ensemble_ray.errors import RecordError
from ensemble_ray.execute.effects import typed_output
from ensemble_ray.execute.orders import FailureSummary, ResumePoint, TaskFailure, TaskResult, count_incomplete
from ensemble_ray.facts.effects import DelegationDecided, ToolReturned
from ensemble_ray.facts.fact import Fact, as_count, as_mapping, as_sequence, kinds_of
from ensemble_ray.facts.runs import (
    DirectiveFact,
    DirectiveRecorded,
    ExitRecorded,
    FailureRecorded,
    ModelSwitched,
    OutputRecorded,
    RunResumed,
    StimulusRecorded,
)
from ensemble_ray.plan.plan import Plan
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.resume.reading import KeepOutput, RecordedFailures, TakePage, read_pages
from ensemble_ray.record.source import FoldedSource, RecordedStimuli, is_undone
from ensemble_ray.record.stores import RunStore
from ensemble_ray.record.work import RecordedWork
from ensemble_ray.schedule.stimuli import Completed, Exited, Stimulus
from ensemble_ray.values.error_data import error_from
from ensemble_ray.values.ids import delegating_call, node_key, task_instance
from ensemble_ray.values.outputs import ExitReason

Output = TypeVar("Output")
Failure = TypeVar("Failure", bound=FailureSummary)


#: Large fields of a worker's output.
_NOT_READ: Mapping[str, object] = {"raw": "", "parsed_output": None, "output_type": None, "trace": None}


class _OutputFigures(NamedTuple):
    at: float
    duration_s: float
    total_tokens: int
    tool_call_count: int


class PlannedResumeReader:
    def __init__(self, keep: KeepOutput, *, is_resumed: bool = True) -> None:
        """`keep` receives each recorded output by instance; the newest one counts.

        If a user resumes the run, all cancellations and the spent budget are dropped. If only its scheduler was replaced, only
        those before the last `resume` are dropped.
        """
        #: has effects of the second reading only: of tasks that no other fact explains, and a manager's delegations
        self._history = RunHistory(has_details=True)
        self.head = self._history.head
        self._keep = keep
        self._is_resumed = is_resumed
        self._stimuli = RecordedStimuli()
        self._exits: dict[str, Exited] = {}
        self._outputs: dict[str, _OutputFigures] = {}
        self._incomplete: dict[str, int] = {}  # cut off or empty answers, by instance with an output
        self._texts: dict[str, str] = {}  # of completed tasks, from stimuli or from outputs: the machine may read them
        self._failures: RecordedFailures[str] = RecordedFailures()
        self._untraced: set[str] = set()
        self._begun: set[str] = set()  # active tasks of a run that may have cancelled some of them for good (S-DUR-135)
        self._has_forks = False
        self._directives: list[DirectiveFact] = []

    @classmethod
    def of(
        cls, facts: Sequence[Fact], keep: KeepOutput | None = None, *, is_resumed: bool = True
    ) -> PlannedResumeReader:
        recovery = cls(keep or (lambda _, __: None), is_resumed=is_resumed)
        recovery.apply(facts)
        recovery.end_pages()
        recovery.effects_taker()(facts)
        return recovery

    # Folding.

    def apply(self, facts: Sequence[Fact]) -> None:
        for fact in facts:
            match fact.data:
                case StimulusRecorded():
                    self._apply_stimulus(cast("Fact[StimulusRecorded]", fact))
                case OutputRecorded() | FailureRecorded() | ExitRecorded():
                    self._apply_end(fact)
                case RunResumed(is_restart=is_restart):
                    self._stimuli.resume(cast("Fact[RunResumed]", fact))
                    if not is_restart:
                        self._forget_undone_exits()
                case DirectiveRecorded() | ModelSwitched() as directive:
                    self._directives.append(directive)
                case _:
                    pass
            if fact.is_of_run:
                self._history.apply(fact)
                self._has_forks = self._history.plan.has_forks
            elif self._has_forks and fact.data.IS_EFFECT:  # an active task
                self._begun.add(task_instance(fact.instance))

    def _apply_stimulus(self, fact: Fact[StimulusRecorded]) -> None:
        match self._stimuli.apply(fact):
            case Completed(instance=instance, text=text):
                self._texts.pop(instance, None)
                if text is not None:
                    self._texts[instance] = text
            case Exited() as exited:
                self._exits[exited.instance] = exited
            case None:
                raise RecordError(
                    f"The record is damaged: stimulus {fact.seq} is of the unknown type '{fact.data.type}'"
                )
            case _:
                pass

    def _apply_end(self, fact: Fact) -> None:
        end = fact.data
        if isinstance(end, FailureRecorded) and not end.trace:
            self._untraced.add(fact.name)
        if isinstance(end, OutputRecorded) and (count := _count_incomplete(end.output_data())):
            self._incomplete[fact.name] = count
        if delegating_call(fact.name) is not None:
            return
        match end:
            case OutputRecorded() as recorded:
                output = typed_output({**recorded.output_data(), "trace": None})
                at, duration_s = output.completed_at.timestamp(), output.duration.total_seconds()
                figures = _OutputFigures(at, duration_s, output.metrics.total_tokens, output.tool_call_count)
                self._outputs[fact.name], self._texts[fact.name] = figures, output.raw
                self._keep(fact.name, recorded)
            case FailureRecorded():
                self._failures.put(fact.name, cast("Fact[FailureRecorded]", fact))
            case ExitRecorded(reason=reason):
                self._exits[fact.name] = Exited(at=fact.at, instance=fact.name, reason=reason)
            case _:
                pass

    def end_pages(self) -> None:
        if self._is_resumed:
            self._stimuli.undo()
            self._forget_undone_exits()

    def _forget_undone_exits(self) -> None:
        self._exits = {instance: each for instance, each in self._exits.items() if not is_undone(each)}

    @property
    def _unexplained(self) -> frozenset[str]:
        return frozenset((self._untraced | self._exits.keys()) - self._outputs.keys()) | self._stoppable

    @property
    def _stoppable(self) -> frozenset[str]:
        return frozenset(self._begun - self._outputs.keys() - set(self._failures) - self._exits.keys())

    @property
    def needs_effects(self) -> bool:
        return bool(self._unexplained) or self.is_managed

    def effects_taker(self) -> TakePage:
        unexplained, is_managed = self._unexplained, self.is_managed

        def take(facts: Sequence[Fact]) -> None:
            for fact in facts:
                if fact.is_of_run or isinstance(fact.data, StimulusRecorded):
                    continue
                is_unexplained = task_instance(fact.instance) in unexplained
                if is_managed:
                    self._apply_managed(fact, is_whole=is_unexplained)
                elif is_unexplained:
                    self._history.apply(fact)

        return take

    def _apply_managed(self, fact: Fact, *, is_whole: bool) -> None:
        """Apply a fact of a manager or its workers; if `is_whole` is false, only delegations and their results."""
        is_workers = delegating_call(fact.instance) is not None
        match fact.data:
            case OutputRecorded() as recorded if is_workers:
                self._keep(fact.name, recorded)
                data = recorded if is_whole else OutputRecorded(output={**recorded.output_data(), **_NOT_READ})
                self._history.apply(replace(fact, data=data))
            case FailureRecorded() if is_workers:
                self._history.apply(fact)
            case DelegationDecided() | ToolReturned():
                self._history.apply(fact)
            case _ if is_whole or any(f"{fact.instance}/".startswith(f"{each}/") for each in self._untraced):
                self._history.apply(fact)
            case _:
                pass

    # Results.

    @property
    def is_empty(self) -> bool:
        return not self.head.run_id

    @property
    def is_managed(self) -> bool:
        return self._history.plan.hierarchy is not None

    @property
    def stimuli(self) -> tuple[tuple[Stimulus, ...], ...]:
        return self._stimuli.groups

    def failure(self, instance: str) -> TaskResult | None:
        """Return the recorded failure or early exit of a task, if any (S-DUR-39)."""
        if instance in self._outputs:
            return None
        failed = self._failures.get(instance)
        if failed is not None:
            work = RecordedWork(self._history, instance, failed)
            return self._result(work, "failed", failed.at, error=error_from(failed.data.error_data))
        exited = self._exits.get(instance)
        if exited is None:
            return None
        return self._result(self._work_of(instance), "exited", exited.at, reason=exited.reason)

    def resume(
        self,
        output_of: Callable[[str], Output],
        failure_of: Callable[[TaskFailure], Failure],
        *,
        is_restart: bool = False,
    ) -> ResumePoint[Output, Failure]:
        """Return the state from which a coordinator resumes.

        `output_of` returns the stored output of a manager's worker. `failure_of` converts a failure for the coordinator. See
        `ResumePoint` for `is_restart`.
        """
        # As if they had been cancelled.
        works = [self._work_of(each) for each in self._stoppable]
        stopped = [self._result(work, "cancelled", work.last_at) for work in works if work.is_recorded]
        return ResumePoint(
            started_at=self.head.started_at,
            stimuli=self.stimuli,
            results=_Results(self.ended, lambda instance: self.result(instance, output_of, failure_of)),
            stopped={each.instance: self._convert(each, failure_of) for each in stopped},
            is_restart=is_restart,
            directives=self._directives,
        )

    @property
    def ended(self) -> Iterable[str]:
        return dict.fromkeys((*self._outputs, *self._failures, *self._exits))

    def result(
        self, instance: str, output_of: Callable[[str], Output], failure_of: Callable[[TaskFailure], Failure]
    ) -> TaskResult[Output, Failure] | None:
        figures = self._outputs.get(instance)
        result = self.failure(instance) if figures is None else self._make_completed(instance, figures)
        if result is None:
            return None
        # A manager received these outputs, in order of completion.
        workers = self._work_of(instance).workers_that_gave() if self.is_managed else ()
        delegated = [(given.agent_role, output_of(each.instance)) for each, given in workers]
        return replace(self._convert(result, failure_of), delegated=delegated)

    def _convert(self, result: TaskResult, failure_of: Callable[[TaskFailure], Failure]) -> TaskResult[Any, Failure]:
        held = cast("TaskResult[Any, Failure]", result)
        failure = None if result.failure is None else failure_of(result.failure)
        return replace(held, failure=failure, incomplete_answers=self._count_incomplete(result))

    def _count_incomplete(self, result: TaskResult) -> int:
        """Outputs of workers are stored elsewhere."""
        workers = self._work_of(result.instance).workers_that_gave() if self.is_managed else ()
        with_output = (result.instance, *(each.instance for each, _ in workers))
        return count_incomplete(result) + sum(self._incomplete.get(each, 0) for each in with_output)

    def _make_completed(self, instance: str, figures: _OutputFigures) -> TaskResult:
        exited = self._exits.get(instance)  # at the gate after it
        return TaskResult(
            key=node_key(instance),
            instance=instance,
            status="completed" if exited is None else "exited",
            exit_reason=ExitReason.USER_EXIT_EARLY if exited is None else exited.reason,
            at=figures.at,
            duration_s=figures.duration_s,
            total_tokens=figures.total_tokens,
            tool_call_count=figures.tool_call_count,
            text=self._texts.get(instance),
            failed_delegations=self._work_of(instance).failed_delegations(),
        )

    def _result(
        self,
        work: RecordedWork,
        status: Literal["failed", "exited", "cancelled"],
        at: float,
        *,
        error: BaseException | None = None,
        reason: ExitReason = ExitReason.USER_EXIT_EARLY,
    ) -> TaskResult:
        trace = work.trace(status)
        return TaskResult(
            key=node_key(work.instance),
            instance=work.instance,
            status=status,
            at=at,
            duration_s=trace.duration.total_seconds(),
            failure=TaskFailure(error=error, trace=trace),
            total_tokens=trace.metrics.total_tokens,
            tool_call_count=trace.metrics.tool_call_count,
            exit_reason=reason,
            failed_delegations=work.failed_delegations(),
        )

    def _work_of(self, instance: str) -> RecordedWork:
        return RecordedWork(self._history, instance)


class _Results(Mapping[str, "TaskResult[Output, Failure]"]):
    def __init__(
        self, instances: Iterable[str], result_of: Callable[[str], TaskResult[Output, Failure] | None]
    ) -> None:
        self._instances = frozenset(instances)
        self._result_of = result_of

    def __getitem__(self, instance: str) -> TaskResult[Output, Failure]:
        found = self._result_of(instance)
        if found is None:
            raise KeyError(instance)
        return found

    def __contains__(self, instance: object) -> bool:
        return instance in self._instances

    def __iter__(self) -> Iterator[str]:
        return iter(self._instances)

    def __len__(self) -> int:
        return len(self._instances)


async def read_planned(
    store: RunStore, run_id: str, keep: KeepOutput, *take: TakePage, is_resumed: bool = True
) -> PlannedResumeReader:
    """`take` receives all pages, too.

    All facts are read, so that no process resumes a record that is damaged anywhere (S-DUR-9).
    """
    recovery = PlannedResumeReader(keep, is_resumed=is_resumed)
    await read_pages(store, run_id, None, recovery.apply, *take)
    recovery.end_pages()
    if recovery.needs_effects:
        await read_pages(store, run_id, None, recovery.effects_taker())
    return recovery


def _count_incomplete(data: Mapping[str, object]) -> int:
    peers = as_sequence(as_mapping(data.get("trace", data)).get("delegations"))
    own = as_count(as_mapping(data.get("metrics")).get("incomplete_answers"))
    return own + sum(_count_incomplete(as_mapping(as_mapping(each).get("worker_trace"))) for each in peers)


async def read_wanted(store: RunStore, run_id: str, plan: Plan) -> frozenset[str]:
    """Return the tasks that would start if the run was resumed now."""
    stimuli = RecordedStimuli()
    async for page in store.read(run_id, kinds=kinds_of(StimulusRecorded, RunResumed)):
        stimuli.take(page)
    stimuli.undo()
    source = FoldedSource(plan)
    for group in stimuli.groups:
        source.handle(group)
    return frozenset(source.source.running)
