"""One task's facts as its trace and its output. Pure.

In: the facts of one instance. Out: what it gave; and what it did, also when it was never finished.
Never: an import of a class that the record names: records are data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar, cast, get_args

from ensemble_ray.errors import RecordError
from ensemble_ray.execute.agent.recorded_model import effect_of
from ensemble_ray.execute.delegation.decisions import EXPECTED_OUTPUT
from ensemble_ray.execute.effects import (
    CallOutcome,
    DelegationEffect,
    ModelEffect,
    TaskEffects,
    ToolEffect,
    typed_output,
)
from ensemble_ray.execute.review.gates import review_entry
from ensemble_ray.execute.scope import describe_exit
from ensemble_ray.facts.directives import DirectivesShown
from ensemble_ray.facts.effects import (
    DelegationDecided,
    ModelAnswered,
    OutcomeDecided,
    ToolIntended,
    ToolReturned,
    began_at,
    is_making_agent,
    read_request,
)
from ensemble_ray.facts.ends import ExitRecorded, FailureRecorded, OutputRecorded
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.lenient import as_mapping
from ensemble_ray.facts.memory import MemoryRecalled, MemoryStored
from ensemble_ray.facts.reflection import ReflectionRecalled, ReflectionRecorded, ReflectionStored
from ensemble_ray.facts.reviews import ReviewDecided, ReviewRequested
from ensemble_ray.facts.runs import StimulusRecorded
from ensemble_ray.facts.sampling import SamplingAnswered
from ensemble_ray.plan.plan import Node
from ensemble_ray.record.delegation_fold import worker_role
from ensemble_ray.values.delegation import DelegationResponse, DelegationStatus
from ensemble_ray.values.ids import delegated_instance, delegating_call, node_key
from ensemble_ray.values.messages import ToolCall
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.task_output import OutputType, TaskOutput
from ensemble_ray.values.trace import CaptureMode, TaskTrace
from ensemble_ray.values.value import Value

_V = TypeVar("_V", bound=Value)

_OUTCOMES = get_args(CallOutcome)
#: `facts#0/2/model`, `facts#0/2/call-1`, `count#0/0/handler`, `search#0/1/runner`; a task's key may hold anything.
_EFFECT_NAME = re.compile(r".*/(?P<turn>\d+)/(?:model|call-(?P<call>\d+)|(?P<whole>handler|runner))", re.DOTALL)
#: What a tool call shows that was begun and never came back.
NO_RESULT = "No result was recorded: the run ended during this call"
#: What the response of an attempt to hand work on says that was begun and never came back.
_NO_WORKER = "No result was recorded: the run ended during this delegation"


@dataclass(slots=True, kw_only=True)
class _Turn:
    """One turn of a task: a model call and the tool calls of its answer."""

    model: ModelAnswered | None = None
    at: float = 0.0
    intents: dict[int, Fact[ToolIntended]] = field(default_factory=dict[int, Fact[ToolIntended]])
    results: dict[int, ToolReturned] = field(default_factory=dict[int, ToolReturned])
    #: what was decided of unknown outcomes
    decisions: dict[int, OutcomeDecided] = field(default_factory=dict[int, OutcomeDecided])
    #: what was decided of calls that hand work on
    delegations: dict[int, Fact[DelegationDecided]] = field(default_factory=dict[int, Fact[DelegationDecided]])


@dataclass(slots=True, kw_only=True)
class _Gate:
    """What is known of one gate."""

    asked: Fact[ReviewRequested] | None = None
    decided: Fact[ReviewDecided] | None = None

    def apply(self, fact: Fact) -> None:
        """Take the next fact of this gate."""
        if isinstance(fact.data, ReviewRequested):
            self.asked = cast("Fact[ReviewRequested]", fact)
        elif isinstance(fact.data, ReviewDecided):
            self.decided = cast("Fact[ReviewDecided]", fact)

    @property
    def entry(self) -> Mapping[str, object] | None:
        """The gate as it stands in a trace; None where nothing tells what was asked."""
        if self.asked is None:
            return None
        decided = self.decided
        return review_entry(
            self.asked.data,
            self.asked.at,
            None if decided is None else decided.data,
            self.asked.at if decided is None else decided.at,
        )


@dataclass(slots=True, kw_only=True)
class TaskFold:
    """What is known of one instance."""

    instance: str
    output: Mapping[str, object] | TaskOutput | None = None
    failure: Fact[FailureRecorded] | None = None
    _turns: dict[int, _Turn] = field(default_factory=dict[int, _Turn])
    #: newest result of its handler or runner, which is no turn of a model, and whether there are facts of it
    _handler: ToolReturned | None = None
    _has_handler: bool = False
    #: whether it asked for the end of the run, and whether it was stopped and did nothing since
    _has_exited: bool = False
    #: by the name of the call that asked for it
    _exits: dict[str, Fact[ExitRecorded]] = field(default_factory=dict[str, "Fact[ExitRecorded]"])
    _is_cancelled: bool = False
    #: its review gates by name, and what is known of the work that it handed on, by the call's name
    _gates: dict[str, _Gate] = field(default_factory=dict[str, _Gate])
    _workers: dict[str, TaskFold] = field(default_factory=dict[str, "TaskFold"])
    _first_at: float | None = None
    _embedding_tokens: int = 0
    #: newest answers to servers of its tools, by name
    _sampled: dict[str, SamplingAnswered] = field(default_factory=dict[str, SamplingAnswered])
    _last_at: float = 0.0

    @property
    def key(self) -> str:
        """Its task's key in the plan; of work that was handed on, its instance without the occurrence."""
        if delegating_call(self.instance) is None:
            return node_key(self.instance) or self.instance
        return self.instance.rpartition("#")[0]

    def apply(self, fact: Fact) -> None:
        """Take the next fact of this instance."""
        if is_making_agent(fact):
            return
        data = fact.data
        self._is_cancelled = isinstance(data, StimulusRecorded) and data.is_cancellation
        if not isinstance(data, StimulusRecorded):
            self._last_at = max(self._last_at, fact.at)
            begun = began_at(fact)
            self._first_at = begun if self._first_at is None else min(begun, self._first_at)
        match data:
            case OutputRecorded(output=output):
                self.output = output
            case FailureRecorded():
                self.failure = cast("Fact[FailureRecorded]", fact)
            case ExitRecorded():
                self._has_exited = True
                self._exits[data.call] = cast("Fact[ExitRecorded]", fact)
            case ReviewRequested() | ReviewDecided():
                self._gates.setdefault(fact.name, _Gate()).apply(fact)
            case MemoryRecalled() | MemoryStored():
                # What the task was reminded of stands in its prompt.
                self._embedding_tokens += data.embedding_tokens
            case ReflectionRecalled() | ReflectionRecorded() | ReflectionStored() | DirectivesShown():
                # Notes and directives stand in its prompt; what is learned of its output is no part of it (S-REFL-18).
                pass
            case _ if data.IS_EFFECT:
                self._apply_effect(fact)
            case _:
                pass

    def resume(self) -> None:
        """Note that the run was resumed: a task that a spent budget stopped goes on (S-BUD-6)."""
        if any(each.data.reason is ExitReason.BUDGET_EXHAUSTED for each in self._exits.values()):
            self._has_exited = False

    def _apply_effect(self, fact: Fact) -> None:
        if isinstance(fact.data, SamplingAnswered):  # within a call
            self._sampled[fact.name] = fact.data
            return
        named = _EFFECT_NAME.fullmatch(fact.name)
        if named is None:
            msg = f"The record is damaged: '{fact.name}' is no name of an effect"
            raise RecordError(msg)
        if named["whole"]:
            self._has_handler = True
            if isinstance(fact.data, ToolReturned):
                self._handler = fact.data
            elif isinstance(fact.data, ToolIntended):  # a runner may be asked again after it answered
                self._handler = None
            return
        self._apply_to_turn(self._turns.setdefault(int(named["turn"]), _Turn()), int(named["call"] or 0), fact)

    @staticmethod
    def _apply_to_turn(turn: _Turn, call: int, fact: Fact) -> None:
        match fact.data:
            case ModelAnswered() as answer:
                turn.model, turn.at = answer, fact.at
            case ToolIntended():
                turn.intents[call] = cast("Fact[ToolIntended]", fact)
            case ToolReturned() as result:
                turn.results[call] = result
            case DelegationDecided():
                turn.delegations[call] = cast("Fact[DelegationDecided]", fact)
            case OutcomeDecided() as decision:
                turn.decisions[call] = decision
            case _:
                pass

    def adopt(self, worker: TaskFold) -> None:
        """Take what is known of work that this task handed on."""
        self._workers[delegating_call(worker.instance) or worker.instance] = worker

    @property
    def is_recorded(self) -> bool:
        """Whether the task did anything that the record tells of."""
        did = self._turns or self._has_handler or self._workers or self._gates
        return self.output is not None or self.failure is not None or bool(did)

    @property
    def is_handler(self) -> bool:
        """Whether a function did it, and no agent."""
        return self._has_handler

    @property
    def is_unfinished(self) -> bool:
        """Whether it gave no output and did not fail either."""
        return self.output is None and self.failure is None

    @property
    def has_failed(self) -> bool:
        """Whether it failed, and gave no output after all."""
        return self.failure is not None and self.output is None

    @property
    def last_at(self) -> float:
        """Time of its last fact, and of its workers'."""
        return max([self._last_at, *(worker.last_at for worker in self._workers.values())])

    # What it gave.

    def task_output(self, output_type: OutputType | None = None) -> TaskOutput | None:
        """Return the recorded output; its parsed output is JSON data, or of the given type where it fits.

        Raises:
            RecordError: it is no output.
        """
        if self.output is None or isinstance(self.output, TaskOutput):
            return self.output
        try:
            return typed_output(self.output, output_type)
        except RecordError as error:
            msg = f"{error} (task '{self.key}')"
            raise RecordError(msg) from error

    def summary(self) -> TaskOutput | None:
        """Return the recorded output without its trace, which is large."""
        if self.output is None or isinstance(self.output, TaskOutput):
            return self.output
        return typed_output({**self.output, "trace": None})

    def workers_that_gave(self) -> list[TaskFold]:
        """Those whose result it was given, in the order in which they were done (S-HIER-6)."""
        outputs: list[tuple[TaskOutput, TaskFold]] = []
        for decision, result in self._attempts():
            worker = self._workers.get(decision.name)
            if worker is not None and result is not None and result.is_success:
                output = worker.summary()
                if output is not None:
                    outputs.append((output, worker))
        return [worker for _, worker in sorted(outputs, key=lambda pair: pair[0].completed_at)]

    def _attempts(self) -> list[tuple[Fact[DelegationDecided], ToolReturned | None]]:
        """Decisions about handing work on and what came of them, in the order of the calls."""
        return [
            (turn.delegations[call], turn.results.get(call))
            for _, turn in sorted(self._turns.items())
            for call in sorted(turn.delegations)
        ]

    def _value(self, value_type: type[_V], data: Mapping[str, object]) -> _V:
        try:
            return value_type(**data)
        except ValueError as error:
            msg = f"The record is damaged: {value_type.__name__} of task '{self.key}': {error}"
            raise RecordError(msg) from error

    # What it did.

    def trace(
        self,
        node: Node | None,
        capture_mode: CaptureMode,
        *,
        state: str,
        roles: Mapping[str, str] | None = None,
        is_manager: bool = False,
    ) -> TaskTrace:
        """Return the task's trace; of a task that was not finished, as far as its effects tell.

        Args:
            node: The task's place in the plan; None: it is not known.
            capture_mode: What the run captured.
            state: How an unfinished task is marked.
            roles: Roles of the run's agents by key.
            is_manager: Whether the traces of its workers stand beside its own (`worker_traces`), and not in it.
        """
        recorded = self.recorded_trace()
        if recorded is not None:
            return recorded
        effects = self._effects(node, capture_mode)
        effects.is_manager = is_manager
        effects.delegations = self._delegations(capture_mode, state, roles or {}, is_manager=is_manager)
        output = self.task_output()
        trace = effects.trace(
            completed_at=max(self.last_at, effects.started_at),
            final_output="" if output is None else output.raw,
            parsed_output=None if output is None else output.parsed_output,
            metrics=effects.metrics(None) if output is None else output.metrics,
        )
        if not self.is_unfinished or (self._has_exited and not self._is_cancelled):
            return trace
        return trace.replace(metadata={**trace.metadata, "state": "cancelled" if self._is_cancelled else state})

    def worker_traces(
        self, capture_mode: CaptureMode, *, state: str, roles: Mapping[str, str], has_failed: bool = False
    ) -> list[TaskTrace]:
        """Return the traces of its workers, in the order in which they were asked; `has_failed`: only of those that failed.

        The other arguments are those of `trace`.
        """
        attempts = ((decision, self._workers.get(decision.name)) for decision, _ in self._attempts())
        return [
            worker.as_worker(decision, capture_mode, state=state, roles=roles)
            for decision, worker in attempts
            if worker is not None and worker.is_recorded and (worker.has_failed or not has_failed)
        ]

    def as_worker(
        self, decision: Fact[DelegationDecided], capture_mode: CaptureMode, *, state: str, roles: Mapping[str, str]
    ) -> TaskTrace:
        """Its trace as that of work that was handed on by that decision."""
        node = Node(
            key=self.key,
            index=0,
            description=read_request(decision).task_description,
            expected_output=EXPECTED_OUTPUT,
            agent_role=worker_role(decision, roles),
            agent_key=decision.data.worker or "",
        )
        return self.trace(node, capture_mode, state=state, roles=roles)

    def _delegations(
        self, capture_mode: CaptureMode, state: str, roles: Mapping[str, str], *, is_manager: bool
    ) -> list[DelegationEffect]:
        found: list[DelegationEffect] = []
        for decision, result in self._attempts():
            worker = self._workers.get(decision.name)
            if worker is not None and not worker.is_recorded:
                worker = None
            effect = self._delegation(decision, result, worker, worker_role(decision, roles))
            if worker is not None and not is_manager:
                effect.trace = worker.as_worker(decision, capture_mode, state=state, roles=roles)
            found.append(effect)
        return found

    def _delegation(
        self, decision: Fact[DelegationDecided], result: ToolReturned | None, worker: TaskFold | None, role: str
    ) -> DelegationEffect:
        """Return the effect of one attempt to hand work on, as this task noted it or would have noted it.

        Args:
            decision: What was decided.
            result: What the model was told; None where the run ended before.
            worker: What is known of the worker; None where none began.
            role: See `worker_role`.
        """
        request, began = read_request(decision), decision.data.started_at
        output = None if worker is None else worker.summary()
        text, errors, took_s = _result_of(decision.data, result, worker, output)
        response = DelegationResponse(
            task_id=request.task_id,
            status=DelegationStatus.FAILURE if errors else DelegationStatus.SUCCESS,
            worker_role=role,
            raw_output=None if errors else text if output is None else output.raw,
            errors=errors,
            duration=timedelta(seconds=max(0.0, took_s)),
        )
        *_, turn, call = decision.name.split("/")
        return DelegationEffect(
            request=request,
            response=response,
            worker_role=role,
            depth=self.instance.count("/delegate#"),
            started_at=began,
            position=(int(turn), int(call.removeprefix("call-"))),
            text=text,
            is_started=decision.data.worker is not None and (worker is not None or result is not None),
            instance=delegated_instance(decision.name),
            output=None if errors else output,
        )

    def recorded_trace(self) -> TaskTrace | None:
        """Return the trace that is recorded with its output or failure; None where it has neither.

        Raises:
            RecordError: it is no trace.
        """
        trace: object
        if self.failure is not None and self.output is None:
            trace = self.failure.data.trace
        else:
            trace = self.output.trace if isinstance(self.output, TaskOutput) else as_mapping(self.output).get("trace")
        if trace is None or isinstance(trace, TaskTrace):
            return trace
        return self._value(TaskTrace, as_mapping(trace))

    def _effects(self, node: Node | None, capture_mode: CaptureMode) -> TaskEffects:
        models = [self._model(self._turns[number]) for number in sorted(self._turns)]
        return TaskEffects(
            task_description=self.key if node is None else node.description,
            expected_output="" if node is None else node.expected_output,
            agent_role="" if node is None else node.agent_role,
            started_at=self._last_at if self._first_at is None else self._first_at,
            capture_mode=capture_mode,
            models=models,
            tool_call_count=self._count_calls(models),
            retry_count=sum(model.retries for model in models),
            is_handler=not models and node is not None and node.agent_key is None,
            is_outcome_unknown=self._is_handler_unknown,
            reviews=[entry for gate in self._gates.values() if (entry := gate.entry) is not None],
            instance=self.instance,
            embedding_tokens=self._embedding_tokens,
            sampled=list(self._sampled.items()),
        )

    def _count_calls(self, models: Sequence[ModelEffect]) -> int:
        """Return how many calls began or were answered; those of unknown tools have no fact, but all have been once the model goes on."""
        answered = sum(max(len(model.tools), len(model.response.tool_calls)) for model in models[:-1])
        return answered + sum(len(model.tools) for model in models[-1:])

    @property
    def _is_handler_unknown(self) -> bool:
        """Whether its handler or runner was called, and nobody knows what came of it (S-DUR-26)."""
        if self._handler is None:
            return self._has_handler and not self._has_exited  # which it did by asking for the end of the run
        return self._handler.is_unknown

    def _model(self, turn: _Turn) -> ModelEffect:
        answer = turn.model
        if answer is None:
            answer = ModelAnswered(request_digest="", started_at=turn.at, latency_s=0.0, text=None)
        effect = effect_of(answer)
        effect.is_final = not answer.tool_calls
        effect.tools = [
            self._tool(turn, number, answer.tool_calls)
            for number in sorted({*turn.intents, *turn.results, *turn.delegations})
        ]
        return effect

    def _tool(self, turn: _Turn, number: int, calls: Sequence[ToolCall]) -> ToolEffect:
        intent, result = turn.intents.get(number), turn.results.get(number)
        call = calls[number] if number < len(calls) else ToolCall(id="", name="")
        if intent is not None:
            call = ToolCall(id=call.id, name=intent.data.tool_name, arguments=intent.data.arguments)
        if result is None:
            asked_at = intent or turn.delegations.get(number)
            begun = turn.at if asked_at is None else asked_at.at
            if intent is not None and (exited := self._exits.get(intent.name)) is not None:
                text, took_s = describe_exit(exited.data.text), exited.at - begun
                return ToolEffect(call=call, outcome="success", text=text, started_at=begun, duration_s=took_s)
            decided = turn.decisions.get(number)
            text = NO_RESULT if decided is None else f"{NO_RESULT}; it was decided: {decided.answer}"
            return ToolEffect(call=call, outcome="unknown", text=text, started_at=begun, duration_s=0.0)
        return ToolEffect(
            call=call,
            outcome=cast("CallOutcome", result.outcome) if result.outcome in _OUTCOMES else "error",
            text=result.text,
            started_at=result.started_at,
            duration_s=result.duration_s,
            structured_output=result.structured_output,
            repairs=result.repairs,
        )


def _result_of(
    decision: DelegationDecided, result: ToolReturned | None, worker: TaskFold | None, output: TaskOutput | None
) -> tuple[str, tuple[str, ...], float]:
    """Return the text for the model, errors, and how long it took, s."""
    text, duration_s = ("", 0.0) if result is None else (result.text, result.duration_s)
    if decision.worker is None:  # nobody was asked, whether or not the model has heard of it
        reason, hint = decision.refusal or ("", "")
        return text or (f"{reason}\n{hint}" if hint else reason), (reason or "refused",), duration_s
    if result is not None:
        return text, () if result.is_success else (text.removeprefix("Error: "),), duration_s
    duration_s = (0.0 if worker is None else worker.last_at) - decision.started_at
    if output is not None:
        return output.raw, (), duration_s
    failure = "" if worker is None or worker.failure is None else worker.failure.data.message
    return f"Error: {failure}" if failure else _NO_WORKER, (failure or _NO_WORKER,), duration_s
