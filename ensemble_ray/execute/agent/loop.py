"""One agent's work on one task: prompts, tools, the ReAct loop, structured output.

Carries out what `ReactMachine` and `structured` decide; the order of steps is the specification's (03, agent executor).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ensemble_ray.errors import MaxIterationsExceededError
from ensemble_ray.errors.texts import LONGEST, brief
from ensemble_ray.events import TaskInputEvent
from ensemble_ray.execute.agent.context_window import ContextWindow, context_data, describe_context, describe_cuts
from ensemble_ray.execute.agent.model_calls import ModelCalls
from ensemble_ray.execute.agent.react import (
    AnswerReceived,
    CallModel,
    CallTools,
    Fail,
    Finish,
    ReactMachine,
    StepInstruction,
    ToolsReturned,
    stop_text,
)
from ensemble_ray.execute.agent.structured import StructuredMachine
from ensemble_ray.execute.effects import ToolEffect, capture_messages
from ensemble_ray.execute.memory import recall, recall_directives
from ensemble_ray.execute.reflection import recall_notes
from ensemble_ray.execute.tools.calls import ToolCalls
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.prompts.task import (
    build_system_prompt,
    build_user_prompt,
    context_section,
    render_parts,
    user_prompt_parts,
)
from ensemble_ray.values.trace import TaskPrompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.execute.scope import TaskScope
    from ensemble_ray.prompts.packing import SectionCut
    from ensemble_ray.values.memory import RecalledMemory, TaskReflection
    from ensemble_ray.values.messages import ChatMessage


_log = bounded_logger(__name__)
#: Below DEBUG; full responses of models (S-ENG-30).
TRACE_LEVEL = 5


class AgentLoop:
    """Runs one task with one agent."""

    def __init__(self, scope: TaskScope, agent: Agent) -> None:
        self._scope = scope
        self._order = scope.order
        self._agent = agent
        self._effects = scope.effects
        self._is_verbose = scope.context.is_verbose or agent.verbose
        self._models = ModelCalls(scope, agent)
        self._asked_again = 0
        #: what holds its requests to a budget; None: it has none
        self._window: ContextWindow | None = None
        #: what was cut of the latest request
        self._cuts: tuple[SectionCut, ...] = ()
        #: the latest answer's text
        self._latest = ""

    async def run(self) -> tuple[str, object]:
        """Return the answer's text and, with an output type, the parsed object."""
        memory, notes = await recall(self._scope), await recall_notes(self._scope)
        directives = await recall_directives(self._scope)
        tools = await ToolCalls.of(self._scope, self._agent)
        self._begin(memory, notes, directives, tools)
        self._announce_input(tools)
        return await self._answer(self._machine.start())

    @property
    def may_ask_again(self) -> bool:
        """Whether a guardrail that refuses the answer may have another one (S-GRD-17)."""
        return self._asked_again < self._order.task.max_output_retries and not self._models.is_answer_lost

    async def again(self, why: str) -> tuple[str, object]:
        """Another answer, since a guardrail wants one for that reason; as `run` gives it."""
        self._asked_again += 1
        most = self._order.task.max_output_retries
        _log.info(
            "Agent '%s' is asked again by a guardrail (%d/%d): %s",
            self._order.agent_role, self._asked_again, most, brief(why),
        )  # fmt: skip
        self._models.begin_anew()
        return await self._answer(self._machine.ask_again(why, answer=self._latest, turn=len(self._effects.models)))

    async def _answer(self, step: StepInstruction) -> tuple[str, object]:
        text = self._latest = self._check(await self._loop(step))
        if self._order.task.output_type is None or self._models.is_answer_lost:
            return text, None
        return text, await self._parse_structured(text)

    def _begin(
        self,
        memory: RecalledMemory | None,
        notes: TaskReflection | None,
        directives: Sequence[str],
        tools: ToolCalls,
    ) -> None:
        """Build the prompts and begin the conversation, as much of it as the context budget allows (S-MEM-131)."""
        clock, order = self._scope.ports.clock, self._order
        began = clock.now()
        system_prompt = build_system_prompt(self._agent)
        budget = order.task.context_budget or self._scope.context.context_budget
        if budget is None:
            user_prompt = build_user_prompt(order.task, order.context, memory, notes, directives)
        else:
            parts = user_prompt_parts(order.task, order.context, memory, notes, directives)
            self._window = ContextWindow(order.key, budget, parts=parts, history=order.task.history, tools=tools.specs)
            user_prompt = render_parts(parts)
        self._tools, self._system_prompt = tools, system_prompt
        self._machine = ReactMachine(
            system_prompt=system_prompt,
            user_prompt=user_prompt,
            history=order.task.history,
            max_iterations=self._agent.max_iterations,
            has_tools=bool(tools.specs),
        )
        _, *history, asked = self._fit(0)
        self._effects.prompt_build_s = clock.now() - began
        self._effects.prompts = TaskPrompts(
            system_prompt=system_prompt, user_prompt=asked.content or "", history=capture_messages(history)
        )
        self._log_prompts(self._effects.prompts)

    def _log_prompts(self, prompts: TaskPrompts) -> None:
        if not (self._is_verbose or _log.isEnabledFor(logging.DEBUG)):  # as a rule
            return
        for name, text in (("System", prompts.system_prompt), ("User", prompts.user_prompt)):
            if self._is_verbose:
                _log.info("%s prompt:\n%s", name, text)
            else:
                _log.debug("%s prompt (%d characters):\n%s", name, len(text), text)

    def _fit(self, turn: int) -> Sequence[ChatMessage]:
        """Return the conversation as it is sent in that turn; what a budget cuts of it is told (S-MEM-136)."""
        messages = self._machine.messages
        if self._window is None:
            return messages
        fitted = self._window.fit(messages)
        if fitted.messages is not messages:
            self._models.begin_anew()
        if fitted.cuts != self._cuts:
            self._cuts = fitted.cuts
            data = context_data(
                fitted.cuts, turn=turn, budget_tokens=self._window.budget_tokens, needed_tokens=fitted.needed_tokens
            )
            self._effects.context_cuts.append(data)
            _log.info(
                "Task '%s': model call %d is cut from %d to %d tokens: %s",
                self._order.key, turn + 1, fitted.needed_tokens, self._window.budget_tokens, describe_context(data),
            )  # fmt: skip
        return fitted.messages

    def _announce_input(self, tools: ToolCalls) -> None:
        order, agent = self._order, self._agent
        self._scope.emit(
            TaskInputEvent,
            lambda: TaskInputEvent(
                task_index=order.index,
                task_description=order.task.description,
                expected_output=order.task.expected_output,
                agent_role=order.agent_role,
                agent_goal=agent.goal,
                agent_background=agent.background,
                tool_names=tuple(spec.name for spec in tools.specs),
                assembled_context=context_section(order.context),
                context_cuts=tuple(cut for data in self._effects.context_cuts for cut in describe_cuts(data)),
                run_id=order.run_id,
                instance=order.instance,
            ),
        )

    async def _loop(self, step: StepInstruction) -> str | None:
        machine, tools = self._machine, self._tools
        while True:
            match step:
                case CallModel():
                    sent = self._fit(step.turn)
                    response = await self._models.call(sent, tools.specs, step.turn)
                    step = machine.handle(AnswerReceived(response=response))
                    said = machine.messages if sent is machine.messages else (*sent, machine.messages[-1])
                    self._models.capture_answer(said, is_final=isinstance(step, Finish))
                    self._models.accept()
                case CallTools():
                    self._effects.tool_call_count = machine.tool_call_count
                    step = machine.handle(ToolsReturned(texts=await self._call_tools(step, tools)))
                case Finish() if (reminder := tools.reminder()) is not None:
                    _log.info("Agent '%s' wanted to finish and is reminded: %s", self._order.agent_role, reminder)
                    step = machine.remind(reminder)
                case Finish():
                    return step.text
                case Fail():
                    raise MaxIterationsExceededError(
                        self._order.agent_role,
                        self._order.task.description,
                        self._agent.max_iterations,
                        step.tool_calls_made,
                    )

    async def _call_tools(self, step: CallTools, tools: ToolCalls) -> list[str]:
        model = self._effects.models[-1]
        texts: list[str] = []
        for effect, text in await tools.run(step.allowed, step.turn):
            model.tools.append(effect)
            texts.append(text)
        if step.allowed:
            tools.turn_ended()  # once they stand in the trace
        limit = self._agent.max_iterations
        now = self._scope.ports.clock.now()
        if step.stopped:
            _log.warning(
                "Agent '%s' exceeded max iterations (%d). Stop message sent (%d/3).",
                self._order.agent_role, limit, step.stop_count,
            )  # fmt: skip
        for call in step.stopped:
            model.tools.append(
                ToolEffect(
                    call=call, outcome="skipped_max_iterations", text=stop_text(limit), started_at=now, duration_s=0.0
                )
            )
        return texts

    def _check(self, text: str | None) -> str:
        """Apply the empty-text rule (S-ENG-34), and log the answer (S-ENG-30)."""
        if text is None or not text.strip():
            _log.warning(
                "Agent '%s' returned empty response for task '%s'",
                self._order.agent_role,
                brief(self._order.task.description),
            )
            return ""
        _log.log(logging.INFO if self._is_verbose else TRACE_LEVEL, "Response:\n%s", text)
        return text

    async def _parse_structured(self, text: str) -> object:
        """Parse, and ask for corrections until it parses or the attempts are used up (S-OUT-30 to S-OUT-38)."""
        machine = StructuredMachine(self._order.task, agent_role=self._order.agent_role, first_response=text)
        while (prompt := machine.next_prompt()) is not None:
            self._log_lines(machine)
            answer = await self._models.correct(self._system_prompt, prompt, len(self._effects.models))
            self._latest = answer or ""
            machine.accept(answer)
        self._log_lines(machine)
        return machine.result(self._models.describe_cut())

    @staticmethod
    def _log_lines(machine: StructuredMachine) -> None:
        for level, line in machine.log_lines():
            _log.log(level, "%s", brief(line, 2 * LONGEST))
