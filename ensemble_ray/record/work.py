"""The actions and the result of one execution of a task: a reader of a history with details. Pure.

It never imports a class that the record names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, cast, get_args

from ensemble_ray.errors import RecordError
from ensemble_ray.execute.agent.attempts import effect_of
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
from ensemble_ray.facts.effects import (
    DelegationDecided,
    MemoryRecalled,
    MemoryStored,
    ModelAnswered,
    OutcomeDecided,
    SamplingAnswered,
    ToolIntended,
    ToolReturned,
    began_at,
    read_request,
)
from ensemble_ray.facts.fact import Fact, FactData, as_mapping
from ensemble_ray.facts.runs import (
    ExitRecorded,
    FailureRecorded,
    OutputRecorded,
    ReviewDecided,
    ReviewRequested,
    StimulusRecorded,
)
from ensemble_ray.plan.plan import Node
from ensemble_ray.record.units import place_trace
from ensemble_ray.values.delegation import DelegationResponse, DelegationStatus
from ensemble_ray.values.ids import delegated_instance, delegating_call, node_key
from ensemble_ray.values.messages import ToolCall
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.task_output import OutputType, TaskOutput
from ensemble_ray.values.trace import TaskTrace

if TYPE_CHECKING:
    from ensemble_ray.record.history import RunHistory

_F = TypeVar("_F", bound=FactData)

_OUTCOMES = get_args(CallOutcome)
NO_RESULT = "No result was recorded: the run ended during this call"  # of a tool call in a trace
#: Response in a trace of a delegation that has no recorded result.
_NO_WORKER = "No result was recorded: the run ended during this delegation"
#: Facts of turns. Recalled memory and directives are in the prompts.
_TURNS: Sequence[type[FactData]] = (ModelAnswered, ToolIntended, ToolReturned, DelegationDecided, OutcomeDecided)
_SHOWN = (*_TURNS, ReviewRequested, ReviewDecided)
_NO_ANSWER = ModelAnswered(request_digest="", started_at=0.0, latency_s=0.0, text=None)
_WHOLE = ("/handler", "/runner")  # Ends of the names of calls that are not turns of a model.


class RecordedWork:
    def __init__(self, history: RunHistory, instance: str, failure: Fact[FailureRecorded] | None = None) -> None:
        self.instance = instance
        self._history = history
        self._facts: Sequence[Fact] = history.work.get(instance, ())
        given, failed = self._all(OutputRecorded), self._all(FailureRecorded)
        self.output: TaskOutput | Mapping[str, object] | None = None
        if given:
            newest = given[-1].data
            self.output = newest.output if isinstance(newest.output, TaskOutput) else newest.output_data()
        self.failure = failure or (failed[-1] if failed else None)

    @cached_property
    def _by_kind(self) -> Mapping[type[FactData], Sequence[Fact]]:
        found: dict[type[FactData], list[Fact]] = {}
        for fact in self._facts:
            found.setdefault(type(fact.data), []).append(fact)
        return found

    def _all(self, kind: type[_F]) -> Sequence[Fact[_F]]:
        return cast("Sequence[Fact[_F]]", self._by_kind.get(kind, ()))

    @property
    def key(self) -> str:
        """Its task's key in the plan; for delegated work, its instance without the occurrence."""
        if delegating_call(self.instance) is None:
            return node_key(self.instance) or self.instance
        return self.instance.rpartition("#")[0]

    @cached_property
    def is_recorded(self) -> bool:
        return not (self.is_unfinished and self._by_kind.keys().isdisjoint(_SHOWN))

    @property
    def is_handler(self) -> bool:
        return any(fact.name.endswith(_WHOLE) for kind in _TURNS for fact in self._all(kind))

    @property
    def is_unfinished(self) -> bool:
        return self.output is None and self.failure is None

    @property
    def has_failed(self) -> bool:
        return self.failure is not None and self.output is None

    @property
    def last_at(self) -> float:
        own = max((fact.at for fact in self._facts if not isinstance(fact.data, StimulusRecorded)), default=0.0)
        return max([own, *(worker.last_at for worker in self._workers.values())])

    @property
    def _has_exited(self) -> bool:
        execution = self._history.executions.get(self.instance)
        return execution is not None and execution.status == "exited"

    # Its result.

    def task_output(self, output_type: OutputType | None = None) -> TaskOutput | None:
        """Return the recorded output. Its parsed output has the given type if it fits, else it is JSON data."""
        if self.output is None:
            return None
        try:
            output = self.output if isinstance(self.output, TaskOutput) else typed_output(self.output, output_type)
        except RecordError as error:
            raise RecordError(f"{error} (task '{self.key}')") from error
        return output if output.trace is None else output.model_copy(update={"trace": self._placed(output.trace)})

    def summary(self) -> TaskOutput | None:
        if self.output is None or isinstance(self.output, TaskOutput):
            return self.output
        return typed_output({**self.output, "trace": None})

    def workers_that_gave(self) -> list[tuple[RecordedWork, TaskOutput]]:
        """Return workers with a received result and their summaries, in order of completion (S-HIER-6)."""
        found: list[tuple[RecordedWork, TaskOutput]] = []
        for decision, result in self._attempts:
            worker = self._workers.get(decision.name) if result is not None and result.is_success else None
            output = None if worker is None else worker.summary()
            if worker is not None and output is not None:
                found.append((worker, output))
        return sorted(found, key=lambda pair: pair[1].completed_at)

    # Its actions.

    def trace(self, state: str) -> TaskTrace:
        """Return the task's trace; for an unfinished task, the trace in `state` that follows from its effects."""
        return self._placed(self.recorded_trace() or self._folded_trace(self._node, state))

    def _placed(self, trace: TaskTrace) -> TaskTrace:
        """Add the position in the tree to the trace of a planned map-reduce's task (S-MR-38)."""
        node = self._history.nodes.get(self.key)
        return trace if node is None or node.level is None else place_trace(trace, node.node_type, node.level)

    def recorded_trace(self) -> TaskTrace | None:
        trace: object
        if self.failure is not None and self.output is None:
            trace = self.failure.data.trace
        else:
            trace = self.output.trace if isinstance(self.output, TaskOutput) else as_mapping(self.output).get("trace")
        if trace is None or isinstance(trace, TaskTrace):
            return trace
        try:
            return TaskTrace(**as_mapping(trace))  # type: ignore[arg-type]  # `TaskTrace` checks it
        except ValueError as error:
            raise RecordError(f"The record is damaged: TaskTrace of task '{self.key}': {error}") from error

    def worker_traces(self, state: str) -> list[TaskTrace]:
        """Return the traces of a manager's workers, in the order of delegation; see `trace`."""
        return [each.trace(state) for each in self._workers.values()] if self._is_manager else []

    def failed_delegations(self) -> tuple[TaskTrace, ...]:
        """Return the traces of a manager's failed workers (S-TRC-43); those of other workers are in its own trace."""
        failed = (each for each in self._workers.values() if each.has_failed) if self._is_manager else ()
        return tuple(each.trace(RunState.FAILED.value) for each in failed)

    @property
    def _is_manager(self) -> bool:
        return self._history.plan.hierarchy is not None and delegating_call(self.instance) is None

    @property
    def _node(self) -> Node | None:
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
        began = (began_at(fact) for fact in self._facts if not isinstance(fact.data, StimulusRecorded))
        models = self._models()
        # Calls of unknown tools have no fact, but end before the next turn.
        tool_calls = sum(max(len(model.tools), len(model.response.tool_calls)) for model in models[:-1])
        tool_calls += sum(len(model.tools) for model in models[-1:])
        effects = TaskEffects(
            task_description=self.key if node is None else node.description,
            expected_output="" if node is None else node.expected_output,
            agent_role="" if node is None else node.agent_role,
            started_at=min(began, default=0.0),
            capture_mode=self._history.head.capture_mode,
            models=models,
            tool_call_count=tool_calls,
            delegations=[self._delegation(*each, state, is_nested=not self._is_manager) for each in self._attempts],
            is_manager=self._is_manager,
            retry_count=sum(model.retries for model in models),
            is_handler=not models and node is not None and node.agent_key is None,
            is_outcome_unknown=self._is_handler_unknown,
            reviews=self._reviews(),
            instance=self.instance,
            embedding_tokens=sum(fact.data.embedding_tokens for fact in self._all(MemoryRecalled))
            + sum(fact.data.embedding_tokens for fact in self._all(MemoryStored)),
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
        """Whether its handler or runner was called with an unknown outcome (S-DUR-26)."""
        if not self.is_handler:
            return False
        # A runner may be called again after it answered.
        calls = (fact.data for fact in reversed(self._facts) if fact.name.endswith(_WHOLE))
        last = next((each for each in calls if isinstance(each, ToolIntended | ToolReturned)), None)
        if isinstance(last, ToolReturned):
            return last.is_unknown
        return not self._has_exited

    def _reviews(self) -> list[Mapping[str, object]]:
        asked = {fact.name: fact for fact in self._all(ReviewRequested)}
        decided = {fact.name: fact for fact in self._all(ReviewDecided)}
        return [
            review_entry(gate.data, gate.at, None, gate.at)
            if (decision := decided.get(name)) is None
            else review_entry(gate.data, gate.at, decision.data, decision.at)
            for name, gate in asked.items()
        ]

    # Model calls by turn, and tool calls by turn and number.

    def _calls(self, kind: type[_F]) -> Mapping[tuple[int, int], Fact[_F]]:
        return {_place_of(fact): fact for fact in self._all(kind) if not fact.name.endswith(_WHOLE)}

    @property
    def call_ids(self) -> Sequence[Sequence[str]]:
        """The models' own ids of their tool requests, by model call and request."""
        turns = {_place_of(each)[0]: [call.id for call in each.data.tool_calls] for each in self._all(ModelAnswered)}
        return [turns.get(turn, ()) for turn in range(max(turns, default=-1) + 1)]

    @cached_property
    def _attempts(self) -> Sequence[tuple[Fact[DelegationDecided], ToolReturned | None]]:
        decisions = self._calls(DelegationDecided)
        results = self._calls(ToolReturned) if decisions else {}
        found = ((decisions[place], results.get(place)) for place in sorted(decisions))
        return [(decision, None if result is None else result.data) for decision, result in found]

    @cached_property
    def _workers(self) -> Mapping[str, RecordedWork]:
        names = (decision.name for decision, _ in self._attempts)
        workers = {name: RecordedWork(self._history, delegated_instance(name)) for name in names}
        return {name: worker for name, worker in workers.items() if worker.is_recorded}

    def _models(self) -> list[ModelEffect]:
        answers = {_place_of(fact)[0]: fact for fact in self._all(ModelAnswered)}
        intents, results = self._calls(ToolIntended), self._calls(ToolReturned)
        decisions, delegations = self._calls(OutcomeDecided), self._calls(DelegationDecided)
        exits = {each.data.call: each for each in self._all(ExitRecorded)}
        turns: dict[int, set[int]] = {turn: set() for turn in (*answers, *(turn for turn, _ in decisions))}
        for turn, number in (*intents, *results, *delegations):
            turns.setdefault(turn, set()).add(number)
        models: list[ModelEffect] = []
        for turn, numbers in sorted(turns.items()):
            answered = answers.get(turn)
            at, answer = (0.0, _NO_ANSWER) if answered is None else (answered.at, answered.data)
            effect = effect_of(answer)
            effect.is_final = not answer.tool_calls
            for number in sorted(numbers):
                place = turn, number
                call = answer.tool_calls[number] if number < len(answer.tool_calls) else ToolCall(id="", name="")
                intent, result = intents.get(place), results.get(place)
                if intent is not None:
                    call = ToolCall(id=call.id, name=intent.data.tool_name, arguments=intent.data.arguments)
                if result is not None:
                    effect.tools.append(_tool_of(call, result.data))
                    continue
                asked = intent or delegations.get(place)
                began = at if asked is None else asked.at
                if intent is not None and (exited := exits.get(intent.name)) is not None:
                    text, took_s = describe_exit(exited.data.text), exited.at - began
                    tool = ToolEffect(call=call, outcome="success", text=text, started_at=began, duration_s=took_s)
                else:
                    decided = decisions.get(place)
                    text = NO_RESULT if decided is None else f"{NO_RESULT}; it was decided: {decided.data.answer}"
                    tool = ToolEffect(call=call, outcome="unknown", text=text, started_at=began, duration_s=0.0)
                effect.tools.append(tool)
            models.append(effect)
        return models

    def _delegation(
        self, decision: Fact[DelegationDecided], result: ToolReturned | None, state: str, *, is_nested: bool
    ) -> DelegationEffect:
        """Return one attempt to delegate work, as a live task would have noted it.

        `result` is None if the run ended before. If `is_nested`, the attempt includes the trace of the worker.
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


def _place_of(fact: Fact) -> tuple[int, int]:
    """Return the turn and the number of a call; the number of a model call is 0."""
    *_, turn, what = ("", *fact.name.rsplit("/", 2))
    number = "0" if what == "model" else what.removeprefix("call-")
    if not (turn.isdecimal() and number.isdecimal()):
        raise RecordError(f"The record is damaged: '{fact.name}' is no name of an effect")
    return int(turn), int(number)


def _tool_of(call: ToolCall, result: ToolReturned) -> ToolEffect:
    return ToolEffect(
        call=call,
        outcome=cast("CallOutcome", result.outcome) if result.outcome in _OUTCOMES else "error",
        text=result.text,
        started_at=result.started_at,
        duration_s=result.duration_s,
        structured_output=result.structured_output,
        repairs=result.repairs,
        log=result.log,
    )


def _result_of(
    decision: DelegationDecided, result: ToolReturned | None, worker: RecordedWork | None, output: TaskOutput | None
) -> tuple[str, tuple[str, ...], float]:
    """Return the text for the model, the errors, and the duration, s."""
    text, duration_s = ("", 0.0) if result is None else (result.text, result.duration_s)
    if decision.worker is None:
        reason, hint = decision.refusal or ("", "")
        return text or (f"{reason}\n{hint}" if hint else reason), (reason or "refused",), duration_s
    if result is not None:
        return text, () if result.is_success else (text.removeprefix("Error: "),), duration_s
    duration_s = (0.0 if worker is None else worker.last_at) - decision.started_at
    if output is not None:
        return output.raw, (), duration_s
    failure = "" if worker is None or worker.failure is None else worker.failure.data.message
    return f"Error: {failure}" if failure else _NO_WORKER, (failure or _NO_WORKER,), duration_s
