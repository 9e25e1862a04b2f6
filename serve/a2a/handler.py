"""TeamHandler: what the SDK's dispatcher asks about one team, for one request (S-INT-72 to S-INT-78).

In: messages of the protocol. Out: runs of the team as tasks. Nothing of a run lives here: every answer is asked from the `RunService`.
A refusal that HTTP has a status for is kept, so that the route answers with it; all others are errors of the protocol.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, NoReturn, TypeVar

from a2a.server.request_handlers.request_handler import RequestHandler
from a2a.types import (
    AgentCard,
    CancelTaskRequest,
    DeleteTaskPushNotificationConfigRequest,
    GetExtendedAgentCardRequest,
    GetTaskPushNotificationConfigRequest,
    GetTaskRequest,
    ListTaskPushNotificationConfigsRequest,
    ListTaskPushNotificationConfigsResponse,
    ListTasksRequest,
    ListTasksResponse,
    Message,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskPushNotificationConfig,
)
from a2a.utils.errors import (
    A2AError,
    ExtendedAgentCardNotConfiguredError,
    InternalError,
    InvalidParamsError,
    PushNotificationNotSupportedError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
)
from typing_extensions import override

from ensemble_ray.access.keys import Right
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.serve.a2a.inputs import decision_of, inputs_of
from ensemble_ray.serve.a2a.streams import TaskStream
from ensemble_ray.serve.a2a.tasks import CONTEXT_TAG, context_of, task_of
from ensemble_ray.serve.asked_run import AskedRun
from ensemble_ray.serve.control_schemas import ReviewConflict
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.routes.visible_runs import visible_run
from ensemble_ray.serve.run_schemas import NewRun, RunStatus

if TYPE_CHECKING:
    from a2a.server.context import ServerCallContext
    from a2a.server.events.event_queue import Event
    from starlette.types import Receive

    from ensemble_ray.serve.callers import Caller
    from ensemble_ray.serve.run_schemas import EnsembleInfo, RunDetail
    from ensemble_ray.serve.run_service import RunService

T = TypeVar("T")
_log = bounded_logger(__name__)
#: Statuses that an answer has as a whole; the protocol has no errors for them.
_OF_HTTP = frozenset(
    {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT}
)
#: Characters of the name of a conversation.
_LONGEST_CONTEXT = 256
#: A run whose gates are decided waits until what drives it goes on with it; it is looked at so often, and so long, s.
_LOOK_S, _PATIENCE_S = 0.25, 30.0
#: How long the answer to a cancellation waits for the end of the run, s.
_CANCEL_S = 5.0


class TeamHandler(RequestHandler):
    """One team as an agent, for one request of one caller."""

    def __init__(
        self,
        service: RunService,
        caller: Caller,
        info: EnsembleInfo,
        receive: Receive,
        *,
        traceparent: str | None = None,
    ) -> None:
        """Make it.

        Args:
            service: Has the runs.
            caller: Who asks.
            info: The team.
            receive: Says when the client goes away.
            traceparent: Span of the client that runs which are begun are part of (S-INT-38); None: there is none.
        """
        self._service = service
        self._caller = caller
        self._info = info
        self._receive = receive
        self._traceparent = traceparent
        #: the answer to the request in place of an error of the protocol
        self.refusal: Refusal | None = None

    @override
    async def on_message_send(self, params: SendMessageRequest, context: ServerCallContext) -> Task:
        """Begin a run or decide at its gate; return it when it ended or waits for a person, or at once if the client likes."""
        return await self._translate_refusals(self._send_message(params))

    @override
    async def on_message_send_stream(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event]:
        """Begin a run or decide at its gate, and tell what happens until it ends or waits for a person."""
        run = await self._translate_refusals(self._carry_out(params.message))
        async with aclosing(self._stream_run(run)) as events:
            async for event in events:
                yield event

    @override
    async def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event]:
        """Tell what happens in a run that goes on."""
        run = await self._translate_refusals(self._get_own_run(params.id, Right.READ))
        if run.status.is_final:
            raise UnsupportedOperationError(f"Task '{run.run_id}' is over: ask for it with GetTask")
        async with aclosing(self._stream_run(run)) as events:
            async for event in events:
                yield event

    @override
    async def on_get_task(self, params: GetTaskRequest, context: ServerCallContext) -> Task:
        """Return a run as it stands."""
        return await self._translate_refusals(self._get_task(params.id))

    @override
    async def on_cancel_task(self, params: CancelTaskRequest, context: ServerCallContext) -> Task:
        """Ask a run to end, and return it as it stands a moment later."""
        return await self._translate_refusals(self._cancel_run(params.id))

    @override
    async def on_list_tasks(self, params: ListTasksRequest, context: ServerCallContext) -> ListTasksResponse:
        """Refuse: the endpoint has a list of its own."""
        raise UnsupportedOperationError("Tasks are not listed here: GET /runs of the endpoint lists runs")

    @override
    async def on_get_extended_agent_card(
        self, params: GetExtendedAgentCardRequest, context: ServerCallContext
    ) -> AgentCard:
        """Refuse: the card has everything."""
        raise ExtendedAgentCardNotConfiguredError

    @override
    async def on_create_task_push_notification_config(
        self, params: TaskPushNotificationConfig, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        """Refuse: the endpoint calls nobody."""
        raise PushNotificationNotSupportedError

    @override
    async def on_get_task_push_notification_config(
        self, params: GetTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        """Refuse: the endpoint calls nobody."""
        raise PushNotificationNotSupportedError

    @override
    async def on_list_task_push_notification_configs(
        self, params: ListTaskPushNotificationConfigsRequest, context: ServerCallContext
    ) -> ListTaskPushNotificationConfigsResponse:
        """Refuse: the endpoint calls nobody."""
        raise PushNotificationNotSupportedError

    @override
    async def on_delete_task_push_notification_config(
        self, params: DeleteTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> None:
        """Refuse: the endpoint calls nobody."""
        raise PushNotificationNotSupportedError

    async def _send_message(self, params: SendMessageRequest) -> Task:
        run = await self._carry_out(params.message)
        if not params.configuration.return_immediately and not _is_settled(run):
            run = await self._make_asked_run(run.run_id).end_for(self._receive, or_gate=True)
        return task_of(run)

    async def _get_task(self, run_id: str) -> Task:
        return task_of(await self._get_own_run(run_id, Right.READ))

    async def _cancel_run(self, run_id: str) -> Task:
        await self._get_own_run(run_id, Right.RUN)
        await self._service.cancel(run_id)
        return task_of(await self._service.wait(run_id, _CANCEL_S))

    async def _carry_out(self, message: Message) -> RunDetail:
        """Carry out what a message asks for, and return its run."""
        if message.task_id:
            return await self._decide(message)
        self._caller.check(Right.RUN)
        tags = {CONTEXT_TAG: message.context_id} if message.context_id else {}
        if len(message.context_id) > _LONGEST_CONTEXT:
            raise _wrong(f"context_id has more than {_LONGEST_CONTEXT} characters")
        inputs = inputs_of(message.parts, self._info)
        asked = NewRun(ensemble=self._info.name, inputs=inputs, tags=tags, traceparent=self._traceparent)
        taken = await self._service.start(asked, idempotency_key=self._key(message))
        return await self._service.get(taken.run_id)

    def _key(self, message: Message) -> str | None:
        """Return what makes a message that is sent again the same request; apart for callers and teams."""
        if not message.message_id:
            return None
        digest = hashlib.sha256(f"{self._info.name}\n{message.message_id}".encode()).hexdigest()
        return f"{self._caller.name}:a2a:{digest}"

    async def _decide(self, message: Message) -> RunDetail:
        run = await self._get_own_run(message.task_id, Right.REVIEW)
        if message.context_id and message.context_id != context_of(run):
            raise _wrong(f"Task '{run.run_id}' is of another context than '{message.context_id[:200]}'")
        if not run.reviews:
            raise _wrong(f"Task '{run.run_id}' asks nothing: it is {run.status}. Begin another one without a task_id")
        gate_id, decision = decision_of(message.parts, run.reviews)
        decided = await self._service.decide(run.run_id, gate_id, decision, by=self._caller.name)
        if isinstance(decided, ReviewConflict):
            raise _wrong(f"Gate '{gate_id}' was decided before: {decided.first.decision}, by {decided.first.by}")
        return await self._service.get(run.run_id)

    async def _get_own_run(self, run_id: str, right: Right) -> RunDetail:
        """Return a run of this team."""
        self._caller.check(right)
        run = await visible_run(self._service, self._caller, run_id)
        if run.ensemble != self._info.name:
            raise Refusal(HTTPStatus.NOT_FOUND, "RUN_NOT_FOUND", f"There is no run '{run_id[:200]}'")
        return run

    def _make_asked_run(self, run_id: str) -> AskedRun:
        return AskedRun(self._service, run_id, ends_with_client=False)

    async def _stream_run(self, run: RunDetail) -> AsyncGenerator[Event]:
        """Yield what happens in a run; what goes wrong meanwhile is an error of the protocol."""
        async with aclosing(self._follow_run(run)) as events:
            while (event := await self._translate_refusals(anext(events, None))) is not None:
                yield event

    async def _follow_run(self, run: RunDetail) -> AsyncGenerator[Event]:
        """Yield a run, what its last task says, which tasks are done, and how it ended or what it asks."""
        yield task_of(run)
        if _is_settled(run):
            return
        stream = TaskStream(await self._wait_until_continued(run), self._info.chat.streamed_task)
        async with aclosing(self._make_asked_run(run.run_id).follow()) as happening:
            async for each in happening:
                for event in stream.events(each):
                    yield event

    async def _wait_until_continued(self, run: RunDetail) -> RunDetail:
        """Return a run that goes on, once what drives it took notice of a decision."""
        for _ in range(int(_PATIENCE_S / _LOOK_S)):
            if run.status is not RunStatus.WAITING or run.reviews:
                break
            await asyncio.sleep(_LOOK_S)
            run = await self._service.get(run.run_id)
        return run

    async def _translate_refusals(self, asking: Awaitable[T]) -> T:
        """Return what the endpoint says; its refusals are errors of the protocol.

        The text of a defect is of use to the operator alone, as on every other route.
        """
        try:
            return await asking
        except A2AError:
            raise
        except Refusal as refusal:
            self._refuse(refusal)
        except Exception as error:  # noqa: BLE001  a defect of ours
            _log.error("Team '%s': %s in an answer of A2A", self._info.name, type(error).__name__, exc_info=error)
            raise InternalError(f"{type(error).__name__} in the endpoint. Its log says more") from None

    def _refuse(self, refusal: Refusal) -> NoReturn:
        if refusal.status in _OF_HTTP or refusal.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.refusal = refusal
            raise InternalError(refusal.message) from refusal
        match refusal.code:
            case "RUN_NOT_FOUND":
                raise TaskNotFoundError(refusal.message) from refusal
            case "RUN_OVER":
                raise TaskNotCancelableError(refusal.message) from refusal
            case _:
                raise InvalidParamsError(refusal.message) from refusal


def _is_settled(run: RunDetail) -> bool:
    """Return whether nothing more happens in a run by itself; one whose gates are all decided goes on in a moment."""
    return run.status.is_final or (run.status is RunStatus.WAITING and bool(run.reviews))


def _wrong(text: str) -> Refusal:
    return Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", text)
