"""One question to an agent of the A2A protocol, from its card to its answer, by the official SDK.

In: a message with an id. Out: pieces of text as they come, then the answer. Rules: a message that may have arrived is not sent again unless
that is harmless; a task whose stream is lost is asked for by its id; one that is not waited for any more is cancelled there.
"""

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
    Losses,
    NewestAnswer,
    RemoteAgentError,
    RemoteAnswer,
    RemoteTask,
    cause_of,
    connect,
    is_beyond_limits,
    is_refusal,
    is_too_deep,
    open_http_client,
    says_nothing_of_the_work,
    sdk_errors,
    was_not_taken,
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


#: A stream that tells nothing of its task for so long is taken for lost, s.
_SILENCE_S = 120.0
#: A task without a stream is looked at after so long, s, and seldomer with time.
_FIRST_LOOK_S, _LAST_LOOK_S = 0.25, 5.0
#: How long a cancellation there may take, s; our endpoint answers one within 5 s.
_CANCEL_S = 10.0
#: So many cancelled tasks of one message are passed by.
_MOST_ANEW = 5
#: Where the deadline stands among the metadata of a message; the protocol has no field for one.
_DEADLINE = "deadline"


async def ask_agent(
    address: AgentAddress, text: str, *, message_id: str, may_repeat: bool, timeout_s: float
) -> AsyncGenerator[str | RemoteAnswer]:
    """Yield the pieces of an answer as they come, then the answer.

    Args:
        address: The agent.
        text: What it is asked.
        message_id: Names the message; the same when it is asked again after a crash.
        may_repeat: Whether the message may be sent again when nobody knows whether it arrived.
        timeout_s: Longest time for all of it, s.

    Raises:
        RemoteAgentError: it cannot be reached, refuses, fails, asks for input, or takes too long.
        ToolConfigurationError: the SDK is not installed.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    question = _Question(address, text, message_id, may_repeat=may_repeat, timeout_s=timeout_s)
    async with aclosing(question.pieces(Losses(deadline))) as pieces:
        while True:
            # Around each step, and not around what is yielded: the time would be up in whoever reads it.
            try:
                async with asyncio.timeout_at(deadline):
                    piece = await anext(pieces, None)
            except TimeoutError:
                raise question.failure(f": no answer within {timeout_s:g} s") from None
            if piece is None:
                break
            yield piece
    yield question.answer()


class _Question:
    """What is asked, and what is known of its task."""

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
        self._anew = 0

    def answer(self) -> RemoteAnswer:
        """Return the answer of a task that is settled.

        Raises:
            RemoteAgentError: there is none.
        """
        try:
            answer = self._task.answer()
        except ValueError as error:
            raise self.failure(f": its answer cannot be read: {error}") from error
        if answer.failure is not None:
            raise RemoteAgentError(f"Remote agent {self._address.url}: {answer.failure}")
        return answer

    def failure(self, text: str, cause: A2AError | None = None) -> RemoteAgentError:
        """Return the error of a question that has no answer; a final one that is too deep is one (S-INT-97)."""
        is_answered = cause is not None and is_too_deep(cause) and self._newest.is_final
        may_be_done = self._task.may_have_begun and not is_answered
        return RemoteAgentError(f"Remote agent {self._address.url}{text}", may_be_done=may_be_done)

    async def pieces(self, losses: Losses) -> AsyncGenerator[str]:
        """Yield what is said until the task is settled; one that is left before is cancelled.

        Raises:
            RemoteAgentError: the agent refuses, or is lost.
        """
        task = self._task
        async with open_http_client(self._address, self._timeout_s, self._newest) as http:
            client = await connect(self._address, http, losses)
            try:
                while not task.is_settled:
                    if task.task_id is not None:
                        await self._look(client, losses)
                        break
                    async with aclosing(self._send(client, losses)) as pieces:
                        async for piece in pieces:
                            yield piece
            finally:
                if task.task_id is not None and not task.is_over:
                    await _cancel(client, task.task_id)

    async def _send(self, client: Client, losses: Losses) -> AsyncGenerator[str]:
        """Send the message and yield what is said; return also where it is to be sent again, or is lost once its task is known.

        Raises:
            RemoteAgentError: the agent refuses, or is lost, or a message that may have arrived must not be sent again.
        """
        from a2a.utils.errors import A2AError

        task = self._task
        may_have_begun_before, task.may_have_begun = task.may_have_begun, True
        is_first = True
        try:
            async with aclosing(_receive(client, self._message(), task)) as coming:
                async for each in coming:
                    losses.forget()
                    piece = task.take(each)
                    if is_first and self._is_to_begin_anew():
                        return
                    is_first = False
                    if piece:
                        yield piece
                    if task.is_settled:  # the agent may leave its stream open (S-INT-98)
                        return
        except A2AError as error:
            await self._take_loss(error, losses, may_have_begun_before=may_have_begun_before)
        else:
            if task.task_id is None and not task.is_settled:
                raise self.failure(": its answer has neither a task nor a message")

    async def _take_loss(self, error: A2AError, losses: Losses, *, may_have_begun_before: bool) -> None:
        """Wait a little after a message that broke off, where it may be sent again or has led to a task.

        Raises:
            RemoteAgentError: it may not, or the agent was lost too often.
        """
        task = self._task
        if task.is_settled:
            return
        if task.task_id is None and (is_refusal(error) or was_not_taken(error)):
            task.may_have_begun = may_have_begun_before
        if (task.task_id is None and self._is_last(error)) or not await losses.wait():
            raise self.failure(_describe_error(error), error) from error

    def _is_last(self, error: A2AError) -> bool:
        """Return whether a message that has led to no task is not sent again."""
        if is_refusal(error) or says_nothing_of_the_work(error):
            return True
        return self._task.may_have_begun and not self._may_repeat

    def _is_to_begin_anew(self) -> bool:
        """Return whether the message is to be sent again under another id; its task is forgotten then.

        The first that is told of a message is that its task was cancelled: by whoever sent it before, and then was ended with its run. The
        next id follows from the first, so that a message that is sent after a crash meets the same tasks.
        """
        if not (self._may_repeat and self._task.is_cancelled) or self._anew == _MOST_ANEW:
            return False
        self._anew += 1
        self._message_id = uuid_of(f"{self._first_id}/again-{self._anew}")
        self._task.forget()
        return True

    def _message(self) -> SendMessageRequest:
        from a2a.types import Message, Part, Role, SendMessageRequest

        message = Message(message_id=self._message_id, role=Role.ROLE_USER, parts=[Part(text=self._text)])
        request = SendMessageRequest(message=message)
        request.metadata.update({_DEADLINE: datetime.fromtimestamp(self._deadline, UTC).isoformat()})
        return request

    async def _look(self, client: Client, losses: Losses) -> None:
        """Ask how the task stands until it is settled.

        Raises:
            RemoteAgentError: the agent is lost, or knows no such task.
        """
        from a2a.types import GetTaskRequest
        from a2a.utils.errors import A2AError

        task = self._task
        pause_s = _FIRST_LOOK_S
        while True:
            try:
                with sdk_errors():
                    async with asyncio.timeout(ANSWER_S):
                        found = await client.get_task(GetTaskRequest(id=task.task_id or ""))
            except A2AError as error:
                if is_refusal(error) or is_beyond_limits(error) or not await losses.wait():
                    raise self.failure(f" says of its task '{task.task_id}': {cause_of(error)}", error) from error
                continue
            losses.forget()
            task.take_task(found)
            if task.is_settled:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LAST_LOOK_S)


async def _receive(client: Client, request: SendMessageRequest, task: RemoteTask) -> AsyncGenerator[StreamResponse]:
    """Yield what the agent tells of a message."""
    async with aclosing(cast("AsyncGenerator[StreamResponse]", client.send_message(request))) as coming:
        while True:
            with sdk_errors():
                async with asyncio.timeout(None if task.task_id is None else _SILENCE_S):
                    each = await anext(coming, None)
            if each is None:
                return
            yield each


async def _cancel(client: Client, task_id: str) -> None:
    """Have the agent stop working on a task that nobody waits for; it may be over, or not be there any more."""
    from a2a.types import CancelTaskRequest
    from a2a.utils.errors import A2AError

    async def cancel() -> None:
        with contextlib.suppress(A2AError), sdk_errors():
            async with asyncio.timeout(_CANCEL_S):
                await client.cancel_task(CancelTaskRequest(id=task_id))

    cancelling = asyncio.ensure_future(cancel())
    try:
        await asyncio.shield(cancelling)
    except asyncio.CancelledError:  # asked twice: it is short
        await cancelling
        raise


def _describe_error(error: A2AError) -> str:
    """Return what is told of the agent that gave an error in place of an answer."""
    from a2a.client.errors import A2AClientError

    is_said = is_refusal(error) and not isinstance(error, A2AClientError)
    return f" refuses: {cause_of(error)}" if is_said else f": {cause_of(error)}"


#: The guard around every tool comes after the tool's own limit, whose text says more, and the cancellation there, s.
_GRACE_S = 15.0
_UNKNOWN = (
    "Outcome unknown: {error}. The agent may have done the work, done a part of it, or nothing; it has not been asked "
    "again. Find out whether it was done before you call it again. If you cannot find out, do not repeat it, and say in "
    "your answer that its outcome is unknown."
)


class A2ATool(AbstractAgentTool):
    """Hands its input to an agent of another system, and returns what that answers.

    Args:
        url: Where the agent's card is found: the part before `/.well-known/agent-card.json`.
        name: What the model calls it; None: `ask_` and the last part of the URL.
        description: Tells the model when to use it; None: that it asks the agent.
        headers: Sent with every request; values do not show anywhere.
        hosts: Hosts that its card may name besides the one of the URL.
        effect: What asking it does to the world. Only what is not `once` is asked again.
        timeout: For one question, in seconds or as a `timedelta`.
        connect_timeout: Until a connection stands, in seconds or as a `timedelta`.

    Raises:
        ValidationError: the URL, the name, a header or a limit is wrong.
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
        """Ask the agent, and return its answer."""
        message_id = self.context.idempotency_key or new_run_id()
        asking = ask_agent(
            self._address, text, message_id=message_id, may_repeat=self.effect != "once", timeout_s=self._limit_s
        )
        try:
            async with aclosing(asking) as pieces:
                async for piece in pieces:
                    if isinstance(piece, RemoteAnswer):
                        return ToolResult.success(piece.shown, piece.data)
        except RemoteAgentError as error:
            is_unknown = error.may_be_done and self.effect == "once"
            return ToolResult.failure(_UNKNOWN.format(error=error) if is_unknown else str(error))
        except ToolConfigurationError as error:
            return ToolResult.failure(str(error))
        return ToolResult.failure(f"Remote agent {self._address.url} gave no answer")


def seconds_of(timeout: float | timedelta, name: str) -> float:
    """Return a limit in seconds.

    Raises:
        ValidationError: it is none, or has no end.
    """
    seconds = timeout_seconds(timeout)
    if seconds is None:
        raise ValidationError(f"RemoteAgent {name} must end")
    return seconds
