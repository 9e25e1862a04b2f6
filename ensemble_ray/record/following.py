"""Follow a run: send its recorded and live events as messages, the same ones to all readers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from ensemble_ray.errors import RecordError
from ensemble_ray.events import LlmIterationStartedEvent, TokenEvent, messages
from ensemble_ray.events.delivery import EventLog
from ensemble_ray.events.messages import (
    LAST_TYPE,
    SKIPPED_TYPE,
    Cursor,
    Message,
    ShownTask,
    WireEvent,
    render_token,
)
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact, as_text
from ensemble_ray.facts.runs import RecordedOutput, ReviewRequested
from ensemble_ray.plan.plan import GraphUnit, LoopUnit, Unit
from ensemble_ray.process.concurrency import SystemClock
from ensemble_ray.record import history
from ensemble_ray.record.history import RecordedExecution
from ensemble_ray.schedule.instructions import IterationEnded, StepEnded
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.metrics import UNKNOWN_TOKENS
from ensemble_ray.values.outputs import RunState

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RecordedRun


class EventProjection:
    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._history = history.RunHistory()
        self._texts: dict[str, str] = {}  # outputs by instance, if units may show them again

    def apply(self, fact: Fact) -> list[WireEvent]:
        found: list[Message] = []
        for change in self._history.apply(fact):
            found.extend(self._render(change))
        return [
            WireEvent(type=kind, data=data, cursor=Cursor(fact.seq, number))
            for number, (kind, data) in enumerate(found, start=1)
        ]

    def end(self) -> WireEvent | None:
        end = self._history.end
        if end is None:
            return None
        data = self._summary(end.at, end.data.reason.value)
        return WireEvent(type=LAST_TYPE, data=data, cursor=Cursor(end.seq, 1))

    def unrecorded_end(self, exit_reason: str, at: float) -> WireEvent:
        """Return the last message about a run without an end. No cursor, since the run may be resumed."""
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
            case history.BatchChanged(batch=batch):
                return (messages.batch_progress(batch.to_event(self._run_id)),)
            case history.RunStarted():
                header = change.fact.data
                begun = messages.ensemble_started(
                    header.ensemble_id or self._run_id,
                    at=self._history.started_at or 0.0,
                    total_tasks=len(self._history.nodes),
                    workflow=header.workflow or as_text((header.plan or {}).get("workflow")),
                )
                return (begun,)
            case _:
                return self._render_request(change)

    @staticmethod
    def _render_request(change: history.Change) -> Iterator[Message]:
        match change:
            case history.DelegationStarted(execution, delegation=delegation):
                data = _delegation_data(execution, delegation)
                if delegation.worker is None:
                    refusal = change.fact.data.refusal
                    reason = refusal.reason if refusal else "refused"
                    yield messages.delegation_failed(data, duration_s=0, reason=reason)
                else:
                    yield messages.delegation_started(data, task_description=delegation.request.task_description)
            case history.GateOpened(execution, fact):
                yield _review(fact.data, execution.id)
            case history.GateClosed(fact=fact, asked=asked) if asked is not None:
                gate, decided = asked.data, fact.data
                if decided.timed_out:
                    yield messages.review_timed_out(gate.review_id, gate.on_timeout.value)
                else:
                    yield messages.review_decided(gate.review_id, decided.verdict, decided.by)
            case _:
                pass

    def _task(self, execution: RecordedExecution) -> ShownTask:
        """Show a task that was made during the run by its key."""
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
        task = structs.replace(self._task(execution), description=output.task_description, agent_role=output.agent_role)
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
            reused=answer.reused,
            cached_tokens=answer.cached_tokens,
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
            return
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
        if "/" not in what.unit:
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


POLL_S = 0.25  # How often a reader polls the record of a quiet run, s.
_KEPT = 1000  # Live events for slow readers; older events are dropped.
_PAGE = 200  # Messages per page.


class LiveEvents:
    """The live events of one run of this process. A listener; thread-safe."""

    def __init__(self) -> None:
        self.log = EventLog(is_open=True, kept=_KEPT)
        self.is_closed = False

    def on_token(self, event: TokenEvent) -> None:
        self.log.emit(event)

    def begin_answer(self, event: LlmIterationStartedEvent) -> None:
        """Mark the start of a model call between the tokens; its messages are not stored."""
        self.log.emit(replace(event, messages=()))

    def close(self) -> None:
        self.is_closed = True
        self.log.close()


class FollowedStore(Protocol):
    def read(self, run_id: str, *, after: int = 0) -> AsyncGenerator[Sequence[Fact]]: ...

    async def summary(self, run_id: str) -> RecordedRun | None: ...


class SharedRecordReader:
    """Lets the many readers of a run share one check for new facts."""

    def __init__(self, store: FollowedStore, *, lasting_s: float = POLL_S * 0.9) -> None:
        self._store = store
        self._lasting_s = lasting_s
        #: by run: last position and time of a check without later facts, newest last
        self._ends: OrderedDict[str, tuple[int, float]] = OrderedDict()

    async def read(self, run_id: str, *, after: int = 0) -> AsyncGenerator[Sequence[Fact]]:
        now = asyncio.get_running_loop().time()
        end, seen_at = self._ends.get(run_id, (-1, 0.0))
        if after == end and now - seen_at < self._lasting_s:
            return
        last = after
        async with aclosing(self._store.read(run_id, after=after)) as pages:
            async for page in pages:
                last = page[-1].seq if page else last
                yield page
        self._ends[run_id] = (last, now)
        self._ends.move_to_end(run_id)
        while (oldest := next(iter(self._ends.values())))[1] + self._lasting_s < now and oldest is not self._ends[
            run_id
        ]:
            self._ends.popitem(last=False)

    async def summary(self, run_id: str) -> RecordedRun | None:
        return await self._store.summary(run_id)

    def drop(self, run_id: str) -> None:
        self._ends.pop(run_id, None)


class RunFollower:
    def __init__(
        self,
        store: FollowedStore,
        run_id: str,
        *,
        after: Cursor | None = None,
        live: LiveEvents | None = None,
        outcome: Callable[[], Awaitable[str | None]] | None = None,
        types: frozenset[str] | None = None,
    ) -> None:
        """Start after a cursor; `live` has the live events if this process runs the run.

        With `types` only messages of these types are read, the last one, and `SKIPPED_TYPE` with the cursor of the others.
        """
        self.run_id = run_id
        self._store = store
        self.cursor = after or Cursor()
        self._live = live
        self._outcome = outcome
        self._types = types
        self._projection = EventProjection(run_id)
        self._seq = 0
        self._live_cursor = 0
        self.is_over = False
        self._knows_closed = False

    async def read(self, timeout_s: float) -> Sequence[WireEvent]:
        """Return the next messages as soon as they exist; none after the timeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self.is_over:
            if messages := self._select(await self._next()):
                return messages
            left = deadline - loop.time()
            if left <= 0:
                break
            await self._wait(min(left, POLL_S))
        return ()

    def _select(self, messages: list[WireEvent]) -> list[WireEvent]:
        if self._types is None or not messages:
            return messages
        selected = [each for each in messages if each.type in self._types or each.type == LAST_TYPE]
        cursors = [each.cursor for each in messages if each.cursor is not None]
        if cursors and all(each.cursor != cursors[-1] for each in selected):
            selected.append(WireEvent(type=SKIPPED_TYPE, data={}, cursor=cursors[-1]))
        return selected

    async def _next(self) -> list[WireEvent]:
        live: list[WireEvent] = []
        if self._live is not None:
            events, self._live_cursor, _ = self._live.log.read(self._live_cursor)
            now = SystemClock().now()
            live = [render_token(event, now) for event in events if isinstance(event, TokenEvent)]
        messages = await self._read_record()
        if messages or live:
            return [*messages, *live]
        end = self._projection.end()
        reason: str | None = None
        if end is None and self._outcome is not None:
            reason = await self._outcome()
        elif end is None:
            summary = await self._store.summary(self.run_id)
            if summary is not None and not summary.state.is_active and summary.state is not RunState.WAITING:
                reason = (summary.state if summary.state.is_final else RunState.INTERRUPTED).value
        if reason is not None:
            # The run may have ended between the two checks.
            messages = await self._read_record()
            end = self._projection.end() or self._projection.unrecorded_end(reason, SystemClock().now())
        if end is None:
            return []
        if messages:
            return messages
        self.is_over = True
        return [*self._unread([end])]

    async def _read_record(self) -> list[WireEvent]:
        messages: list[WireEvent] = []
        async with aclosing(self._store.read(self.run_id, after=self._seq)) as pages:
            async for page in pages:
                for fact in page:
                    self._seq = fact.seq
                    messages += self._unread(self._projection.apply(fact))
                if len(messages) >= _PAGE:
                    break
        return messages

    def _unread(self, messages: Sequence[WireEvent]) -> list[WireEvent]:
        unread = [each for each in messages if each.cursor is None or each.cursor > self.cursor]
        self.cursor = max([self.cursor, *(each.cursor for each in unread if each.cursor is not None)])
        return unread

    async def _wait(self, timeout_s: float) -> None:
        if self._live is None:
            await asyncio.sleep(timeout_s)
            return
        is_changed = await self._live.log.wait_until_changed(self._live_cursor, timeout_s=timeout_s)
        if is_changed and self._live.is_closed:
            if self._knows_closed:
                await asyncio.sleep(timeout_s)
            self._knows_closed = True
