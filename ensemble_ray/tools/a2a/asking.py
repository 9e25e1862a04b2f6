"""Call an agent of the A2A protocol: send one message and stream the answer of its task."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, cast

from ensemble_ray.errors import ToolConfigurationError, ValidationError
from ensemble_ray.process.forks import SystemClock
from ensemble_ray.tools.a2a.connecting import (
    ANSWER_S,
    AgentAddress,
    ConnectionFailures,
    NewestAnswer,
    RemoteAgentError,
    RemoteAnswer,
    RemoteTask,
    cause_of,
    connect,
    has_unknown_outcome,
    is_beyond_limits,
    is_refusal,
    is_too_deep,
    open_http_client,
    sdk_errors,
    was_not_processed,
)
from ensemble_ray.tools.tool import (
    AbstractAgentTool,
    ToolResult,
    check_effect,
    check_tool_name,
    make_tool_name,
    timeout_seconds,
)
from ensemble_ray.values.ids import new_run_id, uuid_of
from ensemble_ray.values.messages import Effect

if TYPE_CHECKING:
    from a2a.client import Client
    from a2a.types import SendMessageRequest, StreamResponse
    from a2a.utils.errors import A2AError


#: The generic limit of a tool call comes later than this tool's own limit, which reports more, and its cancellation.
_GRACE_S = 15.0
_UNKNOWN = (
    "Outcome unknown: {error}. The agent may have finished all, a part or none of the work, and the request was not "
    "repeated. Check the outcome before you call it again. If you cannot check it, do not repeat the call, and say in "
    "your answer that its outcome is unknown."
)


class A2ATool(AbstractAgentTool):
    """Sends its input to an agent of another system and returns the agent's answer.

    Args:
        url: URL of the agent's card, up to `/.well-known/agent-card.json`.
        name: Name for the model; None: `ask_` and the last part of the URL.
        description: Explains to the model when to use the tool; None: a general text.
        headers: Headers of every request; their values are never shown.
        hosts: Further hosts that the card may name, besides the host of the URL.
        effect: Effect of a call on the outside world. With `once`, a message that may have arrived is not sent again.
        timeout: Time limit of one call, in seconds or as a `timedelta`.
        connect_timeout: Time limit of a connection, in seconds or as a `timedelta`.

    Raises:
        ValidationError: the URL, the name, a header or a limit is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        description: str | None = None,
        headers: Mapping[str, str] | None = None,
        hosts: Collection[str] = (),
        effect: Effect = "once",
        timeout: float | timedelta = 30.0,
        connect_timeout: float | timedelta = 10.0,
    ) -> None:
        self._address = AgentAddress.of(
            url, headers=headers, hosts=hosts, connect_timeout_s=seconds_of(connect_timeout, "connect_timeout")
        )
        self.name = name or f"ask_{make_tool_name(self._address.name)}"
        if problem := check_tool_name(self.name):
            raise ValidationError(f"A2ATool: {problem}")
        self.description = (
            description or f"Asks the agent '{self._address.name}' of another system. Say all it must know."
        )
        self.effect = check_effect(effect, "A2ATool")
        self._limit_s = seconds_of(timeout, "timeout")
        self.timeout = self._limit_s + _GRACE_S

    def __repr__(self) -> str:
        return f"A2ATool({self._address.url!r})"

    async def do_execute(self, text: str, /) -> ToolResult:
        message_id = self.context.idempotency_key or new_run_id()
        answering = ask_agent(
            self._address, text, message_id=message_id, may_repeat=self.effect != "once", timeout_s=self._limit_s
        )
        try:
            async with aclosing(answering) as pieces:
                async for piece in pieces:
                    if isinstance(piece, RemoteAnswer):
                        return ToolResult.success(piece.shown, piece.data)
        except RemoteAgentError as error:
            is_unknown = error.may_be_done and self.effect == "once"
            return ToolResult.failure(_UNKNOWN.format(error=error) if is_unknown else str(error))
        except ToolConfigurationError as error:
            return ToolResult.failure(str(error))
        return ToolResult.failure(f"Remote agent {self._address.url} did not answer")


