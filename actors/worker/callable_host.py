"""The process with the only copy of a run's handlers, guardrails, predicates and policies (S-SET-31).

It also runs the agents before predicates (`plan.placement`).
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.packing import PackedQuestion, packed_evaluation, unpack, unpack_output
from ensemble_ray.actors.link.reach import refuse
from ensemble_ray.actors.link.wire import CallableRef, CallablesUpdate, TaskCallables, WireOrder, WireResult
from ensemble_ray.actors.worker.agent import AgentActor
from ensemble_ray.errors import EnsembleError, ValidationError, message_of
from ensemble_ray.errors.travel import ErrorChain
from ensemble_ray.execute.callables import LocalCallables
from ensemble_ray.execute.orders import EvaluationFailed, FollowingQuestions, HistoryPart
from ensemble_ray.execute.scope import Callables
from ensemble_ray.process.concurrency import USER_ERRORS
from ensemble_ray.process.config import dumps
from ensemble_ray.runs.unit_evaluations import LocalPredicates
from ensemble_ray.schedule.instructions import UnitQuestion

T = TypeVar("T")
#: A report waits so long for verdicts, s. A round trip of 1 ms does not matter for a slower predicate.
_WAIT_S = 0.01


class CallableHost(AgentActor):
    def __init__(self, name: str, scheduler: str = spawn.SCHEDULER) -> None:
        super().__init__(name, scheduler)
        self._held: dict[str, HeldCallables] = {}
        self._callables: dict[str, asyncio.Future[LocalCallables]] = {}
        self._predicates: dict[str, PredicateEvaluator] = {}

    async def hold(self, body: bytes) -> None:
        """Store callables, and drop callables of finished tasks."""
        run_id, update = unpack(body, tuple[str, CallablesUpdate])
        held = self._held.setdefault(run_id, HeldCallables())
        held.update(update)
        callables = self._callables_in(run_id)
        if callables.done():
            return
        try:
            policies = [held.load(ref) for ref in update.policies]
            predicates = {path: held.load(ref) for path, ref in update.predicates.items()}
            for bundle in update.bundles if update.is_complete else ():
                held.load(CallableRef(bundle))
        except Exception as error:
            refusal = ValidationError(
                f"The run's handlers, guardrails, predicates and delegation policies cannot be loaded in a worker process: {message_of(error)}. "
                "Install the modules they come from on every node, or use runtime='inline'"
            )
            refuse(callables, refusal)
            refuse(self._binding(run_id), refusal)  # no `bind` will follow
            raise refusal from error
        self._predicates[run_id] = PredicateEvaluator(LocalPredicates(predicates))
        callables.set_result(LocalCallables(held, policies))

    async def evaluate(self, run_id: str, path: str, argument: bytes) -> bytes:
        """Return `(value, None)` or `(None, error)` as bytes."""
        try:
            # An agent's process may call before the scheduler's message with the callables has arrived.
            held = await asyncio.shield(self._callables_in(run_id))
            loaded: object = pickle.loads(argument)  # noqa: S301  our own cluster's bytes
            value = await self._call(run_id, partial(held.evaluate, path, loaded))
            return dumps((value, None))
        except USER_ERRORS as error:  # it is raised in the calling task; `sys.exit` in a guardrail ends no process
            return dumps((None, ErrorChain(error)))

    async def holds_predicate(self, body: bytes) -> bool | EvaluationFailed | None:
        """Return None if this process lacks the history that was sent before (S-LOOP-54)."""
        asked: PackedQuestion = unpack(body, tuple)
        run_id, question, sent_count, new = asked
        try:
            await asyncio.shield(self._callables_in(run_id))
        except USER_ERRORS as error:  # the callables cannot be loaded here
            return packed_evaluation(EvaluationFailed.of(error))
        try:
            holds = partial(self._predicates[run_id].holds, question, sent_count=sent_count, new=new)
            return await self._call(run_id, holds)
        except EnsembleError as error:  # the deps cannot be opened here
            return packed_evaluation(EvaluationFailed.of(error))

    async def _perform(self, run_id: str, order: WireOrder, templates: Mapping[str, bytes]) -> WireResult:
        """Return a report with the verdicts that follow the output (S-LOOP-189)."""
        report = await super()._perform(run_id, order, templates)
        held = self._predicates.get(run_id)  # None: the run was released meanwhile
        if order.asks is None or held is None or report.status != "completed" or report.output is None:
            return report
        return replace(
            report, verdicts=await self._host.call(run_id, partial(held.ask_after, order.asks, report.output))
        )

    async def _call(self, run_id: str, function: Callable[[], Awaitable[T]]) -> T:
        """Call user code with the run's context, which arrives with `bind`."""
        await asyncio.shield(self._binding(run_id))
        return await self._host.call(run_id, function)

    async def forget_history(self, run_id: str, unit: str) -> None:
        if run_id in self._predicates:
            self._predicates[run_id].drop(unit)

    async def release(self, run_id: str) -> bool:
        self._held.pop(run_id, None)
        predicates = self._predicates.pop(run_id, None)
        callables = self._callables.pop(run_id, None)
        if callables is not None:
            callables.cancel()
        is_idle = await super().release(run_id)
        return is_idle and (predicates is None or not predicates.is_asking)

    def _callables_in(self, run_id: str) -> asyncio.Future[LocalCallables]:
        if run_id not in self._callables:
            self._callables[run_id] = asyncio.get_running_loop().create_future()
        return self._callables[run_id]

    def _callables_of(self, run_id: str, host: Any) -> Callables:  # noqa: ARG002  this process is the host
        return self._callables[run_id].result()


