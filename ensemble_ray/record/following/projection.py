"""The messages about a run, rendered from the changes of its history. Pure.

The same facts produce the same messages with the same cursors, whoever reads them and when. Delegated work has the messages of its
delegation, of its tools and of its model, none of a task. The follower sends the message about the run's end, since it knows
whether the run was resumed afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ensemble_ray.errors import RecordError
from ensemble_ray.events import messages
from ensemble_ray.events.messages import LAST_TYPE, Cursor, Message, ShownTask, WireEvent
from ensemble_ray.facts.lenient import as_text
from ensemble_ray.plan.plan import GraphUnit, LoopUnit
from ensemble_ray.record import history
from ensemble_ray.schedule.instructions import IterationEnded
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.metrics import UNKNOWN_TOKENS

if TYPE_CHECKING:
    from ensemble_ray.facts.effects import ModelAnswered
    from ensemble_ray.facts.ends import RecordedOutput
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.facts.reviews import ReviewDecided, ReviewRequested
    from ensemble_ray.facts.runs import PlanRecorded
    from ensemble_ray.plan.plan import Unit
    from ensemble_ray.record.history import RecordedExecution
    from ensemble_ray.schedule.instructions import StepEnded


class EventProjection:
    """The messages about one run, as far as its facts were applied."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._history = history.RunHistory()
        #: texts of outputs by instance, where units may show them again
        self._texts: dict[str, str] = {}

    def apply(self, fact: Fact) -> list[WireEvent]:
        """Apply the next fact and return the messages about it.

        Raises:
            RecordError: The fact is damaged.
        """
        found: list[Message] = []
        for change in self._history.apply(fact):
            found.extend(self._render(change))
        return [
            WireEvent(type=kind, data=data, cursor=Cursor(fact.seq, number))
            for number, (kind, data) in enumerate(found, start=1)
        ]

    def end(self) -> WireEvent | None:
        """Return the last message; None: the run has no end, or was resumed after it."""
        end = self._history.end
        if end is None:
            return None
        data = self._summary(end.at, end.data.reason.value)
        return WireEvent(type=LAST_TYPE, data=data, cursor=Cursor(end.seq, 1))

    def unrecorded_end(self, exit_reason: str, at: float) -> WireEvent:
        """Return the last message about a run without an end. It has no cursor, since the run may be resumed.

        Args:
            exit_reason: Why no more messages follow, such as `interrupted`.
            at: The time, Unix time, s.
        """
        return WireEvent(type=LAST_TYPE, data=self._summary(at, exit_reason))

    def _summary(self, at: float, exit_reason: str) -> dict[str, object]:
        started_at, totals = self._history.started_at, self._history.totals
        return messages.ensemble_completed(
            self._run_id,
            at=at,
            duration_s=at - started_at if started_at else 0,
            exit_reason=exit_reason,
            total_tokens=totals.tokens,
            total_tool_calls=totals.tool_calls,
        ).data

    def _render(self, change: history.Change) -> Iterable[Message]:
        match change:
            case history.ModelReplied():
                return (self._answer(change.execution, change.fact),)
            case history.CallEnded():
                return self._call(change)
            case history.CallStarted() | history.WorkRecorded():
                return ()
            case history.ExecutionStarted():
                return (messages.task_started(self._task(change.execution), at=change.fact.at),)
            case history.ExecutionEnded():
                return self._end_task(change)
            case history.RoundEnded():
                return (self._round(change.execution, change.what),)
            case history.RunStarted():
                return (self._begin(change.fact.data),)
            case _:
                return self._render_request(change)

    @staticmethod
    def _render_request(change: history.Change) -> Iterator[Message]:
        match change:
            case history.DelegationStarted(execution, delegation=delegation):
                data = _delegation_data(execution, delegation)
                if delegation.worker is None:
                    refusal = change.fact.data.refusal
                    yield messages.delegation_failed(
                        data, duration_s=0, reason=refusal.reason if refusal else "refused"
                    )
                else:
                    yield messages.delegation_started(data, task_description=delegation.request.task_description)
            case history.GateOpened(execution, fact):
                yield _review(fact.data, execution.id)
            case history.GateClosed(fact=fact, asked=asked) if asked is not None:
                yield _decision(asked.data, fact.data)
            case _:
                pass

    def _begin(self, header: PlanRecorded) -> Message:
        return messages.ensemble_started(
            header.ensemble_id or self._run_id,
            at=self._history.started_at or 0.0,
            total_tasks=len(self._history.nodes),
            workflow=header.workflow or as_text((header.plan or {}).get("workflow")),
        )

    def _task(self, execution: RecordedExecution) -> ShownTask:
        """Return what messages say of a task; of one that was made in the run, its key."""
        nodes, key = self._history.nodes, node_key(execution.id)
        node = nodes.get(key)
        if node is None:
            return ShownTask(index=0, total=len(nodes), description=key, agent_role="", instance=execution.id)
        return ShownTask(
            index=node.index,
            total=len(nodes) if node.total is None else node.total,
            description=node.description or key,
            agent_role=node.agent_role,
            instance=execution.id,
        )

    def _end_task(self, change: history.ExecutionEnded) -> Iterable[Message]:
        execution, fact = change.execution, change.fact
        if execution.kind == "delegation":
            return ()
        if change.output is not None:
            return (self._complete(execution, change.output),)
        if change.status == "failed":
            return (messages.task_failed(self._task(execution), at=fact.at, reason=change.reason),)
        return ()

    def _complete(self, execution: RecordedExecution, output: RecordedOutput) -> Message:
        if output.completed_at is None or output.duration_s is None:
            raise RecordError(f"The record is damaged: output of task '{execution.id}' has no end or no duration")
        tokens = output.metrics.get("total_tokens")
        if self._history.units:
            self._texts[execution.id] = output.raw
        task = replace(self._task(execution), description=output.task_description, agent_role=output.agent_role)
        return messages.task_completed(
            task,
            at=output.completed_at,
            duration_s=output.duration_s,
            token_count=tokens if isinstance(tokens, int) else UNKNOWN_TOKENS,
            tool_call_count=output.tool_call_count,
        )

    def _answer(self, execution: RecordedExecution, fact: Fact[ModelAnswered]) -> Message:
        answer, node = fact.data, self._history.nodes.get(node_key(execution.id))
        return messages.llm_iteration_completed(
            agent_role=execution.agent,
            task_description=execution.label or (node.description if node else "") or node_key(execution.id),
            iteration_index=int(fact.name.rsplit("/", 2)[1]),
            text=answer.text,
            tool_calls=answer.tool_calls,
            input_tokens=answer.input_tokens,
            output_tokens=answer.output_tokens,
            latency_s=answer.latency_s,
            instance=execution.id,
            reasoning=answer.reasoning,
        )

    def _call(self, change: history.CallEnded) -> Iterator[Message]:
        execution, result, intent = change.execution, change.fact.data, change.intent
        delegation = change.delegation
        if delegation is not None and delegation.worker is not None:
            data = _delegation_data(execution, delegation)
            if result.is_success:
                yield messages.delegation_completed(data, duration_s=result.duration_s)
            else:
                reason = result.text.removeprefix("Error: ")
                yield messages.delegation_failed(data, duration_s=result.duration_s, reason=reason)
        is_call = change.fact.name.rpartition("/call-")[2].isdecimal()
        if not is_call or (intent is None and delegation is None):
            return  # of a handler, or of an unknown tool
        requested, node = change.requested, self._history.nodes.get(node_key(execution.task.id))
        yield messages.tool_called(
            agent_role=execution.agent,
            task_index=0 if node is None else node.index,
            tool_name=intent.tool_name if intent else requested.name if requested else "",
            duration_s=result.duration_s,
            is_success=result.is_success,
            arguments=intent.arguments if intent else requested.arguments if requested else "",
            result=result.text,
            structured_result=result.structured_output,
            instance=execution.id,
        )

    def _round(self, execution: RecordedExecution, what: IterationEnded | StepEnded) -> Message:
        """Return the message about an iteration or a step (S-LOOP-107, S-GRAPH-75)."""
        key = what.unit.rpartition("/")[2]
        unit = self._history.units.get(key)
        if isinstance(what, IterationEnded):
            instances, message = what.instances, _iteration(execution.id, what, unit, self._texts)
        else:
            instances = what.output.instances
            message = messages.graph_state_completed(
                name=unit.name if isinstance(unit, GraphUnit) else key,
                state=what.state,
                number=what.step,
                most=unit.max_steps if isinstance(unit, GraphUnit) else 0,
                output="\n\n".join(self._texts.get(each, "") for each in instances),
                next_state=what.next_state,
                duration_s=what.duration_s,
                instance=execution.id,
            )
        if "/" not in what.unit:  # no unit around it shows them again
            for each in instances:
                self._texts.pop(each, None)
        return message


def _iteration(instance: str, what: IterationEnded, unit: Unit | None, texts: Mapping[str, str]) -> Message:
    names = dict(zip(unit.body, unit.body_names, strict=True)) if isinstance(unit, LoopUnit) else {}
    return messages.loop_iteration_completed(
        name=unit.name if isinstance(unit, LoopUnit) else what.unit.rpartition("/")[2],
        number=what.iteration,
        most=unit.max_iterations if isinstance(unit, LoopUnit) else 0,
        outputs={names.get(node_key(each), node_key(each)): texts.get(each, "") for each in what.instances},
        duration_s=what.duration_s,
        instance=instance,
    )


def _delegation_data(asking: RecordedExecution, delegation: history.Delegation) -> Mapping[str, object]:
    return {
        "delegation_id": delegation.request.task_id,
        "delegating_agent_role": asking.agent,
        "worker_role": delegation.role,
        "instance": asking.id,
    }


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


def _decision(asked: ReviewRequested, decided: ReviewDecided) -> Message:
    if decided.timed_out:
        return messages.review_timed_out(asked.review_id, asked.on_timeout.value)
    return messages.review_decided(asked.review_id, decided.verdict, decided.by)
