"""What one execution of a task did and gave: a reader of a history with details. Package: record. Pure.

Never: an import of a class that the record names; records are data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, cast, get_args

from ensemble_ray.errors import RecordError
from ensemble_ray.execute.agent.recorded_model import effect_of
from ensemble_ray.execute.delegation.calls import EXPECTED_OUTPUT
from ensemble_ray.execute.effects import CallOutcome, DelegationEffect, ModelEffect, TaskEffects, ToolEffect
from ensemble_ray.execute.exits import describe_exit
from ensemble_ray.execute.recorded import typed_output
from ensemble_ray.execute.review.tracing import review_entry
from ensemble_ray.facts.effects import (
    DelegationDecided,
    ModelAnswered,
    OutcomeDecided,
    ToolIntended,
    ToolReturned,
    began_at,
    read_request,
)
from ensemble_ray.facts.ends import ExitRecorded, FailureRecorded, OutputRecorded
from ensemble_ray.facts.fact import Fact, FactData
from ensemble_ray.facts.lenient import as_mapping
from ensemble_ray.facts.memory import MemoryRecalled, MemoryStored
from ensemble_ray.facts.reviews import ReviewDecided, ReviewRequested
from ensemble_ray.facts.runs import StimulusRecorded
from ensemble_ray.facts.sampling import SamplingAnswered
from ensemble_ray.plan.plan import Node
from ensemble_ray.record.levels import place_trace
from ensemble_ray.values.delegation import DelegationResponse, DelegationStatus
from ensemble_ray.values.ids import delegated_instance, delegating_call, node_key
from ensemble_ray.values.messages import ToolCall
from ensemble_ray.values.task_output import OutputType, TaskOutput
from ensemble_ray.values.trace import TaskTrace

if TYPE_CHECKING:
    from ensemble_ray.record.history import RunHistory

__all__ = ["NO_RESULT", "RecordedWork"]

_F = TypeVar("_F", bound=FactData)

_OUTCOMES = get_args(CallOutcome)
#: Result in a trace of a tool call that has no recorded result.
NO_RESULT = "No result was recorded: the run ended during this call"
#: Response in a trace of a delegation that has no recorded result.
_NO_WORKER = "No result was recorded: the run ended during this delegation"
#: Facts of turns. What a task recalled or was told is in its prompts.
_TURNS = (ModelAnswered, ToolIntended, ToolReturned, DelegationDecided, OutcomeDecided)
_SHOWN = (*_TURNS, ReviewRequested, ReviewDecided)
#: Ends of the names of calls that are no turn of a model.
_WHOLE = ("/handler", "/runner")


@dataclass(slots=True, kw_only=True)
class _Turn:
    """One turn: a model call, and by number the tool calls of its answer."""

    model: ModelAnswered | None = None
    at: float = 0.0
    intents: dict[int, Fact[ToolIntended]] = field(default_factory=dict[int, Fact[ToolIntended]])
    results: dict[int, ToolReturned] = field(default_factory=dict[int, ToolReturned])
    #: decisions about unknown outcomes
    decisions: dict[int, OutcomeDecided] = field(default_factory=dict[int, OutcomeDecided])
    delegations: dict[int, Fact[DelegationDecided]] = field(default_factory=dict[int, Fact[DelegationDecided]])


class RecordedWork:
    """What one execution did and gave.

    Attributes:
        instance: Its instance.
        output: Its newest output, or the data of it; None: it gave none.
        failure: Its newest failure; None: it did not fail. The output counts if it has both.
    """

    def __init__(self, history: RunHistory, instance: str, failure: Fact[FailureRecorded] | None = None) -> None:
        """Read the work of an instance; `failure`: in place of a failure that the history does not contain."""
        self.instance = instance
        self._history = history
        self._facts: Sequence[Fact] = history.work.get(instance, ())
        given = self._newest(OutputRecorded)
        self.output = None if given is None else given.data.output
        self.failure = failure or self._newest(FailureRecorded)

    def _newest(self, kind: type[_F]) -> Fact[_F] | None:
        found = (fact for fact in reversed(self._facts) if isinstance(fact.data, kind))
        return cast("Fact[_F] | None", next(found, None))

    def _all(self, kind: type[_F]) -> Iterable[Fact[_F]]:
        return (cast("Fact[_F]", fact) for fact in self._facts if isinstance(fact.data, kind))

    @property
    def key(self) -> str:
        """Its task's key in the plan; of delegated work, its instance without the occurrence."""
        if delegating_call(self.instance) is None:
            return node_key(self.instance) or self.instance
        return self.instance.rpartition("#")[0]

    @cached_property
    def is_recorded(self) -> bool:
        """Whether the task did anything that the record shows."""
        return not self.is_unfinished or any(isinstance(fact.data, _SHOWN) for fact in self._facts)

    @property
    def is_handler(self) -> bool:
        """Whether a function did it, and no agent."""
        return any(isinstance(fact.data, _TURNS) and fact.name.endswith(_WHOLE) for fact in self._facts)

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
        own = max((fact.at for fact in self._facts if not isinstance(fact.data, StimulusRecorded)), default=0.0)
        return max([own, *(worker.last_at for worker in self._workers.values())])

    @property
    def _has_exited(self) -> bool:
        execution = self._history.executions.get(self.instance)
        return execution is not None and execution.status == "exited"

    # What it gave.

    def task_output(self, output_type: OutputType | None = None) -> TaskOutput | None:
        """Return the recorded output; its parsed output is JSON data, or of the given type where it fits.

        Raises:
            RecordError: it is no output.
        """
        if self.output is None:
            return None
        try:
            output = self.output if isinstance(self.output, TaskOutput) else typed_output(self.output, output_type)
        except RecordError as error:
            raise RecordError(f"{error} (task '{self.key}')") from error
        return output if output.trace is None else output.model_copy(update={"trace": self._placed(output.trace)})

    def summary(self) -> TaskOutput | None:
        """Return the recorded output without its trace, which is large."""
        if self.output is None or isinstance(self.output, TaskOutput):
            return self.output
        return typed_output({**self.output, "trace": None})

    def workers_that_gave(self) -> list[tuple[RecordedWork, TaskOutput]]:
        """Return the workers whose result it received with their summaries, in the order in which they were done (S-HIER-6)."""
        found: list[tuple[RecordedWork, TaskOutput]] = []
        for decision, result in self._attempts():
            worker = self._workers.get(decision.name) if result is not None and result.is_success else None
            output = None if worker is None else worker.summary()
            if worker is not None and output is not None:
                found.append((worker, output))
        return sorted(found, key=lambda pair: pair[1].completed_at)

    # What it did.

    def trace(self, state: str) -> TaskTrace:
        """Return the task's trace; of a task that was not finished, as far as its effects tell.

        Args:
            state: How an unfinished task is marked.

        Raises:
            RecordError: its record is damaged.
        """
        return self._placed(self.recorded_trace() or self._folded_trace(self._node, state))

    def _placed(self, trace: TaskTrace) -> TaskTrace:
        """Return the trace of a planned map-reduce's task with its place in the tree (S-MR-38); any other as it is."""
        node = self._history.nodes.get(self.key)
        return trace if node is None or node.level is None else place_trace(trace, node.node_type, node.level)

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
        try:
            return TaskTrace(**as_mapping(trace))  # type: ignore[arg-type]  # which is checked there
        except ValueError as error:
            raise RecordError(f"The record is damaged: TaskTrace of task '{self.key}': {error}") from error

    def worker_traces(self, state: str, *, has_failed: bool = False) -> list[TaskTrace]:
        """Return the traces of its workers, in the order in which they were asked; `has_failed`: only of those that failed."""
        return [each.trace(state) for each in self._workers.values() if each.has_failed or not has_failed]

    @property
    def _node(self) -> Node | None:
        """Its place in the plan; of delegated work, what would be there."""
        execution = self._history.executions.get(self.instance)
        if execution is None or execution.kind != "delegation":
            return self._history.nodes.get(self.key)
        if not execution.agent:
            return None
        return Node(
            key=self.key,
            index=0,
            description=execution.label,
            expected_output=EXPECTED_OUTPUT,
            agent_role=execution.agent,
            agent_key=execution.agent,
        )

    def _folded_trace(self, node: Node | None, state: str) -> TaskTrace:
        """Return the trace that its effects give."""
        began = (began_at(fact) for fact in self._facts if not isinstance(fact.data, StimulusRecorded))
        models = [self._model(turn) for _, turn in sorted(self._turns.items())]
        is_manager = self._history.plan.hierarchy is not None and delegating_call(self.instance) is None
        effects = TaskEffects(
            task_description=self.key if node is None else node.description,
            expected_output="" if node is None else node.expected_output,
            agent_role="" if node is None else node.agent_role,
            started_at=min(began, default=0.0),
            capture_mode=self._history.head.capture_mode,
            models=models,
            tool_call_count=_count_calls(models),
            delegations=[self._delegation(*each, state, is_nested=not is_manager) for each in self._attempts()],
            is_manager=is_manager,
            retry_count=sum(model.retries for model in models),
            is_handler=not models and node is not None and node.agent_key is None,
            is_outcome_unknown=self._is_handler_unknown,
            reviews=self._reviews(),
            instance=self.instance,
            embedding_tokens=sum(
                fact.data.embedding_tokens
                for fact in self._facts
                if isinstance(fact.data, MemoryRecalled | MemoryStored)
            ),
            sampled=list({fact.name: fact.data for fact in self._all(SamplingAnswered)}.items()),
        )
        output = self.task_output()
        trace = effects.trace(
            completed_at=max(self.last_at, effects.started_at),
            final_output="" if output is None else output.raw,
            parsed_output=None if output is None else output.parsed_output,
            metrics=effects.metrics(None) if output is None else output.metrics,
        )
        last = self._facts[-1].data if self._facts else None
        is_cancelled = isinstance(last, StimulusRecorded) and last.is_cancellation
        if not self.is_unfinished or (self._has_exited and not is_cancelled):
            return trace
        return trace.replace(metadata={**trace.metadata, "state": "cancelled" if is_cancelled else state})

    @property
    def _is_handler_unknown(self) -> bool:
        """Whether its handler or runner was called, and nobody knows what came of it (S-DUR-26)."""
        calls = [fact.data for fact in self._facts if isinstance(fact.data, _TURNS) and fact.name.endswith(_WHOLE)]
        # A runner may be asked again after it answered.
        last = next((each for each in reversed(calls) if isinstance(each, ToolIntended | ToolReturned)), None)
        if isinstance(last, ToolReturned):
            return last.is_unknown
        return bool(calls) and not self._has_exited  # which it did by asking for the end of the run

    def _reviews(self) -> list[Mapping[str, object]]:
        """Return its gates in the order in which they were requested, as a trace shows them."""
        asked = {fact.name: fact for fact in self._all(ReviewRequested)}
        decided = {fact.name: fact for fact in self._all(ReviewDecided)}
        return [
            review_entry(gate.data, gate.at, None, gate.at)
            if (decision := decided.get(name)) is None
            else review_entry(gate.data, gate.at, decision.data, decision.at)
            for name, gate in asked.items()
        ]

    # Its turns.

    @cached_property
    def _turns(self) -> Mapping[int, _Turn]:
        turns: dict[int, _Turn] = {}
        for fact in self._facts:
            data = fact.data
            if not isinstance(data, _TURNS) or fact.name.endswith(_WHOLE):
                continue
            *_, number, what = ("", *fact.name.split("/"))
            call = "0" if what == "model" else what.removeprefix("call-")
            if not (number.isdecimal() and call.isdecimal()):
                raise RecordError(f"The record is damaged: '{fact.name}' is no name of an effect")
            turn = turns.setdefault(int(number), _Turn())
            match data:
                case ModelAnswered():
                    turn.model, turn.at = data, fact.at
                case ToolIntended():
                    turn.intents[int(call)] = cast("Fact[ToolIntended]", fact)
                case ToolReturned():
                    turn.results[int(call)] = data
                case DelegationDecided():
                    turn.delegations[int(call)] = cast("Fact[DelegationDecided]", fact)
                case OutcomeDecided():
                    turn.decisions[int(call)] = data
        return turns

    def _attempts(self) -> list[tuple[Fact[DelegationDecided], ToolReturned | None]]:
        """Return decisions about delegating work and their results, in the order of the calls."""
        return [
            (turn.delegations[call], turn.results.get(call))
            for _, turn in sorted(self._turns.items())
            for call in sorted(turn.delegations)
        ]

    @cached_property
    def _workers(self) -> Mapping[str, RecordedWork]:
        """The delegated work of which anything is recorded, by the name of the call."""
        names = (decision.name for decision, _ in self._attempts())
        workers = {name: RecordedWork(self._history, delegated_instance(name)) for name in names}
        return {name: worker for name, worker in workers.items() if worker.is_recorded}

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
        if result is not None:
            return ToolEffect(
                call=call,
                outcome=cast("CallOutcome", result.outcome) if result.outcome in _OUTCOMES else "error",
                text=result.text,
                started_at=result.started_at,
                duration_s=result.duration_s,
                structured_output=result.structured_output,
                repairs=result.repairs,
            )
        asked_at = intent or turn.delegations.get(number)
        begun = turn.at if asked_at is None else asked_at.at
        exited = (
            None if intent is None else {exit_.data.call: exit_ for exit_ in self._all(ExitRecorded)}.get(intent.name)
        )
        if exited is not None:
            text, took_s = describe_exit(exited.data.text), exited.at - begun
            return ToolEffect(call=call, outcome="success", text=text, started_at=begun, duration_s=took_s)
        decided = turn.decisions.get(number)
        text = NO_RESULT if decided is None else f"{NO_RESULT}; it was decided: {decided.answer}"
        return ToolEffect(call=call, outcome="unknown", text=text, started_at=begun, duration_s=0.0)

    def _delegation(
        self, decision: Fact[DelegationDecided], result: ToolReturned | None, state: str, *, is_nested: bool
    ) -> DelegationEffect:
        """Return one attempt to delegate work, as this task noted it or would have noted it.

        Args:
            decision: The decision.
            result: The result that the model received; None where the run ended before.
            state: How an unfinished worker is marked.
            is_nested: Whether the trace of the worker is part of it.
        """
        request, began, worker = read_request(decision), decision.data.started_at, self._workers.get(decision.name)
        output = None if worker is None else worker.summary()
        text, errors, took_s = _result_of(decision.data, result, worker, output)
        role = self._history.role_of(decision)
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
            trace=worker.trace(state) if worker is not None and is_nested else None,
        )


def _count_calls(models: Sequence[ModelEffect]) -> int:
    """Return how many calls began or were answered; those of unknown tools have no fact, but all have been once the model goes on."""
    answered = sum(max(len(model.tools), len(model.response.tool_calls)) for model in models[:-1])
    return answered + sum(len(model.tools) for model in models[-1:])


def _result_of(
    decision: DelegationDecided, result: ToolReturned | None, worker: RecordedWork | None, output: TaskOutput | None
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
