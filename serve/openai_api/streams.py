"""Answers of the OpenAI API as server-sent events.

In: a run that a client waits for. Out: its text while it is said, what is left of it in pieces, then how it ended.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING

from sse_starlette import ServerSentEvent

from ensemble_ray.serve.answers import json_text
from ensemble_ray.serve.openai_api.endings import TeamAnswer, answer_of, begun_anew
from ensemble_ray.serve.openai_api.errors import RUN_HEADER
from ensemble_ray.serve.openai_api.said_text import SaidText
from ensemble_ray.studio.event_answer import EventAnswer
from ensemble_ray.values.messages import Reasoning

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from ensemble_ray.serve.asked_run import AskedRun
    from ensemble_ray.serve.run_schemas import RunDetail
    from ensemble_ray.serve.schemas import Failure

#: Characters of a piece of an answer that is known as a whole.
_PIECE = 200


class AnswerStream(EventAnswer):
    """The stream of one run's answer; whatever ends it, the run learns that its client is gone."""

    def __init__(self, run: AskedRun, events: AsyncGenerator[ServerSentEvent]) -> None:
        """Make it.

        Args:
            run: The run.
            events: What is sent.
        """
        super().__init__(events, headers={RUN_HEADER: run.run_id})
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._run.leave()


async def texts_of(run: AskedRun, streamed_task: str | None) -> AsyncGenerator[str | TeamAnswer | Failure]:
    """Yield the pieces of an answer and of reasoning (`Reasoning`), then the answer as a whole, or why there is none.

    Args:
        run: The run.
        streamed_task: Instance of the task whose tokens are the answer; None: it is known at the end alone.
    """
    said, has_thought = SaidText(), False
    async with aclosing(run.answer(streamed_task, said)) as pieces:
        async for each in pieces:
            if not isinstance(each, str):
                for last in _end(each, said, has_thought=has_thought):
                    yield last
            elif each:
                has_thought = has_thought or isinstance(each, Reasoning)
                yield each


def _end(run: RunDetail, said: SaidText, *, has_thought: bool) -> list[str | TeamAnswer | Failure]:
    found = answer_of(run)
    if not isinstance(found, TeamAnswer):
        return [found]
    rest = said.rest(found.text)
    if rest is None:
        return [begun_anew(run)]
    # An answer that is known at the end alone has its reasoning before it.
    thought = [Reasoning(found.reasoning)] if found.reasoning and rest == found.text and not has_thought else []
    return [*thought, *(rest[start : start + _PIECE] for start in range(0, len(rest), _PIECE)), found]


def render(data: Mapping[str, object], event: str | None = None) -> ServerSentEvent:
    """Return data as an event."""
    return ServerSentEvent(data=json_text(data), event=event, sep="\n")
