"""What the facts of a planned run give to whoever goes on with it. Pure, but for the reading (S-DUR-30).

In: its facts in order, page by page. Out: what its source was told, and what came of its tasks, as results. Outputs are
handed on as data when they pass by, and are not kept here: who holds them decides whether and where they become objects,
since a scheduler runs no user code. All is known by instance, since a task may have several executions.
Never: a repetition of what is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from ensemble_ray.errors import RecordError
from ensemble_ray.execute.effects import typed_output
from ensemble_ray.execute.orders import FailureSummary, Resumed, TaskFailure, TaskResult, count_incomplete
from ensemble_ray.facts.directives import DirectiveFact, DirectiveRecorded, ModelSwitched
from ensemble_ray.facts.effects import DelegationDecided, ToolReturned
from ensemble_ray.facts.ends import ExitRecorded, FailureRecorded, OutputRecorded
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.lenient import as_count, as_mapping, as_sequence
from ensemble_ray.facts.runs import RunResumed, StimulusRecorded
from ensemble_ray.record.fold import RunFold
from ensemble_ray.record.resume.lazy_results import LazyResults
from ensemble_ray.record.resume.reading import RecordedFailures, TakePage, read_pages
from ensemble_ray.record.resume.run_head import RunHead
from ensemble_ray.record.source import RecordedStimuli, is_undone
from ensemble_ray.record.task_fold import TaskFold
from ensemble_ray.schedule.stimuli import Completed, Exited, Stimulus
from ensemble_ray.values.error_data import error_from
from ensemble_ray.values.ids import delegating_call, node_key, task_instance
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.task_output import TaskOutput

if TYPE_CHECKING:
    from ensemble_ray.record.resume.reading import KeepOutput
    from ensemble_ray.record.stores import RunStore

Output = TypeVar("Output")
Failure = TypeVar("Failure", bound=FailureSummary)


@dataclass(frozen=True, slots=True)
class _OutputFigures:
    """What scheduling needs of a task's output."""

    at: float
    duration_s: float
    total_tokens: int
    tool_call_count: int

    @classmethod
    def of(cls, output: TaskOutput) -> _OutputFigures:
        return cls(
            output.completed_at.timestamp(),
            output.duration.total_seconds(),
            output.metrics.total_tokens,
            output.tool_call_count,
        )


