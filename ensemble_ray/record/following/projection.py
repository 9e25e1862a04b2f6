"""A run's facts as messages, one fact after the other. Package: record. Pure.

In: the facts of one run, in order. Out: what a page is told of each. Rules:

1. The same facts give the same messages with the same cursors, whoever reads them and when.
2. A task starts and ends once, however often its run was interrupted. It has started when the source wanted it, or when something is
   recorded of it, if that comes first.
3. Work that was handed on has the messages of its delegation, of its tools and of its model, none of a task.
4. That a run ended is said by its follower, who knows whether it went on afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from ensemble_ray.events import messages
from ensemble_ray.events.messages import Message, ShownTask
from ensemble_ray.events.wire import LAST_TYPE, Cursor, WireEvent
from ensemble_ray.execute.recorded import typed_output
from ensemble_ray.facts.effects import DelegationDecided, ModelAnswered, ToolIntended, ToolReturned, is_making_agent
from ensemble_ray.facts.ends import ExitRecorded, FailureRecorded, OutputRecorded
from ensemble_ray.facts.items import ItemOutputRecorded
from ensemble_ray.facts.lenient import as_text
from ensemble_ray.facts.reviews import ReviewDecided, ReviewRequested
from ensemble_ray.facts.runs import PlanRecorded, RunEnded, RunResumed, StimulusRecorded
from ensemble_ray.record.following.delegations import DelegationMessages
from ensemble_ray.record.following.unit_messages import render_round
from ensemble_ray.record.source import ReplayedSource
from ensemble_ray.record.totals import ExecutionTotals
from ensemble_ray.schedule.instructions import Announce, Start
from ensemble_ray.schedule.stimuli import Failed, decode_stimulus
from ensemble_ray.values.ids import delegating_call, node_key, task_instance
from ensemble_ray.values.outputs import RunState

if TYPE_CHECKING:
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.plan.plan import Node
    from ensemble_ray.schedule.instructions import Instruction
    from ensemble_ray.values.messages import ToolCall

__all__ = ["EventProjection"]


class EventProjection:
    """The messages about one run, as far as its facts were taken."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._started_at = 0.0
        self._nodes: Mapping[str, Node] = {}
        self._source: ReplayedSource | None = None
        self._started: set[str] = set()
        self._ended: set[str] = set()
        #: rounds of units that were told
        self._rounds: set[tuple[str, int]] = set()
        #: texts of outputs by instance, where units may show them again
        self._texts: dict[str, str] = {}
        #: calls of tools that have not returned, by their names
        self._intents: dict[str, ToolIntended] = {}
        #: calls of the last answer of each instance
        self._calls: dict[str, tuple[ToolCall, ...]] = {}
        self._gates: dict[str, ReviewRequested] = {}
        self._delegations = DelegationMessages()
        self._totals = ExecutionTotals()
        self._end: tuple[RunEnded, float, int] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether anything is recorded."""
        return bool(self._started_at)

    def apply(self, fact: Fact) -> list[WireEvent]:
        """Take the next fact, and return the messages that follow from it.

        Raises:
            RecordError: it is damaged.
        """
        self._totals.apply(fact)
        return [
            WireEvent(type=kind, data=data, cursor=Cursor(fact.seq, number))
            for number, (kind, data) in enumerate(self._messages_of(fact), start=1)
        ]

    def end(self) -> WireEvent | None:
        """Return the last message; None where the record has no end, or the run went on after it."""
        if self._end is None:
            return None
        end, at, seq = self._end
        return WireEvent(type=LAST_TYPE, data=self._summary(at, end.reason.value), cursor=Cursor(seq, 1))

    def unrecorded_end(self, exit_reason: str, at: float) -> WireEvent:
        """Return the last message about a run whose record has no end; it has no cursor, since the run may go on.

        Args:
            exit_reason: Why nothing more comes, such as `interrupted`.
            at: The time, Unix time, s.
        """
        return WireEvent(type=LAST_TYPE, data=self._summary(at, exit_reason))

    def _summary(self, at: float, exit_reason: str) -> dict[str, object]:
        return messages.ensemble_completed(
            self._run_id,
            at=at,
            duration_s=at - self._started_at if self.has_begun else 0,
            exit_reason=exit_reason,
            total_tokens=self._totals.tokens,
            total_tool_calls=self._totals.tool_calls,
        ).data

    def _messages_of(self, fact: Fact) -> list[Message]:
        match fact.data:
            case PlanRecorded() as header:
                return [self._begin(header, fact.at)]
            case RunEnded() as end:
                # A run that waits for people has not ended: its record goes on when they have decided.
                self._end = None if end.state is RunState.WAITING else (end, fact.at, fact.seq)
                return []
            case RunResumed():
                self._end = None
                wanted = [] if self._source is None else self._source.resume(cast("Fact[RunResumed]", fact))
                return list(self._project_wanted(wanted, fact.at))
            case StimulusRecorded():
                return list(self._stimulus(cast("Fact[StimulusRecorded]", fact)))
            case _ if fact.is_of_run or is_making_agent(fact) or isinstance(fact.data, ItemOutputRecorded):
                return []
            case _:
                return [*self._start(task_instance(fact.instance), fact.at), *self._of_task(fact)]

    def _begin(self, header: PlanRecorded, at: float) -> Message:
        plan = header.plan or {}
        self._started_at = at if header.started_at is None else header.started_at
        if not header.is_dynamic and plan:
            self._source = ReplayedSource(plan)
            self._nodes = {node.key: node for node in self._source.plan.nodes}
            self._delegations.begin(self._source.plan)
        return messages.ensemble_started(
            header.ensemble_id or self._run_id,
            at=self._started_at,
            total_tasks=len(self._nodes),
            workflow=header.workflow or as_text(plan.get("workflow")),
        )

    # What the source wanted.

    def _stimulus(self, fact: Fact[StimulusRecorded]) -> Iterator[Message]:
        told = decode_stimulus(fact) if fact.data.type == "TaskFailed" else None
        if (
            isinstance(told, Failed) and told.instance not in self._ended
        ):  # its process died, and nobody else wrote it down
            yield from self._start(told.instance, fact.at)
            yield self._fail(told.instance, told.message or told.error_type, fact.at)
        if self._source is not None:
            yield from self._project_wanted(self._source.apply(fact), fact.at)

    def _project_wanted(self, wanted: Sequence[Instruction], at: float) -> Iterator[Message]:
        for each in wanted:
            if isinstance(each, Start):
                yield from self._start(each.instance, at)
            elif isinstance(each, Announce) and self._source is not None:
                number, message = render_round(each.what, self._source.plan, self._texts)
                if (each.what.unit, number) not in self._rounds:
                    self._rounds.add((each.what.unit, number))
                    yield message

    def _start(self, instance: str, at: float) -> Iterator[Message]:
        if instance in self._started:
            return
        self._started.add(instance)
        yield messages.task_started(self._task(instance), at=at)

    def _task(self, instance: str) -> ShownTask:
        """Return what messages say of a task, as far as the plan tells; of one that was made in the run, its key."""
        key = node_key(instance)
        node = self._nodes.get(key)
        if node is None:
            return ShownTask(index=0, total=len(self._nodes), description=key, agent_role="", instance=instance)
        return ShownTask(
            index=node.index,
            total=len(self._nodes) if node.total is None else node.total,
            description=node.description or key,
            agent_role=node.agent_role,
            instance=instance,
        )

    # What tasks recorded.

    def _of_task(self, fact: Fact) -> list[Message]:
        is_handed_on = delegating_call(fact.instance) is not None
        match fact.data:
            case OutputRecorded() as given if not is_handed_on:
                return [self._complete(fact.instance, given)]
            case FailureRecorded() as failure if not is_handed_on:
                return [self._fail(fact.instance, failure.message or failure.error_type, fact.at)]
            case ExitRecorded():
                self._ended.add(fact.instance)
                return []
            case ModelAnswered() as answer:
                self._calls[fact.instance] = answer.tool_calls
                return [self._answer(fact, answer)]
            case ToolIntended() as intent:
                self._intents[fact.name] = intent
                return []
            case DelegationDecided():
                return self._delegations.decide(
                    cast("Fact[DelegationDecided]", fact), self._who(fact.instance), fact.instance
                )
            case ToolReturned() as result:
                return self._return(fact.name, fact.instance, result)
            case ReviewRequested() as asked:
                self._gates[fact.name] = asked
                return [_review(asked, fact.instance)]
            case ReviewDecided() as decided:
                return self._decide(fact.name, decided)
            case _:
                return []

    def _who(self, instance: str) -> str:
        """Return the role of who does the work of an instance, which may have been handed on."""
        node = self._nodes.get(node_key(instance))
        return self._delegations.role_of(instance) or ("" if node is None else node.agent_role)

    def _complete(self, instance: str, given: OutputRecorded) -> Message:
        output = typed_output({**given.output_data(), "trace": None})  # which is large
        self._ended.add(instance)
        if self._source is not None and self._source.plan.units:
            self._texts[instance] = output.raw
        task = replace(self._task(instance), description=output.task_description, agent_role=output.agent_role)
        return messages.task_completed(
            task,
            at=output.completed_at.timestamp(),
            duration_s=output.duration.total_seconds(),
            token_count=output.metrics.total_tokens,
            tool_call_count=output.tool_call_count,
        )

    def _fail(self, instance: str, reason: str, at: float) -> Message:
        self._ended.add(instance)
        return messages.task_failed(self._task(instance), at=at, reason=reason)

    def _answer(self, fact: Fact, answer: ModelAnswered) -> Message:
        return messages.llm_iteration_completed(
            agent_role=self._who(fact.instance),
            task_description=self._delegations.work_of(fact.instance) or self._task(fact.instance).description,
            iteration_index=int(fact.name.rsplit("/", 2)[1]),
            text=answer.text,
            tool_calls=answer.tool_calls,
            input_tokens=answer.input_tokens,
            output_tokens=answer.output_tokens,
            latency_s=answer.latency_s,
            instance=fact.instance,
            reasoning=answer.reasoning,
        )

    def _return(self, name: str, instance: str, result: ToolReturned) -> list[Message]:
        is_delegation, told = self._delegations.is_open(name), self._delegations.close(name, result)
        intent = self._intents.pop(name, None)
        number = name.rpartition("/call-")[2]
        if not number.isdecimal() or (intent is None and not is_delegation):
            return told  # a handler's, or a call of nothing that there is
        calls = self._calls.get(instance, ())
        call = calls[int(number)] if int(number) < len(calls) else None
        called = messages.tool_called(
            agent_role=self._who(instance),
            task_index=self._task(task_instance(instance)).index,
            tool_name=intent.tool_name if intent else "" if call is None else call.name,
            duration_s=result.duration_s,
            is_success=result.is_success,
            arguments=intent.arguments if intent else "" if call is None else call.arguments,
            result=result.text,
            structured_result=result.structured_output,
            instance=instance,
        )
        return [*told, called]

    def _decide(self, name: str, decided: ReviewDecided) -> list[Message]:
        asked = self._gates.pop(name, None)
        if asked is None:
            return []
        if decided.timed_out:
            return [messages.review_timed_out(asked.review_id, asked.on_timeout.value)]
        return [messages.review_decided(asked.review_id, decided.verdict, decided.by)]


def _review(asked: ReviewRequested, instance: str) -> Message:
    message = messages.review_requested(
        review_id=asked.review_id,
        task_description=asked.task_description,
        task_output=asked.task_output,
        timing=asked.timing.value,
        prompt=asked.prompt,
        timeout_s=asked.timeout_s,
        on_timeout=asked.on_timeout.value,
        required_role=asked.required_role,
    )
    return Message(message.type, {**message.data, "instance": instance})
