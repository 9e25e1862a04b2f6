"""A task's tool calls: the agent's own tool set, the record around each call, events, several calls at once.

Room: execute. A call whose result is recorded is not made again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, cast

from ensemble_ray.errors import AgentExecutionError, IllegalStateError, message_of
from ensemble_ray.events import Event, ToolCallEvent
from ensemble_ray.execute.effects import Outcome, ToolEffect
from ensemble_ray.ids import effect_name, uuid_of
from ensemble_ray.tools.batch import call_batch
from ensemble_ray.tools.call import call_tool, truncate_output
from ensemble_ray.tools.registry import ResolvedTools, expand_providers, resolve_tools
from ensemble_ray.tools.tool import ToolContext

if TYPE_CHECKING:
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.execute.scope import TaskScope
    from ensemble_ray.messages import Fact, ToolCall, ToolSpec

__all__ = ["ToolCalls"]

_log = logging.getLogger(__name__)


def _from_fact(call: ToolCall, fact: Fact) -> ToolEffect:
    """The result that was recorded."""
    data = fact.data
    return ToolEffect(
        call=call,
        outcome=cast("Outcome", data["outcome"]),
        text=str(data["text"]),
        started_at=cast("float", data["started_at"]),
        duration_s=cast("float", data["duration_s"]),
        structured_output=data["structured_output"],
    )


class ToolCalls:
    """Resolves and calls the tools of one task."""

    def __init__(self, scope: TaskScope, tools: ResolvedTools) -> None:
        self._scope = scope
        self._order = scope.order
        self._tools = tools
        self.specs: Sequence[ToolSpec] = tools.specs

    @classmethod
    async def of(cls, scope: TaskScope, agent: Agent) -> ToolCalls:
        """The tools of an agent; dynamic providers are asked now, once (S-TOOL-32).

        Raises:
            ValidationError: an entry is no tool, or a name is taken twice (S-ENG-60).
        """
        return cls(scope, resolve_tools(await expand_providers(agent.tools)))

    async def run(self, calls: Sequence[ToolCall], turn: int) -> list[tuple[ToolEffect, str]]:
        """Run the requests of one turn, several at the same time; effect and text for the model, in request order.

        Raises:
            AgentExecutionError: the batch took longer than its limit (S-TOOL-83).
            AgentExecutionError: a tool is set up wrongly (S-ENG-58).
            ExitEarlyError: a tool ended the run (S-TOOL-85).
        """
        if not calls:
            return []
        try:
            effects = await call_batch(
                [partial(self._call, call, turn, index) for index, call in enumerate(calls)],
                agent_role=self._order.agent_role,
                task_description=self._order.task.description,
            )
        except IllegalStateError as error:
            role = self._order.agent_role
            text = f"Agent '{role}' failed: {message_of(error)}"
            raise AgentExecutionError(text, role, self._order.task.description) from error
        for effect in effects:
            self._announce(effect)
        limit = self._scope.frame.max_tool_output_length
        return [(effect, truncate_output(effect.text, limit)) for effect in effects]

    async def _call(self, call: ToolCall, turn: int, index: int) -> ToolEffect:
        name = effect_name(self._order.instance, turn, f"call-{index}")
        recorded = self._scope.recorded(name, "tool_result")
        if recorded is not None:
            return _from_fact(call, recorded)
        bound = self._tools.get(call.name)
        clock = self._scope.ports.clock
        started_at = clock.now()
        if bound is None:
            text = f"Error: Unknown tool '{call.name}'"
            _log.warning("Agent '%s' asked for unknown tool '%s'", self._order.agent_role, call.name)
            return ToolEffect(call=call, outcome="failure", text=text, started_at=started_at, duration_s=0.0)
        intent = {"tool_name": call.name, "arguments": call.arguments}
        await self._scope.note("tool_intent", name, intent)
        outcome = await call_tool(bound, call.arguments, context=self._context(call.name, name))
        effect = ToolEffect(
            call=call,
            outcome=outcome.outcome,
            text=outcome.text,
            started_at=started_at,
            duration_s=clock.now() - started_at,
            structured_output=outcome.structured_output,
        )
        await self._scope.note(
            "tool_result",
            name,
            {
                "outcome": effect.outcome,
                "text": effect.text,
                "structured_output": effect.structured_output,
                "started_at": effect.started_at,
                "duration_s": effect.duration_s,
            },
        )
        return effect

    def _context(self, tool_name: str, effect: str) -> ToolContext:
        order = self._order
        return ToolContext(
            tool_name=tool_name,
            agent_role=order.agent_role,
            metrics=self._scope.ports.tool_metrics,
            idempotency_key=uuid_of(f"{order.run_id}/{effect}"),
            emit=self._emit,
            run_id=order.run_id,
            instance=order.instance,
            task_index=order.index,
            log_truncate_length=self._scope.frame.tool_log_truncate_length,
        )

    def _emit(self, event: Event) -> None:
        if self._scope.ports.events.wants(type(event)):
            self._scope.ports.events.emit(event)

    def _announce(self, effect: ToolEffect) -> None:
        if self._tools.get(effect.call.name) is None:  # S-SET-25
            return
        order = self._order
        self._scope.emit(
            ToolCallEvent,
            lambda: ToolCallEvent(
                tool_name=effect.call.name,
                tool_arguments=effect.call.arguments,
                tool_result=effect.text,
                structured_result=effect.structured_output,
                agent_role=order.agent_role,
                duration=timedelta(seconds=effect.duration_s),
                task_index=order.index,
                outcome="success" if effect.outcome == "success" else "failure",
                run_id=order.run_id,
                instance=order.instance,
            ),
        )