class PlannedRecovery:
    """What is known of a planned run that goes on.

    Attributes:
        head: How it began, and how it stands.
    """

    def __init__(self, keep: KeepOutput, *, is_resumed: bool = True) -> None:
        """Begin without facts.

        Args:
            keep: Takes each recorded output by instance, as it passes by; the newest one counts.
            is_resumed: Whether somebody wants it to go on now: then every cancellation is forgotten, and that a budget
                was spent. False: its scheduler was replaced; only that of before the last `resume` is forgotten.
        """
        self.head = RunHead()
        self._keep = keep
        self._is_resumed = is_resumed
        self._is_empty = True
        self._stimuli = RecordedStimuli()
        #: early ends that tasks recorded, or the source was told of, by instance
        self._exits: dict[str, Exited] = {}
        self._outputs: dict[str, _OutputFigures] = {}
        #: answers that were cut off or empty, by instance of a task or worker with an output
        self._incomplete: dict[str, int] = {}
        #: texts of tasks whose end the machine was not told, and those that it was told: it may read them
        self._texts: dict[str, str] = {}
        self._failures: RecordedFailures[str] = RecordedFailures()
        #: tasks and workers that failed, with nothing recorded of what they had done
        self._untraced: set[str] = set()
        #: tasks that did something, of a run that may have stopped some of them for good (S-DUR-135)
        self._begun: set[str] = set()
        self._has_forks = False
        #: of a second reading: what those did of which only their effects tell; what a manager asked for
        self._fold = RunFold()
        self._directives: list[DirectiveFact] = []

    @classmethod
    def of(cls, facts: Sequence[Fact], keep: KeepOutput | None = None, *, is_resumed: bool = True) -> PlannedRecovery:
        """Return what facts tell that are all at hand.

        Raises:
            RecordError: one of them is damaged.
        """
        recovery = cls(keep or _keep_nothing, is_resumed=is_resumed)
        recovery.apply(facts)
        recovery.end_pages()
        recovery.effects_taker()(facts)
        return recovery

    # Folding.

    def apply(self, facts: Sequence[Fact]) -> None:
        """Take the next facts; effects are passed over.

        Raises:
            RecordError: one of them is damaged.
        """
        for fact in facts:
            self._is_empty = False
            match fact.data:
                case StimulusRecorded():
                    self._apply_stimulus(cast("Fact[StimulusRecorded]", fact))
                case OutputRecorded() | FailureRecorded() | ExitRecorded():
                    self._apply_end(fact)
                case RunResumed(is_restart=is_restart):
                    self.head.apply(fact)
                    self._stimuli.resume(cast("Fact[RunResumed]", fact))
                    if not is_restart:
                        self._forget_undone_exits()
                case DirectiveRecorded() | ModelSwitched() as directive:
                    self._directives.append(directive)
                case _ if fact.is_of_run:
                    self.head.apply(fact)
                case _:
                    pass
            self._apply_begin(fact)

    def _apply_begin(self, fact: Fact) -> None:
        """Take what the run began with, and that a task did something."""
        if fact.is_of_run:
            self._fold.apply(fact)
            self._has_forks = self._fold.plan.has_forks
        elif self._has_forks and fact.data.IS_EFFECT:
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
                output = typed_output({**recorded.output_data(), "trace": None})  # which is large
                self._outputs[fact.name], self._texts[fact.name] = _OutputFigures.of(output), output.raw
                self._keep(fact.name, recorded)
            case FailureRecorded():
                self._failures.put(fact.name, cast("Fact[FailureRecorded]", fact))
            case ExitRecorded(reason=reason):
                self._exits[fact.name] = Exited(at=fact.at, instance=fact.name, reason=reason)
            case _:
                pass

    def end_pages(self) -> None:
        """Take notice that all facts were given."""
        if self._is_resumed:
            self._stimuli.undo()
            self._forget_undone_exits()

    def _forget_undone_exits(self) -> None:
        self._exits = {instance: each for instance, each in self._exits.items() if not is_undone(each)}

    @property
    def unexplained(self) -> frozenset[str]:
        """Instances of tasks that gave nothing, of which only their effects tell what they did."""
        return frozenset((self._untraced | self._exits.keys()) - self._outputs.keys()) | self._stoppable

    @property
    def _stoppable(self) -> frozenset[str]:
        """Those of `_begun` that did not end."""
        return frozenset(self._begun - self._outputs.keys() - set(self._failures) - self._exits.keys())

    @property
    def needs_effects(self) -> bool:
        """Whether the record is to be read again, for effects."""
        return bool(self.unexplained) or self.is_managed

    def effects_taker(self) -> TakePage:
        """Return what takes facts of all kinds, of a second reading."""
        unexplained, is_managed = self.unexplained, self.is_managed

        def take(facts: Sequence[Fact]) -> None:
            for fact in facts:
                if fact.is_of_run or isinstance(fact.data, StimulusRecorded):
                    continue
                is_unexplained = task_instance(fact.instance) in unexplained
                if is_managed:
                    self._apply_managed(fact, is_whole=is_unexplained)
                elif is_unexplained:
                    self._fold.apply(fact)

        return take

    def _apply_managed(self, fact: Fact, *, is_whole: bool) -> None:
        """Take a fact of a manager or of its workers; of what is told elsewhere, only what was asked and what came of it."""
        is_workers = delegating_call(fact.instance) is not None
        match fact.data:
            case OutputRecorded() as recorded if is_workers:
                self._keep(fact.name, recorded)
                data = recorded if is_whole else OutputRecorded(output=_head_of(recorded))
                self._fold.apply(replace(fact, data=data))
            case FailureRecorded() if is_workers:
                self._fold.apply(fact)
            case DelegationDecided() | ToolReturned():
                self._fold.apply(fact)
            case _ if is_whole or any(_is_inside(fact.instance, each) for each in self._untraced):
                self._fold.apply(fact)
            case _:
                pass

    # What is known.

    @property
    def is_empty(self) -> bool:
        """Whether nothing is recorded."""
        return self._is_empty

    @property
    def is_managed(self) -> bool:
        """Whether its only task is a manager's."""
        return self._fold.is_hierarchical

    @property
    def stimuli(self) -> tuple[tuple[Stimulus, ...], ...]:
        """What the machine was told, in the groups in which it was."""
        return self._stimuli.groups

    def failure(self, instance: str) -> TaskResult | None:
        """Return what is recorded of a task that failed or ended the run early; None when it did neither (S-DUR-39)."""
        if instance in self._outputs:
            return None
        failed = self._failures.get(instance)
        if failed is not None:
            done = self._fold_of(instance) if instance in self._untraced else TaskFold(instance=instance)
            done.failure = failed
            return self._result(done, "failed", failed.at, error=error_from(failed.data.error_data))
        exited = self._exits.get(instance)
        if exited is None:
            return None
        return self._result(self._fold_of(instance), "exited", exited.at, reason=exited.reason)

    def resume(
        self,
        output_of: Callable[[str], Output],
        failure_of: Callable[[TaskFailure], Failure],
        *,
        is_restart: bool = False,
    ) -> Resumed[Output, Failure]:
        """Return what a coordinator needs to go on.

        Args:
            output_of: Gives a kept output of a manager's worker, by instance.
            failure_of: How a failure is held there.
            is_restart: See `Resumed`.
        """
        return Resumed(
            started_at=self.head.started_at,
            stimuli=self.stimuli,
            results=LazyResults(self.ended, lambda instance: self.result(instance, output_of, failure_of)),
            stopped=cast("dict[str, TaskResult[Output, Failure]]", self._list_stopped(failure_of)),
            is_restart=is_restart,
            directives=self._directives,
        )

    def _list_stopped(self, failure_of: Callable[[TaskFailure], Failure]) -> dict[str, TaskResult[TaskOutput, Failure]]:
        """Return what tasks did that did not end, each as if it had been stopped."""
        folds = {each: self._fold_of(each) for each in self._stoppable}
        known = {each: fold for each, fold in folds.items() if fold.is_recorded}
        results = {each: self._result(fold, "cancelled", fold.last_at) for each, fold in known.items()}
        return {
            each: replace(
                cast("TaskResult[TaskOutput, Failure]", result),
                failure=None if result.failure is None else failure_of(result.failure),
                incomplete_answers=self._count_incomplete(result),
            )
            for each, result in results.items()
        }

    @property
    def ended(self) -> Iterable[str]:
        """Instances of tasks whose output, failure or early exit is recorded."""
        return dict.fromkeys((*self._outputs, *self._failures, *self._exits))

    def result(
        self, instance: str, output_of: Callable[[str], Output], failure_of: Callable[[TaskFailure], Failure]
    ) -> TaskResult[Output, Failure] | None:
        """Return the result of a task; None where no end of it is recorded. Its output stays where it is kept."""
        figures = self._outputs.get(instance)
        result = self.failure(instance) if figures is None else self._make_completed(instance, figures)
        if result is None:
            return None
        held = cast("TaskResult[Output, Failure]", result)  # of which it has neither yet
        failure = None if result.failure is None else failure_of(result.failure)
        return replace(
            held,
            failure=failure,
            delegated=self._list_delegated(instance, output_of),
            incomplete_answers=self._count_incomplete(result),
        )

    def _list_delegated(self, instance: str, output_of: Callable[[str], Output]) -> list[tuple[str, Output]]:
        """Return what a manager got from its workers, with their roles, in the order in which they were done."""
        if not self.is_managed:
            return []
        workers = [(each, each.summary()) for each in self._fold_of(instance).workers_that_gave()]
        return [(given.agent_role, output_of(each.instance)) for each, given in workers if given is not None]

    def _count_incomplete(self, result: TaskResult) -> int:
        """Return how many answers of a task and of its workers were cut off or empty; their outputs are kept elsewhere."""
        workers = self._fold_of(result.instance).workers_that_gave() if self.is_managed else ()
        with_output = (result.instance, *(each.instance for each in workers))
        return count_incomplete(result) + sum(self._incomplete.get(each, 0) for each in with_output)

    def _make_completed(self, instance: str, figures: _OutputFigures) -> TaskResult:
        """Return what scheduling needs of a task that gave its output."""
        exited = self._exits.get(instance)  # at the gate behind it
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
            failed_delegations=self._fold.failed_delegations(instance),
        )

    def _result(
        self,
        fold: TaskFold,
        status: Literal["failed", "exited", "cancelled"],
        at: float,
        *,
        error: BaseException | None = None,
        reason: ExitReason = ExitReason.USER_EXIT_EARLY,
    ) -> TaskResult:
        trace = self._fold.trace_of(fold, state=status)
        return TaskResult(
            key=node_key(fold.instance),
            instance=fold.instance,
            status=status,
            at=at,
            duration_s=trace.duration.total_seconds(),
            failure=TaskFailure(error=error, trace=trace),
            total_tokens=trace.metrics.total_tokens,
            tool_call_count=trace.metrics.tool_call_count,
            exit_reason=reason,
            failed_delegations=self._fold.failed_delegations(fold.instance),
        )

    def _fold_of(self, instance: str) -> TaskFold:
        return self._fold.tasks.get(instance) or TaskFold(instance=instance)


