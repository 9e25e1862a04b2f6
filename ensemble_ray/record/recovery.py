"""What the facts of a run give to whoever goes on with it. Package: record. Pure (S-DUR-30).

In: all facts of a run in order. Out: what its machine was told, and what came of its tasks, as results. Outputs are
given as data: who holds them decides whether and where they become objects, since a scheduler runs no user code.
Never: a repetition of what is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Never, TypeVar, cast

from ensemble_ray.errors import RecordError
from ensemble_ray.execute.orders import FailureSummary, TaskFailure, TaskResult
from ensemble_ray.execute.outcomes import Resumed
from ensemble_ray.execute.recorded import typed_output
from ensemble_ray.facts.ends import ExitRecorded
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.lenient import as_text
from ensemble_ray.facts.runs import RunResumed, StimulusRecorded
from ensemble_ray.plan.plan import Plan
from ensemble_ray.record.fold import RunFold
from ensemble_ray.record.resume.run_head import origin_in
from ensemble_ray.record.task_fold import TaskFold
from ensemble_ray.schedule.stimuli import Cancelled, CancelRequested, Exited, Stimulus, decode_stimulus
from ensemble_ray.values.error_data import error_from
from ensemble_ray.values.ids import delegating_call, key_of
from ensemble_ray.values.outputs import ExitReason, TaskOutput

if TYPE_CHECKING:
    from ensemble_ray.definition.origin import Origin
    from ensemble_ray.values.outputs import RunState

__all__ = ["Recovered", "resumed_inline"]

Output = TypeVar("Output")
Failure = TypeVar("Failure", bound=FailureSummary)


class Recovered:
    """What is known of a run that goes on.

    Attributes:
        header: The record's first fact; an empty one when the run recorded nothing.
        stimuli: What the machine was told, in the groups in which it was.
    """

    def __init__(self, facts: Iterable[Fact], *, is_resumed: bool = True) -> None:
        """Read the facts.

        Args:
            facts: All facts of the run in order.
            is_resumed: Whether somebody wants it to go on now: then every cancellation is forgotten, and that a budget
                was spent. False: its scheduler was replaced; only that of before the last `resume` is forgotten.

        Raises:
            RecordError: the record is damaged.
        """
        recorded = list(facts)
        self._fold = RunFold(recorded)
        self.header = self._fold.header
        forgotten = len(recorded) if is_resumed else _last_resume(recorded)
        self.stimuli: tuple[tuple[Stimulus, ...], ...] = tuple(_groups(recorded, forgotten))
        exits = {key_of(each.instance): each for group in self.stimuli for each in group if isinstance(each, Exited)}
        self._exits = {**_exits(recorded, forgotten), **exits}
        self._by_key: Mapping[str, TaskFold] = {fold.key: fold for fold in self._fold.tasks.values()}

    @property
    def tasks(self) -> Mapping[str, TaskFold]:
        """What is known of each task, by key."""
        return self._by_key

    def fold_of(self, instance: str) -> TaskFold:
        """Return what is known of an instance, also of one that was handed on."""
        found = self._fold.tasks.get(instance) or self._fold.delegated.get(instance)
        return found or TaskFold(instance=instance)

    @property
    def plan(self) -> Plan:
        """The recorded plan, without hidden ids.

        Raises:
            RecordError: it is not recorded, or damaged.
        """
        try:
            return Plan.from_dict(cast("Mapping[str, None]", self.header.plan or {}))
        except ValueError as error:
            msg = f"The record is damaged: its plan cannot be read: {error}"
            raise RecordError(msg) from error

    @property
    def state(self) -> RunState:
        """How the run ended; a run that went on after an end, or has none, was interrupted."""
        return self._fold.state

    @property
    def started_at(self) -> float:
        """When the run began first, Unix time, s."""
        return self.header.started_at or 0.0

    @property
    def source(self) -> Origin:
        """Where the definition came from, and what was chosen in place of what stands there."""
        return origin_in(self.header)

    def output_data(self, key: str) -> Mapping[str, object] | None:
        """Return the recorded output of a task as JSON data; None when there is none."""
        fold = self._by_key.get(key)
        return None if fold is None else _data_of(fold)

    def failure(self, key: str, output_type: type[object] | None = None) -> TaskResult | None:
        """Return what is recorded of a task that failed or ended the run early; None when it did neither (S-DUR-39).

        Args:
            key: The task's key.
            output_type: What the task declares, for errors that tell it.
        """
        fold = self._by_key.get(key)
        if fold is None or fold.output is not None:
            return None
        failure = fold.failure
        if failure is not None:
            return self._result(
                fold, "failed", failure.at, error_from(failure.data.error_data, output_type=output_type)
            )
        exited = self._exits.get(key)
        return None if exited is None else self._result(fold, "exited", exited.at, None, exited)

    def resumed(
        self, output_of: Callable[[str, Mapping[str, object]], Output], failure_of: Callable[[TaskFailure], Failure]
    ) -> Resumed[Output, Failure]:
        """Return what a coordinator needs to go on.

        Args:
            output_of: How an output is held there: made of the task's key and the recorded data.
            failure_of: How a failure is held there.
        """
        results: dict[str, TaskResult[Output, Failure]] = {}
        for key in self._by_key:
            data = self.output_data(key)
            if data is not None:
                results[key] = self._completed(key, data, output_of)
            elif (ended := self.failure(key)) is not None:
                held = cast("TaskResult[Output, Failure]", ended)
                failure = None if ended.failure is None else failure_of(ended.failure)
                results[key] = replace(held, failure=failure, delegated=self._delegated_outputs(key, output_of))
        return Resumed(started_at=self.started_at, stimuli=self.stimuli, results=results)

    def _delegated_outputs(
        self, key: str, output_of: Callable[[str, Mapping[str, object]], Output]
    ) -> list[tuple[str, Output]]:
        """Return what a manager got from its workers, with their roles, in the order in which they were done."""
        if not self._fold.is_hierarchical:
            return []
        outputs: list[tuple[str, Output]] = []
        for worker in self._by_key[key].workers_that_gave():
            data = _data_of(worker)
            if data is not None:
                outputs.append((as_text(data.get("agent_role")), output_of(worker.key, data)))
        return outputs

    def _completed(
        self, key: str, data: Mapping[str, object], output_of: Callable[[str, Mapping[str, object]], Output]
    ) -> TaskResult[Output, Never]:
        """Return what scheduling needs of a completed task; the trace, which is large, is not read for it."""
        value = typed_output({**data, "trace": None})
        exited = self._exits.get(key)  # at the gate behind it
        return TaskResult(
            key=key,
            instance=self._by_key[key].instance,
            status="completed" if exited is None else "exited",
            exit_reason=ExitReason.USER_EXIT_EARLY if exited is None else exited.reason,
            at=value.completed_at.timestamp(),
            duration_s=value.duration.total_seconds(),
            output=output_of(key, data),
            total_tokens=value.metrics.total_tokens,
            tool_call_count=value.tool_call_count,
            delegated=self._delegated_outputs(key, output_of),
            failed_delegations=self._fold.failed_delegations(self._by_key[key]),
        )

    def _result(
        self,
        fold: TaskFold,
        status: Literal["failed", "exited"],
        at: float,
        error: BaseException | None,
        exited: Exited | None = None,
    ) -> TaskResult:
        trace = self._fold.trace_of(fold, state=status)
        return TaskResult(
            key=fold.key,
            instance=fold.instance,
            status=status,
            at=at,
            duration_s=trace.duration.total_seconds(),
            failure=TaskFailure(error=error, trace=trace),
            total_tokens=trace.metrics.total_tokens,
            tool_call_count=trace.metrics.tool_call_count,
            exit_reason=ExitReason.USER_EXIT_EARLY if exited is None else exited.reason,
            failed_delegations=self._fold.failed_delegations(fold),
        )


def resumed_inline(recovered: Recovered, output_types: Mapping[str, type[object]] | None = None) -> Resumed:
    """Return what a coordinator in the definition's process needs: outputs as objects of their declared types."""
    types = output_types or {}
    return recovered.resumed(lambda key, data: typed_output(data, types.get(key)), lambda failure: failure)