class PredicateEvaluator:
    def __init__(self, predicates: LocalPredicates) -> None:
        self._predicates = predicates
        self._open: dict[UnitQuestion, asyncio.Task[bool | EvaluationFailed | None]] = {}
        self._asking = 0

    @property
    def is_asking(self) -> bool:
        return self._asking > 0

    async def holds(
        self, question: UnitQuestion, *, sent_count: int, new: Sequence[HistoryPart[bytes]]
    ) -> bool | EvaluationFailed | None:
        """Wait for an evaluation in progress, too. Return None if this process lacks the earlier history."""
        asked = self._open.pop(question, None)
        answer = None if asked is None else await asyncio.shield(asked)
        return await self._ask(question, sent_count, new) if answer is None else answer

    async def ask_after(self, asks: FollowingQuestions[bytes], output: bytes) -> tuple[bool | EvaluationFailed, ...]:
        """Evaluate the questions after a task until one holds. Return the verdicts that are ready in time."""
        *earlier, last = asks.new
        sent_count = asks.sent_count
        new: Sequence[HistoryPart[bytes]] = (*earlier, replace(last, outputs=(*last.outputs, output)))
        loop = asyncio.get_running_loop()
        until = loop.time() + _WAIT_S
        verdicts: list[bool | EvaluationFailed] = []
        for question in asks.questions:
            asking = loop.create_task(self._ask(question, sent_count, new))
            done, _ = await asyncio.wait([asking], timeout=max(0.0, until - loop.time()))
            if not done:
                self._open[question] = asking
                break
            verdict = asking.result()
            if verdict is None:
                break  # the scheduler asks again and sends the missing parts
            verdicts.append(verdict)
            if verdict is not False:
                break
            sent_count, new = sent_count + len(new), ()
        return tuple(verdicts)

    def drop(self, unit: str) -> None:
        self._open = {question: asked for question, asked in self._open.items() if question.unit != unit}
        self._predicates.drop(unit)

    async def _ask(
        self, question: UnitQuestion, sent_count: int, new: Sequence[HistoryPart[bytes]]
    ) -> bool | EvaluationFailed | None:
        self._asking += 1
        try:
            parts = [
                HistoryPart(names=part.names, outputs=tuple(map(unpack_output, part.outputs)), is_joined=part.is_joined)
                for part in new
            ]
            answer = await self._predicates.holds(question, sent_count=sent_count, new=parts)
        except USER_ERRORS as error:  # such as an output whose class is missing here
            answer = EvaluationFailed.of(error)
        finally:
            self._asking -= 1
        return packed_evaluation(answer) if isinstance(answer, EvaluationFailed) else answer


class _HeldTask(Struct, frozen=True, kw_only=True):
    handler: object
    input_guardrails: tuple[object, ...]
    output_guardrails: tuple[object, ...]


class HeldCallables(Mapping[str, _HeldTask]):
    """Callables of a run by task. Tasks that share an object receive the same one (S-SET-31)."""

    def __init__(self) -> None:
        self._bundles: dict[str, bytes] = {}
        self._loaded: dict[str, object] = {}
        self._tasks: dict[str, TaskCallables] = {}

    def update(self, update: CallablesUpdate) -> None:
        """Drop finished callables, add new ones. One that cannot be loaded raises when it is used."""
        for key in update.done_tasks:
            self._tasks.pop(key, None)
        for name in update.done_bundles:
            self._bundles.pop(name, None)
            self._loaded.pop(name, None)
        for name, body in update.bundles.items():
            self._bundles.setdefault(name, body)
        self._tasks.update(update.tasks)

    def __getitem__(self, key: str) -> _HeldTask:
        callables = self._tasks[key]
        try:
            return _HeldTask(
                handler=None if callables.handler is None else self.load(callables.handler),
                input_guardrails=tuple(map(self.load, callables.input_guardrails)),
                output_guardrails=tuple(map(self.load, callables.output_guardrails)),
            )
        except Exception as error:
            raise ValidationError(
                f"A handler or guardrail cannot be loaded in a worker process: {message_of(error)}. "
                "Install the module it comes from on every node, or use runtime='inline'"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def load(self, ref: CallableRef) -> object:
        if ref.bundle not in self._loaded:
            body = self._bundles[ref.bundle]
            self._loaded[ref.bundle] = cast("object", pickle.loads(body))  # noqa: S301  our own driver's bytes
        held = self._loaded[ref.bundle]
        return held if ref.position is None else cast("tuple[object, ...]", held)[ref.position]