async def read_planned(
    store: RunStore, run_id: str, keep: KeepOutput, *take: TakePage, is_resumed: bool = True
) -> PlannedRecovery:
    """Read what is known of a planned run, page by page; see `PlannedRecovery`.

    All of it is read, so that nobody goes on with a record that is damaged anywhere (S-DUR-9).

    Args:
        store: Has the record.
        run_id: The run's id.
        keep: See `PlannedRecovery`.
        take: Take the pages too.
        is_resumed: See `PlannedRecovery`.

    Raises:
        RecordError: the record is damaged, of a newer format, or was removed meanwhile.
    """
    recovery = PlannedRecovery(keep, is_resumed=is_resumed)
    await read_pages(store, run_id, None, recovery.apply, *take)
    recovery.end_pages()
    if recovery.needs_effects:
        await read_pages(store, run_id, None, recovery.effects_taker())
    return recovery


def _keep_nothing(instance: str, recorded: OutputRecorded) -> None:
    """Take an output that nobody asks for."""


def _head_of(recorded: OutputRecorded) -> Mapping[str, object]:
    """Return an output without what is large in it."""
    return {**recorded.output_data(), "raw": "", "parsed_output": None, "output_type": None, "trace": None}


def _count_incomplete(data: Mapping[str, object]) -> int:
    """Return how many answers were cut off or empty, by an output's or a trace's data with those of its peers."""
    peers = as_sequence(as_mapping(data.get("trace", data)).get("delegations"))
    own = as_count(as_mapping(data.get("metrics")).get("incomplete_answers"))
    return own + sum(_count_incomplete(as_mapping(as_mapping(each).get("worker_trace"))) for each in peers)


def _is_inside(instance: str, outer: str) -> bool:
    return instance == outer or instance.startswith(f"{outer}/")
