"""One agent's work on one task."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ensemble_ray.definition.agent import Agent
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
from ensemble_ray.execute.memory import recall, recall_directives, recall_notes
from ensemble_ray.execute.redaction import learn_from
from ensemble_ray.execute.scope import TaskScope
from ensemble_ray.execute.tools.calls import ToolCalls
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.prompts.packing import SectionCut
from ensemble_ray.prompts.task import (
    build_system_prompt,
    build_user_prompt,
    context_section,
    render_parts,
    user_prompt_parts,
)
from ensemble_ray.values.attachments import Attachment
from ensemble_ray.values.memory import RecalledMemory, TaskReflection
from ensemble_ray.values.messages import ChatMessage, ToolSpec
from ensemble_ray.values.trace import TaskPrompts

_log = bounded_logger(__name__)
TRACE_LEVEL = 5  # below DEBUG: the models' full responses (S-ENG-30)


class AgentLoop:
    def __init__(self, scope: TaskScope, agent: Agent) -> None:
        self._scope = scope
        self._order = scope.order
        self._agent = agent
        most = None if scope.is_manager else scope.context.max_iterations
        self._max_iterations = agent.max_iterations if most is None else min(most, agent.max_iterations)
        self._effects = scope.effects
        self._is_verbose = scope.context.is_verbose or agent.verbose
        self._models = ModelCalls(scope, agent)
        self._tools: ToolCalls | None = None  # None: no tools and no delegation
        self._specs: Sequence[ToolSpec] = ()
        self._answer_retries = 0
        self._window: ContextWindow | None = None  # None: no budget
        self._cuts: tuple[SectionCut, ...] = ()
        self._latest = ""

    async def prepare(self) -> StepInstruction:
        """Read memory, notes, directives and tools; build the prompts; return the first step."""
        scope, order = self._scope, self._order
        memory = notes = None
        directives: tuple[str, ...] = ()
        if scope.context.memory is not None:
            memory = await recall(scope)
        if order.task.reflection_config is not None:
            notes = await recall_notes(scope)
        if order.directives or scope.recorded_facts:
            directives = await recall_directives(scope)
        if self._agent.tools or self._agent.allow_delegation or scope.is_manager:
            self._tools = await ToolCalls.of(scope, self._agent)
            self._specs = scope.clean(self._tools.specs)
        self._build_prompts(memory, notes, directives)
        agent = self._agent
        scope.emit(
            TaskInputEvent,
            lambda: TaskInputEvent(
                task_index=order.index,
                task_description=order.task.description,
                expected_output=order.task.expected_output,
                agent_role=order.agent_role,
                agent_goal=agent.goal,
                agent_background=agent.background,
                tool_names=tuple(spec.name for spec in self._specs),
                assembled_context=context_section(order.context),
                attachments=tuple([each.as_reference() for each in order.task.attachments]),
                context_cuts=tuple(cut for data in self._effects.context_cuts for cut in describe_cuts(data)),
                run_id=order.run_id,
                instance=order.instance,
            ),
        )
        return self._machine.start()

    @property
    def may_ask_again(self) -> bool:
        """Whether the model may answer again after a guardrail's refusal (S-GRD-17)."""
        return self._answer_retries < self._order.task.max_output_retries and not self._models.is_answer_lost

    def refuse_answer(self, why: str) -> StepInstruction:
        self._answer_retries += 1
        _log.info(
            "Agent '%s' is asked again by a guardrail (%d/%d): %s",
            self._order.agent_role, self._answer_retries, self._order.task.max_output_retries, brief(why),
        )  # fmt: skip
        self._models.reset_digest()
        return self._machine.ask_again(why, answer=self._latest, turn=len(self._effects.models))

    async def answer(self, step: StepInstruction) -> tuple[str, object]:
        """Work until the model answers. Return the text and, with an output type, the parsed object."""
        machine, tools = self._machine, self._tools
        gate = None if tools is None or tools.delegations is None else tools.delegations.gate
        while True:
            match step:
                case CallModel():
                    sent = machine.messages if self._window is None else self._fit(self._window, step.turn)
                    response = await self._models.call(sent, self._specs, step.turn)
                    step = machine.handle(AnswerReceived(response=response))
                    said = machine.messages if sent is machine.messages else (*sent, machine.messages[-1])
                    self._models.accept(said, is_final=isinstance(step, Finish))
                case CallTools():
                    assert tools is not None  # noqa: S101  the machine calls no tools without any
                    self._effects.tool_call_count = machine.tool_call_count
                    step = machine.handle(await self._call_tools(tools, step))
                case Finish() if gate is not None and (reminder := gate.reminder()) is not None:
                    _log.info("Agent '%s' wanted to finish and is reminded: %s", self._order.agent_role, reminder)
                    step = machine.remind(reminder)
                case Finish():
                    break
                case Fail():
                    role, description = self._order.agent_role, self._order.task.description
                    raise MaxIterationsExceededError(role, description, self._max_iterations, step.tool_calls_made)
        text = self._latest = self._check(step.text)
        if self._order.task.output_type is None or self._models.is_answer_lost:
            return text, None
        return text, await self._parse_structured(text)

    def _build_prompts(
        self, memory: RecalledMemory | None, notes: TaskReflection | None, directives: Sequence[str]
    ) -> None:
        clock, order = self._scope.ports.clock, self._order
        began = clock.now()
        self._system_prompt = system_prompt = build_system_prompt(self._agent)
        budget = order.task.context_budget or self._scope.context.context_budget
        added = self._scope.context.additional_context
        if budget is None:
            user_prompt = build_user_prompt(
                order.task, order.context, memory, notes, directives, additional_context=added
            )
        else:
            parts = user_prompt_parts(order.task, order.context, memory, notes, directives, additional_context=added)
            user_prompt = render_parts(parts)
            history = order.task.history
            self._window = ContextWindow(order.key, budget, parts=parts, history=history, tools=self._specs)
        self._machine = ReactMachine(
            system_prompt=system_prompt,
            user_prompt=user_prompt,
            history=order.task.history,
            attachments=order.task.attachments,
            max_iterations=self._max_iterations,
            has_tools=bool(self._specs),
        )
        history = order.task.history
        if self._window is not None:
            _, *history, sent_prompt = self._fit(self._window, 0)
            user_prompt = sent_prompt.content or ""
        self._effects.prompt_build_s = clock.now() - began
        self._effects.prompts = TaskPrompts.unchecked(
            system_prompt=system_prompt,
            user_prompt=user_prompt,
            history=capture_messages(history) if history else (),
            attachments=tuple([each.to_json() for each in order.task.attachments]),
        )
        if _log.isEnabledFor(logging.INFO):
            for name, text in (("System", system_prompt), ("User", user_prompt)):
                if self._is_verbose:
                    _log.info("%s prompt:\n%s", name, text)
                else:
                    _log.debug("%s prompt (%d characters):\n%s", name, len(text), text)

    def _fit(self, window: ContextWindow, turn: int) -> Sequence[ChatMessage]:
        """Return the conversation cut to its budget (S-MEM-131), and report new cuts (S-MEM-136)."""
        messages = self._machine.messages
        fitted = window.fit(messages)
        if fitted.messages is not messages:
            self._models.reset_digest()
        if fitted.cuts != self._cuts:
            self._cuts = fitted.cuts
            budget, needed = window.budget_tokens, fitted.needed_tokens
            data = context_data(fitted.cuts, turn=turn, budget_tokens=budget, needed_tokens=needed)
            self._effects.context_cuts.append(data)
            _log.info(
                "Task '%s': model call %d is cut from %d to %d tokens: %s",
                self._order.key, turn + 1, needed, budget, describe_context(data),
            )  # fmt: skip
        return fitted.messages

    async def _call_tools(self, tools: ToolCalls, step: CallTools) -> ToolsReturned:
        model = self._effects.models[-1]
        texts: list[str] = []
        attachments: list[tuple[str, Attachment]] = []
        for effect, text in await tools.run(step.allowed, step.turn):
            model.tools.append(effect)
            texts.append(text)
            attachments += [(effect.call.name, each) for each in effect.attachments]
        if step.allowed and tools.delegations is not None:
            tools.delegations.turn_ended()  # may raise, so the trace must contain the calls before
        limit = self._max_iterations
        if step.stopped:
            _log.warning(
                "Agent '%s' exceeded max iterations (%d). Stop message sent (%d/3).",
                self._order.agent_role, limit, step.stop_count,
            )  # fmt: skip
        now, stop = self._scope.ports.clock.now(), stop_text(limit)
        model.tools += [
            ToolEffect(call=call, outcome="skipped_max_iterations", text=stop, started_at=now, duration_s=0.0)
            for call in step.stopped
        ]
        return ToolsReturned(texts=texts, attachments=attachments)

    def _check(self, text: str | None) -> str:
        if text is None or not text.strip():
            role, description = self._order.agent_role, brief(self._order.task.description)
            _log.warning("Agent '%s' returned empty response for task '%s'", role, description)
            return ""
        level = logging.INFO if self._is_verbose else TRACE_LEVEL
        if _log.isEnabledFor(level):
            _log.log(level, "Response:\n%s", text)
        return text

    async def _parse_structured(self, text: str) -> object:
        """Parse the answer, with corrections as the task allows (S-OUT-30 to S-OUT-38)."""
        redaction = self._scope.context.redaction
        if redaction is not None:  # types are checked with the values, and have placeholders after that (S-RED-31)
            await learn_from(redaction, self._scope.ports.journal, text)
            text = redaction.restore(text)
        machine = StructuredMachine(self._order.task, agent_role=self._order.agent_role, first_response=text)
        while (prompt := machine.next_prompt()) is not None:
            self._log_lines(machine)
            answer = await self._models.correct(self._system_prompt, prompt, len(self._effects.models))
            self._latest = answer or ""
            machine.accept(answer if redaction is None or answer is None else redaction.restore(answer))
        self._log_lines(machine)
        return self._scope.clean(machine.result(self._models.describe_cut()))

    @staticmethod
    def _log_lines(machine: StructuredMachine) -> None:
        for level, line in machine.log_lines():
            _log.log(level, "%s", brief(line, 2 * LONGEST))