def seconds_of(timeout: float | timedelta, name: str) -> float:
    """Return a time limit in seconds; raise `ValidationError` if it is invalid or infinite."""
    seconds = timeout_seconds(timeout)
    if seconds is None:
        raise ValidationError(f"RemoteAgent {name} must end")
    return seconds


#: Longest silence on the stream of a task, s. After it, the stream counts as lost.
_SILENCE_S = 120.0
#: First and longest pause between two polls of a task without a stream, s.
_FIRST_POLL_S, _LAST_POLL_S = 0.25, 5.0
#: Time limit of a cancellation, s. Our own endpoint answers one within 5 s.
_CANCEL_S = 10.0
#: How often a cancelled task is replaced by a new message.
_MOST_RESTARTS = 5
#: Metadata key of the deadline; the protocol has no field for it.
_DEADLINE = "deadline"


async def ask_agent(
    address: AgentAddress, text: str, *, message_id: str, may_repeat: bool, timeout_s: float
) -> AsyncGenerator[str | RemoteAnswer]:
    """Yield the pieces of an answer as they arrive, then the complete answer. Failures raise `RemoteAgentError`.

    A call that is repeated after a crash uses the same `message_id`. A message that may have arrived is sent again only if
    `may_repeat`.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    call = _AgentCall(address, text, message_id, may_repeat=may_repeat, timeout_s=timeout_s)
    async with aclosing(call.stream(ConnectionFailures(deadline))) as pieces:
        while True:
            # The timeout covers each step, not the yield: it must not cancel the code that consumes the pieces.
            try:
                async with asyncio.timeout_at(deadline):
                    piece = await anext(pieces, None)
            except TimeoutError:
                raise call.failure(f": no answer within {timeout_s:g} s") from None
            if piece is None:
                break
            yield piece
    yield call.answer()


class _AgentCall:
    """One message and the state of its task."""

    def __init__(
        self, address: AgentAddress, text: str, message_id: str, *, may_repeat: bool, timeout_s: float
    ) -> None:
        self._address = address
        self._text = text
        self._first_id = self._message_id = message_id
        self._may_repeat = may_repeat
        self._timeout_s = timeout_s
        self._deadline = SystemClock().now() + timeout_s
        self._task = RemoteTask()
        self._newest = NewestAnswer()
        self._restarts = 0

    def answer(self) -> RemoteAnswer:
        """Return the answer of a settled task; raise `RemoteAgentError` if there is none."""
        try:
            answer = self._task.answer()
        except ValueError as error:
            raise self.failure(f": its answer cannot be read: {error}") from error
        if answer.failure is not None:
            raise RemoteAgentError(f"Remote agent {self._address.url}: {answer.failure}")
        return answer

    def failure(self, text: str, cause: A2AError | None = None) -> RemoteAgentError:
        """Return the error of a call without a readable answer.

        If the answer was final and only nested too deeply, the outcome of the work is known (S-INT-97).
        """
        is_answered = cause is not None and is_too_deep(cause) and self._newest.is_final
        may_be_done = self._task.may_have_begun and not is_answered
        return RemoteAgentError(f"Remote agent {self._address.url}{text}", may_be_done=may_be_done)

    async def stream(self, failures: ConnectionFailures) -> AsyncGenerator[str]:
        """Yield pieces of text until the task is settled; finally, cancel it if the agent still works on it."""
        task = self._task
        async with open_http_client(self._address, self._timeout_s, self._newest) as http:
            client = await connect(self._address, http, failures)
            try:
                while not task.is_settled:
                    if task.task_id is not None:
                        await self._poll(client, failures)
                        break
                    async with aclosing(self._send(client, failures)) as pieces:
                        async for piece in pieces:
                            yield piece
            finally:
                if task.task_id is not None and not task.is_over:
                    await _cancel(client, task.task_id)

    async def _send(self, client: Client, failures: ConnectionFailures) -> AsyncGenerator[str]:
        """Send the message and yield the answer's text.

        It also returns if the message must be sent again, and if the connection is lost after the task is known.
        """
        from a2a.utils.errors import A2AError

        task = self._task
        may_have_begun_before, task.may_have_begun = task.may_have_begun, True
        is_first = True
        try:
            async with aclosing(_receive(client, self._message(), task)) as responses:
                async for response in responses:
                    failures.reset()
                    piece = task.update(response)
                    if is_first and self._restart_if_cancelled():
                        return
                    is_first = False
                    if piece:
                        yield piece
                    if task.is_settled:  # the agent may leave its stream open (S-INT-98)
                        return
        except A2AError as error:
            await self._handle_failure(error, failures, may_have_begun_before=may_have_begun_before)
        else:
            if task.task_id is None and not task.is_settled:
                raise self.failure(": its answer has neither a task nor a message")

    async def _handle_failure(
        self, error: A2AError, failures: ConnectionFailures, *, may_have_begun_before: bool
    ) -> None:
        """Pause before the next attempt; raise `RemoteAgentError` if there must be none."""
        task = self._task
        if task.is_settled:
            return
        if task.task_id is None and (is_refusal(error) or was_not_processed(error)):
            task.may_have_begun = may_have_begun_before
        is_final = is_refusal(error) or has_unknown_outcome(error) or (task.may_have_begun and not self._may_repeat)
        if (task.task_id is None and is_final) or not await failures.pause():
            from a2a.client.errors import A2AClientError

            refuses = is_refusal(error) and not isinstance(error, A2AClientError)
            raise self.failure(f"{' refuses' if refuses else ''}: {cause_of(error)}", error) from error

    def _restart_if_cancelled(self) -> bool:
        """Return whether the message must be sent again under another id, because its task is cancelled already.

        An earlier sender of the message cancelled the task when its run ended. The next id is derived from the first one, so
        that a message after a crash finds the same tasks.
        """
        if not (self._may_repeat and self._task.is_cancelled) or self._restarts == _MOST_RESTARTS:
            return False
        self._restarts += 1
        self._message_id = uuid_of(f"{self._first_id}/again-{self._restarts}")
        self._task.reset()
        return True

    def _message(self) -> SendMessageRequest:
        from a2a.types import Message, Part, Role, SendMessageRequest

        message = Message(message_id=self._message_id, role=Role.ROLE_USER, parts=[Part(text=self._text)])
        request = SendMessageRequest(message=message)
        request.metadata.update({_DEADLINE: datetime.fromtimestamp(self._deadline, UTC).isoformat()})
        return request

    async def _poll(self, client: Client, failures: ConnectionFailures) -> None:
        from a2a.types import GetTaskRequest
        from a2a.utils.errors import A2AError

        task = self._task
        pause_s = _FIRST_POLL_S
        while True:
            try:
                with sdk_errors():
                    async with asyncio.timeout(ANSWER_S):
                        found = await client.get_task(GetTaskRequest(id=task.task_id or ""))
            except A2AError as error:
                if is_refusal(error) or is_beyond_limits(error) or not await failures.pause():
                    raise self.failure(f" says of its task '{task.task_id}': {cause_of(error)}", error) from error
                continue
            failures.reset()
            task.update_from(found)
            if task.is_settled:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LAST_POLL_S)


async def _receive(client: Client, request: SendMessageRequest, task: RemoteTask) -> AsyncGenerator[StreamResponse]:
    async with aclosing(cast("AsyncGenerator[StreamResponse]", client.send_message(request))) as responses:
        while True:
            with sdk_errors():
                async with asyncio.timeout(None if task.task_id is None else _SILENCE_S):
                    response = await anext(responses, None)
            if response is None:
                return
            yield response


async def _cancel(client: Client, task_id: str) -> None:
    """Ask the agent to cancel an abandoned task; it may be over or unknown already."""
    from a2a.types import CancelTaskRequest
    from a2a.utils.errors import A2AError

    async def cancel() -> None:
        with contextlib.suppress(A2AError), sdk_errors():
            async with asyncio.timeout(_CANCEL_S):
                await client.cancel_task(CancelTaskRequest(id=task_id))

    cancelling = asyncio.ensure_future(cancel())
    try:
        await asyncio.shield(cancelling)
    except asyncio.CancelledError:  # cancelled again: finish the short request first
        await cancelling
        raise