def _data_of(fold: TaskFold) -> Mapping[str, object] | None:
    """Return the recorded output as JSON data; None when there is none."""
    return fold.output.model_dump(mode="json") if isinstance(fold.output, TaskOutput) else fold.output


def _last_resume(facts: Sequence[Fact]) -> int:
    """Position of the last `resume` that somebody wanted; 0 when there is none. Restarts are nobody's wish to go on."""
    wanted = (
        position
        for position, fact in enumerate(facts)
        if isinstance(fact.data, RunResumed) and not fact.data.is_restart
    )
    return max(wanted, default=0)


def _exits(facts: Sequence[Fact], forgotten: int) -> dict[str, Exited]:
    """Tasks that recorded that they ended the run, by key; the machine may not have been told."""
    found: dict[str, Exited] = {}
    for position, fact in enumerate(facts):
        if isinstance(fact.data, ExitRecorded) and delegating_call(fact.name) is None:
            key = key_of(fact.name)
            exited = Exited(at=fact.at, instance=fact.name, reason=fact.data.reason)
            if position >= forgotten or not _is_undone(exited):
                found[key] = exited
    return found


def _is_undone(stimulus: Stimulus) -> bool:
    """Whether a run that goes on makes up for it: it was cancelled, or had spent its budget (S-DUR-35, S-BUD-6)."""
    if isinstance(stimulus, Exited):
        return stimulus.reason is ExitReason.BUDGET_EXHAUSTED
    return isinstance(stimulus, CancelRequested | Cancelled)


def _groups(facts: Sequence[Fact], forgotten: int) -> Iterable[tuple[Stimulus, ...]]:
    """Stimuli in their groups; what a run that goes on makes up for is left out among the first `forgotten` facts."""
    group: list[Stimulus] = []
    for position, fact in enumerate(facts):
        if not isinstance(fact.data, StimulusRecorded):
            continue
        stimulus = _stimulus(cast("Fact[StimulusRecorded]", fact))
        if position >= forgotten or not _is_undone(stimulus):
            group.append(stimulus)
        if not fact.data.more:
            if group:
                yield tuple(group)
            group = []
    if group:  # the rest of the group was torn off
        yield tuple(group)


def _stimulus(fact: Fact[StimulusRecorded]) -> Stimulus:
    try:
        stimulus = decode_stimulus(fact)
    except TypeError as error:
        msg = f"The record is damaged: stimulus {fact.seq}: {error}"
        raise RecordError(msg) from error
    if stimulus is None:
        msg = f"The record is damaged: stimulus {fact.seq} is of the unknown type '{fact.data.type}'"
        raise RecordError(msg)
    return stimulus
